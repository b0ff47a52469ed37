"""A ring all-reduce on nothing but send and receive (Patarasuk and Yuan 2009, section 3).

    python examples/ring_all_reduce.py                  four ranks in this process
    mpirun -n 4 python examples/ring_all_reduce.py      four MPI ranks
"""

import os

import numpy as np

import refdist as rd
from refdist.cli.launch import launched


def ring_all_reduce(comm: rd.Comm, x: np.ndarray) -> np.ndarray:
    """The sum of all ranks' `x` (1-d, the same length everywhere), on every rank."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    chunks = [chunk.copy() for chunk in np.array_split(x, comm.size)]
    for step in range(comm.size - 1):  # reduce-scatter: a partial sum moves right and grows at each rank
        mine, theirs = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
        chunks[theirs] += comm.sendrecv(chunks[mine], dest=right, source=left)
    for step in range(comm.size - 1):  # all-gather: the finished sums go round once
        mine, theirs = (comm.rank - step + 1) % comm.size, (comm.rank - step) % comm.size
        chunks[theirs] = comm.sendrecv(chunks[mine], dest=right, source=left)
    return np.concatenate(chunks)


def program(comm: rd.Comm) -> np.ndarray:
    x = np.arange(10.0) * (comm.rank + 1)
    total = ring_all_reduce(comm, x)
    assert np.array_equal(total, np.arange(10.0) * sum(range(1, comm.size + 1)))
    print(f"rank {comm.rank} of {comm.size}: {total}")
    return total


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        rd.run(program, ranks=4)

"""The rows of several parameters by one set of messages: those of a unit of FSDP (Zhao et al. 2023, section 3.2.1).

    rank 0    ▇▇ rows of A   ▇ of B   ─▶ ▇▇▇ ─▶ rank 1     gather: each rank's rows of all parameters are packed into one message,
    rank 1    ░░ rows of A   ░ of B   ─▶ ░░░ ─▶ rank 2     walk the ring, and are copied to their places wherever they pass

    rank 0    rows of A and B for rank 2  ─▶ ▇▇▇ ─▶ rank 1     reduce-scatter: a sum starts at the rank after its owner, walks
    rank 1    adds its own to them        ─▶ ▇▇▇ ─▶ rank 2     the ring, and what the others have for these rows is added to it

As many bytes as collectives of each parameter, in fewer messages; on top of the arrays themselves, memory for two messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from refdist.comm import Comm
from refdist.comm.call import Steps

__all__ = ["gather_rows", "reduce_scatter_rows"]


def gather_rows(comm: Comm, mine: Sequence[np.ndarray], wholes: Sequence[np.ndarray], offsets: Sequence[Sequence[int]]) -> Steps:
    """The steps of a collective that fills whole arrays.

    Args:
        comm: the ranks that have the rows.
        mine: this rank's rows of each array; they may lie in the whole arrays.
        wholes: C-contiguous, of one dtype.
        offsets: rank r has rows ``offsets[i][r]`` to ``offsets[i][r + 1]`` of array i.
    """
    shapes = tuple([whole.shape for whole in wholes])
    call = comm.call("all_gather", "ring", wholes[0].dtype, "rows", shapes)
    size, rank = call.size, call.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    rows, lengths = _by_rank(wholes, offsets, size)
    buffers = [call.buffer(wholes[0], max(lengths)) for _ in range(2)]  # one is sent while the other one is filled
    moving = buffers[0][:lengths[rank]]
    np.concatenate([part.reshape(-1) for part in mine], out=moving)
    _unpack(moving, rows[rank])
    for step in range(size - 1):
        source = (rank - step - 1) % size
        received = buffers[1 - step % 2][:lengths[source]]
        yield call.irecv(received, left), call.isend(moving, right)
        _unpack(received, rows[source])
        moving = received
        call.step += 1


def reduce_scatter_rows(comm: Comm, wholes: Sequence[np.ndarray], sums: Sequence[np.ndarray],
                        offsets: Sequence[Sequence[int]]) -> Steps:
    """The steps of a collective that adds whole arrays up, of which each rank gets the sums of its rows; returns ``sums``.

    Args:
        comm: the ranks that have a term each.
        wholes: this rank's terms, C-contiguous, of one dtype.
        sums: where this rank's rows of each sum go, C-contiguous, of the same dtype; they may be these rows of the whole arrays.
        offsets: rank r gets rows ``offsets[i][r]`` to ``offsets[i][r + 1]`` of array i.
    """
    shapes = tuple([whole.shape for whole in wholes])
    call = comm.call("reduce_scatter", "ring", wholes[0].dtype, "rows", shapes)
    size, rank = call.size, call.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    rows, lengths = _by_rank(wholes, offsets, size)
    buffers = [call.buffer(wholes[0], max(lengths)) for _ in range(2)]  # one is sent while the other one is filled
    moving = buffers[0][:lengths[left]]
    np.concatenate(rows[left], out=moving)
    own = [part.reshape(-1) for part in sums]
    if size == 1:
        for mine, total in zip(rows[rank], own, strict=True):
            np.copyto(total, mine)
    for step in range(size - 1):
        owner = (rank - 2 - step) % size
        received = buffers[1 - step % 2][:lengths[owner]]
        yield call.irecv(received, left), call.isend(moving, right)
        terms = _parts(received, rows[owner])
        for mine, term, total in zip(rows[owner], terms, own if owner == rank else terms, strict=True):
            np.add(mine, term, out=total)
        moving = received
        call.step += 1
    return sums


def _by_rank(wholes: Sequence[np.ndarray], offsets: Sequence[Sequence[int]],
             size: int) -> tuple[list[list[np.ndarray]], list[int]]:
    """The rows of each rank, flat, a list for each rank; and how many elements they are."""
    rows = [[whole[at[r]:at[r + 1]].reshape(-1) for whole, at in zip(wholes, offsets, strict=True)] for r in range(size)]
    return rows, [sum(part.size for part in parts) for parts in rows]


def _parts(message: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Consecutive parts of a message, as views, of the sizes of these arrays."""
    ends = list(accumulate(part.size for part in like))
    return [message[end - part.size:end] for part, end in zip(like, ends, strict=True)]


def _unpack(message: np.ndarray, rows: Sequence[np.ndarray]) -> None:
    for part, row in zip(_parts(message, rows), rows, strict=True):
        row[:] = part

"""The two movements of context parallelism, as generators on a ``Call``.

    hop             rank ─▶ rank + 1                          several arrays at once, whose lengths differ from rank to rank
    exchange        rank ─▶ every other, a block for each     an all-to-all of which one block may go to several ranks
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refdist.comm import Comm
from refdist.comm.call import Call, Steps
from refdist.comm.work import Work, drive
from refdist.device import Device

__all__ = ["exchange", "start_hop"]


def _hop(call: Call, arrays: Sequence[np.ndarray], incoming: list[np.ndarray]) -> Steps:
    """Send to the right what is received from the left."""
    left, right = (call.rank - 1) % call.size, (call.rank + 1) % call.size
    yield [call.irecv(array, left) for array in incoming] + [call.isend(array, right) for array in arrays]
    return incoming


def start_hop(comm: Comm, device: Device, name: str, arrays: Sequence[np.ndarray], length: int) -> Work:
    """Start to send arrays [rows, seq, …] to the next rank; the Work gives those of the rank before, of ``length`` positions."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    incoming = [device.empty(array, (array.shape[0], length, *array.shape[2:]), "communication") for array in arrays]
    shapes = [(array.shape[0], *array.shape[2:]) for array in arrays]
    return comm.start_steps(_hop(comm.call(name, "hop", arrays[0].dtype, *shapes), arrays, incoming), f"hop of {name}")


def _pairwise(call: Call, blocks: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> Steps:
    """In step k send to the rank k further and receive from the one k back; the own block is the caller's."""
    size, rank = call.size, call.rank
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        yield call.irecv(incoming[source], source), call.isend(blocks[to], to)
        call.step += 1


def exchange(comm: Comm, device: Device, name: str, blocks: Sequence[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
    """Send a block [rows, seq, …] to each rank, which differ in rank and sender in the number of positions only.

    Args:
        blocks: one for each rank.
        lengths: of the blocks that come, in positions.

    Returns:
        The blocks that came, one from each rank; the own one is that which was passed.
    """
    blocks = [np.ascontiguousarray(block) for block in blocks]
    rows, _, *rest = blocks[0].shape
    incoming = [blocks[rank] if rank == comm.rank else device.empty(blocks[0], (rows, length, *rest), "communication")
                for rank, length in enumerate(lengths)]
    drive(comm.transport, _pairwise(comm.call(name, "pairwise", blocks[0].dtype, rows, *rest), blocks, incoming))
    return incoming

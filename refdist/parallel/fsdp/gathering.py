"""Gathering the rows of several parameters by one set of messages: those of a unit of FSDP (Zhao et al. 2023, section 3.2.1).

    rank 0    ▇▇ rows of A   ▇ of B   ─▶ ▇▇▇ ─▶ rank 1     each rank's rows of all parameters are packed into one message, walk
    rank 1    ░░ rows of A   ░ of B   ─▶ ░░░ ─▶ rank 2     the ring, and are copied to their places wherever they pass

As many bytes as gathers of each parameter, in fewer messages; on top of the whole arrays, memory for two messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refdist.comm import Comm
from refdist.comm.call import Steps

__all__ = ["gather_rows"]


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
    rows = [[whole[at[r]:at[r + 1]].reshape(-1) for whole, at in zip(wholes, offsets, strict=True)] for r in range(size)]
    lengths = [sum(part.size for part in parts) for parts in rows]
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


def _unpack(message: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    end = 0
    for part in parts:
        start, end = end, end + part.size
        part[:] = message[start:end]

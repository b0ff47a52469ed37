"""Several arrays in one go: a table of their shapes, and their elements end to end. Whoever receives them knows neither.

The tables are counted apart from the elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from refdist.comm.call import Call
from refdist.comm.reduction import pieces
from refdist.comm.transport import Request

__all__ = ["check_blocks", "irecv_blocks", "isend_blocks", "received_blocks"]


def isend_blocks(call: Call, blocks: Sequence[np.ndarray], dest: int) -> tuple[Request, Request]:
    """Start to send arrays of one dtype and one number of dimensions (at least one array)."""
    table = np.array([block.shape for block in blocks], np.int64)  # [blocks, dimensions]
    flat = np.concatenate([block.reshape(-1) for block in blocks])
    return (call.part(f"{call.name} shapes").isend(table, dest, describes=table), call.isend(flat, dest, describes=flat))


def irecv_blocks(call: Call, source: int) -> tuple[Request, Request]:
    """Start to receive what :func:`isend_blocks` sends."""
    return call.irecv_described(source), call.irecv_described(source)


def received_blocks(call: Call, requests: Sequence[Request]) -> list[np.ndarray]:
    """The arrays of a finished :func:`irecv_blocks`, each C-contiguous."""
    table, flat = (call.received(request) for request in requests)
    lengths = np.prod(table, axis=1, dtype=np.int64)
    offsets = [0, *np.cumsum(lengths).tolist()]
    return [piece.reshape(shape) for piece, shape in zip(pieces(flat, offsets), table.tolist(), strict=True)]


def check_blocks(blocks: Sequence[np.ndarray], rank: int, what: str) -> None:
    """Refuse arrays of more than one dtype or number of dimensions."""
    kinds = {(block.dtype, block.ndim) for block in blocks}
    if len(kinds) > 1:
        raise ValueError(f"{what} (rank {rank}): expected one dtype and one number of dimensions, got "
                         + ", ".join(sorted(f"{dtype} with {ndim}" for dtype, ndim in kinds)))

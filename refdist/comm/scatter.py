"""Scatter: rank r gets the r-th array of the root's list; the others need not know dtype or shape.

Binomial tree, the gather's backwards: a rank gets the arrays of its whole subtree, and hands on those of the farther half, then
of the farther half of the rest, and so on. ⌈lg N⌉ steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from refdist.comm.blocks import check_blocks, irecv_blocks, isend_blocks, received_blocks
from refdist.comm.call import Call, Steps

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "binomial", "scatter"]


def binomial(call: Call, blocks: list[np.ndarray], root: int) -> Steps:
    """``blocks``: on the root, all arrays by distance from it; returns this rank's array."""
    size, rank = call.size, call.rank
    away = (rank - root) % size
    reach = 1 << (size - 1).bit_length()  # this rank has the arrays of this many distances from its own on
    if away > 0:
        reach = away & -away
        requests = irecv_blocks(call, (rank - reach) % size)
        yield requests
        blocks = received_blocks(call, requests)
    while reach > 1:
        reach //= 2
        if len(blocks) > reach:
            yield isend_blocks(call, blocks[reach:], (rank + reach) % size)
            blocks = blocks[:reach]
        call.step += 1
    return blocks[0]


ALGORITHMS = {"binomial": binomial}


def scatter(comm: Comm, xs: Sequence[np.ndarray] | None, root: int = 0, algorithm: str | None = None) -> Steps:
    """The steps of :meth:`Comm.scatter`."""
    comm.check_rank(root, "root")
    call = comm.prepare("scatter", ALGORITHMS, algorithm, 0, root)
    blocks: list[np.ndarray] = []
    if comm.rank == root:
        if xs is None or len(xs) != comm.size:
            raise ValueError(f"xs (rank {comm.rank}): the root passes {comm.size} arrays, one a rank")
        arrays = [np.asarray(comm.check_array(x), order="C") for x in xs]
        check_blocks(arrays, comm.rank, "xs")
        blocks = [arrays[(root + away) % comm.size] for away in range(comm.size)]
    own = yield from ALGORITHMS[call.algorithm](call, blocks, root)
    return np.array(own)  # neither the input nor a view of what came for others too

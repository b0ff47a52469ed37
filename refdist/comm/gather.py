"""Gather: the root gets a list of all ranks' arrays, in rank order. Shapes may differ, also in more than one dimension.

Binomial tree: in step k every rank whose distance from the root is an odd multiple of 2^k hands on all that it has, the 2^k
arrays from its own distance on, to the rank 2^k closer. ⌈lg N⌉ steps; every array is sent once for each bit of its distance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refdist.comm.blocks import irecv_blocks, isend_blocks, received_blocks
from refdist.comm.call import Call, Steps

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "binomial", "gather"]


def binomial(call: Call, x: np.ndarray, root: int) -> Steps:
    """Returns the arrays by distance from the root, on the root; None elsewhere."""
    size, rank = call.size, call.rank
    away = (rank - root) % size
    blocks = [x]  # of the ranks from this one on
    distance = 1
    while distance < size:
        if away & distance:
            yield isend_blocks(call, blocks, (rank - distance) % size)
            return None
        if away + distance < size:
            requests = irecv_blocks(call, (rank + distance) % size)
            yield requests
            blocks += received_blocks(call, requests)
        distance *= 2
        call.step += 1
    return blocks


ALGORITHMS = {"binomial": binomial}


def gather(comm: Comm, x: np.ndarray, root: int = 0, algorithm: str | None = None) -> Steps:
    """The steps of :meth:`Comm.gather`."""
    x = comm.check_array(x)
    comm.check_rank(root, "root")
    call = comm.prepare("gather", ALGORITHMS, algorithm, 0, x.dtype, x.ndim, root)
    blocks = yield from ALGORITHMS[call.algorithm](call, np.array(x, order="C"), root)
    if comm.rank != root:
        return None
    return [blocks[(rank - root) % comm.size] for rank in range(comm.size)]

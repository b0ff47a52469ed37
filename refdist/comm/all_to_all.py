"""All-to-all: every rank cuts its array into N blocks, sends block r to rank r, and joins what it gets in rank order.

    pairwise  in step k send to the rank k further and receive from the one k back: N - 1 steps, n (N - 1) / N bytes
    bruck     ⌈lg N⌉ steps, ~(n / 2) lg N bytes: for many small blocks. A block that must go a distance d travels once for each
              bit of d. Bruck, Ho, Kipnis, Upfal & Weathersby 1997, section III

    pairwise, 4 ranks, what rank 0 sends      bruck, what rank 0 sends
      step 0:  block 1 ─▶ 1                     step 0:  blocks with bit 0 of d  (1, 3) ─▶ 1
      step 1:  block 2 ─▶ 2                     step 1:  blocks with bit 1 of d  (2, 3) ─▶ 2
      step 2:  block 3 ─▶ 3

Blocks may have any lengths, and nobody needs to know the others': shapes travel along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from refdist.comm.blocks import irecv_blocks, isend_blocks, received_blocks
from refdist.comm.call import Call, Steps
from refdist.comm.reduction import bounds

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "all_to_all", "bruck", "pairwise"]


def pairwise(call: Call, blocks: list[np.ndarray]) -> Steps:
    """``blocks[r]`` goes to rank r; returns the blocks from all ranks."""
    size, rank = call.size, call.rank
    received = list(blocks)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        block = np.ascontiguousarray(blocks[to])
        request = call.irecv_described(source)
        yield request, call.isend(block, to, describes=block)
        received[source] = call.received(request)
        call.step += 1
    return received


def bruck(call: Call, blocks: list[np.ndarray]) -> Steps:
    """``moving[d]`` is on its way to the rank d further than where it started."""
    size, rank = call.size, call.rank
    moving = [np.ascontiguousarray(blocks[(rank + distance) % size]) for distance in range(size)]
    bit = 1
    while bit < size:
        chosen = [distance for distance in range(size) if distance & bit]
        requests = irecv_blocks(call, (rank - bit) % size)
        yield requests + isend_blocks(call, [moving[distance] for distance in chosen], (rank + bit) % size)
        for distance, block in zip(chosen, received_blocks(call, requests), strict=True):
            moving[distance] = block
        bit *= 2
        call.step += 1
    return [moving[(rank - source) % size] for source in range(size)]


ALGORITHMS: dict[str, Callable[..., Steps]] = {"pairwise": pairwise, "bruck": bruck}


def all_to_all(comm: Comm, x: np.ndarray, split_axis: int = 0, concat_axis: int = 0, algorithm: str | None = None,
               lengths: Sequence[int] | None = None) -> Steps:
    """The steps of :meth:`Comm.all_to_all`."""
    x = comm.check_array(x)
    split_axis, concat_axis = comm.check_axis(split_axis, x.ndim), comm.check_axis(concat_axis, x.ndim)
    fixed = tuple(length for axis, length in enumerate(x.shape) if axis not in (split_axis, concat_axis))
    # The ranks' arrays may differ in size, so that cannot decide.
    call = comm.prepare("all_to_all", ALGORITHMS, algorithm, 0, x.dtype, x.ndim, fixed, split_axis, concat_axis)
    if lengths is None:
        offsets: Sequence[int] = bounds(x.shape[split_axis], comm.size)
    elif len(lengths) != comm.size or sum(lengths) != x.shape[split_axis] or min(lengths) < 0:
        raise ValueError(f"lengths={list(lengths)} (rank {comm.rank}): expected {comm.size} lengths that add up to "
                         f"{x.shape[split_axis]}")
    else:
        offsets = [0, *accumulate(lengths)]
    blocks = np.split(x, offsets[1:-1], axis=split_axis)
    received = yield from ALGORITHMS[call.algorithm](call, blocks)
    return np.concatenate(received, axis=concat_axis)

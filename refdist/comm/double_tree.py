"""All-reduce on two binary trees at once, each for half of the array (Sanders, Speck & Träff 2009, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", section 2; the numbering of NCCL 2.4, Jeaugey 2019, "Massively scale your deep learning
training with NCCL 2.4").

In one tree half of the ranks are leaves, which have almost nothing to do. A second tree of the same shape, in which those are the
inner nodes, takes the other half of the array, so that everybody sends at most 2 n bytes, in about 2 lg N steps.

    first tree, 8 ranks                    second tree: rank r has the place of rank 7 - r
          0                                      7
          └──── 4                                └──── 3
            ┌───┴───┐                              ┌───┴───┐
            2       6                              5       1
          ┌─┴─┐   ┌─┴─┐                          ┌─┴─┐   ┌─┴─┐
          1   3   5   7                          6   4   2   0
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from refdist.comm.call import Call, Steps
from refdist.comm.reduction import Reduce, bounds, pieces
from refdist.comm.transport import Request

__all__ = ["double_tree"]


class _Node(NamedTuple):
    parent: int  # -1 for the root
    children: Sequence[int]


@lru_cache(maxsize=4096)
def _first(size: int, rank: int) -> _Node:
    """The neighbours of a rank in the first tree: the lowest bit of its number says how high it stands."""
    if rank == 0:
        return _Node(-1, [1 << (size - 1).bit_length() - 1])
    bit = rank & -rank
    parent = (rank ^ bit) | bit << 1
    parent = parent if parent < size else rank ^ bit
    children = [rank - bit // 2] if bit > 1 else []
    lower = bit // 2
    while lower and rank + lower >= size:  # the right subtree may be cut off: take the highest node that exists
        lower //= 2
    return _Node(parent, children + ([rank + lower] if lower else []))


def _second(size: int, rank: int) -> _Node:
    """The second tree: the first one with the ranks mirrored, or, for an odd number of them, shifted by one."""
    if size % 2 == 0:
        node = _first(size, size - 1 - rank)
        return _Node(-1 if node.parent < 0 else size - 1 - node.parent, [size - 1 - child for child in node.children])
    node = _first(size, (rank - 1) % size)
    return _Node(-1 if node.parent < 0 else (node.parent + 1) % size, [(child + 1) % size for child in node.children])


def double_tree(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce) -> Steps:
    """Sums go up both trees and results come down; a rank tends the tree in which it has children first."""
    offsets = bounds(total.size, 2)
    trees = list(zip((call, call.channel()), (_first(call.size, call.rank), _second(call.size, call.rank)), pieces(x, offsets),
                     pieces(total, offsets), strict=True))
    leaves = [(tree, node.parent, tree.isend(mine, node.parent), result)
              for tree, node, mine, result in trees if not node.children]
    sends: list[Request] = []
    for tree, node, mine, result in trees:
        if not node.children:
            continue
        incoming = [call.buffer(result) for _ in node.children]
        yield [tree.irecv(received, child) for received, child in zip(incoming, node.children, strict=True)]
        for received in incoming:
            mine = reduce(mine, received, out=result)
        tree.step += 1
        if node.parent >= 0:
            yield (tree.isend(result, node.parent),)
            yield (tree.irecv(result, node.parent),)
            tree.step += 1
        sends += [tree.isend(result, child) for child in node.children]
    for tree, parent, sent, result in leaves:
        yield (sent,)
        yield (tree.irecv(result, parent),)
    yield sends

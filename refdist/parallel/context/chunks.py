"""Which positions of a sequence each context-parallel rank holds.

    contiguous, 4 ranks      0 0 0 0  1 1 1 1  2 2 2 2  3 3 3 3
    zigzag, 4 ranks          0 0  1 1  2 2  3 3  3 3  2 2  1 1  0 0

Zigzag is Llama 3's cut into 2N chunks, of which rank i holds i and 2N − 1 − i (Grattafiori et al. 2024, section 3.3.2). A query
sees the keys before it, so a contiguous last rank has about 2N − 1 times the first one's work; with zigzag everybody has a cheap
early chunk and its expensive mirror image, the same in sum.

A rank has as many positions in the one layout as in the other, and its two chunks share them evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from refdist.comm.reduction import bounds
from refdist.ops import AttentionMask

__all__ = ["LAYOUTS", "Chunks", "lengths", "positions"]

LAYOUTS = ("zigzag", "contiguous")


def positions(length: int, ranks: int, layout: str, together: int = 1) -> tuple[np.ndarray, ...]:
    """Each rank's positions of a sequence, integers in increasing order.

    Groups of ``together`` neighbours have what ``np.array_split`` gives so many groups, and share it in the same way.
    """
    held = lengths(length, ranks, together)
    if layout == "contiguous":
        return tuple(np.arange(start, end) for start, end in pairwise([0, *accumulate(held)]))
    sizes = [(count + 1) // 2 for count in held] + [count // 2 for count in reversed(held)]  # of the 2N chunks
    chunks = [np.arange(start, end) for start, end in pairwise([0, *accumulate(sizes)])]
    return tuple(np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks))


def lengths(length: int, ranks: int, together: int = 1) -> list[int]:
    """How many positions of a sequence each rank holds, in either layout."""
    groups = bounds(length, ranks // together)
    return [stop - start for first, last in pairwise(groups) for start, stop in pairwise(bounds(last - first, together))]


class Chunks(NamedTuple):
    """What each rank of a group holds of a sequence; every rank knows that of all.

    Attributes:
        positions: of each rank, integers [seq of that rank].
        segments: of each rank, integers [rows, seq of that rank], or None without segments.
    """

    positions: tuple[np.ndarray, ...]
    segments: tuple[np.ndarray, ...] | None = None

    @classmethod
    def of(cls, positions: Sequence[np.ndarray], segment_ids: np.ndarray | None) -> Chunks:
        """From each rank's positions and the whole sequences' segments [rows, seq]."""
        return cls(tuple(positions), None if segment_ids is None else tuple(segment_ids[:, part] for part in positions))

    @property
    def lengths(self) -> list[int]:
        return [len(part) for part in self.positions]

    def grouped(self, size: int) -> Chunks:
        """What groups of ``size`` neighbours hold together, rank after rank."""
        def joined(parts: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
            return tuple(np.concatenate(parts[first:first + size], axis=-1) for first in range(0, len(parts), size))

        return Chunks(joined(self.positions), None if self.segments is None else joined(self.segments))

    def mask(self, queries: int, keys: int | None = None) -> AttentionMask:
        """Of one rank's queries against another rank's keys, or against all ranks' keys, rank after rank."""
        everybody = self.grouped(len(self.positions))
        owner, of = (everybody, 0) if keys is None else (self, keys)
        own = None if self.segments is None else self.segments[queries]
        other = None if owner.segments is None else owner.segments[of]
        return AttentionMask(self.positions[queries], owner.positions[of], own, other)

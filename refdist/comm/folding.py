"""What algorithms for powers of two do with the other numbers of ranks.

P is the largest power of two that is at most N. The first 2 (N - P) ranks form pairs; the even rank of each pair hands what it
has to the odd one and sits out, and is told the result at the end (Rabenseifner & Träff 2004, "More efficient reduction
algorithms for non-power-of-two number of processors", section 3).

    N = 6:   0 ─▶ 1    2 ─▶ 3    4    5          the core: 1 3 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Fold", "fold"]


class Fold(NamedTuple):
    """Who takes part.

    Attributes:
        core: the ranks that take part; their number is a power of two; all of them as a range if that is every rank.
        folded: whether this rank sits out.
        partner: the other rank of its pair, or -1.
        owners: the lowest rank that each core rank stands for: of its pair, or itself.
    """

    core: Sequence[int]
    folded: bool
    partner: int
    owners: Sequence[int]


@lru_cache(maxsize=4096)
def fold(size: int, rank: int) -> Fold:
    """The fold of ``size`` ranks as ``rank`` sees it."""
    paired = 2 * (size - (1 << size.bit_length() - 1))
    if not paired:
        return Fold(range(size), False, -1, range(size))
    singles = range(paired, size)
    partner = rank ^ 1 if rank < paired else -1
    return Fold((*range(1, paired, 2), *singles), rank < paired and rank % 2 == 0, partner, (*range(0, paired, 2), *singles))

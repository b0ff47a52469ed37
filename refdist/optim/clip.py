"""Clipping by the global norm (Pascanu, Mikolov & Bengio 2013), from a sum of squares that no order and no sharding changes.

Floating-point addition depends on its order, and a norm that is summed shard by shard, then over ranks, would differ in its last
digits from the single device's; after clipping so would every parameter. Here squares are summed in float64 within a row, which
sharding keeps whole, and the rows' sums exactly: as one integer in units of 2⁻¹⁰⁷⁴, the smallest float64, of which a rank's
share is a vector of 32-bit digits that an integer all-reduce adds up (a superaccumulator: Kulisch & Miranker 1981; Collange,
Defour, Graillat & Iakymchuk 2015).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from refdist.numerics.rounding import widened

__all__ = ["clip_scale", "exact_squares", "exact_value", "squared_norm"]

_BLOCK = 16384  # elements of one pass
_UNIT = 1074  # the sum is counted in units of 2 ** -_UNIT
_DIGITS = 68  # of 32 bits: up to 2 ** 1024, and room above
_MASK = (1 << 32) - 1


def exact_squares(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """This rank's share of the sum of squares: int64 [70], 32-bit digits from the lowest, then how many rows are infinite or NaN.

    Shares add up elementwise, in any order; :func:`exact_value` turns their sum into a number.

    Args:
        arrays: parts of gradients in which rows (along the last dimension) are whole.
    """
    digits = np.zeros(_DIGITS + 2, np.int64)
    arrays = list(arrays)
    with np.errstate(over="ignore"):  # to infinity, which is counted
        sums = np.concatenate([np.zeros(0), *_row_sums(arrays)])
    finite = np.isfinite(sums)
    if not finite.all():
        digits[-2] += np.count_nonzero(np.isinf(sums))
        digits[-1] += np.count_nonzero(np.isnan(sums))
        sums = sums[finite]
    _add_up(digits, sums)
    return digits


def exact_value(digits: np.ndarray) -> float:
    """The sum that digits of :func:`exact_squares` stand for, correctly rounded; infinite or NaN if a part of it is."""
    if digits[-1]:
        return math.nan
    if digits[-2]:
        return math.inf
    total = sum(digit << 32 * place for place, digit in enumerate(digits[:_DIGITS].tolist()))
    try:
        return total / (1 << _UNIT)
    except OverflowError:
        return math.inf


def squared_norm(arrays: Iterable[np.ndarray]) -> float:
    """The sum of squares of all elements."""
    return exact_value(exact_squares(arrays))


def clip_scale(norm: float, max_norm: float | None) -> float:
    """What gradients of this global norm are multiplied by so that the norm is at most ``max_norm``; None: never clip."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def _row_sums(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Sums of squares of some rows at a time, in float64; the elements of a vector are rows of their own."""
    for rows in _joined(arrays):
        step = max(1, _BLOCK // rows.shape[1])
        for start in range(0, len(rows), step):
            block = widened(rows[start:start + step]).astype(np.float64)
            block *= block
            yield np.add.reduce(block, axis=1)


def _joined(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Arrays as matrices of rows, the small ones of one length of rows joined into one."""
    small: defaultdict[Any, list[np.ndarray]] = defaultdict(list)
    for array in arrays:
        rows = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1) if array.size else array.reshape(0, 1)
        if rows.size < _BLOCK:
            small[rows.shape[1], rows.dtype].append(rows)
        else:
            yield rows
    for group in small.values():
        yield np.concatenate(group) if len(group) > 1 else group[0]


def _add_up(digits: np.ndarray, sums: np.ndarray) -> None:
    """Add finite sums ≥ 0: each is a 53-bit integer times a power of two, which covers three digits."""
    fraction, exponent = np.frexp(sums)
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    place = exponent.astype(np.int64) + (_UNIT - 53)
    mantissa >>= np.clip(-place, 0, 63)  # subnormal numbers have trailing zeros here
    digit, shift = np.divmod(np.maximum(place, 0), 32)
    low, high = (mantissa & _MASK) << shift, (mantissa >> 32) << shift
    np.add.at(digits, digit, low & _MASK)
    np.add.at(digits, digit + 1, (low >> 32) + (high & _MASK))
    np.add.at(digits, digit + 2, high >> 32)

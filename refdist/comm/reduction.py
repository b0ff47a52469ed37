"""The reduction operators, and the shards of an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

__all__ = ["OPERATIONS", "Reduce", "accumulation_dtype", "accumulator", "bounds", "divide", "parts", "pieces", "reduction"]

_OPERATORS: dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply,
                                   "avg": np.add}
OPERATIONS = tuple(_OPERATORS)

Reduce: TypeAlias = Callable[..., np.ndarray]
"""``reduce(a, b, out=out)``: one elementwise addition (or maximum, …); returns ``out``, which may be ``a`` or ``b``."""


class _InDtype:
    """An addition that is carried out in an accumulation dtype and rounded to the dtype of ``out``.

    What travels between ranks is of the message dtype; a rank that adds several contributions keeps their sum in an
    :func:`accumulator` meanwhile.
    """

    def __init__(self, ufunc: np.ufunc, dtype: np.dtype) -> None:
        self.ufunc = ufunc
        self.dtype = dtype

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self.ufunc(a, b, out=out, dtype=self.dtype, casting="unsafe")


@lru_cache(maxsize=256)
def reduction(op: str, accumulate: Any, dtype: np.dtype) -> Reduce:
    """The addition of arrays of ``dtype``, carried out in ``accumulate`` (None: in ``dtype`` itself)."""
    if op not in _OPERATORS:
        raise ValueError(f"op={op!r}: expected one of {', '.join(_OPERATORS)}")
    if op == "avg" and dtype.kind in "biu":
        raise ValueError(f"op='avg' needs a floating-point array, not {dtype}")
    if accumulate is None or np.dtype(accumulate) == dtype:
        return _OPERATORS[op]
    accumulate = np.dtype(accumulate)
    if accumulate.kind == "O" or not np.can_cast(dtype, accumulate, "same_kind"):
        raise ValueError(f"accumulate={accumulate}: expected a dtype of the kind of {dtype}, or of a wider one")
    return _InDtype(_OPERATORS[op], accumulate)


def accumulation_dtype(reduce: Reduce) -> np.dtype | None:
    """The dtype in which additions are carried out; None: that of the arrays."""
    return reduce.dtype if isinstance(reduce, _InDtype) else None


def accumulator(reduce: Reduce, like: np.ndarray) -> np.ndarray:
    """Where a sum of several contributions grows: ``like`` itself, or an array of the accumulation dtype if there is one."""
    return np.empty_like(like, reduce.dtype) if isinstance(reduce, _InDtype) else like


def divide(total: np.ndarray, size: int, reduce: Reduce) -> None:
    """Turn a sum over ``size`` ranks into their average, in place."""
    dtype = accumulation_dtype(reduce)
    np.divide(total, size, out=total, dtype=dtype, casting="same_kind" if dtype is None else "unsafe")


@lru_cache(maxsize=4096)
def bounds(length: int, parts: int) -> tuple[int, ...]:
    """Where ``np.array_split`` cuts ``length`` elements into ``parts``: ``parts + 1`` offsets, the first shards longer."""
    short, longer = divmod(length, parts)
    return tuple(part * short + min(part, longer) for part in range(parts + 1))


def parts(x: np.ndarray, axis: int, lengths: Sequence[int]) -> list[np.ndarray]:
    """Consecutive parts of an array along an axis, as views."""
    ends = list(accumulate(lengths))
    turned = x.swapaxes(0, axis)
    return [turned[end - length:end].swapaxes(0, axis) for end, length in zip(ends, lengths, strict=True)]


def pieces(flat: np.ndarray, offsets: Sequence[int]) -> list[np.ndarray]:
    """The parts of a flat array between consecutive offsets, as views."""
    return [flat[offsets[part]:offsets[part + 1]] for part in range(len(offsets) - 1)]

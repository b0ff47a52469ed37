"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-rotation layout, with Llama 3.1's scaling.

Of a head of width d, element j and element j + d/2 are the two coordinates of a plane that is turned by the angle
position · f_j, with f_j = θ^(−2j/d):

    y_j       = x_j cos − x_{j+d/2} sin
    y_{j+d/2} = x_{j+d/2} cos + x_j sin

The transpose of a rotation is the rotation by the opposite angle; that is the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from .kernel import accumulation_dtype, empty_like, kernel, row_blocks

__all__ = ["RotaryTables", "rotary", "rotary_backward", "rotary_frequencies"]


def rotary_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None = None) -> np.ndarray:
    """The angle that one position turns each plane by: float64 [head_dim / 2].

    Args:
        head_dim: even.
        theta: the base θ.
        scaling: None, or Llama 3.1's mapping of `factor`, `low_freq_factor`, `high_freq_factor` and
            `original_max_position_embeddings` (`rope_type: llama3` in Hugging Face): planes that turn slowly in the
            original context are slowed down by `factor`, fast ones are left alone, those between are interpolated.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: as it is; 0: stretched
    return frequencies * (kept + (1 - kept) / scaling["factor"])


class RotaryTables:
    """cos and sin of the angles at some positions, worked out in float64; and remembered in the shapes that kernels want: twice
    the numbers of a row of queries, and of keys, for as long as the tables live.

    Args:
        frequencies: of `rotary_frequencies`.
        positions: integers [seq] or [batch, seq].
        dtype: of the tables.

    Attributes:
        cos, sin: [..., seq, 1, head_dim / 2]; not to be changed.
    """

    def __init__(self, frequencies: np.ndarray, positions: np.ndarray, dtype: Any) -> None:
        angles = positions[..., None, None] * frequencies
        self.cos, self.sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        self._as_wide_as_rows: dict[Any, np.ndarray] = {}

    def as_wide_as_rows(self, heads: int, dtype: np.dtype) -> np.ndarray:
        """Factors of x and of its swapped halves, [2, 1 or batch, seq · heads · head_dim], so that products run along memory."""
        tables = self._as_wide_as_rows.get((heads, dtype))
        if tables is None:
            rows, (length, _, half) = math.prod(self.cos.shape[:-3]), self.cos.shape[-3:]
            tables = empty_like(self.cos, (2, rows, length, heads, 2, half), dtype)
            tables[0] = self.cos[..., None, :]
            tables[1, ..., 0, :], tables[1, ..., 1, :] = -self.sin, self.sin
            tables = self._as_wide_as_rows[heads, dtype] = tables.reshape(2, rows, length * heads * 2 * half)
        return tables


@kernel()
def rotary(
    x: np.ndarray,
    tables: RotaryTables,
    *,
    out: np.ndarray | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> np.ndarray:
    """Turn queries or keys: x [batch, seq, heads, head_dim], tables of its positions -> y like x.

    Args:
        out: where to write y, C-contiguous; it may be x.
    """
    return _turn(x, tables, empty(x) if out is None else out, np.add)


@kernel()
def rotary_backward(
    dy: np.ndarray,
    tables: RotaryTables,
    *,
    out: np.ndarray | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> np.ndarray:
    """dx [batch, seq, heads, head_dim]: dy turned back; out may be dy."""
    return _turn(dy, tables, empty(dy) if out is None else out, np.subtract)


def _turn(x: np.ndarray, tables: RotaryTables, y: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """y = x · cos ± swapped x · sin."""
    half, shape = x.shape[-1] // 2, (len(x), math.prod(x.shape[1:]))
    cos, sin = tables.as_wide_as_rows(x.shape[2], accumulation_dtype(x))  # [1 or batch, width]
    own = (cos, sin) if len(cos) > 1 else ()
    for xs, *of_rows, ys, swapped in row_blocks(x.reshape(shape), *own, out=(y.reshape(shape),), scratch=1):
        before, after = _halves(xs, half), _halves(swapped, half)
        after[:, ::2], after[:, 1::2] = before[:, 1::2], before[:, ::2]
        c, s = of_rows or (cos, sin)
        swapped *= s
        np.multiply(xs, c, out=ys)
        combine(ys, swapped, out=ys)
    return y


def _halves(x: np.ndarray, half: int) -> np.ndarray:
    """[..., n · half] seen as [..., n] halves of heads, which NumPy copies each in one piece."""
    return np.ascontiguousarray(x).view(_piece(half * x.itemsize))


@lru_cache(maxsize=64)
def _piece(nbytes: int) -> np.dtype:
    """An item of so many bytes, which are nothing but bytes."""
    return np.dtype((np.void, nbytes))

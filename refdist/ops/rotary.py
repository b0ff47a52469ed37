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
from typing import Any

import numpy as np

from .kernel import accumulation_dtype, empty_like, kernel, row_blocks

__all__ = ["rotary", "rotary_backward", "rotary_frequencies", "rotary_tables"]


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


def rotary_tables(frequencies: np.ndarray, positions: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [..., seq, 1, head_dim / 2] for integer positions [seq] or [batch, seq], computed in float64."""
    angles = positions[..., None, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


@kernel()
def rotary(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    out: np.ndarray | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> np.ndarray:
    """Turn queries or keys: x [batch, seq, heads, head_dim], tables from `rotary_tables` -> y like x.

    Args:
        out: where to write y, C-contiguous; it may be x.
    """
    y = empty(x) if out is None else out
    half, width = x.shape[-1] // 2, math.prod(x.shape[1:])
    wide_cos, wide_sin = _as_wide_as_rows(x, cos, sin)
    own = (wide_cos, wide_sin) if cos.ndim == 4 else ()
    for xs, *of_rows, ys, swapped in row_blocks(x.reshape(len(x), width), *own, out=(y.reshape(len(x), width),), scratch=1):
        before, after = _halves(xs, half), _halves(swapped, half)
        after[:, ::2], after[:, 1::2] = before[:, 1::2], before[:, ::2]
        c, s = of_rows or (wide_cos, wide_sin)
        swapped *= s
        np.multiply(xs, c, out=ys)
        ys += swapped
    return y


@kernel()
def rotary_backward(
    dy: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    *,
    out: np.ndarray | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> np.ndarray:
    """dx [batch, seq, heads, head_dim]: dy turned back; out may be dy."""
    return rotary(dy, cos, -sin, out=out, empty=empty)


def _as_wide_as_rows(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The factors of x and of its swapped halves, [2, 1 or batch, seq · heads · head_dim], so that products run along memory."""
    dtype, half = accumulation_dtype(x), x.shape[-1] // 2
    tables = empty_like(x, (2, math.prod(cos.shape[:-3]), *x.shape[1:]), dtype)
    cos, sin, opposite = (_halves(np.ascontiguousarray(table, dtype), half) for table in (cos, sin, -sin))  # [..., seq, 1, 1]
    halves = _halves(tables, half)  # [2, 1 or batch, seq, heads, 2]
    halves[0], halves[1, ..., :1], halves[1, ..., 1:] = cos, opposite, sin
    return tables.reshape(2, tables.shape[1], math.prod(x.shape[1:]))


def _halves(x: np.ndarray, half: int) -> np.ndarray:
    """[..., n · half] seen as [..., n] halves of heads, which NumPy copies each in one piece."""
    return np.ascontiguousarray(x).view(np.dtype((np.void, half * x.itemsize)))

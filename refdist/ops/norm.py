"""RMSNorm (Zhang & Sennrich 2019), as Llama uses it: no mean is subtracted, no bias is added.

    r  = 1 / sqrt(mean(x²) + ε)                     [..., 1]      the saved statistic
    y  = x · r · g
    dx = r · (g·dy) − x · r³ · mean(g·dy·x)
    dg = Σ dy · x · r                                [hidden]     summed over all rows

The mean is over the last dimension. Statistics are kept in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..numerics.rounding import store, widened
from .kernel import accumulation_dtype, empty_like, kernel, row_blocks

__all__ = ["rms_norm", "rms_norm_again", "rms_norm_backward"]


@kernel()
def rms_norm(
    x: np.ndarray, gain: np.ndarray, eps: float, *, empty: Callable[..., np.ndarray] = empty_like
) -> tuple[np.ndarray, np.ndarray]:
    """Normalise each row.

    Args:
        x: [..., hidden].
        gain: [hidden].
        eps: ε, added to the mean square.

    Returns:
        y: [..., hidden]; r: [..., 1], to be saved. y need not be: `rms_norm_again(x, gain, r)` is y, bit for bit.
    """
    y = empty(x)
    r = empty(x, shape=(*x.shape[:-1], 1), dtype=accumulation_dtype(x))
    gain = widened(gain)
    for xs, ys, rs in row_blocks(x, out=(y, r)):
        mean_square = np.vecdot(xs, xs)[:, None] / xs.shape[1]
        np.divide(1, np.sqrt(mean_square + eps), out=rs)
        _scale(xs, rs, gain, out=ys)
    return y, r


@kernel()
def rms_norm_again(
    x: np.ndarray, gain: np.ndarray, r: np.ndarray, *, empty: Callable[..., np.ndarray] = empty_like
) -> np.ndarray:
    """y from x [..., hidden] and the saved r [..., 1]."""
    y, gain = empty(x), widened(gain)
    for xs, rs, ys in row_blocks(x, r, out=(y,)):
        _scale(xs, rs, gain, out=ys)
    return y


def _scale(x: np.ndarray, r: np.ndarray, gain: np.ndarray, out: np.ndarray) -> None:
    np.multiply(x, r, out=out)
    out *= gain


@kernel()
def rms_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gain: np.ndarray,
    r: np.ndarray,
    residual: np.ndarray | None = None,
    *,
    empty: Callable[..., np.ndarray] = empty_like,
) -> tuple[np.ndarray, np.ndarray]:
    """Both gradients in one pass.

    Args:
        dy, x: [..., hidden].
        gain: [hidden].
        r: [..., 1], as saved.
        residual: [..., hidden], the gradient that has gone past the norm; None: none has.

    Returns:
        dx [..., hidden], to which residual has been added; dg [hidden].
    """
    dx, wide_gain = empty(dy), widened(gain)
    dgain = np.zeros_like(r, shape=gain.shape)
    past = () if residual is None else (residual,)
    for dys, xs, rs, *others, dxs, term in row_blocks(dy, x, r, *past, out=(dx,), scratch=1):
        np.multiply(dys, xs, out=term)
        dgain += rs[:, 0] @ term  # Σ over the rows
        slope = (term @ wide_gain)[:, None] * rs**3 / xs.shape[1]
        np.multiply(xs, slope, out=term)
        np.multiply(dys, wide_gain, out=dxs)
        dxs *= rs
        dxs -= term
        for other in others:
            dxs += other
    return dx, dgain if dgain.dtype == gain.dtype else store(dgain, out=empty_like(gain))

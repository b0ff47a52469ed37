"""Dropout (Srivastava et al. 2014), scaled so that the expectation stays: y = x · keep / (1 − p). It is its own backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .kernel import empty_like, kernel, row_blocks

__all__ = ["dropout"]


@kernel()
def dropout(
    x: np.ndarray,
    keep: np.ndarray,
    probability: float,
    *,
    out: np.ndarray | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> np.ndarray:
    """y [..., n] from x [..., n] and bool keep [..., n], false with the probability p; out may be x."""
    y = empty(x) if out is None else out
    for xs, ks, ys in row_blocks(x, keep, out=(y,)):
        np.multiply(xs, 1 / (1 - probability), out=ys)
        ys *= ks
    return y

"""SwiGLU (Shazeer 2020): a = silu(gate) · up, where silu(g) = g · σ(g).

    da/dup   = silu(gate)
    da/dgate = up · (σ + silu · (1 − σ))

σ(g) = (1 + tanh(g/2)) / 2 never overflows. The product a is not saved: backward needs it for the weight gradient of the
down projection, and gives it back again next to the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .kernel import empty_like, kernel, row_blocks

__all__ = ["swiglu", "swiglu_backward"]


@kernel()
def swiglu(gate: np.ndarray, up: np.ndarray, *, empty: Callable[..., np.ndarray] = empty_like) -> np.ndarray:
    """a = silu(gate) · up; all [..., ffn]. Backward needs gate and up."""
    a = empty(gate)
    for g, u, out, half, silu in row_blocks(gate, up, out=(a,), scratch=2):
        np.multiply(g, 0.5, out=half)
        np.tanh(half, out=silu)
        silu += 1
        silu *= half
        np.multiply(silu, u, out=out)
    return a


@kernel()
def swiglu_backward(
    da: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    *,
    out: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From da, gate, up [..., ffn] to dgate, dup and the forward's a, all [..., ffn].

    Args:
        out: where to write the three; it may be (gate, up, da) themselves, which saves their memory and its traffic.
    """
    dgate, dup, a = out or (empty(gate), empty(up), empty(da))
    for d, g, u, dg, du, product, sigma, silu, slope in row_blocks(da, gate, up, out=(dgate, dup, a), scratch=3):
        np.multiply(g, 0.5, out=silu)
        np.tanh(silu, out=sigma)
        sigma += 1
        silu *= sigma
        sigma *= 0.5
        np.subtract(1, silu, out=slope)
        slope *= sigma
        slope += silu  # σ + silu · (1 − σ)
        slope *= d
        np.multiply(slope, u, out=dg)
        np.multiply(silu, u, out=slope)
        np.multiply(silu, d, out=du)
        product[...] = slope
    return dgate, dup, a


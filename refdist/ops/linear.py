"""The linear layer y = x Wᵀ + b, its input gradient and its weight gradient apart.

    y  = x Wᵀ + b        [..., out]
    dx = dy W            [..., in]         or a sum of such terms, where several layers have the same input
    dW = dyᵀ x           [out, in]      summed over all leading dimensions
    db = Σ dy            [out]

Weights are [out, in], as PyTorch and Hugging Face keep them. Input and weight gradient are separate kernels because
zero-bubble pipelines (Qi et al. 2023) run them at different times, and tensor parallelism overlaps one of them with a
collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..numerics.rounding import has_16_bits, store, widened
from .kernel import empty_like, kernel, row_blocks, working

__all__ = ["add", "add_bias", "linear", "linear_bias_grad", "linear_input_grad", "linear_weight_grad"]


@kernel(flops=lambda x, w, *_: 2 * x.size * w.shape[0])
def linear(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None = None,
    *,
    empty: Callable[..., np.ndarray] = empty_like,
    matmul: Callable[..., np.ndarray] = np.matmul,
) -> np.ndarray:
    """y = x Wᵀ + b.

    Args:
        x: [..., in].
        w: [out, in].
        b: [out], or None.

    Returns:
        y: [..., out]. Backward needs x and w only.
    """
    y = empty(x, shape=(*x.shape[:-1], w.shape[0]))
    matmul(_rows(x), w.T, out=_rows(y))
    return y if b is None else add_bias(y, b)


@kernel(flops=lambda *terms: sum(2 * dy.size * w.shape[1] for dy, w in _pairs(terms)))
def linear_input_grad(
    dy: np.ndarray,
    w: np.ndarray,
    *more: np.ndarray,
    empty: Callable[..., np.ndarray] = empty_like,
    matmul: Callable[..., np.ndarray] = np.matmul,
) -> np.ndarray:
    """dx = dy W: dy [..., out], w [out, in] -> dx [..., in].

    Args:
        more: dy and w of further layers with the same input: dx is the sum, rounded once.
    """
    dx = empty(dy, shape=(*dy.shape[:-1], w.shape[1]))
    if not more:
        matmul(_rows(dy), w, out=_rows(dx))
        return dx
    total = working(dx)
    matmul(_rows(dy), w, out=_rows(total))
    term = empty_like(total)
    for other_dy, other_w in _pairs(more):
        total += matmul(_rows(other_dy), other_w, out=_rows(term)).reshape(total.shape)
    return dx if total is dx else store(total, dx)


@kernel(flops=lambda dy, x, *_: 2 * dy.size * x.shape[-1])
def linear_weight_grad(
    dy: np.ndarray,
    x: np.ndarray,
    *,
    empty: Callable[..., np.ndarray] = empty_like,
    matmul: Callable[..., np.ndarray] = np.matmul,
) -> np.ndarray:
    """dW = dyᵀ x: dy [..., out], x [..., in] -> dW [out, in]."""
    dw = empty(dy, shape=(dy.shape[-1], x.shape[-1]))
    matmul(_rows(dy).T, _rows(x), out=dw)
    return dw


@kernel()
def linear_bias_grad(dy: np.ndarray, *, empty: Callable[..., np.ndarray] = empty_like) -> np.ndarray:
    """db = Σ dy over the leading dimensions: dy [..., out] -> db [out]."""
    return store(np.add.reduce(widened(_rows(dy)), axis=0), out=empty(dy, shape=dy.shape[-1:]))


@kernel()
def add_bias(y: np.ndarray, b: np.ndarray) -> np.ndarray:
    """y += b in place: y [..., out] is C-contiguous and nobody else's, b [out]. Returns y."""
    b = widened(b)
    if not has_16_bits(y.dtype):
        return np.add(y, b, out=y)
    for ys, sums in row_blocks(y, out=(y,)):
        np.add(ys, b, out=sums)
    return y


@kernel()
def add(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """y += x, the residual connection, in place: y is C-contiguous and nobody else's, x has its shape. Returns y."""
    if not has_16_bits(y.dtype) and not has_16_bits(x.dtype):
        return np.add(y, x, out=y)
    for ys, xs, sums in row_blocks(y, x, out=(y,)):
        np.add(ys, xs, out=sums)
    return y


def _pairs(terms: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """dy and w of each layer."""
    return zip(terms[::2], terms[1::2], strict=True)


def _rows(x: np.ndarray) -> np.ndarray:
    """[..., n] seen as a matrix [rows, n]."""
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if x.size else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

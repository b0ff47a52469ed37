"""Helpers for testing kernels: finite differences, and the formulas written as plainly as they can be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

STEP = 1e-3


def numeric_gradient(f: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """df/dx in float64, element by element, by the central difference of fourth order: error of about 1e-11."""
    x = np.array(x, dtype=np.float64)
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        kept = x[i]
        values = []
        for steps in (-2, -1, 1, 2):
            x[i] = kept + steps * STEP
            values.append(f(x))
        x[i] = kept
        gradient[i] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * STEP)
    return gradient


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-9) -> None:
    """Element by element, relative to the largest element."""
    assert got.shape == want.shape, (got.shape, want.shape)
    error = np.abs(np.asarray(got, np.float64) - want).max(initial=0)
    assert error <= tolerance * max(1.0, np.abs(want).max(initial=0)), f"error {error:.2e}"


def naive_attention(q, k, v, mask, factors=None):
    """out and lse with the [queries, keys] matrix written out; factors [batch, heads, queries, keys] multiply P."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    sees = mask.k_positions[None, :] <= mask.q_positions[:, None]
    if mask.q_segments is not None:
        sees = sees & (mask.q_segments[:, :, None] == mask.k_segments[:, None, :])
        sees = sees[:, None]
    scores = np.where(sees, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    p = weights / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[..., 0]
    if factors is not None:
        p = p * factors
    return np.einsum("bhqk,bkhd->bqhd", p, v), lse.transpose(0, 2, 1)

"""The token embedding: y = W[ids], and its weight gradient, a sum of the rows of dy that belong to one token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..numerics.rounding import store, widened
from .kernel import empty_like, kernel

__all__ = ["embedding", "embedding_weight_grad"]


@kernel()
def embedding(w: np.ndarray, ids: np.ndarray, *, empty: Callable[..., np.ndarray] = empty_like) -> np.ndarray:
    """w [vocab, hidden], ids [...], integers in [0, vocab) as the caller has checked -> y [..., hidden]."""
    y = empty(w, shape=(*ids.shape, w.shape[1]))
    return np.take(w, ids, axis=0, out=y, mode="clip")  # "raise" would go through a copy of y


@kernel()
def embedding_weight_grad(
    dy: np.ndarray, ids: np.ndarray, vocab_size: int, *, empty: Callable[..., np.ndarray] = empty_like
) -> np.ndarray:
    """dW [vocab, hidden] from dy [..., hidden] and ids [...]; the rows of one token are added in their order."""
    dw = empty(dy, shape=(vocab_size, dy.shape[-1]))
    dw[...] = 0
    order = np.argsort(ids, axis=None, kind="stable")
    if order.size:
        tokens, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        rows = widened(dy.reshape(-1, dy.shape[-1])[order])
        sums = np.add.reduceat(rows, starts, axis=0)
        dw[tokens] = store(sums, empty_like(dw, sums.shape))
    return dw

"""Kernels of vocabulary parallelism: a rank holds rows [first, first + n) of the embedding and of the output matrix.

    embedding     y[t] = W[ids[t] − first] where that row is here, else 0                        Σ over ranks: the embedding
    head          logits[t, v] for v of this rank only
    loss          lse[t] = log Σ_ranks exp lse_rank[t]
                  loss[t] = loss_rank[t] + (lse[t] − lse_rank[t])        on the rank that has the label's column
    gradient      dlogits[t, v] = scale · (exp(logits[t, v] − lse[t]) − [v = label])

(Shoeybi et al. 2019, section 3, which sums exponentials after a maximum over the ranks; here each rank's own log-sum-exp takes
the place of both, so that one exchange of two numbers a token is enough, and logits of ±10⁴ are as safe as on one device.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from refdist import ops
from refdist.ops import IGNORED, accumulation_dtype, empty_like, kernel, row_blocks

__all__ = ["embedding_part", "embedding_part_weight_grad", "part_cross_entropy", "part_cross_entropy_backward",
           "whole_cross_entropy"]


@kernel()
def embedding_part(w: np.ndarray, ids: np.ndarray, first: int, *, empty: Callable[..., np.ndarray] = empty_like) -> np.ndarray:
    """w: rows from ``first`` on, [rows, hidden]; ids [...] of the whole vocabulary -> y [..., hidden], 0 where not here."""
    here = (ids >= first) & (ids < first + w.shape[0])
    if not w.shape[0]:
        y = empty(w, shape=(*ids.shape, w.shape[1]))
        y[...] = 0
        return y
    y = ops.embedding(w, np.where(here, ids - first, 0), empty=empty)
    y[~here] = 0
    return y


@kernel()
def embedding_part_weight_grad(dy: np.ndarray, ids: np.ndarray, first: int, end: int, *,
                               empty: Callable[..., np.ndarray] = empty_like) -> np.ndarray:
    """dW of rows [first, end), [end − first, hidden], from dy [..., hidden] and ids [...]."""
    here = (ids >= first) & (ids < end)
    return ops.embedding_weight_grad(dy[here], ids[here] - first, end - first, empty=empty)


@kernel()
def part_cross_entropy(logits: np.ndarray, labels: np.ndarray, first: int, *,
                       empty: Callable[..., np.ndarray] = empty_like) -> np.ndarray:
    """This rank's terms: logits [tokens, columns from ``first`` on], labels [tokens] of the whole vocabulary.

    Returns:
        [1, 2, tokens]: lse over these columns (−∞ without any); lse less the label's logit, where that is here, else 0.
    """
    terms = empty(logits, shape=(1, 2, len(labels)), dtype=accumulation_dtype(logits))
    if logits.shape[1]:
        here = (labels >= first) & (labels < first + logits.shape[1])
        terms[0, 1], terms[0, 0] = ops.cross_entropy(logits, np.where(here, labels - first, IGNORED), empty=empty)
    else:
        terms[0, 0], terms[0, 1] = -np.inf, 0
    return terms


@kernel()
def whole_cross_entropy(terms: np.ndarray, labels: np.ndarray, cuts: Sequence[int], *,
                        empty: Callable[..., np.ndarray] = empty_like) -> tuple[np.ndarray, np.ndarray]:
    """losses and lse over all columns [tokens], from every rank's terms [tp, 2, tokens] and where the vocabulary is cut."""
    losses, lse = empty(terms, shape=labels.shape), empty(terms, shape=labels.shape)
    lse[...] = terms[0, 0]
    for term in terms[1:]:
        np.logaddexp(lse, term[0], out=lse)
    losses[...] = 0
    for (own_lse, own_loss), first, end in zip(terms, cuts, cuts[1:], strict=False):
        here = (labels >= first) & (labels < end)
        losses[here] = own_loss[here] + (lse[here] - own_lse[here])
    return losses, lse


@kernel()
def part_cross_entropy_backward(scale: float, logits: np.ndarray, labels: np.ndarray, lse: np.ndarray, first: int) -> np.ndarray:
    """dlogits of Σ_t scale · loss_t for these columns, in place of the logits [tokens, columns]; lse over all columns."""
    weights = np.where(labels != IGNORED, lse.dtype.type(scale), lse.dtype.type(0))[:, None]
    columns = labels[:, None] - first
    for x, column, log_sum, weight, dx in row_blocks(logits, columns, lse[:, None], weights, out=(logits,)):
        p = x - log_sum
        np.exp(p, out=p)
        rows = np.flatnonzero((column[:, 0] >= 0) & (column[:, 0] < p.shape[1]))
        p[rows, column[rows, 0]] -= 1
        np.multiply(p, weight, out=dx)
    return logits

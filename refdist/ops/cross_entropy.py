"""Cross-entropy of the next token, as a sum over the tokens whose label is not IGNORED.

    loss_t       = lse_t − logits_t[label_t]         lse_t = log Σ_v exp(logits_t[v])
    dlogits_t[v] = scale · (exp(logits_t[v] − lse_t) − [v = label_t])

The largest logit is subtracted before exp, so that logits of any size are safe. An ignored token has loss 0 and
gradient 0. Dividing by the number of valid tokens is the caller's, because that number is global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .kernel import accumulation_dtype, empty_like, kernel, row_blocks

__all__ = ["IGNORED", "cross_entropy", "cross_entropy_backward", "token_chunks"]

IGNORED = -100  # the label of a token that does not count, as in PyTorch and Hugging Face
LOGITS = 1 << 22  # how many logits are alive at a time


def token_chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Cut the tokens into chunks with about LOGITS logits each, so that those of all tokens are never alive together."""
    step = max(1, LOGITS // vocab)
    for start in range(0, tokens, step):
        yield slice(start, min(tokens, start + step))


@kernel()
def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, *, empty: Callable[..., np.ndarray] = empty_like
) -> tuple[np.ndarray, np.ndarray]:
    """logits [tokens, vocab], labels integer [tokens] -> losses [tokens] and lse [tokens], both in float32 or wider."""
    losses = empty(logits, shape=labels.shape, dtype=accumulation_dtype(logits))
    lse = empty(losses)
    for x, y, loss, log_sum in row_blocks(logits, labels[:, None], out=(losses[:, None], lse[:, None])):
        top = np.maximum.reduce(x, axis=1, keepdims=True)
        shifted = x - top
        np.exp(shifted, out=shifted)
        np.log(np.add.reduce(shifted, axis=1, keepdims=True), out=log_sum)
        log_sum += top
        valid = y != IGNORED
        target = np.take_along_axis(x, np.where(valid, y, 0), axis=1)
        loss[...] = np.where(valid, log_sum - target, 0)
    return losses, lse


@kernel()
def cross_entropy_backward(
    scale: float | np.ndarray,
    logits: np.ndarray,
    labels: np.ndarray,
    lse: np.ndarray,
    *,
    out: np.ndarray | None = None,
    empty: Callable[..., np.ndarray] = empty_like,
) -> np.ndarray:
    """dlogits [tokens, vocab] of Σ_t scale · loss_t.

    Args:
        scale: one number, or one a token [tokens].
        logits, labels, lse: as given to and returned by `cross_entropy`.
        out: where to write dlogits; it may be `logits` itself.
    """
    dlogits = empty(logits) if out is None else out
    weights = np.where(labels != IGNORED, np.asarray(scale, dtype=lse.dtype), lse.dtype.type(0))[:, None]
    for x, y, log_sum, weight, dx in row_blocks(logits, labels[:, None], lse[:, None], weights, out=(dlogits,)):
        p = x - log_sum
        np.exp(p, out=p)
        row = np.arange(len(p))
        p[row, np.where(weight[:, 0] != 0, y[:, 0], 0)] -= 1
        np.multiply(p, weight, out=dx)
    return dlogits

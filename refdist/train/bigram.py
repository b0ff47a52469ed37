"""The baseline that a language model has to beat: the next byte, given only the byte before it.

    p(b | a) = (count(a, b) + strength · p(b)) / (count(a) + strength)        p(b) = (count(b) + 1) / (total + 256)

Bigram counts smoothed toward unigram frequencies, those smoothed by adding one (Dirichlet prior: MacKay and Peto 1995,
"A hierarchical Dirichlet language model", section 3).
"""

from __future__ import annotations

import numpy as np

from refdist.train.data import BYTES

__all__ = ["bigram_log_probabilities", "bigram_loss"]

STRENGTH = 4.0  # pseudo-counts given to the unigram frequencies


def bigram_log_probabilities(text: np.ndarray, strength: float = STRENGTH) -> np.ndarray:
    """log p(b | a), float64 [256, 256], of the model fitted on `text`, uint8 [length]."""
    unigram = np.bincount(text, minlength=BYTES) + 1.0  # [256]
    pairs = np.bincount(text[:-1].astype(np.int64) * BYTES + text[1:], minlength=BYTES * BYTES)
    counts = pairs.reshape(BYTES, BYTES)
    smoothed = counts + strength * unigram / unigram.sum()  # [256, 256]
    return np.log(smoothed / smoothed.sum(axis=1, keepdims=True))


def bigram_loss(log_probabilities: np.ndarray, windows: np.ndarray) -> float:
    """Mean negative log-likelihood, in nats per byte, of every byte but the first of each window [count, seq + 1]."""
    return float(-log_probabilities[windows[:, :-1], windows[:, 1:]].mean())

"""Sample text from a model, one token after another.

    logits of the last position ──► divide by the temperature ──► softmax ──► the token where a random number falls

The random number of position t is a function of (seed, t), so a sample can be repeated anywhere. Each token is a forward
pass over the whole window: plain, and fast enough for a few lines of text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refdist.errors import ConfigError
from refdist.numerics.random import random_words, stream

__all__ = ["generate", "pick"]


def generate(
    logits: Callable[[np.ndarray], np.ndarray],
    prompt: np.ndarray,
    count: int,
    *,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> np.ndarray:
    """Continue `prompt`, integers [length], by `count` tokens; returns the new ones, int64 [count].

    Args:
        logits: from input_ids [1, length] to the logits of each position [1, length, vocab].
        window: how many of the last tokens the model sees, at most.
        temperature: below 1 makes likely tokens likelier; 0 takes the likeliest.

    Raises:
        ConfigError: the model gives logits that are no numbers.
    """
    tokens = np.asarray(prompt, dtype=np.int64)
    uniform = random_words(stream(seed, "sample"), [count]) / 2.0**32  # [count] in [0, 1)
    for number in uniform:
        with np.errstate(over="ignore", invalid="ignore"):  # which the next line sees
            last = logits(tokens[None, -window:])[0, -1]  # [vocab]
        if not np.isfinite(last).all():
            raise ConfigError("the model's logits are not finite: it has diverged, and cannot be sampled from")
        tokens = np.append(tokens, pick(last, float(number), temperature))
    return tokens[len(prompt) :]


def pick(logits: np.ndarray, number: float, temperature: float) -> int:
    """The token of `logits` [vocab] where `number` in [0, 1) falls in the cumulative distribution."""
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    return int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))

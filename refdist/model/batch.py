"""What a batch has to be before anybody computes with it."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from ..ops import IGNORED
from .config import ModelConfig

__all__ = ["check_batch", "check_tokens"]


def check_batch(
    config: ModelConfig, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None
) -> int:
    """The number of labels that count (are not -100); ConfigError if the batch cannot be used.

    Args:
        input_ids, labels: integers [batch, seq]; labels[b, t] is the target of position t, or -100.
        segment_ids: integers [batch, seq], or None.
    """
    check_tokens(config, input_ids)
    named = [("labels", labels)] + ([] if segment_ids is None else [("segment_ids", segment_ids)])
    for name, array in named:
        _check_integers(name, array)
        if np.shape(array) != np.shape(input_ids):
            raise ConfigError(f"{name}: found shape {np.shape(array)}, expected that of input_ids, {np.shape(input_ids)}")
    counted = labels != IGNORED
    _check_range("labels", labels[counted], config, f" or {IGNORED}")
    if not counted.any():
        raise ConfigError(f"labels: all {labels.size} are {IGNORED}; expected at least one that counts")
    return int(np.count_nonzero(counted))


def check_tokens(config: ModelConfig, input_ids: np.ndarray) -> None:
    """ConfigError unless input_ids is [batch, seq] of integers in [0, vocab_size)."""
    _check_integers("input_ids", input_ids)
    if np.ndim(input_ids) != 2:
        raise ConfigError(f"input_ids: found shape {np.shape(input_ids)}, expected [batch, sequence]")
    _check_range("input_ids", input_ids, config)


def _check_integers(name: str, array: np.ndarray) -> None:
    dtype = getattr(array, "dtype", None)
    if dtype is None or not np.issubdtype(dtype, np.integer):
        raise ConfigError(f"{name}: found {dtype or type(array).__name__}, expected an array of integers")


def _check_range(name: str, array: np.ndarray, config: ModelConfig, otherwise: str = "") -> None:
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < config.vocab_size:
        worst = int(array.min()) if array.min() < 0 else int(array.max())
        raise ConfigError(f"{name}: found {worst}, expected 0 to {config.vocab_size - 1}{otherwise}")

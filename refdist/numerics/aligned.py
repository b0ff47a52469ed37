"""Scratch arrays that start on a cache line: vector instructions that cross lines take a quarter longer or more."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Scratch", "aligned_empty"]

LINE = 64  # bytes


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialised C-ordered array whose data start at a multiple of 64 bytes."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size].view(dtype).reshape(shape)


class Scratch(threading.local):
    """Working memory that each thread keeps: the pages of fresh memory cost more than what is done with them."""

    def __init__(self) -> None:
        self.memory = aligned_empty((0,), np.uint8)

    def arrays(self, *kinds: tuple[Sequence[int], Any]) -> list[np.ndarray]:
        """Uninitialised arrays like those of `aligned_empty`, a shape and a dtype each; those of the call
        before must not be used any more."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in kinds]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // LINE) * LINE)
        if starts[-1] > self.memory.size:
            self.memory = aligned_empty((starts[-1],), np.uint8)
        parts = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return [part.view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, kinds, strict=True)]

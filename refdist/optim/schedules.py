"""Learning-rate schedules: functions of the step number, from 1."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["linear", "warmup_cosine"]


def warmup_cosine(peak: float, warmup: int, steps: int, final: float = 0.1) -> Callable[[int], float]:
    """Linear to ``peak`` over ``warmup`` steps, then half a cosine down to ``final · peak`` at step ``steps``."""
    def rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))
    return rate


def linear(peak: float, warmup: int, steps: int, final: float = 0.0) -> Callable[[int], float]:
    """Linear to ``peak`` over ``warmup`` steps, then linear down to ``final · peak`` at step ``steps``."""
    def rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return peak * (1 - (1 - final) * done)
    return rate

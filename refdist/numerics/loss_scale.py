"""Loss scaling: backward runs on ``scale · loss``, so that small gradients are not below the smallest number of fp16.

    loss ─▶ · scale ─▶ backward in fp16 ─▶ reduce ─▶ any inf or NaN, on any rank?  ─ no ─▶ ÷ scale ─▶ clip, update
                                                               └─ yes ─▶ no update on any rank; a smaller scale

Micikevicius et al. 2018, "Mixed precision training", section 3.2. The dynamic scale is that of PyTorch's ``GradScaler``: half
after a step with an overflow, double after ``growth_interval`` steps in a row without one. Scales are powers of two, so that
scaling rounds nothing that is not too small or too large anyway.
"""

from __future__ import annotations

import copy
import math

import numpy as np

__all__ = ["LossScale", "loss_scale_of"]


class LossScale:
    """What the loss is multiplied by, from step to step.

    Args:
        value: at first.
        growth_interval: steps without an overflow after which it grows; None: it is static.
        growth, backoff: what it is multiplied by then, and after an overflow.
        smallest, largest: it stays between these.

    Attributes:
        value: for the next step.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int | None = 2000, growth: float = 2.0, backoff: float = 0.5,
                 smallest: float = 1.0, largest: float = 2.0**24) -> None:
        if not 0 < value < math.inf:
            raise ValueError(f"loss_scale={value!r}: expected a number above 0")
        if growth_interval is not None and growth_interval < 1:
            raise ValueError(f"growth_interval={growth_interval!r}: expected at least 1, or None")
        if not (growth > 1 and 0 < backoff < 1):
            raise ValueError(f"growth={growth!r}, backoff={backoff!r}: expected one above 1, and one between 0 and 1")
        if growth_interval is not None and not smallest <= value <= largest:
            raise ValueError(f"loss_scale={value!r}: expected a number from {smallest!r} to {largest!r}")
        self.value = float(value)
        self.growth_interval = growth_interval
        self.growth, self.backoff = growth, backoff
        self.smallest, self.largest = smallest, largest
        self._good = 0  # steps since the last change

    def update(self, overflow: bool) -> None:
        """After a step: whether any gradient, on any rank, was infinite or NaN."""
        if self.growth_interval is None:
            return
        self._good = 0 if overflow else self._good + 1
        if overflow:
            self.value = max(self.smallest, self.value * self.backoff)
        elif self._good == self.growth_interval:
            self.value = min(self.largest, self.value * self.growth)
            self._good = 0


def loss_scale_of(option: str | float | LossScale | None, precision: str) -> LossScale | None:
    """The loss scale that an option asks for.

    Args:
        option: "dynamic"; a number, which stays; a `LossScale`, of which a copy is taken, since ranks in one process may be given
            the same one; None: dynamic with fp16, none otherwise, since the exponents of bf16 reach as far down as those of fp32.
        precision: name of the preset.
    """
    if isinstance(option, LossScale):
        return copy.copy(option)
    if option == "dynamic" or (option is None and precision == "fp16"):
        return LossScale()
    if option is None:
        return None
    if isinstance(option, bool) or not isinstance(option, (int, float, np.integer, np.floating)):
        raise ValueError(f"loss_scale={option!r}: expected 'dynamic', a number above 0, a LossScale, or None")
    return LossScale(option.item() if isinstance(option, np.generic) else option, growth_interval=None)

"""Number formats: what a pattern of bits means, as data.

    value = (-1)^sign · 1.fraction · 2^(exponent − bias)          exponent field > 0
    value = (-1)^sign · 0.fraction · 2^(1 − bias)                 exponent field = 0: subnormals and zeros

    format   bits: sign exponent fraction   smallest exponent   largest finite number   infinities
    fp16            1    5        10               -14               65504                   yes
    bf16            1    8         7              -126               3.39e38                 yes
    tf32            1    8        10              -126               3.40e38                 yes, stored as float32
    e4m3            1    4         3                -6               448                     no: only NaN (0x7F, 0xFF)
    e5m2            1    5         2               -14               57344                   yes
    fp32            1    8        23              -126               3.40e38                 yes

Sources: IEEE 754-2019 (fp16, fp32); Micikevicius et al. 2022, "FP8 formats for deep learning", table 1 (e4m3, e5m2);
NVIDIA A100 white paper 2020 (bf16, tf32).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["FORMATS", "Format", "format_named", "format_of"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    exponent_bits: int
    fraction_bits: int
    dtype: np.dtype  # of an array that stores it
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number, which is also that of every subnormal."""
        return 1 - self.bias

    @property
    def max_finite(self) -> float:
        if self.has_infinity:
            return (2 - 2.0**-self.fraction_bits) * 2.0**self.bias
        return (2 - 2.0 ** (1 - self.fraction_bits)) * 2.0 ** (self.bias + 1)  # the last pattern is NaN

    def contains(self, other: Format) -> bool:
        """Whether every number of the other format is one of this format."""
        return (
            self.fraction_bits >= other.fraction_bits
            and self.max_finite >= other.max_finite
            and self.min_exponent - self.fraction_bits <= other.min_exponent - other.fraction_bits
            and self.has_infinity >= other.has_infinity
        )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp16", 5, 10, np.dtype(np.float16)),
        Format("bf16", 8, 7, np.dtype(ml_dtypes.bfloat16)),
        Format("tf32", 8, 10, np.dtype(np.float32)),
        Format("e4m3", 4, 3, np.dtype(ml_dtypes.float8_e4m3fn), has_infinity=False),
        Format("e5m2", 5, 2, np.dtype(ml_dtypes.float8_e5m2)),
        Format("fp32", 8, 23, np.dtype(np.float32)),
    )
}


def format_named(name: str | Format) -> Format:
    """The format of that name; ValueError lists the names there are."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(dtype: Any) -> Format | None:
    """The format that arrays of this dtype store (float32: fp32), or None: float64 and what is not a number of ours."""
    return _stored().get(np.dtype(dtype))


@functools.cache
def _stored() -> dict[np.dtype, Format]:
    return {f.dtype: f for f in FORMATS.values()}  # fp32 comes last, so float32 means fp32

"""The arithmetic of NVIDIA's tensor cores, bit for bit, written as the rule reads.

One step sums Kb products and the addend c:

    E     = the largest exponent among the non-zero products and c      a product is exact and not renormalised: its
                                                                        exponent is that of a plus that of b
    term  = trunc(product · 2^(F − E)), and the same for c              toward zero; an integer
    sum   = Σ terms                                                     exact, so in any order
    d     = sum · 2^(E − F), rounded once                               to fp32 toward zero, or to fp16 to nearest even

A longer K is a chain: the d of one step is the c of the next. Kb and F are the chip's (see `chips`).

Special values: a NaN, Inf · 0 or Inf − Inf gives the NaN 0x7FFFFFFF (0x7FFF in fp16). An exact zero is +0. A sum of 2^128
or more is an infinity; just below that it is the largest finite number; fp16 overflows as rounding to nearest does. What is
not zero but rounds to zero keeps its sign (a choice: no source says).

Here everything runs in float64, where products, scaling by powers of two and sums below 2^53 are exact. It takes any
operands. `tensor_core_fast` does the same arithmetic several times faster for operands whose exponents are moderate.

Source: Fasi, Higham, Mikaitis & Pranesh 2021, "Numerical behavior of NVIDIA tensor cores", section 4; for Hopper and
later Khattak & Mikaitis' models in github.com/north-numerical-computing/MATLAB-tensor-core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .chips import Step
from .formats import FORMATS, Format
from .rounding import Nearest

__all__ = ["NAN_FP32", "Operands", "chain", "exponents"]

NAN_FP32 = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
NO_EXPONENT = -(1 << 20)  # of a zero: below every sum of exponents, also after another one is added
TILE = 8192  # elements of the result that are worked on at once


class Operands(NamedTuple):
    """One stack of products d = c + a b, in float32 that holds numbers of the input format."""

    a: np.ndarray  # [batch, M, K]
    b: np.ndarray  # [batch, K, N]
    c: np.ndarray  # [batch, M, N], the accumulator's numbers
    inputs: Format

    def part(self, batch: slice, rows: slice) -> Operands:
        return Operands(self.a[batch, rows], self.b[batch], self.c[batch, rows], self.inputs)


def chain(operands: Operands, step: Step, to_fp16: bool, out: np.ndarray) -> None:
    """Run the chain of steps over K for every element, and write the result.

    Args:
        operands: see there; K of any size (the last step is filled up with zeros, which change nothing).
        step: the chip's.
        to_fp16: each step rounds to fp16 instead of fp32.
        out: float32 [batch, M, N].
    """
    batch, rows, columns = operands.c.shape
    if columns < rows:  # the inner loops of NumPy run along the columns
        a, b, c, inputs = operands
        operands = Operands(b.transpose(0, 2, 1), a.transpose(0, 2, 1), c.transpose(0, 2, 1), inputs)
        return chain(operands, step, to_fp16, out.transpose(0, 2, 1))
    height = max(1, min(rows, TILE // max(1, columns)))
    depth = max(1, TILE // max(1, height * columns))
    for start in range(0, batch, depth):
        for row in range(0, rows, height):
            part = slice(start, start + depth), slice(row, row + height)
            out[part] = _chain_tile(operands.part(*part), step, to_fp16)


def _chain_tile(operands: Operands, step: Step, to_fp16: bool) -> np.ndarray:
    """The chain for a tile: float32 [batch, rows, columns]."""
    a, b, d, inputs = operands
    for k in _steps(a.shape[-1], step.terms):
        a_part, b_part = a[..., k], b[:, k]
        special = _special(a_part, b_part, d)
        if special is None:
            d = _step(a_part, b_part, d, inputs, step, to_fp16)
        else:
            d = _step(_finite(a_part), _finite(b_part), _finite(d), inputs, step, to_fp16)
            np.copyto(d, special, where=~np.isfinite(special))
    return d


def _steps(size: int, terms: int) -> Iterator[slice]:
    """The k of each step; there is at least one step."""
    return (slice(k, k + terms) for k in range(0, max(1, size), terms))


def _step(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, inputs: Format, step: Step, to_fp16: bool
) -> np.ndarray:
    """One step of finite operands: a [batch, rows, Kb], b [batch, Kb, columns], c [batch, rows, columns] -> float32."""
    exponents_a, exponents_b = exponents(a, inputs.min_exponent), exponents(b, inputs.min_exponent)
    largest = exponents(c, -126)  # [batch, rows, columns]
    for k in range(a.shape[-1]):
        np.maximum(largest, exponents_a[:, :, k, None] + exponents_b[:, k, None, :], out=largest)
    np.maximum(largest, -400, out=largest)  # every term is zero: any E will do
    scale, back = _power_of_two(step.kept_bits - largest), _power_of_two(largest - step.kept_bits)
    total = np.trunc(c * scale)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    for k in range(a.shape[-1]):
        total += np.trunc(wide_a[:, :, k, None] * wide_b[:, k, None, :] * scale)
    total += 0.0  # an exact zero is +0
    total *= back
    return _to_fp16(total) if to_fp16 else _to_fp32(total, step.result_bits)


def exponents(x: np.ndarray, smallest: int) -> np.ndarray:
    """int32: floor(log2 |x|) of float32 x, but at least the smallest exponent of the format; NO_EXPONENT for zero."""
    magnitude = np.ascontiguousarray(x).view(np.int32) & 0x7FFFFFFF
    exponent = np.maximum((magnitude >> 23) - 127, smallest)
    exponent[magnitude == 0] = NO_EXPONENT
    return exponent


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    """float64 2^exponent, for exponents of normal numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _to_fp32(total: np.ndarray, fraction_bits: int) -> np.ndarray:
    """float64 -> float32 toward zero, to so many fraction bits; subnormals too; infinite from 2^128 on."""
    infinite = np.abs(total) >= 2.0**128
    small = np.abs(total) < 2.0**-126
    total[small] = np.trunc(total[small] * 2.0 ** (126 + fraction_bits)) * 2.0 ** -(126 + fraction_bits)
    total.view(np.int64)[...] &= -(1 << (52 - fraction_bits))
    total[infinite] = np.copysign(np.inf, total[infinite])
    return total.astype(np.float32)


def _to_fp16(total: np.ndarray) -> np.ndarray:
    """float64 -> float32 that holds fp16 numbers, to nearest even."""
    flat, rounded = total.reshape(-1), np.empty(total.size)
    half = FORMATS["fp16"]
    if not Nearest(half, total.dtype, total.size)(flat, rounded):
        np.copyto(rounded, np.copysign(np.inf, flat), where=~(np.abs(rounded) <= half.max_finite))
    return rounded.reshape(total.shape).astype(np.float32)


def _finite(x: np.ndarray) -> np.ndarray:
    """Zero in the place of infinities and NaN."""
    return np.where(np.isfinite(x), x, np.float32(0))


def _special(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray | None:
    """Infinities and NaN of the results where an operand is not finite, finite numbers elsewhere; None: all are finite."""
    if np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all():
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.matmul(a, b, dtype=np.float64) + c  # sums of finite numbers stay finite in float64
        special = total.astype(np.float32)
    special[np.isfinite(total)] = 0
    special[np.isnan(total)] = NAN_FP32
    return special

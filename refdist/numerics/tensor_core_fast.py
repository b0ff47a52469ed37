"""The arithmetic of `tensor_core`, many times faster, for operands whose exponents are moderate.

The same rule, in float32 and int32, on tiles that stay in the second-level cache. What makes each line of it exact:

    product           has at most 22 bits: exact in float32. One small BLAS product makes those of 2 k at once, from a
                      block-diagonal left operand (a_k on the diagonal); what it adds to each of them is zero
    · 2^(F − E)       exact, but where it underflows, and there the term is zero
    trunc             is what the cast from float32 to int32 does
    sum               |term of c| < 2^(F+1), |term of a product| < σ_a σ_b 2^F, where σ in [1, 2) are significands: c and
                      G products stay below 2^31 if 4 G 2^F + 2^(F+1) does, or (16 terms, F = 25) if the σ_b of each
                      column and step add up to less than 31. Where neither holds there are two int32 sums
    E                 = max over k of (exponent of a + exponent of b) is a product of matrices over (max, +). Let BLAS add
                      positive numbers instead: with t = 64/15 the sum of up to 16 powers 2^(t·(e_a + e_b)) lies between
                      2^(tE) and 2^(tE + 4), so E is the integer part of log2(sum) / t. The bits of a float, read as
                      an integer, are its log2 to within 0.09, and t − 4 leaves room for that. A zero adds nothing
    rounding          in float64, where clearing the low 29 bits rounds to float32 toward zero; in float32, if F is so
                      small that all sums have 24 bits

"Moderate": the exponents of the operands' non-zero numbers, of a and of b together, span at most 58 (fp16 and fp8 always
do), no product and no sum comes near the ends of float32, everything is finite, and c is zero or not too far below the
products. All else, and small products, go through `tensor_core`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from . import tensor_core
from .aligned import Scratch, aligned_empty
from .chips import Step
from .formats import FORMATS, Format
from .rounding import Nearest
from .tensor_core import Operands

__all__ = ["chain"]

SMALL = 512  # elements of a result below which the loops below cost more than they save
WIDTH = 512  # columns of a tile
TILE = 32768  # elements of a tile of the result
PRODUCTS = 65536  # products in flight: 256 KiB
DIAGONAL = 2  # k that one small BLAS product takes
GROUP = 16  # terms whose sum of powers stays below the next exponent's, and whose int32 sum is made at once
BUFFER = 4096  # elements: with more, NumPy copies what it broadcasts
PART = 8192  # elements of an operand that are laid out at once: intermediate arrays take memory that is there already

T = 64 / 15  # powers 2^(T e) instead of exponents e
SPAN = 58  # of the exponents of a and b together: 1 + SPAN classes of T binades, and one for zero, are all of float32
ABOVE = 0.17  # log2 of a power above its class's lower end: more than 0.09 from both ends of the class
BIAS = 127
TO_CLASS = np.array(6, np.uint32), np.array(15, np.uint32)  # bits >> 6, times 15: divided by T
MAGNITUDE = np.array(0x7FFFFFFF, np.int32)
EXPONENT = np.array(0x7F800000, np.int32)
SCRATCH = Scratch()  # of the tile that is worked on


class Range(NamedTuple):
    """The smallest and the largest exponent of the non-zero numbers of an operand."""

    low: int
    high: int

    @property
    def span(self) -> int:
        return self.high - self.low


def chain(operands: Operands, step: Step, to_fp16: bool, out: np.ndarray) -> None:
    """As `tensor_core.chain`: the chain of steps over K for every element of a stack of products, written to out."""
    a, b, c, inputs = operands
    plan = _plan(operands, step) if out[:1].size >= SMALL else None
    if plan is None:
        tensor_core.chain(operands, step, to_fp16, out)
        return
    with _small_buffers():
        for i in range(len(c)):
            _Matrix(a[i], b[i], plan, step, inputs, to_fp16).run(c[i], out[i])


def _range(x: np.ndarray, smallest: int) -> Range | None:
    """The exponents of float32 x, 0 if all of x is zero; None if not all of it is finite."""
    x = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)]  # what is broadcast, once
    magnitude = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    largest = int(magnitude.max(initial=0))
    if largest >= 0x7F800000:
        return None
    if largest == 0:
        return Range(0, 0)
    magnitude -= np.uint32(1)  # zeros become the largest of all
    low = (int(magnitude.min()) + 1 >> 23) - BIAS
    return Range(max(low, smallest), max((largest >> 23) - BIAS, smallest))


class Plan(NamedTuple):
    """How exponents become powers: those of a are counted from a.low, those of b from b.low."""

    a: Range
    b: Range
    room: int  # a step whose products are all zero gets the exponent a.low + b.low − 1 − room

    @property
    def bottom(self) -> int:
        """The exponent that is class 0, of sums that are zero."""
        return self.a.low + self.b.low - 1 - self.room

    def powers(self) -> tuple[np.ndarray, np.ndarray]:
        """The powers for a and for b, by sign and exponent bits. The product of the smallest two is of class 1 + room."""
        smallest = T * (1 + self.room) + ABOVE - BIAS
        share = smallest * (self.a.span + 0.5) / (self.a.span + self.b.span + 1)
        return _powers(self.a, share), _powers(self.b, smallest - share)


def _plan(operands: Operands, step: Step) -> Plan | None:
    """None if the exponents are not moderate."""
    a, b = (_range(x, operands.inputs.min_exponent) for x in operands[:2])
    c = _range(operands.c, 1 - BIAS)
    if a is None or b is None or c is None or min(a.low, b.low) <= 1 - BIAS:
        return None
    products = a.high + b.high + 2 + math.ceil(math.log2(max(1, operands.a.shape[-1])))
    smallest = step.kept_bits - 124  # from there on scales and results are normal numbers
    room = min(SPAN - a.span - b.span, a.low + b.low - 1 - smallest)
    if room < 0 or max(products, c.high + 1) > 126:  # their sum stays below 2^127
        return None
    plan = Plan(a, b, room)
    return None if c.low < plan.bottom and operands.c.any() else plan


@contextlib.contextmanager
def _small_buffers() -> Iterator[None]:
    before = np.setbufsize(BUFFER)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        np.setbufsize(before)


@functools.cache
def _powers(span: Range, smallest: float) -> np.ndarray:
    """float32 [512]: 2^(T·(exponent − span.low) + smallest) for the sign and exponent bits of a float32, and 0 for zero."""
    exponent = np.clip(np.arange(256) - BIAS, span.low, span.high)  # subnormals of the format are below span.low
    table = np.exp2(T * (exponent - span.low) + smallest)
    table[0] = 0
    return np.tile(table, 2).astype(np.float32)


def _to_powers(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The power of every number of contiguous float32 x."""
    powers = aligned_empty(x.shape, np.float32)
    flat, result = x.reshape(-1).view(np.uint32), powers.reshape(-1)
    for start in range(0, flat.size, PART):
        part = slice(start, start + PART)
        np.take(table, (flat[part] >> np.uint32(23)).astype(np.uint16), out=result[part], mode="clip")
    return powers


def _even(size: int, most: int) -> int:
    """The size of equal pieces, the last one perhaps smaller, of `most` at most."""
    pieces = -(-size // most)
    return -(-size // pieces)


def _padded(x: np.ndarray, rows: int, columns: int | None = None) -> np.ndarray:
    """x, contiguous, with zeros below it and on its right."""
    shape = rows, columns or x.shape[1]
    if x.shape == shape and x.flags.c_contiguous:
        return x
    padded = aligned_empty(shape, np.float32)
    padded[: len(x), : x.shape[1]] = x
    padded[len(x) :] = 0
    padded[: len(x), x.shape[1] :] = 0
    return padded


def _diagonals(a: np.ndarray, band: int) -> np.ndarray:
    """[bands, K pairs, (which of the pair, row), 2]: block-diagonal left operands of the products of two k at once."""
    rows, size = a.shape
    diagonals = aligned_empty((rows // band, size // DIAGONAL, DIAGONAL, band, DIAGONAL), np.float32)
    diagonals[...] = 0
    pairs = a.reshape(rows // band, band, size // DIAGONAL, DIAGONAL).transpose(0, 2, 1, 3)
    for q in range(DIAGONAL):
        diagonals[:, :, q, :, q] = pairs[..., q]
    return diagonals.reshape(rows // band, size // DIAGONAL, DIAGONAL * band, DIAGONAL)


def _terms_per_sum(b: np.ndarray, step: Step, inputs: Format) -> int:
    """How many products of a step, and c, an int32 holds the sum of. b: float32 [steps, terms, columns]."""
    terms, significand = min(step.terms, GROUP), 2 - 2.0**-inputs.fraction_bits
    while (terms * significand**2 + 2) * 2**step.kept_bits > 2**31:
        if terms == step.terms == 16 and _significands(b) < 30.99:
            break
        terms //= 2
    return terms


def _significands(b: np.ndarray) -> float:
    """The largest sum over axis 1 of the significands of b."""
    largest = 0.0
    steps = max(1, PART // max(1, b[0].size))
    for start in range(0, len(b), steps):
        significands = b[start : start + steps].view(np.int32) & np.int32(0x007FFFFF)
        significands |= np.int32(0x3F800000)
        sums = np.add.reduce(significands.view(np.float32), axis=1)
        largest = max(largest, float(sums.max(initial=0)))
    return largest


class _Matrix:
    """One product, its operands laid out for the steps."""

    def __init__(self, a: np.ndarray, b: np.ndarray, plan: Plan, step: Step, inputs: Format, to_fp16: bool) -> None:
        rows, size = a.shape
        columns = b.shape[1]
        self.step, self.to_fp16 = step, to_fp16
        self.steps = max(1, -(-size // step.terms))
        padded = self.steps * step.terms
        b = _padded(b, padded)
        self.terms = _terms_per_sum(b.reshape(self.steps, step.terms, columns), step, inputs)
        self.width = _even(columns, max(WIDTH, PRODUCTS // (self.terms * rows)))
        self.band = _even(rows, max(1, PRODUCTS // (self.terms * self.width)))  # rows whose products are in flight
        self.height = self.band * max(1, min(-(-rows // self.band), TILE // (self.band * self.width)))
        a = _padded(a, -(-rows // self.band) * self.band, padded)
        self.b = b.reshape(padded // DIAGONAL, DIAGONAL, columns)
        self.diagonals = _diagonals(a, self.band)
        table_a, table_b = plan.powers()
        self.powers_a, self.powers_b = _to_powers(a, table_a), _to_powers(b, table_b)
        self.bottom = np.array(plan.bottom + BIAS << 23, np.uint32)

    def run(self, c: np.ndarray, out: np.ndarray) -> None:
        """Write c + a b, float32 [rows, columns], to out."""
        rows, columns = out.shape
        tiles: dict[tuple[int, int], _Tile] = {}  # by shape: the memory is used again while it is in the cache
        for left in range(0, columns, self.width):
            across = slice(left, min(left + self.width, columns))
            for top in range(0, rows, self.height):
                down = slice(top, min(top + self.height, len(self.diagonals) * self.band))
                shape = down.stop - top, across.stop - left
                if shape not in tiles:
                    tiles[shape] = _Tile(self, *shape)
                self._run_tile(tiles[shape], down, across, c, out)

    def _run_tile(self, tile: _Tile, down: slice, across: slice, c: np.ndarray, out: np.ndarray) -> None:
        part = out[down, across]  # fewer rows than the tile where rows were added to fill a band
        tile.start(c[down, across])
        for index in range(self.steps):
            tile.find_scale(index, down, across)
            tile.add_products(index, down.start // self.band, across)
            tile.round()
        part[...] = tile.d[: len(part)]


class _Tile:
    """A part of the result, d [height, width], and what a step needs for it."""

    def __init__(self, matrix: _Matrix, height: int, width: int) -> None:
        self.matrix = matrix
        shape, step, band, terms = (height, width), matrix.step, matrix.band, matrix.terms
        parts = step.terms // terms
        narrow = (4 * step.terms + 2) * 2**step.kept_bits <= 2**24  # float32 holds every sum
        wide = np.dtype(np.float32 if narrow else np.float64)
        self.d, self.scale, self.work, self.total, self.wide, self.pairs, self.sums = SCRATCH.arrays(
            (shape, np.float32),
            (shape, np.float32),  # 2^(F − E)
            (shape, np.float32),
            (shape, wide),
            (shape if parts > 1 or matrix.to_fp16 else (0,), wide),
            ((terms // DIAGONAL, DIAGONAL * band, width), np.float32),
            ((parts, *shape), np.int32),
        )
        self.products = self.pairs.reshape(terms, band, width)
        self.to_fp16 = Nearest(FORMATS["fp16"], wide, self.total.size) if matrix.to_fp16 else None
        self.infinite: np.ndarray | None = None
        bands = [slice(row, row + band) for row in range(0, height, band)]
        self.bands = [[(self.scale[rows], sums[rows]) for rows in bands] for sums in self.sums]  # of each part
        self.bits = self.total.view(f"i{wide.itemsize}")
        self.keep = np.array(-(1 << (np.finfo(wide).nmant - step.result_bits)), self.bits.dtype)
        numerator = np.array(2 * BIAS + step.kept_bits << 23, np.uint32)
        self.numerator = numerator.view(np.int32)  # 2^(F − E) has the bits numerator − (bits of 2^E), modulo 2^32

    def start(self, c: np.ndarray) -> None:
        """d = c, and zero in the rows that fill a band."""
        self.d[: len(c)] = c
        self.d[len(c) :] = 0
        self.infinite = None

    def find_scale(self, index: int, rows: slice, across: slice) -> None:
        """E and 2^(F − E), from the exponents of this step's products and of d."""
        matrix = self.matrix
        first = index * matrix.step.terms
        end = first + matrix.step.terms
        bits, work = self.scale.view(np.int32), self.work.view(np.int32)
        for k in range(first, end, GROUP):
            terms = slice(k, min(k + GROUP, end))
            np.dot(matrix.powers_a[rows, terms], matrix.powers_b[terms, across], out=self.scale if k == first else self.work)
            if k > first:
                np.maximum(bits, work, out=bits)
        classes = self.scale.view(np.uint32)
        np.right_shift(classes, TO_CLASS[0], out=classes)
        np.multiply(classes, TO_CLASS[1], out=classes)
        np.add(classes, matrix.bottom, out=classes)  # the largest exponent of a product is this one's
        np.bitwise_and(self.d.view(np.int32), MAGNITUDE, out=work)
        np.maximum(bits, work, out=bits)
        np.bitwise_and(bits, EXPONENT, out=bits)
        np.subtract(self.numerator, bits, out=bits)

    def add_products(self, index: int, first_band: int, across: slice) -> None:
        """The sums of the truncated products."""
        matrix = self.matrix
        first = index * matrix.step.terms
        for number, bands in enumerate(self.bands):
            start = (first + number * matrix.terms) // DIAGONAL
            pairs = slice(start, start + matrix.terms // DIAGONAL)
            b = matrix.b[pairs, :, across]
            for (scale, sums), a in zip(bands, matrix.diagonals[first_band:, pairs], strict=False):
                np.matmul(a, b, out=self.pairs)
                np.multiply(self.products, scale, out=self.products)
                np.add.reduce(self.products, axis=0, dtype=np.int32, out=sums)  # the cast truncates

    def round(self) -> None:
        """d = the sum of everything, rounded."""
        sums, cut = self.sums[0], self.work.view(np.int32)
        np.multiply(self.d, self.scale, out=self.d)
        np.copyto(cut, self.d, casting="unsafe")  # truncates
        np.add(sums, cut, out=sums)
        np.copyto(self.total, sums, casting="same_kind")
        for part in self.sums[1:]:
            np.copyto(self.wide, part, casting="same_kind")
            np.add(self.total, self.wide, out=self.total)
        if self.to_fp16 is not None:
            self._round_to_fp16(self.to_fp16)
            return
        np.bitwise_and(self.bits, self.keep, out=self.bits)
        np.copyto(self.d, self.total, casting="unsafe")
        np.divide(self.d, self.scale, out=self.d)

    def _round_to_fp16(self, nearest: Nearest) -> None:
        np.copyto(self.wide, self.scale)
        np.divide(self.total, self.wide, out=self.total)
        total, rounded = self.total.reshape(-1), self.wide.reshape(-1)
        within = nearest(total, rounded)
        if not within:
            np.copyto(rounded, np.copysign(np.inf, total), where=~(np.abs(rounded) <= FORMATS["fp16"].max_finite))
        np.copyto(self.d, self.wide, casting="unsafe")
        if self.infinite is not None:  # infinities stay, whatever the integers made of them
            np.copyto(self.d, self.infinite, where=np.isinf(self.infinite))
        if not within:
            self.infinite = self.d.copy()

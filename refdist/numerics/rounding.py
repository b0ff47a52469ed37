"""Rounding numbers to a format, and packing them into its bits.

    round_to     float32 or float64 -> float32 that holds only numbers of the format
    convert      the same, stored in the format's own dtype
    to_float32   back: exact, since float32 contains every format here
    widened      float32 from 16 bits, float32 and float64 as they are: what a kernel computes with
    store        the way back: rounded to nearest into an array of any of these

Three ways to round a number that lies between two neighbours of the format:
    nearest      the closer one, a tie goes to the one whose last bit is 0
    zero         the one nearer to zero
    stochastic   away from zero with the probability (distance from the one nearer to zero) / (distance of the two),
                 to 2⁻³²: the bits are an argument, so the result is a function of them and of nothing else

Beyond the largest finite number "nearest" and "stochastic" give an infinity (NaN in e4m3, which has none), as IEEE 754
and ml_dtypes have it; with saturate=True everything beyond, infinities too, gives the largest finite number, as the
`satfinite` of NVIDIA's conversion instructions. Toward zero never leaves the finite numbers. NaN stays NaN.

How rounding to nearest is done without a branch, for any format, in float arithmetic: adding M = 1.5 · 2^(e + 23 − f) to
x, where 2^e ≤ |x| < 2^(e+1) and f is the number of fraction bits kept, leaves no room below the last bit to keep, so
the adder itself rounds x there; subtracting M gives the rounded x. With e held at the format's smallest exponent the
same addition rounds subnormals. Everything goes block by block through the cache.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .aligned import aligned_empty
from .formats import FORMATS, Format, format_named, format_of
from .random import Stream, random_words

__all__ = ["ROUNDINGS", "Nearest", "convert", "has_16_bits", "round_to", "store", "to_float32", "widened"]

ROUNDINGS = ("nearest", "zero", "stochastic")
BLOCK = 32768  # elements: a handful of such blocks fit the second-level cache
UNPACK_BLOCK = 131072  # of float16: unpacking takes no memory but its argument and its result
SMALL = 4096  # elements that are looked up in a table more quickly than they are computed

# Packing and unpacking float16. Operations with arrays for constants begin sooner than those with numbers.
EXPONENT = np.array(0x7F800000, np.uint32)
PACKS_TO_INFINITY = np.array(0x47800000, np.uint32)  # 2^16
TO_MAGIC = np.array((13 << 23) + (1 << 11), np.uint32)  # from the bits of 2^e to those of M
LOST_BITS = np.array(13, np.uint32)
SIGN_BIT = np.array(15, np.uint16)
UNPACK, UNPACKED = np.array(13, np.int32), np.array(-0x70002000, np.int32)  # leaves the sign and 5 + 10 bits
BIASES_APART = np.array(2.0**112, np.float32)
SAMPLE = 251  # one number of so many says whether a block has many subnormal ones
FEW = 64  # one of so many; a vector instruction is slow if it meets one


class Word(NamedTuple):
    """The layout of a floating-point word of the processor."""

    integer: Any  # the integer dtype of the same size
    fraction_bits: int
    bias: int
    exponent_mask: int
    sign_mask: int


WORDS = {
    np.dtype(np.float32): Word(np.int32, 23, 127, 0xFF << 23, -(1 << 31)),
    np.dtype(np.float64): Word(np.int64, 52, 1023, 0x7FF << 52, -(1 << 63)),
}


def round_to(
    x: np.ndarray,
    format: str | Format,
    rounding: str = "nearest",
    saturate: bool = False,
    bits: np.ndarray | None = None,
    random: Stream | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Round every number to the format; the result stays in float32.

    Args:
        x: [...], float16, bfloat16, float8, float32 or float64 (rounded once, never through float32).
        format: "fp16", "bf16", "tf32", "e4m3", "e5m2" or "fp32".
        rounding: "nearest", "zero" or "stochastic".
        saturate: beyond the largest finite number stay there.
        bits: for "stochastic": uint32, the shape of x.
        random: or instead of bits a stream of counter-based random numbers; element i of x takes word i.
        out: float32 [...]; x itself is allowed.

    Returns:
        float32 [...].

    Raises:
        ValueError: unknown format or rounding, integer x, bits missing or superfluous or of another shape.
    """
    to = format_named(format)
    x = _floats(x)
    words = _random_bits(x.shape, rounding, bits, random)
    result = _result(out, x.shape, np.float32)
    own = format_of(x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if own is not None and to.contains(own) and not saturate:
            return to_float32(x, out=result)
        if own is not None:
            x = to_float32(x) if x.dtype != np.float32 else x
        if rounding != "nearest":
            block = functools.partial(_round_directed_block, to=to, saturate=saturate)
            _copy_blocks(x, result, block, *(() if words is None else (words,)))
        else:
            _round_nearest(x, to, result, saturate)
    return result


def _round_nearest(
    x: np.ndarray, to: Format, out: np.ndarray, saturate: bool = False, signed_zeros: bool = True
) -> None:
    """out = x, both float32, or x float64, rounded to nearest. Without signed_zeros what rounds to zero gives +0."""
    if to.name == "bf16" and x.dtype == out.dtype and not saturate:
        np.copyto(out, x.astype(to.dtype))  # in vector instructions
        return
    size = min(x.size, BLOCK)
    rounder = Nearest(to, x.dtype, size)
    apart = None if out.dtype == x.dtype and not np.may_share_memory(out, x) else np.empty(size, x.dtype)

    def block(part: np.ndarray, dest: np.ndarray) -> None:
        rounded = dest if apart is None else apart[: part.size]
        if not rounder(part, rounded, signed_zeros):
            _overflow(part, rounded, to, saturate)
        if apart is not None:
            np.copyto(dest, rounded, casting="unsafe")

    _copy_blocks(x, out, block)


def convert(
    x: np.ndarray,
    format: str | Format,
    rounding: str = "nearest",
    saturate: bool = False,
    bits: np.ndarray | None = None,
    random: Stream | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Round every number to the format and store it in the format's dtype.

    Arguments and errors as in `round_to`, and out: an array of the dtype of the format.

    Returns:
        [...], float16, ml_dtypes.bfloat16, float8_e4m3fn or float8_e5m2; float32 for tf32 and fp32.
    """
    to = format_named(format)
    x = _floats(x)
    result = _result(out, x.shape, to.dtype)
    if to.dtype == np.float32:
        return round_to(x, to, rounding, saturate, bits, random, out=result)
    words = _random_bits(x.shape, rounding, bits, random)
    at_once = x.dtype == np.float32 and to.name in ("fp16", "bf16") and rounding == "nearest" and not saturate
    rounded = x if at_once else round_to(x, to, rounding, saturate, words)
    with np.errstate(over="ignore", invalid="ignore"):
        if to.name == "bf16":
            np.copyto(result, rounded, casting="unsafe")
        elif to.name == "fp16":
            _copy_blocks(rounded, result.view(np.uint16), _pack_fp16_block)
        else:
            _copy_blocks(rounded, result.view(np.uint8), functools.partial(_pack_fp8_block, name=to.name))
    return result


def to_float32(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """float16, bfloat16, float8 or float32 [...] -> float32 [...], exactly; subnormals cost what other numbers cost."""
    own = format_of(x.dtype)
    if own is None:
        raise ValueError(f"float32 does not hold every number of dtype {x.dtype}; use round_to(x, 'fp32')")
    result = _result(out, x.shape, np.float32)
    if own.name in ("bf16", "fp32"):
        np.copyto(result, x)
        return result
    if own.name != "fp16":
        _copy_blocks(x.view(np.uint8), result, functools.partial(_look_up_block, name=own.name))
    elif x.size <= SMALL:
        np.take(_values("fp16"), x.view(np.uint16), out=result, mode="wrap")
    else:
        _copy_blocks(x.view(np.int16), result, _unpack_fp16_block, size=UNPACK_BLOCK)
    return result


_SIXTEEN_BITS = frozenset(f.dtype for f in FORMATS.values() if f.dtype.itemsize == 2)


def has_16_bits(dtype: np.dtype) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype in _SIXTEEN_BITS


def widened(x: np.ndarray) -> np.ndarray:
    """A float32 copy of float16 or bfloat16 [...], exactly; anything else as it is."""
    return to_float32(x) if x.dtype in _SIXTEEN_BITS else x


def store(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """out = x, rounded to nearest even to the dtype of out; both of a format of ours or float64, of one shape."""
    if out.dtype == x.dtype:
        np.copyto(out, x)
    elif x.dtype == np.float32 and out.dtype == np.float16 and x.flags.c_contiguous and out.flags.c_contiguous:
        flat, bits = x.reshape(-1), out.reshape(-1).view(np.uint16)
        for start in range(0, flat.size, BLOCK):
            _pack_fp16_block(flat[start : start + BLOCK], bits[start : start + BLOCK])
    elif out.dtype == np.float32 and x.dtype in _SIXTEEN_BITS:
        to_float32(x, out=out)
    else:
        to = format_of(out.dtype)
        np.copyto(out, x) if to is None else convert(x, to, out=out)
    return out


class Nearest:
    """Rounds to nearest even as if exponents had no upper end: to `to.fraction_bits`, subnormals as in `to`.

    Args:
        to: the format.
        dtype: float32 or float64, of what is to be rounded.
        size: of the largest array that is to be rounded.
    """

    def __init__(self, to: Format, dtype: np.dtype, size: int) -> None:
        word = WORDS[np.dtype(dtype)]
        self.integer, self.below = word.integer, word.fraction_bits - to.fraction_bits
        self.by_carry = to.bias == word.bias  # exponents reach as far as the word's: M could overflow
        self.scratch = aligned_empty((size,), dtype)
        self.exponent_mask, self.sign_mask = np.array(word.exponent_mask), np.array(word.sign_mask)
        self.smallest = _filled(size, word.integer, (to.min_exponent + word.bias) << word.fraction_bits)
        self.top = (math.frexp(to.max_finite)[1] - 1 + word.bias) << word.fraction_bits
        self.to_magic = np.array((self.below << word.fraction_bits) + (1 << (word.fraction_bits - 1)))
        constants = (self.exponent_mask, self.sign_mask, self.to_magic)
        self.exponent_mask, self.sign_mask, self.to_magic = (x.astype(word.integer) for x in constants)

    def __call__(self, x: np.ndarray, out: np.ndarray, signed_zeros: bool = True) -> bool:
        """out = x rounded, both contiguous, one-dimensional and apart in memory.

        Returns:
            Whether all numbers stayed below the format's largest power of two. If not, what is beyond its largest number
            is beyond it in `out` too, or NaN; that is for the caller to put right.
        """
        magic = self.scratch[: x.size]
        raw, bits, rounded = x.view(self.integer), magic.view(self.integer), out.view(self.integer)
        if self.by_carry:
            return self._carry(raw, bits, rounded)
        np.bitwise_and(raw, self.exponent_mask, out=bits)
        np.maximum(bits, self.smallest[: x.size], out=bits)
        within = bool(bits.max(initial=0) < self.top)
        np.add(bits, self.to_magic, out=bits)  # those of M
        np.add(x, magic, out=out)
        np.subtract(out, magic, out=out)
        if signed_zeros:
            np.bitwise_and(raw, self.sign_mask, out=bits)
            np.bitwise_or(rounded, bits, out=rounded)
        return within

    def _carry(self, raw: np.ndarray, scratch: np.ndarray, rounded: np.ndarray) -> bool:
        """The same by integers, which carry from the fraction into the exponent."""
        if self.below == 0:
            np.copyto(rounded, raw)
            return False
        np.right_shift(raw, self.below, out=scratch)
        np.bitwise_and(scratch, 1, out=scratch)  # a tie goes up from an odd last bit only
        np.add(scratch, (1 << (self.below - 1)) - 1, out=scratch)
        np.add(raw, scratch, out=rounded)
        np.bitwise_and(rounded, -(1 << self.below), out=rounded)
        np.bitwise_and(raw, self.exponent_mask, out=scratch)
        return bool(scratch.max(initial=0) < self.top)


class TileRounder:
    """Rounds contiguous float32 arrays to nearest even to fp16 or bf16, in the middle of a kernel: with little ado.

    What rounds to zero gives +0. One object serves one thread: it keeps its working memory.
    """

    def __init__(self, to: Format) -> None:
        self.to = to
        self.nearest = Nearest(to, np.dtype(np.float32), BLOCK) if to.name == "fp16" else None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 like x [...], which is C-contiguous."""
        if self.nearest is None:
            with np.errstate(over="ignore"):
                return x.astype(self.to.dtype).astype(np.float32)
        result = np.empty(x.shape, np.float32)
        flat, rounded = x.reshape(-1), result.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            part, dest = flat[start : start + BLOCK], rounded[start : start + BLOCK]
            if not self.nearest(part, dest, signed_zeros=False):
                with np.errstate(invalid="ignore"):
                    _overflow(part, dest, self.to, saturate=False)
        return result


def _round_directed_block(
    x: np.ndarray, dest: np.ndarray, words: np.ndarray | None = None, *, to: Format, saturate: bool
) -> None:
    """Toward zero, or stochastically with one 32-bit word for each number, in float64."""
    magnitude = np.abs(x, dtype=np.float64)
    power = (magnitude.view(np.int64) & WORDS[np.dtype(np.float64)].exponent_mask).view(np.float64)  # 2^e
    np.maximum(power, 2.0**to.min_exponent, out=power)
    power *= 2.0**-to.fraction_bits  # the distance of two neighbours
    units = magnitude / power  # exact; NaN for infinities
    limit = to.max_finite
    if words is None:
        rounded = np.trunc(units) * power
        np.minimum(rounded, limit, out=rounded, where=np.isfinite(x))
    else:
        below = np.floor(units)
        units -= below
        rounded = (below + (np.floor(units * 2.0**32) + words >= 2.0**32)) * power
    np.copysign(rounded, x, out=rounded)
    _overflow(x, rounded, to, saturate)
    np.copyto(dest, rounded, casting="unsafe")


def _overflow(x: np.ndarray, rounded: np.ndarray, to: Format, saturate: bool) -> None:
    """Put right what is not finite, or beyond the largest finite number, in `rounded`."""
    beyond = ~(np.abs(rounded) <= to.max_finite) | ~np.isfinite(x)
    if not beyond.any():
        return
    end = to.max_finite if saturate else np.inf if to.has_infinity else np.nan
    np.copyto(rounded, np.copysign(np.asarray(end, rounded.dtype), x), where=beyond)
    np.copyto(rounded, x, where=np.isnan(x))


def _pack_fp16_block(x: np.ndarray, dest: np.ndarray) -> None:
    """float32 -> the 16 bits of float16, to nearest even, by the addition of `Nearest` and integer packing.

    s = |x| + M with M = 2^(e+13) has the rounded significand of |x| as its low 16 bits, and its exponent field e + 140 on top of
    23 bits. s + (s >> 13) adds that field where float16 has it, which is 126 too much. M has 2^11 units more for that:
    126 · 2^10 + 2^11 is 2^17, nothing in 16 bits. A significand that rounds up to 2 carries into the exponent, and out of the
    largest exponent into infinity, as it should.
    """
    magnitude = np.abs(x)
    bits = magnitude.view(np.uint32)
    largest = np.maximum.reduce(bits, initial=0)
    if largest > PACKS_TO_INFINITY:
        np.minimum(bits, PACKS_TO_INFINITY, out=bits)
    scratch = np.bitwise_and(bits, EXPONENT)
    np.maximum(scratch, _filled(scratch.size, scratch.dtype, 113 << 23), out=scratch)  # subnormals keep the exponent -14
    np.add(scratch, TO_MAGIC, out=scratch)
    np.add(magnitude, scratch.view(np.float32), out=magnitude)
    np.right_shift(bits, LOST_BITS, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.copyto(dest, scratch, casting="unsafe")
    sign = np.signbit(x).astype(np.uint16)
    np.left_shift(sign, SIGN_BIT, out=sign)
    np.bitwise_or(dest, sign, out=dest)
    if largest > EXPONENT:  # NaN keeps the top of its payload, as NumPy has it
        payload = (x.view(np.uint32) >> LOST_BITS).astype(np.uint16) & np.uint16(0x3FF)
        np.maximum(payload, np.uint16(1), out=payload)
        np.copyto(dest, payload | np.uint16(0x7C00) | sign, where=np.isnan(x))


def _unpack_fp16_block(x: np.ndarray, dest: np.ndarray) -> None:
    """The bits of float16, as int16 -> float32: exactly, and not much slower where they are subnormal.

    Exponent and fraction, moved to where float32 has them, are the number · 2^(15 − 127), which a multiplication by 2^112 puts
    right for subnormals too; but some processors are slow at these, so where they are many all are looked up in a table. Only
    infinities and NaN come out wrong, as numbers of 2^16 and more, and are looked up as well.
    """
    bits, patterns = dest.view(np.int32), x.view(np.uint16)
    if _subnormals_are_slow() and _has_many_subnormals(patterns):
        _look_up_block(patterns, dest, "fp16")
        return
    np.copyto(bits, x)  # with copies of the sign above it
    np.left_shift(bits, UNPACK, out=bits)
    np.bitwise_and(bits, UNPACKED, out=bits)
    np.multiply(dest, BIASES_APART, out=dest)
    if np.maximum.reduce(x, initial=0) >= 0x7C00 or np.maximum.reduce(patterns, initial=0) >= 0xFC00:
        _look_up_block(patterns, dest, "fp16")


def _has_many_subnormals(patterns: np.ndarray) -> bool:
    """Whether more than a few of some float16 are subnormal, judged by a sample; zeros are not."""
    sample = patterns[::SAMPLE]
    return np.count_nonzero(_is_subnormal()[sample]) * FEW > sample.size


def _look_up_block(x: np.ndarray, dest: np.ndarray, name: str) -> None:
    np.take(_values(name), x, out=dest, mode="wrap")


def _pack_fp8_block(x: np.ndarray, dest: np.ndarray, name: str) -> None:
    """float32 that holds numbers of the format -> its bits, by way of float16, which contains both formats."""
    half = np.empty(x.shape, np.uint16)
    _pack_fp16_block(x, half)
    np.take(_fp8_patterns(name), half, out=dest, mode="wrap")


@functools.cache
def _constants(dtype: Any, value: int) -> np.ndarray:
    constants = aligned_empty((BLOCK,), dtype)
    constants[...] = value
    return constants


def _filled(size: int, dtype: Any, value: int) -> np.ndarray:
    """An array of one value: NumPy's integer maximum of two arrays is three times as fast as that with a scalar."""
    return _constants(dtype, value)[:size] if size <= BLOCK else np.full(size, value, dtype)


@functools.cache
def _subnormals_are_slow() -> bool:
    """Whether this processor takes longer over products of subnormal float32: tried once, in less than a millisecond."""
    out = np.empty(SMALL, np.float32)
    best = []
    for value in (2.0**-120, 2.0**-140):
        x, times = np.full(SMALL, value, np.float32), []
        for _ in range(5):
            start = time.perf_counter()
            np.multiply(x, BIASES_APART, out=out)
            times.append(time.perf_counter() - start)
        best.append(min(times))
    return best[1] > 2 * best[0]


@functools.cache
def _is_subnormal() -> np.ndarray:
    """bool [2^16], for each pattern of float16."""
    magnitude = np.arange(2**16) & 0x7FFF
    return (magnitude > 0) & (magnitude < 0x400)


@functools.cache
def _fp8_patterns(name: str) -> np.ndarray:
    """uint8 [2^16]: the pattern of the format for each pattern of float16."""
    with np.errstate(all="ignore"):
        return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(FORMATS[name].dtype).view(np.uint8)


@functools.cache
def _values(name: str) -> np.ndarray:
    """float32 [2^8 or 2^16]: the number that each pattern of the format stands for."""
    dtype = FORMATS[name].dtype
    patterns = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        return patterns.view(dtype).astype(np.float32)


def _floats(x: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype != np.float64 and format_of(x.dtype) is None:
        names = "float16, bfloat16, float8_e4m3fn, float8_e5m2, float32 or float64"
        raise ValueError(f"cannot round numbers of dtype {x.dtype}: expected {names}")
    return x


def _result(out: np.ndarray | None, shape: Sequence[int], dtype: Any) -> np.ndarray:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != tuple(shape) or out.dtype != dtype:
        raise ValueError(f"out is {out.dtype} {out.shape}, expected {np.dtype(dtype)} {tuple(shape)}")
    return out


def _random_bits(
    shape: Sequence[int], rounding: str, bits: np.ndarray | None, random: Stream | None
) -> np.ndarray | None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}; the roundings are {', '.join(ROUNDINGS)}")
    if rounding != "stochastic":
        if bits is not None or random is not None:
            raise ValueError(f"rounding {rounding!r} takes no random bits")
        return None
    if (bits is None) == (random is None):
        raise ValueError("stochastic rounding takes either bits (uint32, the shape of x) or random (a stream)")
    words = random_words(random, shape) if random is not None else np.asarray(bits)
    if words.dtype != np.uint32 or words.shape != tuple(shape):
        raise ValueError(f"bits are {words.dtype} {words.shape}, expected uint32 {tuple(shape)}")
    return words


def _copy_blocks(x: np.ndarray, out: np.ndarray, block: Any, *more: np.ndarray, size: int = BLOCK) -> None:
    """Run block(contiguous part of x, part of out, …) over arrays of one shape; x may be non-contiguous, or be out."""
    if out.flags.c_contiguous:
        for parts in _parts(out.reshape(-1), x, *more, size=size):
            block(parts[1], parts[0], *parts[2:])
    else:
        packed = np.empty(out.shape, out.dtype)
        _copy_blocks(x, packed, block, *more, size=size)
        np.copyto(out, packed)


def _parts(*arrays: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Contiguous one-dimensional parts, of so many elements at most, of arrays of one size."""
    flat = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    for start in range(0, flat[0].size, size):
        yield tuple(a[start : start + size] for a in flat)

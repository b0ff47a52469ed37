"""Formats and rounding, against NumPy and ml_dtypes where they define the answer, and against Python integers elsewhere."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refdist.numerics import FORMATS, convert, format_named, format_of, round_to, rounding, to_float32
from refdist.numerics.random import random_words, stream

STORED = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
BITS = {"fp16": np.uint16, "bf16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8}


def patterns(name):
    """Every pattern of the format, in its own dtype."""
    bits = BITS[name]
    return np.arange(np.iinfo(bits).max + 1, dtype=np.uint32).astype(bits).view(STORED[name])


def widened(x):
    """To float32 by the other library, without its remarks on NaN."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32)


def finite_values(name):
    """The finite numbers of the format in rising order, as float64, one zero."""
    values = widened(patterns(name))
    return np.unique(values[np.isfinite(values)].astype(np.float64))


def hard_cases(name, dtype):
    """All numbers of the format, what lies half way between neighbours, the numbers next to those, and special ones."""
    values = finite_values(name)
    step = values[-1] - values[-2]
    middles = np.concatenate([(values[:-1] + values[1:]) / 2, [values[-1] + step / 2, -values[-1] - step / 2]])
    middles = middles.astype(dtype)
    up, down = np.nextafter(middles, dtype(np.inf)), np.nextafter(middles, dtype(-np.inf))
    tiny = np.finfo(dtype).smallest_subnormal
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, np.finfo(dtype).max, np.finfo(dtype).min])
    rng = np.random.default_rng(0)
    word = np.uint32 if dtype is np.float32 else np.uint64
    random = rng.integers(0, np.iinfo(word).max, 200_000, dtype=word, endpoint=True).view(dtype)
    around = rng.standard_normal(50_000) * 2.0 ** rng.integers(-30, 20, 50_000)
    parts = (values, middles, up, down, special, random, around)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([p.astype(dtype) for p in parts])


def assert_same_patterns(got, want, bits):
    """Equal bit for bit; a NaN may have any payload, not any sign."""
    got_bits, want_bits = got.view(bits), want.view(bits)
    sign = np.iinfo(bits).max // 2 + 1
    both_nan = np.isnan(widened(got)) & np.isnan(widened(want)) & ((got_bits ^ want_bits) & sign == 0)
    wrong = (got_bits != want_bits) & ~both_nan
    assert not wrong.any(), (got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("name", STORED)
def test_every_pattern_stands_for_its_number(name):
    x = patterns(name)
    np.testing.assert_array_equal(to_float32(x).view(np.uint32), widened(x).view(np.uint32))
    np.testing.assert_array_equal(round_to(x, "fp32").view(np.uint32), widened(x).view(np.uint32))


@pytest.mark.parametrize("copies", [1, 3])
def test_every_finite_fp16_is_widened_by_arithmetic(copies, monkeypatch):
    """Without infinities and NaN no block needs the table, on a processor that is fast with subnormal numbers."""
    x = patterns("fp16")
    x = np.repeat(x[np.isfinite(x)], copies)
    monkeypatch.setattr(rounding, "_look_up_block", None)
    monkeypatch.setattr(rounding, "_subnormals_are_slow", lambda: False)
    got = to_float32(x)
    np.testing.assert_array_equal(got.view(np.uint32), widened(x).view(np.uint32))
    turned = to_float32(x[: 3 * 5000].reshape(3, 5000).T)
    np.testing.assert_array_equal(turned.view(np.uint32), widened(x[: 3 * 5000].reshape(3, 5000).T).view(np.uint32))


def test_blocks_with_many_subnormals_are_looked_up_where_the_processor_is_slow_with_them(monkeypatch):
    looked_up = []
    monkeypatch.setattr(rounding, "_subnormals_are_slow", lambda: True)
    monkeypatch.setattr(rounding, "_look_up_block",
                        lambda x, dest, name, look_up=rounding._look_up_block: (looked_up.append(x.size), look_up(x, dest, name)))
    small = np.tile(np.float16([2.0**-24, -(2.0**-15), 0.0, -0.0]), 5000)
    for x in (small, np.where(np.arange(small.size) % 3, np.float16(1.5), np.float16(-0.0))):
        np.testing.assert_array_equal(to_float32(x).view(np.uint32), widened(x).view(np.uint32))
    assert looked_up == [small.size]


@pytest.mark.parametrize(("part", "many"), [(0.0, False), (0.001, False), (0.1, True), (1.0, True)])
def test_blocks_with_many_subnormal_fp16_are_known(part, many):
    generator = np.random.default_rng(5)
    for scale in (1e-6, -1e-6, 2.0**-24):
        x = generator.choice([0.0, -0.0, 1.0, -3e-3, 2.0**-14, 65504.0], 32768)
        x[generator.random(x.size) < part] = scale
        assert rounding._has_many_subnormals(x.astype(np.float16).view(np.uint16)) == many


@pytest.mark.parametrize("size", [5, 5000, 70000])
def test_an_infinity_or_nan_among_ordinary_fp16_numbers_is_widened(size):
    for pattern in (0x7C00, 0xFC00, 0x7C01, 0x7DFF, 0x7E00, 0x7FFF, 0xFC01, 0xFE00, 0xFFFF):
        for place in (0, size // 2, size - 1):
            x = np.linspace(-1, 1, size).astype(np.float16)
            x.view(np.uint16)[place] = pattern
            np.testing.assert_array_equal(to_float32(x).view(np.uint32), widened(x).view(np.uint32))
    large = np.full(size, 65504, np.float16)
    np.testing.assert_array_equal(to_float32(large), np.full(size, 65504, np.float32))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("rounding", ["nearest", "zero", "stochastic"])
def test_every_pattern_converts_to_itself(name, rounding):
    x = patterns(name)
    bits = random_words(stream(3, "all"), x.shape) if rounding == "stochastic" else None
    assert_same_patterns(convert(to_float32(x), name, rounding, bits=bits), x, BITS[name])


def test_every_fp16_nan_keeps_its_payload():
    x = patterns("fp16")
    np.testing.assert_array_equal(convert(to_float32(x), "fp16").view(np.uint16), x.view(np.uint16))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nearest_is_what_numpy_and_ml_dtypes_give(name, dtype):
    x = hard_cases(name, dtype)
    with np.errstate(all="ignore"):
        want = x.astype(STORED[name])
        if dtype is np.float64 and name != "fp16":  # ml_dtypes rounds float64 twice, by way of float32
            once = np.float32(x).astype(np.float64) == x
            x, want = x[once], want[once]
    assert_same_patterns(convert(x, name), want, BITS[name])
    np.testing.assert_array_equal(round_to(x, name), widened(want))
    np.testing.assert_array_equal(np.signbit(round_to(x, name)), np.signbit(widened(want)))


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2"])
def test_float64_is_rounded_once(name):
    one_and_half_step = 1 + 2.0 ** -(FORMATS[name].fraction_bits + 1)
    above = np.array([one_and_half_step + 2.0**-40])  # float32 rounds it to the tie, and the tie goes to 1
    assert round_to(above, name)[0] == 1 + 2.0 ** -FORMATS[name].fraction_bits


def test_tf32_is_float32_rounded_to_ten_bits():
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 2**32, 300_000, dtype=np.uint32)
    raw[:100_000] = raw[:100_000] & 0xFFFFE000 | 0x1000  # ties
    x = raw.view(np.float32)
    x = x[np.isfinite(x)]
    raw = x.view(np.uint32).astype(np.int64)
    want = ((raw + 0xFFF + (raw >> 13 & 1)) & ~0x1FFF).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(round_to(x, "tf32").view(np.uint32), want.view(np.uint32))
    cut = (raw & ~0x1FFF).astype(np.uint32)
    np.testing.assert_array_equal(round_to(x, "tf32", "zero").view(np.uint32), cut)
    assert np.isnan(round_to(np.array([0x7F800001], np.uint32).view(np.float32), "tf32"))[0]


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_toward_zero_takes_the_neighbour_nearer_to_zero(name, dtype):
    x = hard_cases(name, dtype)
    finite = np.isfinite(x)
    values = finite_values(name)
    values = values[values >= 0]
    below = values[np.searchsorted(values, np.abs(x[finite]).astype(np.float64), side="right") - 1]
    got = round_to(x, name, "zero")
    np.testing.assert_array_equal(np.abs(got[finite]), below)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(x[finite]))
    assert np.isnan(got[np.isnan(x)]).all()
    infinite = got[np.isinf(x)]
    assert (np.isinf(infinite) if FORMATS[name].has_infinity else np.isnan(infinite)).all()


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("rounding", ["nearest", "zero", "stochastic"])
def test_saturating_stays_at_the_largest_finite_number(name, rounding):
    largest = np.float32(FORMATS[name].max_finite)
    assert largest == np.float32(ml_dtypes.finfo(STORED[name]).max)
    x = np.array([np.inf, -np.inf, 3e38, -3e38, largest, np.nan, 1.0], np.float32)
    bits = np.full(x.shape, 2**32 - 1, np.uint32) if rounding == "stochastic" else None
    want = np.array([largest, -largest, largest, -largest, largest, np.nan, 1], np.float32)
    if name == "bf16":
        want[2:4] = round_to(x[2:4], "bf16", rounding, bits=None if bits is None else bits[2:4])  # within its range
    np.testing.assert_array_equal(round_to(x, name, rounding, saturate=True, bits=bits), want)
    np.testing.assert_array_equal(widened(convert(x, name, rounding, saturate=True, bits=bits)), want)
    np.testing.assert_array_equal(round_to(x.astype(np.float64), name, rounding, saturate=True, bits=bits), want)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(list(STORED)),
    x=st.one_of(st.floats(-500, 500, width=32), st.floats(-(2.0**-10), 2.0**-10, width=32)),
    word=st.integers(0, 2**32 - 1),
)
def test_stochastic_is_the_formula(name, x, word):
    to = FORMATS[name]
    size = Fraction(abs(x))
    exponent = to.min_exponent
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - to.fraction_bits)
    whole = size // unit
    up = (size / unit - whole) * 2**32 // 1 + word >= 2**32
    want = float((whole + up) * unit)
    if want > to.max_finite:
        want = np.inf if to.has_infinity else np.nan
    got = round_to(np.array([x], np.float32), name, "stochastic", bits=np.array([word], np.uint32))[0]
    np.testing.assert_array_equal(got, np.copysign(np.float32(want), np.float32(x)))
    assert np.signbit(got) == np.signbit(np.float32(x)) or np.isnan(got)


@pytest.mark.parametrize("name", [*STORED, "tf32", "fp32"])
def test_stochastic_leaves_what_is_representable_alone(name):
    x = round_to(np.random.default_rng(7).normal(size=5000), name).astype(np.float64)
    bits = np.full(x.shape, 2**32 - 1, np.uint32)
    np.testing.assert_array_equal(round_to(x, name, "stochastic", bits=bits), x)


def test_stochastic_is_right_on_average_and_depends_on_the_stream_alone():
    x = np.full(40_000, 1 + 0.3 * 2.0**-10, np.float32)
    identity = stream(7, "rounding")
    got = round_to(x, "fp16", "stochastic", random=identity)
    assert set(np.unique(got)) == {np.float32(1), np.float32(1 + 2.0**-10)}
    up = np.mean(got > 1)
    assert abs(up - 0.3) < 4 * np.sqrt(0.3 * 0.7 / x.size)
    part = random_words(identity, x.shape, [slice(1000, 2000)])
    np.testing.assert_array_equal(round_to(x[1000:2000], "fp16", "stochastic", bits=part), got[1000:2000])


def test_any_layout_of_input_and_output():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((33, 65, 7)).astype(np.float32)
    want = x.astype(np.float16)
    for view in (np.s_[:], np.s_[::-1, ::2], np.s_[5:20, 3], np.s_[0, 0, 0], np.s_[:0]):
        np.testing.assert_array_equal(convert(x[view], "fp16"), want[view])
        np.testing.assert_array_equal(round_to(x[view].T, "fp16"), want[view].T)
    out = np.zeros((7, 65, 33), np.float16).T
    assert convert(x, "fp16", out=out) is out
    np.testing.assert_array_equal(out, want)
    big = rng.standard_normal(100_001).astype(np.float32)  # several blocks
    want = big.astype(np.float16).astype(np.float32)
    assert round_to(big, "fp16", out=big) is big
    np.testing.assert_array_equal(big, want)


def test_x_is_not_changed_and_the_result_is_new():
    x = np.array([1.0, 1e-8, 1e8, np.nan], np.float32)
    before = x.copy()
    for name in FORMATS:
        assert not np.may_share_memory(convert(x, name), x)
        assert not np.may_share_memory(round_to(x, name), x)
    np.testing.assert_array_equal(x, before)


def test_errors_say_what_is_allowed():
    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"unknown format 'fp8'; the formats are fp16, bf16, tf32, e4m3, e5m2, fp32"):
        convert(x, "fp8")
    with pytest.raises(ValueError, match=r"unknown rounding 'up'; the roundings are nearest, zero, stochastic"):
        convert(x, "fp16", "up")
    with pytest.raises(ValueError, match=r"cannot round numbers of dtype int64: expected float16"):
        convert(np.arange(3), "fp16")
    with pytest.raises(ValueError, match=r"either bits .* or random"):
        convert(x, "fp16", "stochastic")
    with pytest.raises(ValueError, match=r"bits are uint32 \(2,\), expected uint32 \(3,\)"):
        convert(x, "fp16", "stochastic", bits=np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match=r"'nearest' takes no random bits"):
        convert(x, "fp16", bits=np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match=r"out is float32 \(3,\), expected float16 \(3,\)"):
        convert(x, "fp16", out=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"float32 does not hold every number of dtype float64"):
        to_float32(np.ones(2))


def test_formats_know_each_other():
    assert format_of(np.float16) is FORMATS["fp16"]
    assert format_of(np.float32) is FORMATS["fp32"]
    assert format_of(np.int32) is None
    assert format_named(FORMATS["e5m2"]) is FORMATS["e5m2"]
    inside = {(a, b) for a in FORMATS for b in FORMATS if a != b and FORMATS[a].contains(FORMATS[b])}
    assert inside == {
        ("fp32", "fp16"), ("fp32", "bf16"), ("fp32", "tf32"), ("fp32", "e4m3"), ("fp32", "e5m2"),
        ("tf32", "fp16"), ("tf32", "bf16"), ("tf32", "e4m3"), ("tf32", "e5m2"),
        ("fp16", "e4m3"), ("fp16", "e5m2"), ("bf16", "e4m3"), ("bf16", "e5m2"),
    }  # fmt: skip

"""Matrix products in the tensor cores' arithmetic, against GPU captures, a scalar oracle, and exact sums."""

import concurrent.futures
import itertools
import math
import pathlib
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refdist as rd
from refdist.numerics import (
    CHIPS,
    FORMATS,
    FormatProduct,
    matmul,
    matmul_for,
    product,
    round_to,
    step_of,
    tensor_core,
    tensor_core_fast,
)
from refdist.ops.linear import linear, linear_input_grad, linear_weight_grad

VECTORS = pathlib.Path(__file__).resolve().parents[2] / "shared" / "vectors" / "tensor_core.npz"
DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
MODES = [
    (chip, inputs, accumulate)
    for chip, steps in CHIPS.items()
    for inputs in steps
    for accumulate in ("fp32", "fp16")
    if not (accumulate == "fp16" and inputs in ("bf16", "tf32"))
]


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def assert_bitwise(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(bits(got), bits(want))


def operands(rng, shape, inputs, spread=4, zeros=0.1):
    """Random numbers of the format in float32, over a range of exponents, some of them zero or subnormal."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    x[rng.random(shape) < zeros] = 0
    x = round_to(x, inputs, saturate=True)
    tiny = rng.random(shape) < 0.05 * (spread > 0)
    smallest = 2.0 ** (max(FORMATS[inputs].min_exponent, -60) - FORMATS[inputs].fraction_bits)
    x[tiny] = (rng.integers(-7, 8, shape) * smallest)[tiny]
    return round_to(x, inputs)


# The rule, once more: for one element, with Python integers and fractions -------------------------------------------


def exponent_of(x, smallest):
    return max(math.frexp(x)[1] - 1, smallest)


def floor_log2(x):
    """floor(log2 |x|) of a Fraction that is not zero."""
    guess = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return guess if abs(x) >= Fraction(2) ** guess else guess - 1


def toward_zero(x, fraction_bits):
    """A Fraction rounded toward zero to float32's range and so many fraction bits."""
    if x == 0:
        return 0.0
    if abs(x) >= Fraction(2) ** 128:
        return math.copysign(math.inf, x)
    unit = Fraction(2) ** (max(floor_log2(x), -126) - fraction_bits)
    return math.copysign(float(int(x / unit) * unit), x)  # what rounds to zero keeps its sign


def to_half(x):
    """A Fraction rounded to fp16, to nearest even."""
    if x == 0:
        return 0.0
    unit = Fraction(2) ** (max(floor_log2(x), -14) - 10)
    rounded = round(x / unit) * unit
    return math.copysign(float(rounded) if abs(rounded) <= 65504 else math.inf, x)


def scalar_step(a, b, c, step, smallest, accumulate):
    exponents = [exponent_of(x, smallest) + exponent_of(y, smallest) for x, y in zip(a, b, strict=True) if x and y]
    if c:
        exponents.append(exponent_of(c, -126))
    if not exponents:
        return 0.0
    unit = Fraction(2) ** (max(exponents) - step.kept_bits)
    terms = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)] + [Fraction(c)]
    total = sum(int(term / unit) for term in terms) * unit
    return to_half(total) if accumulate == "fp16" else toward_zero(total, step.result_bits)


def scalar_chain(a, b, c, step, smallest, accumulate):
    for k in range(0, len(a), step.terms):
        if math.isinf(c):
            return c
        c = scalar_step(a[k : k + step.terms], b[k : k + step.terms], c, step, smallest, accumulate)
    return c


def oracle(a, b, c, chip, inputs, accumulate):
    """[M, K], [K, N], [M, N] -> [M, N], an element at a time."""
    step, smallest = step_of(chip, inputs, accumulate), FORMATS[inputs].min_exponent
    y = np.empty(c.shape, np.float32 if accumulate == "fp32" else np.float16)
    for i, j in np.ndindex(*c.shape):
        y[i, j] = scalar_chain(a[i].tolist(), b[:, j].tolist(), float(c[i, j]), step, smallest, accumulate)
    return y


@pytest.mark.parametrize(("chip", "inputs", "accumulate"), MODES)
def test_equals_the_scalar_oracle(chip, inputs, accumulate):
    rng = np.random.default_rng([len(chip), len(inputs), MODES.index((chip, inputs, accumulate))])
    for (m, n, k), spread in itertools.product(((3, 5, 37), (2, 2, 64), (4, 1, 1)), (0, 4, 9)):
        a, b = operands(rng, (m, k), inputs, spread), operands(rng, (k, n), inputs, spread)
        c = round_to(rng.standard_normal((m, n)) * 2.0 ** rng.integers(-9, 9, (m, n)), accumulate)
        c[0, 0] = 0
        got = matmul(a, b, c, inputs, accumulate, chip)
        assert_bitwise(got, oracle(a, b, c, chip, inputs, accumulate))


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(min_size=8, max_size=320), mode=st.sampled_from(MODES), c=st.floats(-(2.0**100), 2.0**100, width=32))
def test_equals_the_scalar_oracle_on_any_patterns(raw, mode, c):
    chip, inputs, accumulate = mode
    to = FORMATS[inputs]
    k = len(raw) // (2 * to.dtype.itemsize)
    with np.errstate(invalid="ignore"):
        x = np.frombuffer(raw[: 2 * k * to.dtype.itemsize], to.dtype).astype(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    if inputs == "tf32":
        x = (x.view(np.uint32) & 0xFFFFE000).view(np.float32)
    start = round_to(np.full((1, 1), c), accumulate, saturate=True)
    a, b = x[None, :k], x[k:, None]
    assert_bitwise(matmul(a, b, start, inputs, accumulate, chip), oracle(a, b, start, chip, inputs, accumulate))


# GPU captures --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not VECTORS.exists(), reason="the captured vectors are not here")
def test_every_captured_result_is_reproduced():
    vectors = np.load(VECTORS)
    count = 0
    for gpu, name in sorted({tuple(key.split("_")[:2]) for key in vectors.files}):
        a, b = (vectors[f"{gpu}_{name}_{x}"].view(DTYPES[name]).astype(np.float32) for x in "ab")
        c = vectors[f"{gpu}_{name}_c"].view(np.float32)
        for accumulate in ("fp32", "fp16"):
            key = f"{gpu}_{name}_d{accumulate}"
            if key not in vectors.files:
                continue
            start = c if accumulate == "fp32" else c.astype(np.float16).astype(np.float32)
            stacked = a[:, None, :], b[:, :, None], start[:, None, None]
            y = matmul(*stacked, name.lower(), accumulate, gpu.lower()).astype(np.float32)
            np.testing.assert_array_equal(bits(y[:, 0, 0]), bits(vectors[key]), err_msg=key)
            count += len(c)
    assert count >= 60_000


@pytest.mark.skipif(not VECTORS.exists(), reason="the captured vectors are not here")
def test_captured_results_by_the_fast_path(monkeypatch):
    """The captures are dot products. On a diagonal of a bigger product they take the fast path."""
    monkeypatch.setattr(tensor_core, "chain", refuse)
    vectors = np.load(VECTORS)
    for gpu, accumulate in itertools.product(("V100", "A100", "H100"), ("fp32", "fp16")):
        a, b = (vectors[f"{gpu}_fp16_{x}"][:600].view(np.float16) for x in "ab")
        c, want = (vectors[f"{gpu}_fp16_{x}"][:600].view(np.float32) for x in ("c", f"d{accumulate}"))
        start = np.broadcast_to(round_to(c, accumulate), (600, 600))
        y = matmul(a, b.T, start, "fp16", accumulate, gpu.lower())
        np.testing.assert_array_equal(bits(np.diagonal(y).astype(np.float32)), bits(want))


def refuse(*_):
    raise AssertionError("the slow path was taken")


# The two paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chip", "inputs", "accumulate"), MODES)
@pytest.mark.parametrize("shape", [(37, 45, 70), (130, 131, 1), (3, 600, 33), (700, 5, 17)])
def test_the_fast_path_equals_the_rule(chip, inputs, accumulate, shape, monkeypatch):
    m, n, k = shape
    rng = np.random.default_rng([m, MODES.index((chip, inputs, accumulate))])
    for spread, addend in ((0, 0), (4, 1), (4, 2.0**12)):
        a, b = operands(rng, (m, k), inputs, spread), operands(rng, (k, n), inputs, spread, zeros=0.5)
        if inputs in ("bf16", "tf32"):  # keep the exponents moderate
            a[np.abs(a) < 2.0**-12], b[np.abs(b) < 2.0**-12] = 0, 0
        a[1], b[:, 2] = 0, 0
        c = (rng.standard_normal((m, n)) * addend).astype(np.float32)
        with monkeypatch.context() as patched:
            patched.setattr(tensor_core, "chain", refuse)
            fast = matmul(a, b, c, inputs, accumulate, chip)
        with monkeypatch.context() as patched:
            patched.setattr(product, "chain", tensor_core.chain)
            assert_bitwise(fast, matmul(a, b, c, inputs, accumulate, chip))


def both_paths(a, b, c, inputs, accumulate, chip, monkeypatch):
    """The product by the fast path, which must take it, and by the rule."""
    with monkeypatch.context() as patched:
        patched.setattr(tensor_core, "chain", refuse)
        fast = matmul(a, b, c, inputs, accumulate, chip)
    with monkeypatch.context() as patched:
        patched.setattr(product, "chain", tensor_core.chain)
        return fast, matmul(a, b, c, inputs, accumulate, chip)


def random_patterns(rng, shape, inputs):
    """Every finite pattern of the format as often as any other; of bf16 and tf32 those with exponents from -14 to 15."""
    if inputs in ("bf16", "tf32"):
        significands = rng.integers(-(2**8) if inputs == "bf16" else -(2**11), 2**8 if inputs == "bf16" else 2**11, shape)
        x = significands * 2.0 ** rng.integers(-14, 8 if inputs == "bf16" else 5, shape)
        return np.where(np.abs(x) < 2.0**-14, 0, x).astype(np.float32)
    dtype = FORMATS[inputs].dtype
    x = rng.integers(0, 256**dtype.itemsize, shape).astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    return np.where(np.isfinite(x), x, np.float32(0))


def adversaries(rng, kind, shape, inputs, step):
    """a, b and c that try one of the claims of `tensor_core_fast` each."""
    m, n, k = shape
    largest = np.float32(2 - 2.0 ** -FORMATS[inputs].fraction_bits)
    a, b = random_patterns(rng, (m, k), inputs), random_patterns(rng, (k, n), inputs)
    c = (rng.standard_normal((m, n)) * 2.0 ** rng.integers(-20, 20, (m, n))).astype(np.float32)
    if kind == "cancel":  # what is left of each pair of products, and of c, is a few of the lowest bits
        a[:, 1::2], b[1::2] = -a[:, : k - k % 2 : 2], b[: k - k % 2 : 2]
        c = np.float32(2.0) ** rng.integers(-26, 30, (m, n)).astype(np.float32)
    elif kind == "largest significands":  # the integers are as large as they can be
        a, b = np.full((m, k), largest), np.full((k, n), largest)
        a[m // 2 :] *= -1
        b[:, n // 2 :] = rng.choice([1, 1.5, largest], (k, n - n // 2), p=[0.01, 0.03, 0.96])
        c = np.copysign(np.float32(2**4 - 2.0**-20), rng.choice([-1, 1], (m, n))).astype(np.float32)
        c[::3] = (2 - 2.0**-22) * np.sign(a[::3, :1])
    elif kind == "one exponent":  # the sums of powers are as large as they can be for it, or as small
        a, b = rng.choice([-1.0, 1.0], (m, k)).astype(np.float32), np.ones((k, n), np.float32)
        a[::4], a[1::4, 1:], a[2::4, 1:] = 1, 0, 0.5
        b[:, ::2] *= 2
        c = rng.choice([-1, 1], (m, n)) * np.float32(2.0) ** rng.integers(-26, 9, (m, n)).astype(np.float32)
    elif kind == "zeros":
        a[rng.random((m, k)) < 0.8], b[rng.random((k, n)) < 0.8] = 0, 0
        c[rng.random((m, n)) < 0.5] = 0
        a[:, : step.terms], c[::5] = 0, -0.0
    elif kind == "smallest":
        smallest = 2.0 ** (max(FORMATS[inputs].min_exponent, -14) - FORMATS[inputs].fraction_bits)
        if inputs in ("bf16", "tf32"):
            smallest = 2.0**-14
        a, b = rng.integers(-1, 2, (m, k)) * np.float32(smallest), rng.integers(-1, 2, (k, n)) * np.float32(smallest)
        a[0], b[:, 0] = largest, largest
        c = (rng.integers(-2, 3, (m, n)) * 2.0**-28).astype(np.float32)
    elif kind == "large c":
        c = (rng.choice([-1, 1], (m, n)) * 2.0 ** rng.integers(20, 125, (m, n)) * 1.2345678).astype(np.float32)
    c[np.abs(c) < 2.0**-28] = 0  # farther below the products it is not for the fast path
    return a, b, c


KINDS = ["patterns", "cancel", "largest significands", "one exponent", "zeros", "smallest", "large c"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chip", "inputs", "accumulate"), MODES)
def test_the_fast_path_equals_the_rule_against_adversaries(chip, inputs, accumulate, kind, monkeypatch):
    step = step_of(chip, inputs, accumulate)
    for shape in ((33, 40, 100), (70, 9, 16), (2, 530, 35)):
        rng = np.random.default_rng([KINDS.index(kind), MODES.index((chip, inputs, accumulate)), *shape])
        a, b, c = adversaries(rng, kind, shape, inputs, step)
        if accumulate == "fp16":
            c = np.clip(c, -60000, 60000)
        assert_bitwise(*both_paths(a, b, c, inputs, accumulate, chip, monkeypatch))


@pytest.mark.parametrize("inputs", ["fp16", "bf16"])
def test_the_sum_of_a_step_is_as_large_as_an_int32_can_be_and_larger(inputs, monkeypatch):
    """16 terms of at most 4 · 2^25 and c: with significands that add up to about 31, and to 32."""
    largest = 2 - 2.0 ** -FORMATS[inputs].fraction_bits
    parts = []
    for few in (16, 8, 7, 6, 5, 4, 3, 2, 1, 0):
        b = np.full((16, 40), largest)
        b[:few] = 1.875
        parts.append(b)
    for b in parts:
        for sign in (1, -1):
            a, c = np.full((40, 16), sign * largest), np.full((40, 40), sign * (2 - 2.0**-23))
            c[::2] *= 2
            c[::3] *= -1
            assert_bitwise(*both_paths(a, b, c, inputs, "fp32", "h100", monkeypatch))
            got = matmul(a[:3], b[:, :2], c[:3, :2], inputs, "fp32", "h100")
            assert_bitwise(got, oracle(a[:3], b[:, :2], c[:3, :2], "h100", inputs, "fp32"))


def test_every_sum_of_powers_is_told_by_its_exponent():
    """All pairs of exponents that are 58 apart or less, all numbers of equal terms, with and without smaller ones."""
    for span_a, span_b in ((58, 0), (0, 58), (29, 29), (30, 28), (14, 14), (7, 50), (0, 0), (1, 20)):
        for room in (58 - span_a - span_b, 0):
            plan = tensor_core_fast.Plan(tensor_core_fast.Range(0, span_a), tensor_core_fast.Range(0, span_b), room)
            powers_a, powers_b = (table[127 : 127 + span + 1] for table, span in
                                  zip(plan.powers(), (span_a, span_b), strict=True))  # fmt: skip
            assert plan.powers()[0][0] == plan.powers()[1][256] == 0
            with np.errstate(over="ignore"):
                power = np.multiply.outer(powers_a, powers_b)
                exponent = np.add.outer(np.arange(span_a + 1), np.arange(span_b + 1))
                for equal in range(1, 17):
                    below = power[0, 0] if exponent.size == 1 else power / np.float32(2 ** (64 / 15))
                    for total in (power * np.float32(equal), power * np.float32(equal) + below * np.float32(16 - equal)):
                        if exponent.size == 1 and equal < 16:
                            total = power * np.float32(equal)
                        classes = (total.view(np.uint32) >> tensor_core_fast.TO_CLASS[0]) * tensor_core_fast.TO_CLASS[1] >> 23
                        np.testing.assert_array_equal(classes, exponent + 1 + room)


def test_an_fp16_sum_that_overflows_stays_infinite(monkeypatch):
    rng = np.random.default_rng(18)
    a, b = operands(rng, (40, 200), "fp16", 2), operands(rng, (200, 40), "fp16", 2)
    a[:, 30], b[30] = 3000, rng.choice([-60.0, 1.0, 60.0], 40)
    a[:, 90], b[90] = 3000, rng.choice([-60.0, 1.0, 60.0], 40)
    for chip in ("v100", "a100", "ada", "h100", "b200"):
        fast, rule = both_paths(a, b, None, "fp16", "fp16", chip, monkeypatch)
        assert 0 < np.isinf(fast).sum() < fast.size
        assert_bitwise(fast, rule)


def test_threads_do_not_share_working_memory():
    rng = np.random.default_rng(19)
    pairs = [(operands(rng, (n, 70), "fp16"), operands(rng, (70, n), "fp16")) for n in (40, 60, 90, 130)]
    want = [matmul(a, b, tensor_core="h100") for a, b in pairs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, y in zip(pool.map(lambda ab: matmul(*ab, tensor_core="h100"), pairs), want, strict=True):
                assert_bitwise(got, y)


@pytest.mark.parametrize("chip", ["v100", "a100", "ada", "h100", "b200"])
def test_equal_exponents_are_told_from_the_next_one(chip, monkeypatch):
    """The sum of powers is largest, for its exponent, when all products share it. They cancel, so that c's bits are seen."""
    monkeypatch.setattr(tensor_core, "chain", refuse)
    cases = ("fp16", 15, 15), ("fp16", -14, -14), ("fp16", 3, -7), ("e5m2", 15, -14), ("e4m3", 8, -6), ("e4m3", 3, 0)
    for (inputs, ea, eb), above in itertools.product(cases, range(4)):
        if inputs not in CHIPS[chip] or ea + above > (8 if inputs == "e4m3" else 15):
            continue
        step, smallest = step_of(chip, inputs, "fp32"), FORMATS[inputs].min_exponent
        a, b = np.full((32, 64), 2.0**ea), np.full((64, 32), 2.0**eb)
        a[:, ::2] *= -1
        a[5, 4:], a[7, 2:], a[9, :2] = 0, 0, 0
        a[11] *= 2.0**above  # moves where the others' powers lie in float32
        c = np.full((32, 32), 3 * 2.0 ** (ea + eb - step.kept_bits))
        got = matmul(a, b, c, inputs, "fp32", chip)
        for i in (0, 5, 7, 9):
            want = scalar_chain(a[i].tolist(), b[:, 0].tolist(), c[i, 0], step, smallest, "fp32")
            assert got[i, 0] == np.float32(want) == c[i, 0]


@pytest.mark.parametrize("span", [28, 29, 30, 31, 45])
def test_exponents_about_as_far_apart_as_the_fast_path_takes(span):
    rng = np.random.default_rng(span)
    a, b = (rng.choice([-1.0, 1.0], (24, 24)) * 2.0 ** rng.integers(-span, 1, (24, 24)) for _ in range(2))
    a[0, 0], a[0, 1], b[0, 0], b[1, 1] = 1, 2.0**-span, 1, 2.0**-span
    a[2], b[:, 3] = 2.0**-span * 1.25, 2.0**-span * 1.5  # one row and one column of small products only
    c = np.zeros((24, 24), np.float32)
    assert_bitwise(matmul(a, b, c, "bf16", "fp32", "h100"), oracle(a, b, c, "h100", "bf16", "fp32"))


@pytest.mark.parametrize("tiny", [2.0**-40, 2.0**-80, 2.0**-120, 2.0**-149])
def test_a_small_c_is_kept_beside_products_that_are_zero(tiny):
    rng = np.random.default_rng(16)
    a, b = operands(rng, (40, 40), "fp16"), operands(rng, (40, 40), "fp16")
    a[3] = 0
    c = np.full((40, 40), -1.25 * tiny if tiny > 2.0**-149 else -tiny, np.float32)
    y = matmul(a, b, c, tensor_core="h100")
    np.testing.assert_array_equal(y[3], c[3])
    assert_bitwise(y[:5, :5], oracle(a[:5], b[:, :5], c[:5, :5], "h100", "fp16", "fp32"))


def test_exponents_too_far_apart_take_the_other_path():
    rng = np.random.default_rng(5)
    a = round_to(rng.standard_normal((23, 33)) * 2.0 ** rng.integers(-120, 100, (23, 33)), "bf16")
    b = round_to(rng.standard_normal((33, 24)) * 2.0 ** rng.integers(-120, 20, (33, 24)), "bf16")
    c = np.float32(2.0) ** rng.integers(-149, 100, (23, 24)).astype(np.float32)
    assert_bitwise(matmul(a, b, c, "bf16", "fp32", "h100"), oracle(a, b, c, "h100", "bf16", "fp32"))


def test_subnormal_results_are_cut_toward_zero():
    rng = np.random.default_rng(15)
    a = round_to(rng.standard_normal((9, 20)) * 2.0 ** rng.integers(-76, -66, (9, 20)), "bf16")
    b = round_to(rng.standard_normal((20, 8)) * 2.0 ** rng.integers(-76, -66, (20, 8)), "bf16")
    c = (rng.standard_normal((9, 8)) * 2.0**-140).astype(np.float32)
    y = matmul(a, b, c, "bf16", "fp32", "h100")
    assert np.mean(np.abs(y) < 2.0**-126) > 0.9
    assert_bitwise(y, oracle(a, b, c, "h100", "bf16", "fp32"))


# What the arithmetic promises -----------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50))


@settings(max_examples=40, deadline=None)
@given(mode=st.sampled_from(MODES), size=SIZES, cut=st.tuples(st.integers(0, 40), st.integers(0, 40)), seed=st.integers(0, 99))
def test_an_element_does_not_depend_on_how_m_and_n_are_cut(mode, size, cut, seed):
    (chip, inputs, accumulate), (m, n, k), rng = mode, size, np.random.default_rng(seed)
    a, b = operands(rng, (m, k), inputs), operands(rng, (k, n), inputs)
    c = rng.standard_normal((m, n)).astype(np.float32)
    whole = matmul(a, b, c, inputs, accumulate, chip)
    row, column = min(cut[0], m), min(cut[1], n)
    for rows, columns in itertools.product((slice(row), slice(row, m)), (slice(column), slice(column, n))):
        part = matmul(a[rows], b[:, columns], c[rows, columns], inputs, accumulate, chip)
        assert_bitwise(part, whole[rows, columns])


@settings(max_examples=40, deadline=None)
@given(mode=st.sampled_from(MODES), size=SIZES, more=st.integers(1, 70), seed=st.integers(0, 99))
def test_zeros_at_the_end_of_k_change_nothing(mode, size, more, seed):
    (chip, inputs, accumulate), (m, n, k), rng = mode, size, np.random.default_rng(seed)
    a, b = operands(rng, (m, k), inputs), operands(rng, (k, n), inputs)
    c = rng.standard_normal((m, n)).astype(np.float32)
    longer = np.pad(a, ((0, 0), (0, more))), np.pad(b, ((0, more), (0, 0)))
    assert_bitwise(matmul(*longer, c, inputs, accumulate, chip), matmul(a, b, c, inputs, accumulate, chip))


@pytest.mark.parametrize("tensor_core_name", [None, "h100"])
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_any_layout_and_any_leading_dimensions(tensor_core_name, accumulate):
    rng = np.random.default_rng(3)
    arithmetic = {"inputs": "fp16", "accumulate": accumulate, "tensor_core": tensor_core_name}
    a, b = operands(rng, (2, 3, 33, 20), "fp16", 1), operands(rng, (2, 3, 20, 31), "fp16", 1)
    c = round_to(rng.standard_normal((2, 3, 33, 31)), accumulate)
    want = np.stack([[matmul(a[i, j], b[i, j], c[i, j], **arithmetic) for j in range(3)] for i in range(2)])
    assert_bitwise(matmul(a, b, c, **arithmetic), want)
    turned = a.swapaxes(-1, -2).copy().swapaxes(-1, -2), b.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    strided = np.repeat(a, 2, -1)[..., ::2], np.repeat(b, 3, 2)[:, :, ::3]
    for x, y in (turned, strided):
        same_bits = np.array_equal if tensor_core_name else np.allclose  # BLAS promises no order
        assert same_bits(matmul(x, y, c, **arithmetic), want)
    one_b = matmul(a, b[0, 0], c, **arithmetic)
    one_a = matmul(a[0, 0], b, c[0, 0], **arithmetic)
    shared = matmul(a[:, :1], b[:1], c[:1, :1], **arithmetic)
    for i, j in itertools.product(range(2), range(3)):
        np.testing.assert_allclose(one_b[i, j], matmul(a[i, j], b[0, 0], c[i, j], **arithmetic), atol=1e-2)
        np.testing.assert_allclose(one_a[i, j], matmul(a[0, 0], b[i, j], c[0, 0], **arithmetic), atol=1e-2)
        np.testing.assert_allclose(shared[i, j], matmul(a[i, 0], b[0, j], c[0, 0], **arithmetic), atol=1e-2)
    if tensor_core_name:
        assert_bitwise(one_b[1, 2], matmul(a[1, 2], b[0, 0], c[1, 2], **arithmetic))
        assert_bitwise(one_a[1, 2], matmul(a[0, 0], b[1, 2], c[0, 0], **arithmetic))


@pytest.mark.parametrize("chip", [None, "v100", "h100"])
def test_empty_operands(chip):
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)):
        c = np.arange(m * n, dtype=np.float32).reshape(m, n)
        np.testing.assert_array_equal(matmul(np.ones((m, k)), np.ones((k, n)), c, tensor_core=chip), c)
        assert matmul(np.ones((0, m, k)), np.ones((k, n)), tensor_core=chip).shape == (0, m, n)


@pytest.mark.parametrize("chip", [None, "a100"])
def test_out_is_written_and_rounded_to_its_dtype(chip):
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((40, 30)), rng.standard_normal((30, 50))
    y = matmul(a, b, tensor_core=chip)
    assert y.dtype == np.float32
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        out = np.full((40, 50), np.nan, dtype)
        assert matmul(a, b, tensor_core=chip, out=out) is out
        np.testing.assert_array_equal(out, y.astype(dtype))
        turned = np.full((50, 40), np.nan, dtype).T
        assert matmul(a, b, tensor_core=chip, out=turned) is turned
        np.testing.assert_allclose(turned.astype(np.float32), y.astype(dtype).astype(np.float32), rtol=1e-2, atol=1e-2)
    stacked = np.full((40, 3, 50), np.nan, np.float32).swapaxes(0, 1)  # [3, 40, 50]; no view of it has 120 rows
    assert matmul(np.stack([a, -a, 2 * a]), b, tensor_core=chip, out=stacked) is stacked
    np.testing.assert_allclose(stacked, [y, -y, 2 * y], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chip", [None, "h100"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_stands_in_for_np_matmul(chip, dtype):
    rng = np.random.default_rng(6)
    product_of = matmul_for("fp16", "fp32", chip)
    a, b = rng.standard_normal((2, 20, 30)).astype(dtype), rng.standard_normal((30, 40)).astype(dtype)
    y, plain = product_of(a, b), np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert y.dtype == dtype
    assert y.shape == plain.shape
    np.testing.assert_allclose(y.astype(np.float64), plain, atol=0.2)
    out = np.zeros_like(y)
    assert product_of(a, b, out=out) is out
    np.testing.assert_array_equal(out, y)
    np.testing.assert_array_equal(y, matmul(a, b, tensor_core=chip).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_kernel_multiplies_by_it(dtype):
    rng = np.random.default_rng(17)
    x, w, dy = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 9, 40), (30, 40), (2, 9, 30)))
    arithmetic = matmul_for("fp16", "fp32", "h100")
    y, dx = linear(x, w, matmul=arithmetic), linear_input_grad(dy, w, matmul=arithmetic)
    dw = linear_weight_grad(dy, x, matmul=arithmetic)
    assert y.dtype == dx.dtype == dw.dtype == dtype
    assert_bitwise(y, matmul(x, w.T, tensor_core="h100").astype(dtype))
    assert_bitwise(dx, matmul(dy, w, tensor_core="h100").astype(dtype))
    assert_bitwise(dw, matmul(dy.reshape(-1, 30).T, x.reshape(-1, 40), tensor_core="h100").astype(dtype))
    column_parallel = [linear(x, part, matmul=arithmetic) for part in np.array_split(w, 3)]
    assert_bitwise(np.concatenate(column_parallel, axis=-1), y)


def test_operands_are_rounded_to_the_input_format():
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((24, 33)) * 4, rng.standard_normal((33, 22)) * 4
    for inputs in ("fp16", "bf16", "e4m3", "e5m2", "tf32", "fp32"):
        want = np.matmul(round_to(a, inputs), round_to(b, inputs))
        np.testing.assert_array_equal(matmul(a, b, inputs=inputs), want)
        np.testing.assert_array_equal(matmul(a.astype(np.float32), b, inputs=inputs), matmul(np.float32(a), b, inputs=inputs))
        if inputs in ("fp16", "bf16", "e4m3", "e5m2"):
            rounded = round_to(a, inputs), round_to(b, inputs)
            assert_bitwise(matmul(a, b, None, inputs, "fp32", "b200" if inputs[0] == "e" else "a100"),
                           matmul(*rounded, None, inputs, "fp32", "b200" if inputs[0] == "e" else "a100"))  # fmt: skip
    c = rng.standard_normal((24, 22)) * 200
    for chip in (None, "v100"):
        rounded_c = matmul(a, b, round_to(c, "fp16"), "fp16", "fp16", chip)
        assert_bitwise(matmul(a, b, c, "fp16", "fp16", chip), rounded_c)
    cut = [(x.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    assert_bitwise(matmul(a, b, None, "tf32", "fp32", "a100"), matmul(*cut, None, "tf32", "fp32", "a100"))
    assert not np.array_equal(matmul(a, b, None, "tf32", "fp32", "a100"), matmul(a, b, None, "tf32", "fp32"))


def test_the_operands_are_not_changed():
    rng = np.random.default_rng(8)
    a, b, c = (rng.standard_normal((40, 40)).astype(np.float32) for _ in range(3))
    before = a.copy(), b.copy(), c.copy()
    for chip, inputs, accumulate in [*MODES, (None, "fp32", "fp32"), (None, "fp16", "fp16")]:
        y = matmul(a, b, c, inputs, accumulate, chip)
        assert not any(np.may_share_memory(y, x) for x in (a, b, c))
    for x, old in zip((a, b, c), before, strict=True):
        np.testing.assert_array_equal(x, old)


def test_fp16_accumulator_without_a_tensor_core_is_rounded_every_16_products():
    rng = np.random.default_rng(9)
    a, b, c = operands(rng, (21, 75), "fp16", 2), operands(rng, (75, 30), "fp16", 2), operands(rng, (21, 30), "fp16", 2)
    y = c.astype(np.float16)
    for k in range(0, 75, 16):
        y = (y.astype(np.float32) + np.matmul(a[:, k : k + 16], b[k : k + 16])).astype(np.float16)
    assert_bitwise(matmul(a, b, c, accumulate="fp16"), y)
    assert np.any(y != matmul(a, b, c).astype(np.float16))


# Special values -------------------------------------------------------------------------------------------------------

NAN = {"fp32": 0x7FFFFFFF, "fp16": 0x7FFF}


@pytest.mark.parametrize("size", [1, 33])
@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
def test_infinities_and_nan(size, accumulate):
    """One dot product with special values, alone and among ordinary ones."""
    inf, nan = np.inf, np.nan
    cases = [
        ([inf, 1], [2, 1], 0, inf),
        ([inf, 1], [-2, 1], 0, -inf),
        ([inf, 1], [0, 1], 0, nan),
        ([inf, inf], [1, -1], 0, nan),
        ([inf, inf], [1, 1], 0, inf),
        ([1, 1], [1, 1], -inf, -inf),
        ([inf, 1], [1, 1], -inf, nan),
        ([nan, 1], [0, 1], 0, nan),
        ([1, 1], [1, 1], nan, nan),
    ]
    for a, b, c, want in cases:
        for place in (0, 19):  # in the first step or in a later one
            full_a, full_b = np.ones((size, 40), np.float32), np.ones((40, size), np.float32)
            full_a[0, place : place + 2], full_b[place : place + 2, 0] = a, b
            full_c = np.zeros((size, size), np.float32)
            full_c[0, 0] = c
            y = matmul(full_a, full_b, full_c, "fp16", accumulate, "h100")
            if np.isnan(want):
                assert bits(y)[0, 0] == NAN[accumulate], (a, b, c)
            else:
                assert y[0, 0] == want
            assert np.all(y[1:, 1:] == 40)


def test_an_infinity_stays_and_meets_its_opposite():
    a, b = np.zeros((1, 48)), np.ones((48, 1))
    a[0, 0], a[0, 40] = np.inf, -np.inf
    assert bits(matmul(a, b, tensor_core="h100"))[0, 0] == 0x7FFFFFFF
    assert matmul(a[:, :40], b[:40], tensor_core="h100")[0, 0] == np.inf


@pytest.mark.parametrize("size", [1, 40])
def test_overflow(size):
    one = np.ones((size, 16), np.float32)
    largest = np.full((size, size), np.finfo(np.float32).max)
    nearly, over = matmul(one, one.T * 2.0**-14, largest, tensor_core="h100"), None
    np.testing.assert_array_equal(nearly, largest)  # the products are cut away
    big = np.full((size, 16), 2.0**63)
    over = matmul(big, big.T, largest, "bf16", "fp32", "h100")
    assert np.all(over == np.inf)
    three_steps = np.full((size, 48), 2.0**63)
    assert np.all(matmul(three_steps, three_steps.T, None, "bf16", "fp32", "h100") == np.inf)
    three_steps[:, 16:] = 1
    assert np.all(matmul(three_steps, three_steps.T, -largest, "bf16", "fp32", "h100") == np.inf)
    just_below = matmul(big, big.T * 0, largest, "bf16", "fp32", "h100")
    np.testing.assert_array_equal(just_below, largest)
    half = matmul(one * 256, one.T * 16, np.full((size, size), -2.0), "fp16", "fp16", "h100")  # 65536 - 2
    assert np.all(half == np.inf)
    half = matmul(one * 256, one.T * 16, np.full((size, size), -17.0), "fp16", "fp16", "h100")  # 65519
    assert np.all(half == 65504)
    half = matmul(one * 256, one.T * 16, np.full((size, size), -16.0), "fp16", "fp16", "h100")  # 65520: to even
    assert np.all(half == np.inf)
    longer = np.concatenate([one * 256, one * -256], axis=1), np.concatenate([one * 16, one * 16], axis=1).T
    assert np.all(matmul(*longer, None, "fp16", "fp16", "h100") == np.inf)  # an infinity stays one


@pytest.mark.parametrize("size", [1, 40])
def test_an_exact_zero_is_positive(size):
    minus = np.full((size, 16), -0.0, np.float32)
    for accumulate in ("fp32", "fp16"):
        y = matmul(minus, np.ones((16, size)), np.full((size, size), -0.0), "fp16", accumulate, "h100")
        assert not bits(y).any()
        one = np.ones((size, 16), np.float32)
        one[:, 8:] = -1
        y = matmul(one, np.ones((16, size)), None, "fp16", accumulate, "h100")
        assert not bits(y).any()


@pytest.mark.parametrize("chip", CHIPS)
def test_the_sum_is_not_monotone(chip):
    """Kb products of 2^-(F + 1): lost beside c = 1, kept beside the number just below it."""
    step = step_of(chip, "fp16", "fp32")
    a = np.full((1, step.terms), 2.0**-12)
    b = np.full((step.terms, 1), 2.0 ** -(step.kept_bits + 1 - 12))
    below = np.array([[1 - 2.0**-24]])
    assert bits(matmul(a, b, np.ones((1, 1)), tensor_core=chip))[0, 0] == 0x3F800000
    smaller = bits(matmul(a, b, below, tensor_core=chip))[0, 0]
    assert smaller == (0x3F800001 if step.terms * 2.0**-step.kept_bits >= 2.0**-21 else 0x3F800000)


def test_the_worked_example_of_the_documentation():
    """docs/numerics.md: one step of a V100, by hand."""
    a = np.array([[1.5, 1.75 * 2.0**-12, 1.75 * 2.0**-12, 0]], np.float16)
    b = np.array([[1.5], [2.0**-11], [2.0**-11], [7]], np.float16)
    c = np.array([[0.25 + 2.0**-23]], np.float32)
    assert matmul(a, b, c, tensor_core="v100")[0, 0] == 2.5 + 2.0**-22
    exact = 2.25 + 2 * 1.75 * 2.0**-23 + 0.25 + 2.0**-23
    assert np.float32(exact) == 2.5 + 2 * 2.0**-22


# fp8 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [32, 64, 128])
@pytest.mark.parametrize("inputs", ["e4m3", "e5m2"])
def test_promotion_adds_partial_sums_in_fp32(every, inputs):
    rng = np.random.default_rng(10)
    a, b, c = operands(rng, (30, 300), inputs, 2), operands(rng, (300, 20), inputs, 2), rng.standard_normal((30, 20))
    want = c.astype(np.float32)
    for k in range(0, 300, every):
        want = want + matmul(a[:, k : k + every], b[k : k + every], None, inputs, "fp32", "h100")
    assert_bitwise(matmul(a, b, c, inputs, "fp32", "h100", promote_every=every), want)
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64)) + c
    plain = matmul(a, b, c, inputs, "fp32", "h100")
    assert np.abs(want - exact).mean() < np.abs(plain - exact).mean()


def test_mma_sync_adds_fp8_in_two_halves_and_c_at_last():
    rng = np.random.default_rng(11)
    order = [k for k in range(32) if k % 4 < 2] + [k for k in range(32) if k % 4 >= 2]
    halves = tensor_core.Step(16, 25)
    for accumulate in ("fp32", "fp16"):
        a, b, c = operands(rng, (3, 64), "e4m3", 2), operands(rng, (64, 4), "e4m3", 2), operands(rng, (3, 4), "fp16", 2)
        want = c.astype(np.float32 if accumulate == "fp32" else np.float16)
        for k in (0, 32):
            for i, j in np.ndindex(3, 4):
                x, y = a[i, k : k + 32][order].tolist(), b[k : k + 32, j][order].tolist()
                partial = np.float32(scalar_chain(x, y, 0.0, halves, -6, accumulate))
                want[i, j] = np.float32(want[i, j]) + partial
        got = matmul(a, b, c, "e4m3", accumulate, "h100", instruction="mma.sync")
        assert_bitwise(got, want)
    a = operands(rng, (4, 60), "fp16")
    assert_bitwise(matmul(a, a.T, None, "fp16", "fp32", "h100", instruction="mma.sync"), matmul(a, a.T, tensor_core="h100"))


def test_mma_sync_and_promotion_together():
    rng = np.random.default_rng(12)
    a, b = operands(rng, (3, 128), "e5m2", 2), operands(rng, (128, 4), "e5m2", 2)
    want = np.zeros((3, 4), np.float32)
    for k in (0, 64):
        want += matmul(a[:, k : k + 64], b[k : k + 64], None, "e5m2", "fp32", "b200", instruction="mma.sync")
    got = matmul(a, b, None, "e5m2", "fp32", "b200", instruction="mma.sync", promote_every=64)
    assert_bitwise(got, want)


# Error bounds ---------------------------------------------------------------------------------------------------------


def exact_sums(a, b, c):
    """c + a b and |c| + |a| |b|, of fp16, bf16, tf32 or fp8 numbers: each product is exact, fsum rounds once."""
    pairs = [(c[i, j], a[i].tolist(), b[:, j].tolist()) for i, j in np.ndindex(c.shape)]
    exact = [math.fsum([float(z), *(x * y for x, y in zip(xs, ys, strict=True))]) for z, xs, ys in pairs]
    size = [math.fsum([abs(float(z)), *(abs(x * y) for x, y in zip(xs, ys, strict=True))]) for z, xs, ys in pairs]
    return np.reshape(exact, c.shape), np.reshape(size, c.shape)


def bound(size, k, inputs, accumulate, chip, every=None):
    """A bound on |y − exact|, where size = |c| + Σ |a b|: what every step and every rounding loses, added up."""
    if chip is None and accumulate == "fp32":
        return (k + 1) * 2.0**-24 * 1.01 * size  # Higham 2002, section 3.1: any order of summation
    chunks = -(-k // (every or k))
    half = 2.0**-11 * 1.01 * size + 2.0**-25  # one rounding to fp16; half the smallest subnormal
    if chip is None:
        return -(-k // 16) * half + (k + 1) * 2.0**-24 * 1.05 * size
    step = step_of(chip, inputs, accumulate)
    steps = -(-k // step.terms)
    cut = (step.terms + 1) * 2.0**-step.kept_bits * 1.02 * size  # each term less than 2^(E − F), and 2^E <= size
    rounded = half if accumulate == "fp16" else 2.0**-step.result_bits * 1.02 * size
    per_chunk = -(-steps // chunks) if every else steps
    return per_chunk * (cut + rounded) + (chunks * 2.0**-24 * 1.05 * size if every else 0)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from([*MODES, *((None, i, acc) for i in ("fp16", "bf16", "e4m3") for acc in ("fp32", "fp16"))]),
    k=st.integers(1, 200),
    spread=st.integers(0, 4),
    seed=st.integers(0, 999),
)
def test_the_error_stays_below_its_bound(mode, k, spread, seed):
    (chip, inputs, accumulate), rng = mode, np.random.default_rng(seed)
    a, b = operands(rng, (5, k), inputs, spread), operands(rng, (k, 6), inputs, spread)
    if accumulate == "fp16":  # stay away from overflow
        a, b = round_to(a / max(1, np.abs(a).max()), inputs), round_to(b / max(1, np.abs(b).max()), inputs)
    c = round_to(rng.standard_normal((5, 6)), accumulate)
    exact, size = exact_sums(a, b, c)
    error = np.abs(matmul(a, b, c, inputs, accumulate, chip).astype(np.float64) - exact)
    assert np.all(error <= bound(size, k, inputs, accumulate, chip))


@settings(max_examples=20, deadline=None)
@given(k=st.integers(1, 500), every=st.sampled_from([32, 128]), seed=st.integers(0, 99))
def test_the_error_of_promoted_sums_stays_below_its_bound(k, every, seed):
    rng = np.random.default_rng(seed)
    a, b, c = operands(rng, (4, k), "e4m3"), operands(rng, (k, 5), "e4m3"), round_to(rng.standard_normal((4, 5)), "fp32")
    exact, size = exact_sums(a, b, c)
    error = np.abs(matmul(a, b, c, "e4m3", "fp32", "h100", promote_every=every) - exact)
    assert np.all(error <= bound(size, max(k, every), "e4m3", "fp32", "h100", every))


def test_truncation_is_biased_and_rounding_is_not():
    rng = np.random.default_rng(13)
    a, b = np.abs(operands(rng, (30, 512), "fp16", 0)), np.abs(operands(rng, (512, 30), "fp16", 0))
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    assert np.all(matmul(a, b, tensor_core="h100") <= exact)
    assert np.any(matmul(a, b) > exact)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_errors_say_what_is_allowed():
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    chips = "v100, t4, a100, ada, h100, h200, b200"
    cases = [
        ((a, b, None, "fp8"), {}, "unknown input format 'fp8'; the formats are fp16, bf16, tf32, e4m3, e5m2, fp32"),
        ((a, b, None, "fp16", "fp64"), {}, "unknown accumulator format 'fp64'; the formats are fp32, fp16"),
        ((a, b, None, "fp16", "fp32", "h1000"), {}, f"unknown tensor core 'h1000'; the chips are {chips}, or None for BLAS"),
        ((a, b, None, "tf32", "fp32", "v100"), {}, "the tensor cores of v100 do not take tf32; they take fp16"),
        ((a, b, None, "e4m3", "fp32", "a100"), {}, "of a100 do not take e4m3; they take fp16, bf16, tf32"),
        ((a, b, None, "fp32", "fp32", "h100"), {}, "no tensor core takes fp32 inputs"),
        ((a, b, None, "bf16", "fp16", "h100"), {}, "tensor cores add bf16 products in fp32 only, not in fp16"),
        ((a, b.T), {}, "a (2, 3) and b (4, 3) do not multiply: expected [..., M, K] and [..., K, N]"),
        ((a[0], b), {}, "a (3,) and b (3, 4) do not multiply"),
        ((a[None].repeat(2, 0), b[None].repeat(3, 0)), {}, "leading dimensions of a (2, 2, 3) and b (3, 3, 4) do not broadcast"),
        ((a, b, a), {}, "c (2, 3) does not broadcast to the result (2, 4)"),
        ((a, b, np.ones((5, 2, 4))), {}, "c (5, 2, 4) does not broadcast to the result (2, 4)"),
        ((np.ones((2, 3), int), b), {}, "operand a has dtype int64; matmul takes float16, bfloat16"),
        ((a, np.ones((3, 4), bool)), {}, "operand b has dtype bool"),
        ((a, b * 1j), {}, "operand b has dtype complex64"),
        ((a, b, np.ones((2, 4), int)), {}, "operand c has dtype int64"),
        ((a, b), {"out": np.ones((4, 2), np.float32)}, "out has the shape (4, 2), the result (2, 4)"),
        ((a, b), {"out": np.ones((2, 4), int)}, "out has dtype int64"),
        ((a, b), {"promote_every": 128}, "promote_every needs a tensor core and accumulate='fp32'"),
        ((a, b, None, "e4m3", "fp32", "h100"), {"promote_every": 48}, "promote_every=48 is not a multiple of the 32 products"),
        ((a, b, None, "e4m3", "fp32", "h100"), {"instruction": "dp4a"}, "unknown instruction 'dp4a'; expected None or 'mma"),
        ((a, b), {"instruction": "mma.sync"}, "instruction='mma.sync' needs a tensor core"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError) as failure:  # noqa: PT011
            rd.numerics.matmul(*arguments, **options)
        assert message in str(failure.value)
        assert "\n" not in str(failure.value)
    with pytest.raises(ValueError, match="do not take tf32"):
        matmul_for("tf32", "fp32", "v100")


def test_fp32_inputs_leave_the_operands_alone():
    rng = np.random.default_rng(14)
    a, b = rng.standard_normal((30, 40)).astype(np.float32), rng.standard_normal((40, 20)).astype(np.float32)
    np.testing.assert_array_equal(matmul(a, b, inputs="fp32"), a @ b)
    assert tensor_core_fast.chain is product.chain


@pytest.mark.parametrize("inputs", ["fp16", "bf16"])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(1300, 40, 30), (30, 1300, 40), (0, 5, 4), (1025, 513, 3), (4, 0, 5)])
def test_operands_are_widened_part_by_part(inputs, rows, terms, columns):
    """x Wᵀ, dy W and dyᵀ x as they lie in memory, into the format of the operands and into float32."""
    dtype, multiply, generator = FORMATS[inputs].dtype, FormatProduct(inputs), np.random.default_rng(0)
    for turned_a, turned_b in ((False, True), (False, False), (True, False)):
        a = generator.normal(size=(terms, rows) if turned_a else (rows, terms)).astype(dtype)
        b = generator.normal(size=(columns, terms) if turned_b else (terms, columns)).astype(dtype)
        a, b = a.T if turned_a else a, b.T if turned_b else b
        want = a.astype(np.float64) @ b.astype(np.float64)
        wide = multiply(a, b, out=np.empty(want.shape, np.float32))
        assert np.abs(wide - want).max(initial=0) <= 1e-5 * np.abs(want).max(initial=1e-300)
        assert np.array_equal(multiply(a, b), wide.astype(dtype))


@pytest.mark.parametrize("accumulate", ["fp32", "fp16"])
@pytest.mark.parametrize(("inputs", "chip"), [("fp32", None), ("fp16", None), ("fp16", "h100"), ("e4m3", "h100")])
def test_the_result_may_take_the_place_of_an_operand(inputs, chip, accumulate):
    generator = np.random.default_rng(9)
    a, b, c = generator.standard_normal((3, 24, 24)).astype(np.float32)
    want = rd.numerics.matmul(a, b, c, inputs=inputs, accumulate=accumulate, tensor_core=chip).astype(np.float32)
    for place in range(3):
        operands = [x.copy() for x in (a, b, c)]
        got = rd.numerics.matmul(*operands, inputs=inputs, accumulate=accumulate, tensor_core=chip, out=operands[place])
        assert got is operands[place]
        np.testing.assert_array_equal(got, want)


def test_special_values_warn_about_nothing():
    """pytest makes errors of NumPy's warnings: sums beyond float32, opposite infinities of two periods."""
    a, b = np.array([[np.inf, 1], [3e38, 3e38]], np.float32), np.ones((2, 1), np.float32)
    np.testing.assert_array_equal(matmul(a, b, inputs="tf32", tensor_core="h100"), [[np.inf], [np.inf]])
    a = np.repeat(np.array([[np.inf, -np.inf]], np.float32), 32, axis=1)
    product = matmul(a, np.ones((64, 1), np.float32), inputs="e5m2", tensor_core="h100", promote_every=32)
    assert bits(product)[0, 0] == NAN["fp32"]

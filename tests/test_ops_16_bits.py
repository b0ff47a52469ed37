"""Kernels on arrays of 16 bits: read and written in 16, computed in FP32; held against float64 on the same numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from refdist import ops
from refdist.numerics import FormatProduct, store, widened
from refdist.ops.kernel import row_blocks
from refdist.parallel.tensor import vocabulary

FORMATS = {"fp16": (np.dtype(np.float16), 2.0**-11), "bf16": (np.dtype(ml_dtypes.bfloat16), 2.0**-8)}
EPS = 1e-5


@pytest.fixture(params=FORMATS)
def draw(request):
    """draw(*shape, scale=1) -> random numbers of the format; draw.u: half a unit in the last place of 1."""
    generator = np.random.default_rng(5)

    def draw(*shape, scale=1.0):
        return (scale * generator.standard_normal(shape)).astype(draw.dtype)

    draw.name, (draw.dtype, draw.u), draw.matmul = request.param, FORMATS[request.param], FormatProduct(request.param)
    return draw


def exact(*arrays):
    return [x.astype(np.float64) if x.dtype.kind in "fV" else x for x in arrays]


def near(got, want, bound, dtype=None):
    """Element by element, relative to the largest one; got has the dtype asked for."""
    assert dtype is None or got.dtype == dtype
    assert got.shape == want.shape
    error = np.abs(got.astype(np.float64) - want).max(initial=0)
    assert error <= bound * np.abs(want).max(initial=1e-300), f"error {error / np.abs(want).max():.2e}, bound {bound:.2e}"


def test_the_scale_of_the_loss_is_not_rounded(draw):
    """1 / tokens has more bits than 16, and a loss scale may be larger than the largest fp16."""
    generator = np.random.default_rng(7)
    labels = generator.integers(0, 90, 50)
    for scale, size in ((1 / 3, 0.0), (1 / 7, 0.0), (2.0**17, 20.0)):
        logits = draw(50, 90)
        logits[np.arange(50), labels] += draw.dtype.type(size)
        _, lse = ops.cross_entropy(logits, labels)
        want = ops.cross_entropy_backward(scale, logits.astype(np.float64), labels, lse.astype(np.float64))
        ordinary = np.abs(want) > 2.0**-14
        ordinary[np.arange(50), labels] &= size == 0  # p - 1 is exact to fewer bits where p is nearly 1
        assert np.count_nonzero(ordinary) > 500
        for got in (ops.cross_entropy_backward(scale, logits.copy(), labels, lse),
                    vocabulary.part_cross_entropy_backward(scale, logits.copy(), labels, lse, 0)):
            error = np.abs(got.astype(np.float64) - want)[ordinary] / np.abs(want)[ordinary]
            assert error.max() <= 1.02 * draw.u


def test_rms_norm_whose_squares_leave_fp16(draw):
    x, dy, gain = draw(3, 5, 700, scale=300), draw(3, 5, 700), draw(700)  # Σ x² is 10⁷ and more
    y, r = ops.rms_norm(x, gain, EPS)
    want_y, want_r = ops.rms_norm(*exact(x, gain), EPS)
    assert r.dtype == np.float32
    near(r, want_r, 1e-6)
    near(y, want_y, draw.u, draw.dtype)
    assert np.array_equal(ops.rms_norm_again(x, gain, r), y)
    for past in ((), (draw(3, 5, 700),)):
        want = ops.rms_norm_backward(*exact(dy, x, gain), want_r, *exact(*past))
        for gradient, wanted in zip(ops.rms_norm_backward(dy, x, gain, r, *past), want, strict=True):
            near(gradient, wanted, draw.u, draw.dtype)


def test_linear_with_a_long_sum(draw):
    x, w, b, dy = draw(2, 3000, 40), draw(30, 40), draw(30), draw(2, 3000, 30)
    ones = np.ones((2, 3000, 30), draw.dtype)
    for kernel, args in [(ops.linear, (x, w)), (ops.linear_input_grad, (dy, w)), (ops.linear_weight_grad, (dy, x))]:
        near(kernel(*args, matmul=draw.matmul), kernel(*exact(*args)), draw.u, draw.dtype)
    pairs = dy, w, draw(2, 3000, 10), draw(10, 40), 1024 * dy, w, -1024 * dy, w  # terms that cancel, were they not rounded
    near(ops.linear_input_grad(*pairs, matmul=draw.matmul), ops.linear_input_grad(*exact(*pairs)), 1.1 * draw.u, draw.dtype)
    near(ops.linear(x, w, b, matmul=draw.matmul), ops.linear(*exact(x, w, b)), 2 * draw.u, draw.dtype)
    near(ops.linear_bias_grad(dy), ops.linear_bias_grad(*exact(dy)), draw.u, draw.dtype)
    near(ops.linear_bias_grad(ones), np.full(30, 6000.0), draw.u, draw.dtype)  # a sum in 16 bits ends at 2048 or 256


def test_addition_in_place_and_into_a_wider_sum(draw):
    y, x = draw(40, 50), draw(40, 50, scale=1e-3)
    want = y.astype(np.float64) + x.astype(np.float64)
    total = y.astype(np.float32)
    assert ops.add(total, x) is total
    near(total, want, 1e-7, np.dtype(np.float32))
    assert ops.add(y, x) is y
    assert np.array_equal(y, want.astype(np.float32).astype(draw.dtype))


def test_swiglu_also_in_place(draw):
    gate, up, da = draw(4, 300, 33, scale=4), draw(4, 300, 33, scale=4), draw(4, 300, 33)
    near(ops.swiglu(gate, up), ops.swiglu(*exact(gate, up)), draw.u, draw.dtype)
    want = ops.swiglu_backward(*exact(da, gate, up))
    for got, wanted in zip(ops.swiglu_backward(da, gate, up, out=(gate, up, da)), want, strict=True):
        near(got, wanted, draw.u, draw.dtype)


def test_rotary_and_its_backward(draw):
    x = draw(3, 50, 4, 8)
    tables = ops.RotaryTables(ops.rotary_frequencies(8, 1e4), np.arange(950, 1000), np.float32)
    for kernel in (ops.rotary, ops.rotary_backward):
        want = kernel(*exact(x), tables)
        near(kernel(x, tables), want, draw.u, draw.dtype)
        turned = x.copy()
        assert kernel(turned, tables, out=turned) is turned
        assert np.array_equal(turned, kernel(x, tables))


def test_dropout(draw):
    x, keep = draw(30, 40), np.random.default_rng(1).random((30, 40)) < 0.7
    near(ops.dropout(x, keep, 0.3), ops.dropout(*exact(x), keep, 0.3), draw.u, draw.dtype)


def test_embedding_gradient_of_a_frequent_token(draw):
    ids = np.random.default_rng(2).integers(0, 3, (2, 4000))
    dy = np.ones((2, 4000, 6), draw.dtype)
    counts = np.bincount(ids.reshape(-1), minlength=5).astype(np.float64)
    near(ops.embedding_weight_grad(dy, ids, 5), np.repeat(counts[:, None], 6, axis=1), draw.u, draw.dtype)


@pytest.mark.parametrize("part", [False, True])
def test_cross_entropy_of_large_logits(draw, part):
    logits, labels = draw(70, 300, scale=40), np.random.default_rng(3).integers(0, 300, 70)
    labels[::7] = -100
    if part:
        cuts = slice(0, 100), slice(100, 300)
        terms = np.concatenate([vocabulary.part_cross_entropy(logits[:, cut], labels, cut.start) for cut in cuts])
        losses, lse = vocabulary.whole_cross_entropy(terms, labels, (0, 100, 300))
        dlogits = np.concatenate([vocabulary.part_cross_entropy_backward(1024.0, logits[:, cut].copy(), labels, lse, cut.start)
                                  for cut in cuts], axis=1)
    else:
        losses, lse = ops.cross_entropy(logits, labels)
        dlogits = ops.cross_entropy_backward(1024.0, logits.copy(), labels, lse)
    want_losses, want_lse = ops.cross_entropy(*exact(logits), labels)
    assert losses.dtype == lse.dtype == np.float32
    near(losses, want_losses, 1e-6)
    near(lse, want_lse, 1e-6)
    near(dlogits, ops.cross_entropy_backward(1024.0, *exact(logits), labels, want_lse), draw.u + 1e-5, draw.dtype)


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_attention_with_scores_beyond_a_16_bit_softmax(draw, dtype):
    q, k, v = draw(2, 90, 4, 16, scale=3), draw(2, 90, 2, 16, scale=3), draw(2, 90, 2, 16)
    dout, mask = draw(2, 90, 4, 16), ops.AttentionMask(np.arange(90), np.arange(90))
    out, lse = ops.attention(q, k, v, mask, dtype=dtype, matmul=draw.matmul)
    want, want_lse = ops.attention(*exact(q, k, v), mask)
    assert lse.dtype == np.float32
    near(lse, want_lse, 1e-6)
    near(out, want, 2 * draw.u, draw.dtype if dtype is None else np.dtype(dtype))
    got = ops.attention_backward(dout, q, k, v, store(out, np.empty_like(q)), lse, mask, dtype=dtype, matmul=draw.matmul)
    for grad, wanted in zip(got, ops.attention_backward(*exact(dout, q, k, v), want, want_lse, mask), strict=True):
        near(grad, wanted, 4 * draw.u, draw.dtype if dtype is None else np.dtype(dtype))


def test_attention_rounds_what_it_multiplies_to_the_input_format(draw):
    """P meets V, and dS meets q and k, as numbers of the input format: the products that the kernel asks for say so."""
    seen = []

    class Noting(FormatProduct):
        def exact(self, a, b, out=None):
            seen.extend([a, b])
            return super().exact(a, b, out)

    q, k, v, dout = (draw(1, 40, 2, 6) for _ in range(4))  # 1/√6 is no power of two
    mask = ops.AttentionMask(np.arange(40), np.arange(40))
    out, lse = ops.attention(q, k, v, mask, matmul=Noting(draw.name))
    ops.attention_backward(dout, q, k, v, out, lse, mask, matmul=Noting(draw.name))
    assert seen
    assert len(seen) % (2 * (2 + 5)) == 0  # two operands; two products forward and five backward a tile
    for operand in seen:
        assert operand.dtype == np.float32
        assert np.array_equal(operand, operand.astype(draw.dtype).astype(np.float32))


def test_mixed_operands_are_multiplied_in_fp32(draw):
    a, b = draw(30, 50), np.random.default_rng(4).standard_normal((50, 20)).astype(np.float32)
    for y in (draw.matmul(a, b), draw.matmul(a, b, out=np.empty((30, 20), np.float32))):
        assert np.array_equal(y, a.astype(np.float32) @ b)
    assert not np.array_equal(y, a.astype(np.float32) @ b.astype(draw.dtype).astype(np.float32))
    out = np.empty((30, 20), draw.dtype)
    assert draw.matmul(a, b, out=out) is out
    assert np.array_equal(out, store(y, np.empty_like(out)))


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (2, 5, 0), (2, 0, 3), (0,)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_of_nothing_there_are_no_blocks(shape, dtype):
    x = np.zeros(shape, dtype)
    assert not list(row_blocks(x, out=(np.zeros_like(x),), scratch=1))


@pytest.mark.parametrize("elements", [3, 100, 32768])
def test_blocks_of_16_bits_are_copies_that_are_stored_only_where_they_are_written(draw, elements):
    x, y, wide = draw(7, 11), draw(7, 11), np.zeros((7, 11), np.float32)
    before, want = x.copy(), widened(x) + widened(y)
    for xs, ys, both, sums in row_blocks(x, y, out=(wide, y), elements=elements):
        assert xs.dtype == ys.dtype == both.dtype == sums.dtype == np.float32
        np.add(xs, ys, out=both)
        np.multiply(xs, 3, out=xs)  # of a copy
        np.subtract(ys, 70000, out=sums)
    assert np.array_equal(x, before)
    assert np.array_equal(wide, want)
    largest = np.float32(np.inf) if draw.name == "fp16" else widened(np.array(-70000).astype(draw.dtype))
    assert np.all(np.abs(widened(y)) == np.abs(largest))


def test_input_gradients_of_two_layers_are_rounded_once():
    rng = np.random.default_rng(0)
    dy, w, other_dy, other_w = (rng.normal(size=size).astype(ml_dtypes.bfloat16) for size in ((64, 16), (16, 32)) * 2)
    exact = [widened(x) for x in (dy, w, other_dy, other_w)]
    want = (exact[0] @ exact[1] + exact[2] @ exact[3]).astype(ml_dtypes.bfloat16)
    got = ops.linear_input_grad(dy, w, other_dy, other_w, matmul=FormatProduct("bf16"))
    assert np.count_nonzero(got != want) < 5  # of 2,048, where sums in another order lie on the other side of a middle

"""Attention in tiles against the [s, s] matrix, on any shapes, positions and segments, with tiles of any size."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import assert_close, naive_attention, numeric_gradient

from refdist import ops

module = importlib.import_module("refdist.ops.attention")  # `ops.attention` is the kernel
rng = np.random.default_rng(7)


@pytest.fixture
def _small_tiles(monkeypatch):
    for name, size in (("QUERY_BLOCK", 3), ("KEY_BLOCK", 2), ("COLUMNS", 1), ("TILE", 24)):
        monkeypatch.setattr(module, name, size)


def causal(seq, segments=None):
    positions = np.arange(seq)
    return ops.AttentionMask(positions, positions, segments, segments)


def draw(batch=2, queries=7, keys=7, kv_heads=2, group=2, width=4, dtype=np.float64, size=1.0, seed=7):
    r = np.random.default_rng(seed)
    shapes = [(batch, queries, kv_heads * group, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)]
    return tuple((size * r.normal(size=shape)).astype(dtype) for shape in shapes)


@st.composite
def cases(draw_from):
    """Shapes, shuffled positions with gaps (so that some queries see nothing), segments or none, tile sizes."""
    sizes = {"batch": 3, "queries": 11, "keys": 11}
    shape = {name: draw_from(st.integers(0, most)) for name, most in sizes.items()}
    shape |= {name: draw_from(st.integers(1, 3)) for name in ("kv_heads", "group", "width")}
    shape["seed"] = draw_from(st.integers(0, 2**32 - 1))
    r = np.random.default_rng(shape["seed"])
    seqs = shape["queries"], shape["keys"]
    positions = [r.permutation(14)[:seq] for seq in seqs]
    segments = [r.integers(0, 3, (shape["batch"], seq)) for seq in seqs] if draw_from(st.booleans()) else []
    tiles = {"QUERY_BLOCK": 5, "KEY_BLOCK": 5, "COLUMNS": 10, "TILE": 200}
    tiles = {name: draw_from(st.integers(1, most)) for name, most in tiles.items()}
    return shape, ops.AttentionMask(*positions, *segments), tiles


@settings(deadline=None, max_examples=200)
@given(cases())
def test_forward_and_backward_are_those_of_the_matrix(case):
    shape, mask, tiles = case
    q, k, v = draw(**shape)
    dout = np.random.default_rng(shape["seed"] + 1).normal(size=q.shape)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in tiles.items():
            patch.setattr(module, name, size)
        with np.errstate(all="raise", under="ignore"):
            out, lse = ops.attention(q, k, v, mask)
            dq, dk, dv = ops.attention_backward(dout, q, k, v, out, lse, mask)
    want_out, want_lse = naive_attention(q, k, v, mask)
    assert_close(out, want_out, 1e-13)
    assert np.array_equal(lse == -np.inf, want_lse == -np.inf)
    assert_close(np.where(lse == -np.inf, 0, lse), np.where(want_lse == -np.inf, 0, want_lse), 1e-13)
    want = naive_gradients(dout, q, k, v, mask)
    for got, expected in zip((dq, dk, dv), want, strict=True):
        assert_close(got, expected, 1e-12)


def naive_gradients(dout, q, k, v, mask, factors=1.0):
    """Through the [s, s] matrix: softmax backward as Pᵀ-free algebra, dS = P · (dP − Σ P dP)."""
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    _, lse = naive_attention(q, k, v, mask)
    k_all, v_all = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    sees = mask.k_positions[None, :] <= mask.q_positions[:, None]
    if mask.q_segments is not None:
        sees = (sees & (mask.q_segments[:, :, None] == mask.k_segments[:, None, :]))[:, None]
    scores = np.where(sees, np.einsum("bqhd,bkhd->bhqk", q, k_all) * scale, -np.inf)
    p = np.exp(scores - np.where(lse == -np.inf, 0, lse).transpose(0, 2, 1)[..., None])
    dp = np.einsum("bqhd,bkhd->bhqk", dout, v_all) * factors
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))

    def by_kv(x):
        return x.reshape(*x.shape[:2], k.shape[2], group, x.shape[3]).sum(axis=3)

    dq = np.einsum("bhqk,bkhd->bqhd", ds, k_all) * scale
    dk = np.einsum("bhqk,bqhd->bkhd", ds, q) * scale
    return dq, by_kv(dk), by_kv(np.einsum("bhqk,bqhd->bkhd", p * factors, dout))


@pytest.mark.usefixtures("_small_tiles")
def test_gradients_are_those_of_finite_differences():
    q, k, v = draw(batch=1, queries=5, keys=5, width=2)
    dout, mask = rng.normal(size=q.shape), causal(5)
    out, lse = ops.attention(q, k, v, mask)
    dq, dk, dv = ops.attention_backward(dout, q, k, v, out, lse, mask)
    assert_close(dq, numeric_gradient(lambda q: np.sum(dout * ops.attention(q, k, v, mask)[0]), q))
    assert_close(dk, numeric_gradient(lambda k: np.sum(dout * ops.attention(q, k, v, mask)[0]), k))
    assert_close(dv, numeric_gradient(lambda v: np.sum(dout * ops.attention(q, k, v, mask)[0]), v))


@pytest.mark.usefixtures("_small_tiles")
def test_dropout_multiplies_the_weights_after_the_softmax():
    q, k, v = draw()
    dout, mask = rng.normal(size=q.shape), causal(7)
    factors = rng.integers(0, 2, size=(2, 4, 7, 7)) / 0.6  # [batch, heads, queries, keys]

    def dropout(rows, heads, queries, keys):
        return factors[rows, heads, queries, keys]

    out, lse = ops.attention(q, k, v, mask, dropout)
    want, want_lse = naive_attention(q, k, v, mask, factors)
    assert_close(out, want, 1e-13)
    assert_close(lse, want_lse, 1e-13)
    got = ops.attention_backward(dout, q, k, v, out, lse, mask, dropout)
    for got_grad, want_grad in zip(got, naive_gradients(dout, q, k, v, mask, factors), strict=True):
        assert_close(got_grad, want_grad, 1e-12)


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_of_ten_thousand_are_safe(dtype):
    q, k, v = draw(dtype=dtype, size=100.0)
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, 2, axis=2)) / 2
    assert np.abs(scores).max() > 1e4
    mask, dout = causal(7), np.ones_like(q)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out, lse = ops.attention(q, k, v, mask)
        grads = ops.attention_backward(dout, q, k, v, out, lse, mask)
    want, _ = naive_attention(*(x.astype(np.float64) for x in (q, k, v)), mask)
    assert_close(out, want, 1e-12 if dtype == np.float64 else 2e-3)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.usefixtures("_small_tiles")
def test_a_row_of_scores_far_below_zero_still_sees_its_keys():
    """Scores of −10⁸, which float16 could not hold, are not taken for keys that nobody sees."""
    q, k, v = (np.abs(x) + 1 for x in draw(dtype=np.float32))
    mask = causal(7)
    out, lse = ops.attention(-1e4 * q, 1e4 * k, v, mask)
    want, want_lse = naive_attention(*(x.astype(np.float64) for x in (-1e4 * q, 1e4 * k, v)), mask)
    assert want_lse.max() < -1e8
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    assert_close(out, want, 1e-6)


def test_parts_merge_into_the_whole_and_gradients_add_up():
    q, k, v = draw(queries=6, keys=9)
    q_positions, k_positions = np.array([0, 3, 4, 6, 7, 8]), np.arange(9)
    whole = ops.AttentionMask(q_positions, k_positions)
    dout = rng.normal(size=q.shape)
    out, lse = np.zeros_like(q), np.full(q.shape[:3], -np.inf)
    parts = [slice(5, 9), slice(0, 2), slice(2, 5)]  # a query sees nothing of the first
    with np.errstate(all="raise", under="ignore"):
        for part in parts:
            mask = ops.AttentionMask(q_positions, k_positions[part])
            ops.merge_attention(out, lse, *ops.attention(q, k[:, part], v[:, part], mask))
    want_out, want_lse = ops.attention(q, k, v, whole)
    assert_close(out, want_out, 1e-13)
    assert_close(lse, want_lse, 1e-13)
    dq_sum, want = 0, ops.attention_backward(dout, q, k, v, want_out, want_lse, whole)
    for part in parts:
        mask = ops.AttentionMask(q_positions, k_positions[part])
        dq, dk, dv = ops.attention_backward(dout, q, k[:, part], v[:, part], out, lse, mask)
        dq_sum = dq_sum + dq
        assert_close(dk, want[1][:, part], 1e-12)
        assert_close(dv, want[2][:, part], 1e-12)
    assert_close(dq_sum, want[0], 1e-12)


def test_masked_tiles_are_skipped_and_the_matrix_never_exists(monkeypatch):
    for name in ("QUERY_BLOCK", "KEY_BLOCK", "COLUMNS"):
        monkeypatch.setattr(module, name, 8)
    q, k, v = draw(batch=1, queries=64, keys=64)
    sizes = []

    def matmul(a, b, out=None):
        y = np.matmul(a, b, out=out)
        sizes.append(y.size)
        return y

    out, lse = ops.attention(q, k, v, causal(64), matmul=matmul)
    tiles = 8 * 9 // 2
    assert len(sizes) == 2 * tiles
    assert max(sizes) == 4 * 8 * 8
    sizes.clear()
    ops.attention_backward(q, q, k, v, out, lse, causal(64), matmul=matmul)
    assert len(sizes) == 5 * tiles
    documents = np.arange(64)[None] // 16
    sizes.clear()
    ops.attention(q, k, v, causal(64, documents), matmul=matmul)
    assert len(sizes) == 2 * 4 * 3


def test_a_row_does_not_know_its_neighbours():
    q, k, v = draw(batch=5, queries=300, keys=300, dtype=np.float32)
    out, lse = ops.attention(q, k, v, causal(300))
    grads = ops.attention_backward(q, q, k, v, out, lse, causal(300))
    for row in range(5):
        one = slice(row, row + 1)
        alone = ops.attention(q[one], k[one], v[one], causal(300))
        grads_alone = ops.attention_backward(q[one], q[one], k[one], v[one], *alone, causal(300))
        for got, want in zip((*alone, *grads_alone), (out, lse, *grads), strict=True):
            assert np.array_equal(got[0], want[row])


def test_visible_pairs_of_chunks_add_up_to_half():
    positions = np.random.default_rng(0).permutation(12)
    assert causal(12).visible_pairs == 12 * 12 / 2
    parts = np.array_split(positions, 5)
    assert sum(ops.AttentionMask(a, b).visible_pairs for a in parts for b in parts) == 12 * 12 / 2
    q, k, v = draw(batch=3, queries=12, keys=12)
    assert ops.attention.flops(q, k, v, causal(12)) == 2 * 2 * 3 * 4 * 4 * 72
    assert ops.attention_backward.flops(q, q, k, v, q, q, causal(12)) == 2 * ops.attention.flops(q, k, v, causal(12))

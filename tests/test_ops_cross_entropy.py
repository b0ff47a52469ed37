import importlib

import numpy as np
import pytest
from kernels import assert_close, numeric_gradient

from refdist import ops

module = importlib.import_module("refdist.ops.cross_entropy")  # `ops.cross_entropy` is the kernel
rng = np.random.default_rng(5)
LABELS = np.array([2, ops.IGNORED, 0, 4, ops.IGNORED, 4])


def test_forward_is_the_formula():
    logits = rng.normal(size=(6, 5))
    losses, lse = ops.cross_entropy(logits, LABELS)
    want = np.log(np.exp(logits).sum(axis=1))
    assert_close(lse, want, 1e-14)
    assert_close(losses, np.where(LABELS >= 0, want - logits[np.arange(6), LABELS % 5], 0), 1e-14)


@pytest.mark.parametrize("scale", [0.37, np.array([1.0, 2.0, -3.0, 0.5, 7.0, 0.0])])
def test_gradient_is_that_of_finite_differences(scale):
    logits = rng.normal(size=(6, 5))
    _, lse = ops.cross_entropy(logits, LABELS)
    got = ops.cross_entropy_backward(scale, logits, LABELS, lse)
    assert_close(got, numeric_gradient(lambda x: np.sum(scale * ops.cross_entropy(x, LABELS)[0]), logits))
    assert not got[LABELS == ops.IGNORED].any()
    assert np.array_equal(ops.cross_entropy_backward(scale, logits, LABELS, lse, out=logits), got)
    assert np.array_equal(logits, got)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_of_any_size_are_safe(dtype):
    logits = np.array([[1e4, -1e4, 0], [-1e4, -1e4, 1e4], [-1e4, -1e4, -1e4]], dtype)
    labels = np.array([0, 1, 2])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        losses, lse = ops.cross_entropy(logits, labels)
        grad = ops.cross_entropy_backward(1.0, logits, labels, lse)
    assert_close(losses, np.array([0, 2e4, np.log(3)]), 1e-3 if dtype == np.float32 else 1e-12)
    want = np.array([[0, 0, 0], [0, -1, 1], [1 / 3, 1 / 3, -2 / 3]])
    assert_close(grad, want, 1e-3 if dtype == np.float32 else 1e-12)


def test_chunks_cover_the_tokens_once(monkeypatch):
    monkeypatch.setattr(module, "LOGITS", 12)
    assert [np.arange(7)[c].tolist() for c in ops.token_chunks(7, 5)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [np.arange(2)[c].tolist() for c in ops.token_chunks(2, 100)] == [[0], [1]]
    assert list(ops.token_chunks(0, 5)) == []

import importlib

import numpy as np
import pytest
from kernels import assert_close, numeric_gradient

from refdist import ops

row_blocks = importlib.import_module("refdist.ops.kernel").row_blocks
rng = np.random.default_rng(2)
EPS = 1e-2


@pytest.fixture(params=[3, 32768])
def _block(request, monkeypatch):
    monkeypatch.setattr(row_blocks, "__kwdefaults__", {**row_blocks.__kwdefaults__, "elements": request.param})


@pytest.mark.usefixtures("_block")
class TestRMSNorm:
    def test_forward_is_the_formula(self):
        x, gain = rng.normal(size=(2, 5, 7)), rng.normal(size=7)
        y, r = ops.rms_norm(x, gain, EPS)
        want = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
        assert_close(r, want, 1e-14)
        assert_close(y, x * want * gain, 1e-14)
        assert np.array_equal(ops.rms_norm_again(x, gain, r), y)

    def test_gradients_are_those_of_finite_differences(self):
        x, gain, dy = rng.normal(size=(2, 3, 5)), rng.normal(size=5), rng.normal(size=(2, 3, 5))
        _, r = ops.rms_norm(x, gain, EPS)
        dx, dgain = ops.rms_norm_backward(dy, x, gain, r)
        assert_close(dx, numeric_gradient(lambda x: np.sum(dy * ops.rms_norm(x, gain, EPS)[0]), x))
        assert_close(dgain, numeric_gradient(lambda gain: np.sum(dy * ops.rms_norm(x, gain, EPS)[0]), gain))
        residual = rng.normal(size=x.shape)
        both = ops.rms_norm_backward(dy, x, gain, r, residual)
        assert np.array_equal(both[0], dx + residual)
        assert np.array_equal(both[1], dgain)


def test_a_row_of_zeros_is_safe():
    y, r = ops.rms_norm(np.zeros((1, 4)), np.ones(4), 1e-5)
    assert np.array_equal(y, np.zeros((1, 4)))
    assert np.isfinite(r).all()

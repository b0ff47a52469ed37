import numpy as np
import pytest
from kernels import assert_close, numeric_gradient

from refdist import ops

rng = np.random.default_rng(3)


def test_forward_is_the_formula():
    gate, up = 3 * rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 4, 5))
    assert_close(ops.swiglu(gate, up), gate / (1 + np.exp(-gate)) * up, 1e-14)


def test_gradients_are_those_of_finite_differences():
    gate, up, da = 2 * rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
    dgate, dup, a = ops.swiglu_backward(da, gate, up)
    assert_close(dgate, numeric_gradient(lambda gate: np.sum(da * ops.swiglu(gate, up)), gate))
    assert_close(dup, numeric_gradient(lambda up: np.sum(da * ops.swiglu(gate, up)), up))
    assert np.array_equal(a, ops.swiglu(gate, up))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_gates_neither_overflow_nor_warn(dtype):
    gate, up = np.array([[-1e4, -200, 200, 1e4]], dtype), np.ones((1, 4), dtype)
    with np.errstate(all="raise"):
        assert np.array_equal(ops.swiglu(gate, up), np.array([[0, 0, 200, 1e4]], dtype))
        dgate, _, _ = ops.swiglu_backward(up, gate, up)
    assert np.array_equal(dgate, np.array([[0, 0, 1, 1]], dtype))

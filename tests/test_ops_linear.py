import numpy as np
import pytest
from kernels import assert_close, numeric_gradient

from refdist import ops

rng = np.random.default_rng(1)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (0, 3), ()])
def test_forward_is_the_formula(lead):
    x, w, b = rng.normal(size=(*lead, 4)), rng.normal(size=(7, 4)), rng.normal(size=7)
    assert_close(ops.linear(x, w, b), np.einsum("...i,oi->...o", x, w) + b, 1e-14)
    assert_close(ops.linear(x, w), np.einsum("...i,oi->...o", x, w), 1e-14)


def test_gradients_are_those_of_finite_differences():
    x, w, b, dy = rng.normal(size=(2, 3, 4)), rng.normal(size=(5, 4)), rng.normal(size=5), rng.normal(size=(2, 3, 5))
    assert_close(ops.linear_input_grad(dy, w), numeric_gradient(lambda x: np.sum(dy * ops.linear(x, w, b)), x))
    pairs = dy, w, rng.normal(size=(2, 3, 6)), rng.normal(size=(6, 4)), dy, w
    assert_close(ops.linear_input_grad(*pairs), 2 * dy @ w + pairs[2] @ pairs[3], 1e-14)
    assert_close(ops.linear_weight_grad(dy, x), numeric_gradient(lambda w: np.sum(dy * ops.linear(x, w, b)), w))
    assert_close(ops.linear_bias_grad(dy), numeric_gradient(lambda b: np.sum(dy * ops.linear(x, w, b)), b))


def test_no_rows_give_zero_weight_gradients():
    x, dy = np.zeros((0, 3, 4)), np.zeros((0, 3, 5))
    assert np.array_equal(ops.linear_weight_grad(dy, x), np.zeros((5, 4)))
    assert np.array_equal(ops.linear_bias_grad(dy), np.zeros(5))


def test_every_product_goes_through_the_given_matmul_and_is_counted():
    x, w, dy = rng.normal(size=(2, 3, 4)), rng.normal(size=(5, 4)), rng.normal(size=(2, 3, 5))
    for kernel, *args in [(ops.linear, x, w), (ops.linear_input_grad, dy, w), (ops.linear_weight_grad, dy, x),
                          (ops.linear_input_grad, dy, w, dy, w)]:
        counted = []

        def matmul(a, b, out=None, counted=counted):
            counted.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
            return np.matmul(a, b, out=out)

        kernel(*args, matmul=matmul)
        assert counted == len(args) // 2 * [2 * 6 * 4 * 5]
        assert sum(counted) == kernel.flops(*args)


def test_add_is_in_place():
    y, x = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    want = y + x
    assert ops.add(y, x) is y
    assert np.array_equal(y, want)


@pytest.mark.parametrize("rows", [(0,), (2, 0), (3, 2)])
@pytest.mark.parametrize("width", [0, 4])
def test_products_of_nothing(rows, width):
    x, w, dy = np.ones((*rows, width)), np.ones((3, width)), np.ones((*rows, 3))
    np.testing.assert_array_equal(ops.linear(x, w), np.full((*rows, 3), width))
    np.testing.assert_array_equal(ops.linear_input_grad(dy, w), np.full((*rows, width), 3))
    np.testing.assert_array_equal(ops.linear_weight_grad(dy, x), np.full((3, width), np.prod(rows)))

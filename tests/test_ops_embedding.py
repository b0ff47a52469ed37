import numpy as np
from kernels import assert_close, numeric_gradient

from refdist import ops

rng = np.random.default_rng(4)


def test_forward_takes_rows():
    w, ids = rng.normal(size=(9, 4)), rng.integers(0, 9, size=(3, 5))
    assert np.array_equal(ops.embedding(w, ids), w[ids])


def test_gradient_sums_the_rows_of_a_token():
    w, ids, dy = rng.normal(size=(6, 3)), np.array([[0, 5, 0, 2], [5, 0, 2, 0]]), rng.normal(size=(2, 4, 3))
    got = ops.embedding_weight_grad(dy, ids, 6)
    assert_close(got, numeric_gradient(lambda w: np.sum(dy * ops.embedding(w, ids)), w))
    one_hot = np.eye(6)[ids.reshape(-1)]
    assert_close(got, one_hot.T @ dy.reshape(-1, 3), 1e-14)


def test_no_tokens_give_zeros():
    assert np.array_equal(ops.embedding_weight_grad(np.zeros((0, 4, 3)), np.zeros((0, 4), int), 6), np.zeros((6, 3)))

"""Tensor parallelism on one page: an MLP cut by columns, then by rows, forward and backward, against the whole one.

    mpirun -n 3 python examples/tensor_parallel_mlp.py
    python examples/tensor_parallel_mlp.py           four ranks in this process

            ┌─ columns of W1 ─▶ relu ─▶ rows of W2 ─┐
    x ─ f ──┤                                       ├── g ─▶ y          f: forward nothing, backward all-reduce
            └─ columns of W1 ─▶ relu ─▶ rows of W2 ─┘                   g: forward all-reduce, backward nothing
"""

import os

import numpy as np

import refdist as rd
from refdist.cli.launch import launched

TOKENS, WIDTH, HIDDEN = 5, 6, 10


def mlp(x, w1, w2, dy):
    """y, and the gradients of x, w1 and w2; weights are [out, in]. A rank calls it with its parts of the weights."""
    hidden = np.maximum(x @ w1.T, 0)  # [tokens, hidden]
    dhidden = (dy @ w2) * (hidden > 0)
    return hidden @ w2.T, dhidden @ w1, dhidden.T @ x, dy.T @ hidden


def program(comm: rd.Comm) -> None:
    """Each rank has the whole x and dy, and its columns of the hidden layer."""
    rng = np.random.default_rng(0)  # the same numbers on every rank
    x, dy = rng.standard_normal((TOKENS, WIDTH)), rng.standard_normal((TOKENS, WIDTH))
    w1, w2 = rng.standard_normal((HIDDEN, WIDTH)), rng.standard_normal((WIDTH, HIDDEN))
    own = np.array_split(np.arange(HIDDEN), comm.size)[comm.rank]

    y_term, dx_term, dw1, dw2 = mlp(x, w1[own], w2[:, own], dy)
    y = comm.all_reduce(y_term)  # g
    dx = comm.all_reduce(dx_term)  # the adjoint of f

    whole_y, whole_dx, whole_dw1, whole_dw2 = mlp(x, w1, w2, dy)
    for got, wanted in ((y, whole_y), (dx, whole_dx), (dw1, whole_dw1[own]), (dw2, whole_dw2[:, own])):
        np.testing.assert_allclose(got, wanted, atol=1e-12)
    print(f"rank {comm.rank} of {comm.size}: hidden columns {own[0]} to {own[-1]}, y and all gradients equal the whole MLP's")


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        rd.run(program, ranks=4)

"""A ring all-reduce that is wrong, and passes the tests that one writes first.

    pytest -p refdist.testing.plugin examples/test_wrong_ring.py

Two ranks: passes. All ones on four ranks: passes. The test kit finds the smallest call that goes wrong: three ranks, two numbers.
"""

import numpy as np
import pytest
from hypothesis import given

import refdist as rd
from refdist.testing import CollectiveCase, strategies


def wrong_ring(comm: rd.Comm, x: np.ndarray) -> np.ndarray:
    """Meant to be the sum of all ranks' `x`, on every rank."""
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = np.array_split(x.reshape(-1), size)
    total = chunks[rank]
    for step in range(size - 1):  # reduce-scatter: a partial sum moves right and grows at each rank
        total = comm.sendrecv(total, dest=right, source=left) + chunks[(rank - step - 1) % size]
    finished = {(rank + 1) % size: total}
    for step in range(1, size):  # all-gather: the finished sums go round
        total = comm.sendrecv(total, dest=right, source=left)
        finished[(rank + 1 + step) % size] = total  # a sign too many: what comes now belongs at rank + 1 - step
    return np.concatenate([finished[chunk] for chunk in range(size)]).reshape(x.shape)


@pytest.mark.ranks(2)
def test_two_ranks(comm: rd.Comm) -> None:
    total = wrong_ring(comm, np.arange(10.0) * (comm.rank + 1))
    assert np.array_equal(total, np.arange(10.0) * 3)


@pytest.mark.ranks(4)
def test_all_ones(comm: rd.Comm) -> None:
    assert np.array_equal(wrong_ring(comm, np.ones(1000)), np.full(1000, 4.0))


@given(strategies.collective_cases("all_reduce", algorithms=False, ops=["sum"]))
def test_everything(case: CollectiveCase) -> None:
    case.check(lambda comm, x, op: wrong_ring(comm, x))

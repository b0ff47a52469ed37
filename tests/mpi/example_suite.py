"""Tests with the ranks marker, some of which fail on purpose; tests/test_testing_mpi.py runs them and reads the report."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refdist as rd
from refdist.testing.together import raises


@pytest.mark.ranks(2, 4)
def test_passes(comm):
    print(f"rank {comm.rank} begins")
    assert comm.all_reduce(np.array(1)) == comm.size
    print(f"rank {comm.rank} ends")


@pytest.mark.ranks(4)
@settings(max_examples=60)
@given(n=st.integers(0, 1000), x=st.lists(st.integers()))
def test_fails_on_rank_3_only(comm, n, x):
    comm.all_reduce(np.arange(n))
    if comm.rank == 3:
        assert n < 17


@pytest.mark.ranks(4)
def test_passes_after_it(comm, tmp_path):
    assert comm.all_reduce(np.array(comm.rank)) == 6


@pytest.mark.ranks(3)
def test_raises(comm):
    with raises(comm, rd.DeadlockError):
        comm.recv((comm.rank + 1) % 3)
    assert comm.all_reduce(np.array(1)) == 3


@pytest.mark.ranks(3, limit=2)
def test_takes_too_long(comm):
    if comm.rank == 1:
        while True:
            time.sleep(0.01)
    comm.barrier()


@pytest.mark.ranks(4)
def test_output_does_not_mix(comm):
    for line in range(3):
        print(f"rank {comm.rank} line {line}")
        comm.barrier()
    assert comm.rank != 2


@pytest.mark.ranks(2)
def test_leaves_a_message(comm):
    if comm.rank == 1:
        comm.isend(np.zeros(5), 0)


@pytest.mark.ranks(2, sends="rendezvous")
def test_sends_first(comm):
    comm.send(np.zeros(3), 1 - comm.rank)
    comm.recv(1 - comm.rank)


@pytest.mark.ranks(2, sends="rendezvous", checks=True)
def test_changes_what_it_sends(comm):
    x = np.zeros(3)
    work = comm.isend(x, 1 - comm.rank)
    x[0] = 1
    work.wait()
    comm.recv(1 - comm.rank)


@pytest.fixture
def broken(request):
    comm = request.getfixturevalue("comm")
    if comm.count == 3:
        raise OSError("no such machine")


@pytest.mark.ranks(2, 3)
def test_with_a_broken_fixture(comm, broken):
    comm.barrier()


@pytest.mark.ranks(9)
def test_needs_nine(comm):
    assert comm.size == 9


def test_without_ranks():
    pass


@pytest.mark.ranks(4)
def test_last(comm):
    comm.barrier()

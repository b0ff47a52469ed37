"""Planted faults on in-process ranks: each is found at once, with the right error, which names what every rank was doing."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

import refdist as rd
from refdist.testing import faults
from refdist.testing.faults import FAULTS, RANKS, Fault
from refdist.testing.together import raises

IN_PROCESS = [fault for fault in FAULTS if fault.in_process]


@pytest.mark.parametrize("fault", IN_PROCESS, ids=lambda fault: fault.name)
def test_found_at_once(fault: Fault) -> None:
    seen = faults.in_process(fault)
    assert seen.right(fault), seen
    assert seen.seconds is not None
    assert seen.seconds < 2


def test_there_are_at_least_thirty_in_process_and_under_mpi() -> None:
    assert len(IN_PROCESS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", IN_PROCESS, ids=lambda fault: fault.name)
def test_every_rank_raises_the_same_kind(fault: Fault) -> None:
    """All ranks that have not finished raise the error itself when it is about communication, PeerFailed when it is one's own."""
    errors: dict[int, BaseException] = {}

    def program(comm: rd.Comm) -> None:
        try:
            fault.program(comm)
        except Exception as error:
            errors[comm.rank] = error
            raise

    with pytest.raises(Exception):  # noqa: B017, PT011
        rd.run(program, RANKS, checks=fault.checks, sends=fault.sends)
    if fault.says == "left over":  # found when all ranks have finished
        assert not errors
        return
    kinds = {type(error) for error in errors.values()} - {rd.PeerFailed}
    assert len(kinds) == 1, errors
    if kinds < {rd.DeadlockError, rd.MismatchError}:
        assert len({str(error) for error in errors.values()}) == 1, "the ranks tell different stories"


def test_a_deadlock_names_operation_group_number_shape_peer_and_place() -> None:
    def program(comm: rd.Comm) -> None:
        group = comm.split(comm.rank % 2, axis="tp")
        assert group is not None
        group.barrier()
        if comm.rank != 3:
            group.all_reduce(np.zeros((2, 5)), algorithm="ring")  # this line

    with pytest.raises(rd.DeadlockError) as caught:
        rd.run(program, 4)
    text = str(caught.value)
    for wanted in ("rank 1 waits: receive of 40 bytes from rank 3", "all_reduce (ring; float64, (2, 5), sum) number 1 on tp",
                   "rank 3 has finished", f"{__file__}:", " in program"):
        assert wanted in text, text
    line = int(re.search(r"py:(\d+) in program", text).group(1))  # type: ignore[union-attr]
    assert open(__file__).read().splitlines()[line - 1].endswith("# this line")


def test_a_group_of_another_rank_is_refused() -> None:
    groups: dict[int, rd.Comm] = {}

    def program(comm: rd.Comm) -> None:
        groups[comm.rank] = comm
        comm.barrier()
        groups[0].all_reduce(np.zeros(1))

    with pytest.raises(rd.MismatchError, match="makes a call on a group of rank 0, which it is not in"):
        rd.run(program, 3)


def test_a_busy_rank_is_no_deadlock() -> None:
    def program(comm: rd.Comm) -> None:
        if comm.rank == 1:
            time.sleep(0.5)
        comm.barrier()

    rd.run(program, 3)


# ------------------------------------------------------------------------------------------ failing and going on


@pytest.mark.ranks(2, 3, 5)
def test_after_an_expected_error_everything_goes_on(comm: rd.Comm) -> None:
    group = comm.split(0)
    assert group is not None
    for _ in range(2):
        with raises(comm, rd.DeadlockError, match="recv") as info:
            comm.recv((comm.rank + 1) % comm.size)
        assert len(info.errors) == comm.size
        with raises(comm, ValueError, match="bad"):
            if comm.rank == 1:
                raise ValueError("bad")
            group.all_reduce(np.zeros(7000))
        with raises(comm, rd.MismatchError):
            comm.send(np.zeros(9000), (comm.rank + 1) % comm.size) if comm.size > 9 else None
            comm.all_reduce(np.zeros(3 + (comm.rank == 1)), algorithm="ring")
        total = np.array(comm.size * (comm.size - 1) // 2)
        assert comm.all_reduce(np.array(comm.rank)) == total
        assert group.all_reduce(np.array(comm.rank)) == total


@pytest.mark.ranks(3)
def test_messages_of_the_failed_part_are_drained(comm: rd.Comm) -> None:
    with raises(comm, ValueError):
        works = [comm.isend(np.full(size, 7.0), (comm.rank + 1) % comm.size, tag=4) for size in (1, 100, 100_000)]
        works.append(comm.irecv((comm.rank + 1) % comm.size, tag=9))
        raise ValueError
    assert not comm.transport.active, "Works of the failed part are still progressed"
    if comm.rank == 0:
        comm.send(np.array([1.0]), 1, tag=4)
    elif comm.rank == 1:
        assert comm.recv(0, tag=4).tolist() == [1.0]
    comm.barrier()


@pytest.mark.ranks(3)
def test_raises_is_collective(comm: rd.Comm) -> None:
    def nothing_happens() -> None:
        with raises(comm, ValueError):
            pass

    def another_error() -> None:
        with raises(comm, KeyError):
            raise ValueError(f"of rank {comm.rank}")

    def other_words() -> None:
        with raises(comm, ValueError, match="good"):
            raise ValueError("bad")

    def some_come_through() -> None:
        with raises(comm, ValueError):
            if comm.rank == 1:
                raise ValueError("alone")

    def nobodys_fault() -> None:
        with raises(comm, KeyError):
            raise rd.PeerFailed(0, "of its own accord")

    for wrong, words in ((nobodys_fault, "rank 2: PeerFailed"), (nothing_happens, "rank 2: nothing was raised"),
                         (another_error, "rank 1: ValueError: of rank 1"), (other_words, "matching 'good'"),
                         (some_come_through, "rank 0: nothing was raised")):
        with pytest.raises(AssertionError, match=words):
            wrong()
    with raises(comm, ValueError, everywhere=False):
        if comm.rank == 1:
            raise ValueError("alone")
    comm.barrier()


def test_a_rank_that_never_comes_to_raises() -> None:
    def program(comm: rd.Comm) -> None:
        if comm.rank:
            with raises(comm, ValueError):
                raise ValueError

    with pytest.raises(rd.DeadlockError, match="rank 0 has finished"):
        rd.run(program, 3)


@pytest.mark.parametrize("start", [
    lambda comm: comm.start("all_reduce", np.ones(4)),
    lambda comm: (comm.send(np.ones(3), (comm.rank + 1) % comm.size), comm.irecv((comm.rank - 1) % comm.size)),
], ids=["a collective", "a receive whose message has come"])
def test_a_work_that_nobody_waits_for_is_left_over(start):
    with pytest.raises(rd.MismatchError, match="started and never waited for"):
        rd.run(start, 4)


# ------------------------------------------------------------------------------------ what a run does to its surroundings


def test_a_work_that_has_failed_fails_whenever_it_is_asked() -> None:
    def program(comm: rd.Comm) -> None:
        work = comm.start("all_gather", np.ones(3), out=np.zeros(7), algorithm="direct")
        for ask in (work.wait, work.wait, work.test):
            with pytest.raises(ValueError, match="out has length 7"):
                ask()

    rd.run(program, 2)


@pytest.mark.parametrize("scheduler", ["fifo", 1, 2, 3])
def test_a_rank_may_be_slower_than_one_that_fails_as_expected(scheduler: str | int) -> None:
    """A broadcast's root has long gone on when the others receive; what it raises then is not their business yet."""
    def program(comm: rd.Comm) -> float:
        x = comm.broadcast(np.ones(3), 0)
        with raises(comm, ValueError):
            raise ValueError("x")
        return float(comm.all_reduce(x)[0])

    assert rd.run(program, 3, scheduler=scheduler) == [3.0] * 3


def test_a_failure_before_an_expected_one_is_what_is_raised() -> None:
    def program(comm: rd.Comm) -> None:
        if comm.rank == 1:
            raise KeyError("not expected")
        with raises(comm, ValueError):
            raise ValueError("x")

    with pytest.raises(KeyError, match="not expected"):
        rd.run(program, 3)


def test_a_message_under_way_is_named_where_an_error_is_expected() -> None:
    def program(comm: rd.Comm) -> None:
        if comm.rank == 0:
            comm.send(np.ones(1), 1)
        with raises(comm, ValueError):
            raise ValueError("x")

    with pytest.raises(rd.MismatchError, match="under way where an error is expected:\n  rank 0: send of 8 bytes to rank 1"):
        rd.run(program, 2)


def groups_after_a_failure(comm: rd.Comm) -> list[float]:
    """Ranks that have made unequal numbers of groups fail together; a group that is new then is none of those that are there."""
    group = comm.split(comm.rank % 2)
    assert group is not None
    if comm.rank % 2:
        group = group.split(0)
        assert group is not None
    with raises(comm, rd.DeadlockError):
        comm.recv((comm.rank + 1) % comm.size)
    new = comm.split(0)
    assert new is not None
    pair = [(group, 1.0), (new, 100.0)]
    if comm.rank == 3:
        pair.reverse()
    works = [each.start("all_reduce", np.full(3, value), algorithm="direct") for each, value in pair]
    return sorted(float(work.wait()[0]) for work in works)


def test_groups_after_a_failure_are_new() -> None:
    assert rd.run(groups_after_a_failure, 4) == [[2.0, 400.0]] * 4


def test_peer_failed_names_the_rank_that_failed_first() -> None:
    seen: dict[int, int] = {}

    def program(comm: rd.Comm) -> None:
        if comm.rank == 1:
            raise ValueError("bad")
        try:
            comm.recv(1)
        except rd.PeerFailed as error:
            seen[comm.rank] = error.rank
            raise

    with pytest.raises(ValueError, match="bad"):
        rd.run(program, 4)
    assert seen == {0: 1, 2: 1, 3: 1}


def test_a_run_has_the_context_of_its_caller() -> None:
    def program(comm: rd.Comm) -> str:
        comm.barrier()
        with pytest.raises(FloatingPointError):
            np.ones(1) / np.zeros(1)
        return "raised"

    with np.errstate(divide="raise"):
        assert rd.run(program, 2) == ["raised"] * 2


def test_a_broken_scheduler_leaves_no_rank_behind() -> None:
    ended = []

    def program(comm: rd.Comm) -> None:
        try:
            comm.barrier()
            comm.barrier()
        finally:
            ended.append(comm.rank)

    turns = iter([0, 0, 0, 99])
    with pytest.raises(IndexError, match="chose 99"):
        rd.run(program, 3, scheduler=lambda runnable: next(turns))
    assert sorted(ended) == [0, 1, 2]

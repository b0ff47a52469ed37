"""Odd but right calls, and wrong ones that must leave memory, messages and the next example alone; under mpirun."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import test_failures
from mpirun import run_ranks

import refdist as rd
from refdist.comm.message import fingerprint
from refdist.testing import raises


@pytest.mark.parametrize("said", [(True, np.True_), (1, np.int64(1), np.uint8(1), True), ("max", np.str_("max")),
                                  ((2, 3), (np.int32(2), np.int64(3))), (np.dtype("longlong"), np.dtype("int64"))])
def test_what_is_equal_has_one_fingerprint(said: tuple[Any, ...]) -> None:
    marks = set()
    for part in said:
        fingerprint.cache_clear()  # as in a process that has not seen the others
        marks.add(fingerprint("broadcast", "binomial", part))
    assert len(marks) == 1
    assert marks != {fingerprint("broadcast", "binomial", 0)}


@pytest.mark.parametrize(("ranks", "program"), [
    (3, "said_otherwise"), (2, "longer_than_expected"), (3, "longer_than_expected"), (2, "out_on_some_ranks"),
    (2, "out_that_cannot_be_written"), (2, "struck_in_a_swap"), (3, "struck_in_a_swap"), (2, "out_overlaps"), (3, "out_overlaps"),
    (2, "nothing_piles_up"), (3, "nothing_piles_up"), (3, "many_under_way"), (2, "very_many_calls"),
    (2, "another_fails_meanwhile"), (4, "groups_after_a_failure")])
def test_odd_calls(program: str, ranks: int) -> None:
    done = run_ranks(ranks, [__file__, program])
    assert done.returncode == 0, done.stdout + done.stderr


def very_many_calls(comm: rd.Comm) -> None:
    """After 65,533 collectives on each of two groups their Works still meet their own messages, in whatever order they start."""
    group = comm.split(0)
    assert group is not None
    comm._sequence[0] = group._sequence[0] = (1 << 16) - 3
    for _ in range(6):
        pair = [(group, 1.0), (comm, 100.0)]
        if comm.rank:
            pair.reverse()
        works = {each.context: each.start("all_reduce", np.full(3, value)) for each, value in pair}
        assert all(0x8000 <= comm.call("a look", "at the tag").tag < 0x10000 for _ in range(2))
        group.call("a look", "at the tag"), group.call("a look", "at the tag")
        assert works[group.context].wait()[0] == comm.size
        assert works[comm.context].wait()[0] == 100 * comm.size


def another_fails_meanwhile(comm: rd.Comm) -> None:
    """A rank that polls hears of the failure of another one."""
    with raises(comm, ValueError):
        if comm.rank == 1:
            raise ValueError("bad")
        work = comm.irecv(1)
        while not work.test():
            pass


def groups_after_a_failure(comm: rd.Comm) -> None:
    assert test_failures.groups_after_a_failure(comm) == [2.0, 400.0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_leaves_between_the_parts_of_a_message_ends_the_job(ranks: int) -> None:
    """It has sent headers and payloads, and never receives the others': one of them waits for its own send, or all do."""
    done = run_ranks(ranks, [__file__, "leaves_in_a_swap"])
    assert done.returncode not in (0, None)
    assert re.search(f"DeadlockError: [1-{ranks - 1}] of {ranks} ranks wait for what never comes", done.stderr), done.stderr


def leaves_in_a_swap(comm: rd.Comm) -> None:
    transport: Any = comm.transport
    if comm.rank == 1:
        start = transport._start

        def leave(operation: Any, *message: Any) -> Any:
            if operation == transport.payloads.Irecv:
                raise SystemExit(0)
            return start(operation, *message)

        transport._start = leave
    comm.all_reduce(np.ones(100_000))


@pytest.mark.parametrize(("program", "cause"), [("finalizes", "DeadlockError"), ("all_finalize", "")])
def test_a_rank_that_finalizes_mpi_leaves_as_at_its_end(program: str, cause: str) -> None:
    done = run_ranks(3, [__file__, program])
    assert (done.returncode != 0) == bool(cause), done.stderr
    assert cause in done.stderr
    assert done.stdout.count("finalized") == (0 if cause else 3), done.stdout


def finalizes(comm: rd.Comm) -> None:
    if comm.rank == 1:
        all_finalize(comm)
    comm.barrier()


def all_finalize(comm: rd.Comm) -> None:
    from mpi4py import MPI
    MPI.Finalize()
    print("finalized", flush=True)


def said_otherwise(comm: rd.Comm) -> None:
    """The same call in other words on rank 1 is no mismatch."""
    size, other = comm.size, comm.rank == 1
    x = np.arange(4.0 * size) + comm.rank
    square = np.arange(float(size * size)).reshape(size, size)

    def one(name: str = "int64") -> Any:
        return np.dtype(name).type(1) if other else 1

    assert comm.broadcast(x, one())[0] == 1
    assert comm.broadcast(x, one("int8"), "chain")[0] == 1
    assert (comm.reduce(x, one("uint8")) is None) != other
    assert (comm.gather(x, True if other else 1) is None) != other
    assert comm.scatter([x] * size, one())[0] == 1
    highest = comm.all_reduce(x, np.str_("max") if other else "max", np.str_("ring") if other else "ring")
    assert highest[0] == size - 1
    np.testing.assert_array_equal(comm.reduce_scatter(square, one()), size * square[:, comm.rank:comm.rank + 1])
    np.testing.assert_array_equal(comm.reduce_scatter(square, -2 if other else 0), size * square[comm.rank:comm.rank + 1])
    np.testing.assert_array_equal(comm.all_gather(square, one(), "ring"), np.tile(square, size))
    np.testing.assert_array_equal(comm.all_to_all(square, one(), one()), np.tile(square[:, comm.rank:comm.rank + 1], size))
    group = comm.split(one(), one("int16"))
    assert group is not None
    assert group.all_reduce(x.astype("longlong" if other else "int64"))[0] == size * (size - 1) // 2
    half = x.astype(np.float32)
    assert comm.all_reduce(half, accumulate=np.float64 if other else "f8")[0] == size * (size - 1) / 2
    assert comm.all_reduce(1.5 if other else np.array(1.5)) == 1.5 * size  # type: ignore[arg-type]


def longer_than_expected(comm: rd.Comm) -> None:
    """A payload that is longer than the receiver expects is a mismatch, and nothing is written beyond the receiver's memory."""
    ways = ((None, False), ("direct", False), ("ring", True), ("direct", True), ("recursive_doubling", True))
    for longer in (1_000, 100_000):
        for algorithm, knows in ways:
            length = longer if comm.rank == 1 else 700
            memory = np.full(comm.size * length + 200_000, 7.0)
            out = memory[:comm.size * length]
            lengths = [length] * comm.size if knows else None
            with raises(comm, rd.MismatchError, everywhere=False):
                comm.all_gather(np.ones(length), algorithm=algorithm, out=out, lengths=lengths)
            assert (memory[out.size:] == 7.0).all(), (longer, algorithm, knows)
    comm.barrier()


def out_on_some_ranks(comm: rd.Comm) -> None:
    """One element of eight bytes is not taken for a length of eight bytes."""
    for algorithm in (None, "direct", "ring"):
        for who in (0, 1):
            x = np.array([comm.rank + 0.5])
            with raises(comm, rd.MismatchError, everywhere=False):
                comm.all_gather(x, algorithm=algorithm, out=np.empty(comm.size) if comm.rank == who else None)


def out_that_cannot_be_written(comm: rd.Comm) -> None:
    """Refused in words before anything is sent, and without a trace in the next call."""
    size = comm.size
    for length in (1, 700):
        x = np.full(length * size, comm.rank + 1.0)
        calls: list[tuple[Callable[[Any], Any], int]] = [
            (lambda out, x=x: comm.all_reduce(x, out=out), length * size),
            (lambda out, x=x: comm.reduce_scatter(x, out=out), length),
            (lambda out, x=x: comm.all_gather(x, out=out), length * size * size),
            (lambda out, x=x: comm.all_gather(x, algorithm="ring", out=out), length * size * size)]
        for call, elements in calls:
            out = np.empty(elements)
            out.flags.writeable = False
            with raises(comm, ValueError, match="out is read-only"):
                call(out)
            with raises(comm, TypeError, match="out is a list"):
                call([0.0] * elements)
            call(np.empty(elements))


def out_overlaps(comm: rd.Comm) -> None:
    """``out`` and the input are views of one memory, shifted against each other or the input a part of ``out``."""
    size, rank = comm.size, comm.rank
    for length in (2 * size, 700 * size, 40_000 * size):
        contribution = np.random.default_rng(3).integers(-99, 99, (size, length)).astype(np.float64)
        for shift in (0, 1, length // size, length):
            memory = np.zeros((size + 1) * length + shift)
            x = memory[shift:shift + length]
            total, every = contribution.sum(0), contribution.ravel()
            for operation, elements, wanted in (("all_reduce", length, total), ("all_gather", size * length, every),
                                                ("reduce_scatter", length // size, np.split(total, size)[rank])):
                x[...] = contribution[rank]
                result = getattr(comm, operation)(x, out=memory[:elements])
                np.testing.assert_array_equal(result, wanted, f"{operation} of {length} elements, shifted by {shift}")


def struck_in_a_swap(comm: rd.Comm) -> None:
    """An exception between the messages of a swap or trade, as a time limit's, leaves no receive behind for the next example."""
    class Struck(int):
        def __lt__(self, other: int) -> bool:  # is asked when the message of the other one is not there at the first look
            raise TimeoutError

    algorithm = None if comm.size == 2 else "direct"
    for length in (1, 700, 7000):
        for _ in range(3):
            with raises(comm, TimeoutError):
                comm.transport.spins = Struck(64)  # type: ignore[attr-defined]
                if comm.rank == 0:
                    comm.all_reduce(np.full(length, 1.0), algorithm=algorithm)
                raise TimeoutError
            comm.transport.spins = 64  # type: ignore[attr-defined]
            for number in range(5):
                total = comm.all_reduce(np.full(length, number + comm.rank), algorithm=algorithm)
                assert (total == sum(number + rank for rank in range(comm.size))).all()


def nothing_piles_up(comm: rd.Comm) -> None:
    """Of swaps that last for long the memory is used again, and their requests are forgotten."""
    from refdist.comm import mpi
    transport: Any = comm.transport
    for patience in (0, 3):
        mpi._PATIENCE = patience
        for length in (1, 700, 7000):
            out = np.empty(length * comm.size)
            for _ in range(150):
                comm.all_reduce(np.ones(length))
                comm.all_reduce(np.ones(length), algorithm="direct")
                comm.all_gather(np.ones(length), out=out)
        for kept in (transport.slots, transport.posted, transport.sending, transport.outgoing):
            assert len(kept) < 80, (patience, len(kept))
        assert not transport.unopened


def many_under_way(comm: rd.Comm) -> None:
    """Receives of one source and tag whose headers are looked at in another order than that in which they were posted."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    rng = np.random.default_rng(7)
    for _ in range(20):
        lengths = [int(length) for length in rng.choice([3, 300, 5000], 6)]
        call = comm.call("many", "at once")
        received = [np.empty(length) for length in lengths]
        receives = [call.irecv(array, left) for array in received]
        sends = [call.isend(np.full(length, comm.rank + number / 8), right) for number, length in enumerate(lengths)]
        for number in rng.permutation(len(lengths)):
            comm.transport.wait([receives[number]])
            assert (received[number] == left + number / 8).all()
        comm.transport.wait(sends)


if __name__ == "__main__":
    globals()[sys.argv[1]](rd.mpi_world())

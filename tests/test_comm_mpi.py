"""The same random calls under mpirun, and what only the MPI transport can get wrong."""

from __future__ import annotations

import os
import sys
import time
import traceback

import numpy as np
import pytest
from mpirun import run_ranks

import refdist as rd

EXAMPLES = 60


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_collectives_under_mpirun(ranks: int) -> None:
    done = run_ranks(ranks, [__file__, "collectives"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all as NumPy says") == ranks, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_arrays_and_receives_of_unknown_length(ranks: int) -> None:
    done = run_ranks(ranks, [__file__, "large"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_with_a_work_under_way_meets_one_without(ranks: int) -> None:
    done = run_ranks(ranks, [__file__, "mixed"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_straight_way_gives_what_the_general_one_does(ranks: int) -> None:
    done = run_ranks(ranks, [__file__, "straight"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_message_that_describes_itself_where_none_was_expected() -> None:
    """Rank 0 sums, rank 1 gathers shards that are not cut in the usual way: another call, not another length."""
    done = run_ranks(2, [__file__, "described"])
    assert done.returncode != 0
    assert "MismatchError: rank 0 is in all_reduce" in done.stderr, done.stdout + done.stderr


@pytest.mark.skipif(not os.environ.get("REFDIST_TEST_HUGE"), reason="REFDIST_TEST_HUGE=1 sends 2^31 bytes and more")
def test_messages_beyond_two_gigabytes() -> None:
    done = run_ranks(2, [__file__, "huge"], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def collectives(comm: rd.Comm) -> None:
    """The cases of the in-process test; every rank draws the same ones."""
    from hypothesis import HealthCheck, given, settings
    from test_comm_collectives import Case, cases

    wrong: list[str] = []

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases(ranks=comm.size))
    def each(case: Case) -> None:
        try:
            result = case.call(comm)
            results = case.expected()
            results[comm.rank] = result
            case.check(results)
        except AssertionError as error:
            wrong.append(str(error))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    each()
    comm.barrier()
    assert not wrong, wrong[0]
    print("all as NumPy says", flush=True)


def large(comm: rd.Comm) -> None:
    """Payloads above the size that travels with its header, several under way, waited for in another order than sent."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrays = [np.arange(length, dtype=np.float64) + length * comm.rank for length in (5, 5000, 0, 300, 70000, 256, 257)]
    receives = [comm.irecv(left) for _ in arrays]
    sends = [comm.isend(x, right) for x in arrays]
    for receive, x in reversed(list(zip(receives, arrays, strict=True))):
        np.testing.assert_array_equal(receive.wait(), x + x.size * (left - comm.rank))
    for send in sends:
        send.wait()
    from refdist.comm import mpi
    mpi._MOST = 9_999  # from here on these payloads travel in pieces
    x = np.random.default_rng(comm.rank).integers(-99, 99, (1001, 37)).astype(np.float32)
    every = [np.random.default_rng(rank).integers(-99, 99, (1001, 37)).astype(np.float32) for rank in range(comm.size)]
    from test_comm_collectives import ALGORITHMS
    for algorithm in ALGORITHMS["all_reduce"]:
        np.testing.assert_array_equal(comm.all_reduce(x, algorithm=algorithm, out=x.copy()), sum(every))
    for algorithm in ALGORITHMS["reduce_scatter"]:
        np.testing.assert_array_equal(comm.reduce_scatter(x, 1, algorithm=algorithm),
                                      np.array_split(sum(every), comm.size, 1)[comm.rank])
    for algorithm in ALGORITHMS["all_gather"]:
        part = x[:1001 - 300 * comm.rank]
        whole = np.concatenate([each[:1001 - 300 * rank] for rank, each in enumerate(every)])
        np.testing.assert_array_equal(comm.all_gather(part, algorithm=algorithm), whole)
        np.testing.assert_array_equal(comm.all_gather(part, algorithm=algorithm, out=np.empty_like(whole)), whole)
    for algorithm in ALGORITHMS["broadcast"]:
        np.testing.assert_array_equal(comm.broadcast(x if comm.rank == 1 else None, 1, algorithm), every[1])
    for algorithm in ALGORITHMS["all_to_all"]:
        parts = [np.array_split(each, comm.size, 0)[comm.rank] for each in every]
        np.testing.assert_array_equal(comm.all_to_all(x, 0, 1, algorithm) if 1001 % comm.size == 0 else comm.all_to_all(x, 0, 0),
                                      np.concatenate(parts, 1 if 1001 % comm.size == 0 else 0))
    assert len(comm.transport.slots) < 200


def mixed(comm: rd.Comm) -> None:
    """Some ranks have a receive open and go the general way, others the straight one (``refdist.comm.straight``)."""
    rng = np.random.default_rng(comm.size)
    size, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    operators = {"sum": np.add, "max": np.maximum, "prod": np.multiply}
    for _ in range(200):
        dtype = np.dtype(str(rng.choice(["float32", "float64", "int32", "bfloat16", "float16"])))
        length = int(rng.integers(0, 400)) * int(rng.choice([1, size]))
        shape = (length, *rng.integers(0, 4, rng.integers(0, 2)).tolist())
        data = [rng.integers(-2, 3, shape).astype(dtype) for _ in range(size)]  # small integers: exact in any order
        busy, op = rng.integers(0, 2, size), str(rng.choice([*operators]))
        total = data[0]
        for other in data[1:]:
            total = operators[op](total, other)
        opened = comm.irecv(left, tag=3) if busy[comm.rank] else None
        x = data[comm.rank].copy()
        for algorithm in (None, "recursive_doubling", "rabenseifner", "direct"):
            np.testing.assert_array_equal(comm.all_reduce(x, op, algorithm), total)
        np.testing.assert_array_equal(comm.reduce_scatter(x, op=op, algorithm=str(rng.choice(["direct", "recursive_halving"]))),
                                      np.array_split(total, size)[comm.rank])
        whole = np.empty((size * length, *shape[1:]), dtype)
        for algorithm in (None, "direct", "recursive_doubling"):
            np.testing.assert_array_equal(comm.all_gather(x, algorithm=algorithm, out=whole), np.concatenate(data))
        cuts = [0, *sorted(rng.integers(0, length + 1, size - 1).tolist()), length]
        for parts in (np.array_split(total, size), [total[cuts[rank]:cuts[rank + 1]] for rank in range(size)]):
            np.testing.assert_array_equal(comm.all_gather(parts[comm.rank], out=np.empty(shape, dtype)), total)
        np.testing.assert_array_equal(x, data[comm.rank])
        np.testing.assert_array_equal(comm.all_reduce(x, op, str(rng.choice(["direct", "rabenseifner"])), out=x), total)
        if busy[right]:
            comm.send(data[comm.rank], right, tag=3)
        if opened is not None:
            np.testing.assert_array_equal(opened.wait(), data[left])


def straight(comm: rd.Comm) -> None:
    """What ``refdist.comm.straight`` tells apart: operations, orders, sizes around its limits, memory of ``out``, Works open."""
    size, rank = comm.size, comm.rank
    rng = np.random.default_rng(size)
    for length in (1, 8, 300 * size):
        data = [size * rng.integers(-9, 9, length * size).astype(np.float64) for _ in range(size)]  # means are exact too
        for op, total in (("avg", sum(data) / size), ("min", np.minimum.reduce(data)), ("sum", sum(data))):
            for algorithm in (None, "direct"):
                np.testing.assert_array_equal(comm.all_reduce(data[rank], op, algorithm), total)
                np.testing.assert_array_equal(comm.reduce_scatter(data[rank], op=op, algorithm=algorithm),
                                              np.array_split(total, size)[rank])
        big = [np.roll(np.resize([1e16, 1.0, -1e16, 3.0, 7.0], length * size), shift) for shift in range(size)]
        in_order = big[0]
        for other in big[1:]:
            in_order = in_order + other
        np.testing.assert_array_equal(comm.all_reduce(big[rank], order="rank"), in_order)
        np.testing.assert_array_equal(comm.reduce_scatter(big[rank], order="rank"), np.array_split(in_order, size)[rank])
    for nbytes in (2047, 2048, 2049, 2056, 2057):
        for length in (nbytes, size * nbytes):
            bytes_of = [rng.integers(-9, 9, length).astype(np.int8) for _ in range(size)]
            total = sum(bytes_of)
            for algorithm in (None, "direct", "recursive_doubling", "rabenseifner"):
                np.testing.assert_array_equal(comm.all_reduce(bytes_of[rank], algorithm=algorithm), total)
            np.testing.assert_array_equal(comm.reduce_scatter(bytes_of[rank], algorithm="direct"),
                                          np.array_split(total, size)[rank])
            np.testing.assert_array_equal(comm.all_gather(np.array_split(total, size)[rank], out=np.empty_like(total)), total)
    for more in range(1, size):  # shards on both sides of what travels with its header
        whole = rng.standard_normal(256 * size + more)
        np.testing.assert_array_equal(comm.all_gather(np.array_split(whole, size)[rank], out=np.empty_like(whole)), whole)
    x = np.arange(12.0 * size).reshape(4 * size, 3)
    for algorithm in (None, "direct"):
        every_other, part = np.zeros((8 * size, 3))[::2], np.zeros((8, 3))[::2]
        np.testing.assert_array_equal(comm.all_reduce(x, algorithm=algorithm, out=every_other), size * x)
        np.testing.assert_array_equal(every_other, size * x)
        np.testing.assert_array_equal(comm.reduce_scatter(x, algorithm=algorithm, out=part), size * x[4 * rank:4 * rank + 4])
        np.testing.assert_array_equal(part, size * x[4 * rank:4 * rank + 4])
    device = rd.Device()
    counted = comm.bind(device)
    np.testing.assert_array_equal(counted.all_reduce(x, algorithm="ring"), size * x)
    np.testing.assert_array_equal(counted.all_reduce(x, algorithm="direct"), size * x)
    assert device.bytes_sent == 2 * 2 * (size - 1) * x.nbytes // size
    for length in (9000, 30):  # rank 0 has to go on with its Work while it waits in another call
        work = comm.start("all_reduce", np.ones(length), algorithm="ring")
        first = comm.all_reduce(np.ones(4), algorithm="direct") if rank == 0 else None
        np.testing.assert_array_equal(work.wait(), np.full(length, size))
        np.testing.assert_array_equal(comm.all_reduce(np.ones(4), algorithm="direct") if rank else first, np.full(4, size))


def described(comm: rd.Comm) -> None:
    if comm.rank == 0:
        comm.all_reduce(np.ones(4), algorithm="recursive_doubling")
    else:  # sends, and does not look at what comes
        work = comm.start("all_gather", np.ones(3), algorithm="recursive_doubling", out=np.empty(8))
        time.sleep(10)
        work.wait()


def huge(comm: rd.Comm) -> None:
    """One message of 2^31 + 24 bytes: a count that does not fit a C int."""
    count = (1 << 31) // 8 + 3
    if comm.rank == 0:
        x = np.zeros(count)
        x[0], x[1 << 20], x[-1] = 1, 2, 3
        comm.send(x, 1)
    else:
        x = comm.recv(0)
        assert x.shape == (count,)
        assert (x[0], x[1 << 20], x[-1], x.sum()) == (1, 2, 3, 6)


if __name__ == "__main__":
    globals()[sys.argv[1]](rd.mpi_world())

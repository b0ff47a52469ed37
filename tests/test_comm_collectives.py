"""Every collective, algorithm, number of ranks, dtype, layout and interleaving against NumPy's own sums and concatenations.

The numbers are small whole ones, so that a sum is exact in every dtype and every order: results are compared with ==.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refdist as rd
from refdist.comm import all_gather, all_reduce, all_to_all, broadcast, gather, inprocess, reduce, reduce_scatter, scatter
from refdist.comm.choose import ANY, LEAST, Row, Table
from refdist.comm.inprocess import _InProcess
from refdist.comm.reduction import bounds

DTYPES = [np.dtype(kind) for kind in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16",
                                      ">f4", ">i2", ml_dtypes.bfloat16)]
ALGORITHMS = {module.__name__.rpartition(".")[2]: [None, *module.ALGORITHMS]
              for module in (all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all)}
UFUNCS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@dataclass
class Case:
    """A call of one collective: each rank's arrays, the arguments, and the world it is made in."""

    operation: str
    arrays: list[np.ndarray]
    kwargs: dict[str, Any]
    with_out: str = ""
    world: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> list[Any]:
        """Each rank's result, by NumPy alone."""
        ranks, kwargs = range(len(self.arrays)), self.kwargs
        arrays = [array.astype(array.dtype.newbyteorder("=")) for array in self.arrays]
        axis, root = kwargs.get("axis", 0), kwargs.get("root", 0)
        if self.operation in ("all_reduce", "reduce_scatter", "reduce"):
            total = functools.reduce(UFUNCS[kwargs["op"]], arrays)
            total = np.asarray(np.divide(total, len(arrays), dtype=total.dtype) if kwargs["op"] == "avg" else total)
            if self.operation == "reduce_scatter":
                return np.array_split(total, len(arrays), axis)
            return [total if self.operation == "all_reduce" or rank == root else None for rank in ranks]
        if self.operation == "all_gather":
            return [np.concatenate(arrays, axis)] * len(arrays)
        if self.operation == "broadcast":
            return [arrays[root]] * len(arrays)
        if self.operation == "gather":
            return [arrays if rank == root else None for rank in ranks]
        if self.operation == "scatter":
            return arrays
        parts = [np.array_split(array, len(arrays), kwargs["split_axis"]) for array in arrays]
        return [np.concatenate([part[rank] for part in parts], kwargs["concat_axis"]) for rank in ranks]

    def call(self, comm: rd.Comm, started: bool = False) -> Any:
        """Make the call on one rank."""
        x: Any = self.arrays[comm.rank]
        kwargs = dict(self.kwargs)
        if self.operation == "broadcast" and comm.rank != kwargs["root"]:
            x = None
        if self.operation == "scatter":
            x = self.arrays if comm.rank == kwargs["root"] else None
        if self.with_out:
            like = self.expected()[comm.rank]
            kwargs["out"] = np.full_like(like, 9, order="C" if self.with_out == "contiguous" else "F")
            if self.with_out == "input" and self.operation == "all_reduce" and x.dtype == like.dtype:
                x = kwargs["out"] = np.array(x)
        if started:
            return comm.start(self.operation, x, **kwargs).wait()
        result = getattr(comm, self.operation)(x, **kwargs)
        if self.with_out:
            assert result is kwargs["out"]
        return result

    def check(self, results: list[Any]) -> None:
        """Hold each rank's result against NumPy's."""
        for rank, (got, want) in enumerate(zip(results, self.expected(), strict=True)):
            if want is None:
                assert got is None
            elif isinstance(want, list):
                assert len(got) == len(want)
                for one, other in zip(got, want, strict=True):
                    same(one, other, f"{self} on rank {rank}")
            else:
                same(got, want, f"{self} on rank {rank}")


def same(got: np.ndarray, want: np.ndarray, where: str) -> None:
    assert isinstance(got, np.ndarray), where
    assert got.shape == want.shape, where
    assert got.dtype == want.dtype, where
    np.testing.assert_array_equal(got, want, err_msg=where)


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """The same numbers in another memory layout."""
    if layout == "transposed":
        return np.array(array.T, order="C").T
    if layout == "gaps" and array.ndim:
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1] + 1), 7, array.dtype)
        wide[..., 1::2] = array
        return wide[..., 1::2]
    if layout == "backwards" and array.ndim:
        return np.array(array[::-1])[::-1]
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


@st.composite
def cases(draw: st.DrawFn, operation: str | None = None, ranks: int | None = None) -> Case:
    """A random call; every choice shrinks to the plainest one."""
    operation = draw(st.sampled_from(sorted(ALGORITHMS))) if operation is None else operation
    ranks = draw(st.integers(1, 9)) if ranks is None else ranks
    dtype = draw(st.sampled_from(DTYPES[::-1]))
    lowest = 1 if operation in ("reduce_scatter", "all_gather", "all_to_all") else 0
    shape = draw(st.lists(st.integers(0, 7), min_size=lowest, max_size=3))
    kwargs: dict[str, Any] = {"algorithm": draw(st.sampled_from(ALGORITHMS[operation]))}
    uneven: tuple[int, ...] = ()
    if operation in ("all_reduce", "reduce_scatter", "reduce"):
        kwargs["op"] = draw(st.sampled_from(sorted(UFUNCS if dtype.kind not in "biu" else {"sum", "max", "min", "prod"})))
    if operation in ("all_reduce", "reduce_scatter") and kwargs["algorithm"] in (None, "direct"):
        kwargs["order"] = draw(st.sampled_from([None, "rank"]))
    if operation in ("reduce_scatter", "all_gather"):
        kwargs["axis"] = draw(st.integers(-len(shape), len(shape) - 1))
        uneven = (kwargs["axis"] % len(shape),) if operation == "all_gather" else ()
    if operation in ("broadcast", "reduce", "gather", "scatter"):
        kwargs["root"] = draw(st.integers(0, ranks - 1))
        uneven = tuple(range(len(shape))) if operation in ("gather", "scatter") else ()
    if operation == "all_to_all":
        kwargs["split_axis"] = draw(st.integers(0, len(shape) - 1))
        kwargs["concat_axis"] = draw(st.integers(0, len(shape) - 1))
        uneven = (kwargs["concat_axis"],)
    if kwargs["algorithm"] == "hierarchical":
        order = draw(st.permutations(range(ranks)))
        cuts = sorted(draw(st.sets(st.integers(1, ranks - 1))) if ranks > 1 else [])
        kwargs["groups"] = [order[start:end] for start, end in zip([0, *cuts], [*cuts, ranks], strict=True)]
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    layout = draw(st.sampled_from(["plain", "transposed", "gaps", "backwards", "read-only"]))
    jagged = draw(st.booleans())
    arrays = []
    for _ in range(ranks):
        more = [generator.integers(0, 3) if jagged and axis in uneven else 0 for axis in range(len(shape))]
        lengths = [length + extra for length, extra in zip(shape, more, strict=True)]
        low = 0 if dtype.kind in "bu" else -3
        numbers = generator.integers(1, 3, lengths) if kwargs.get("op") == "prod" else generator.integers(low, 4, lengths)
        arrays.append(laid_out(np.asarray(numbers).astype(dtype), layout))
    outs = ["", "contiguous", "other layout"] + ["input"] * (operation == "all_reduce")
    with_out = draw(st.sampled_from(outs)) if operation in ("all_reduce", "reduce_scatter", "all_gather") else ""
    world = {"scheduler": draw(st.sampled_from(["fifo", 1, 2, 3])), "sends": draw(st.sampled_from(["buffered", "rendezvous"])),
             "checks": draw(st.booleans())}
    return Case(operation, arrays, kwargs, with_out, world)


@pytest.mark.parametrize("operation", sorted(ALGORITHMS))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_collective_equals_numpy(operation: str, data: st.DataObject) -> None:
    case = data.draw(cases(operation))
    before = [array.copy() for array in case.arrays]

    def program(comm: rd.Comm) -> Any:
        result = case.call(comm)
        result = case.call(comm) if case.with_out != "input" else result  # a second call finds nothing of the first
        return result

    results = rd.run(program, len(case.arrays), **case.world)
    case.check(results)
    for array, original in zip(case.arrays, before, strict=True):
        np.testing.assert_array_equal(array, original)
    for result in results:
        for mine in result if isinstance(result, list) else [result]:
            assert mine is None or not any(np.shares_memory(mine, array) for array in case.arrays)


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce", "reduce_scatter"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_straight_way_equals_numpy(operation: str, data: st.DataObject) -> None:
    """On in-process ranks too, by the swap and the trade that every transport has."""
    case = data.draw(cases(operation, data.draw(st.sampled_from([2, 3, 4, 5, 8]))))
    with mock.patch.object(_InProcess, "can_swap", True):
        results = rd.run(case.call, len(case.arrays), scheduler=case.world["scheduler"])
    case.check(results)


@pytest.mark.parametrize("size", [8, 8000])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_straight_way_is_taken(ranks: int, size: int) -> None:
    """By a swap a step, or by one trade for a direct exchange; of two ranks' all-gather, by a swap too."""
    power = not ranks & (ranks - 1)

    def program(comm: rd.Comm) -> list[np.ndarray]:
        x, whole, shard = np.arange(size) * (comm.rank + 1.0), np.empty(ranks * size), np.empty(size)
        mine = np.array_split(np.arange(float(size)), ranks)[comm.rank]  # 3 ranks: not of one length
        by_halves = [comm.all_reduce(x, algorithm="recursive_doubling"), comm.reduce_scatter(x, algorithm="recursive_halving"),
                     comm.all_reduce(x, algorithm="rabenseifner"), comm.reduce_scatter(x, algorithm="recursive_doubling"),
                     comm.all_gather(x, algorithm="recursive_doubling", out=np.empty_like(whole))] if power else []
        return [comm.all_reduce(x, algorithm="direct"), comm.reduce_scatter(x, algorithm="direct"),
                comm.all_gather(x, algorithm="direct", out=whole), comm.all_gather(mine, algorithm="direct", out=shard),
                *by_halves]

    with (mock.patch.object(_InProcess, "can_swap", True),
          mock.patch.object(_InProcess, "trade", autospec=True, side_effect=_InProcess.trade) as trade,
          mock.patch.object(_InProcess, "swap", autospec=True, side_effect=_InProcess.swap) as swap):
        results = rd.run(program, ranks)
    assert swap.call_count == ranks * ((ranks.bit_length() - 1) * 6 * power + 2 * (ranks == 2))
    assert trade.call_count == ranks * (3 + 2 * (ranks > 2))
    total = np.arange(size) * (ranks * (ranks + 1) / 2)
    every = np.concatenate([np.arange(size) * (other + 1.0) for other in range(ranks)])
    for rank, result in enumerate(results):
        own = np.array_split(total, ranks)[rank]
        by_halves = [total, own, total, own, every] if power else []
        for got, want in zip(result, [total, own, every, np.arange(size), *by_halves], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("can_swap", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_doubling_of_arrays_of_any_lengths(ranks: int, can_swap: bool) -> None:
    """All-gather into ``out`` without ``lengths``: what is not cut as ``np.array_split`` cuts describes itself, at any step."""
    generator = np.random.default_rng(ranks)
    for rows in (ranks, 5, 40 * ranks + 3):
        whole = generator.standard_normal((rows, 7))
        cuts = [sorted(generator.integers(0, rows + 1, ranks - 1).tolist()) for _ in range(12)]
        for edges in [*cuts, [0] * (ranks - 1), [rows] * (ranks - 1), list(bounds(rows, ranks)[1:-1])]:
            edges = [0, *edges, rows]
            with mock.patch.object(_InProcess, "can_swap", can_swap):
                results = rd.run(lambda comm, w=whole, e=edges: comm.all_gather(
                    w[e[comm.rank]:e[comm.rank + 1]].copy(), algorithm="recursive_doubling", out=np.empty_like(w)), ranks)
            for result in results:
                np.testing.assert_array_equal(result, whole)

    def too_long(comm: rd.Comm) -> None:
        comm.all_gather(np.ones((2 + (comm.rank == 1), 7)), algorithm="recursive_doubling", out=np.empty((2 * ranks, 7)))

    wrong = f"out has length {2 * ranks} along the axis, the arrays have {2 * ranks + 1} together"
    with mock.patch.object(_InProcess, "can_swap", can_swap), pytest.raises(ValueError, match=wrong):
        rd.run(too_long, ranks)


def test_a_group_that_is_counted_sends_as_little_as_possible() -> None:
    """Without a device the fastest algorithm, with one the least traffic; a table that was set is used by both."""
    x = np.ones(1 << 14, np.float32)

    def program(comm: rd.Comm) -> list[str]:
        def names(group: rd.Comm) -> list[str]:
            return [group.choose("all_reduce", None, all_reduce.ALGORITHMS, x.nbytes)]

        counted, half = comm.bind(rd.Device()), comm.split(0)
        assert half is not None
        mesh = rd.Mesh(comm, tp=4, device=rd.Device())
        usual = [*names(comm), *names(counted), *names(counted.bind(None)), *names(half), *names(mesh.axis("tp")),
                 *names(half.bind(rd.Device()))]
        comm.table = table = Table({"all_reduce": [Row(ANY, ANY, "ring")]})
        half = comm.split(0)
        assert half is not None
        assert half.table is comm.bind(rd.Device()).table is comm.bind(rd.Device()).bind(None).table is table
        assert rd.Mesh(comm, tp=4, device=rd.Device()).axis("tp").table is table
        return usual

    for usual in rd.run(program, 4):
        assert usual == ["recursive_doubling", "rabenseifner", "recursive_doubling", "recursive_doubling", "rabenseifner",
                         "rabenseifner"]
    for ranks, nbytes in itertools.product((2, 4, 8, 16, 64), (1 << 11, 1 << 16, 1 << 17, 1 << 22, 1 << 28)):
        assert LEAST.pick("reduce_scatter", ranks, nbytes) != "recursive_doubling"
        assert ranks == 2 or LEAST.pick("all_reduce", ranks, nbytes) in ("ring", "rabenseifner", "direct")


def test_the_straight_way_is_left_where_it_must_be() -> None:
    """With checks, after another table was set, with an ``out`` of another dtype or over the input."""
    def program(comm: rd.Comm) -> None:
        x = np.arange(16.0) + comm.rank
        comm.all_reduce(x)
        comm.table = Table({operation: [Row(ANY, ANY, "ring")] for operation in ("all_reduce", "reduce_scatter", "all_gather")})
        np.testing.assert_array_equal(comm.all_reduce(x), 4 * np.arange(16.0) + 6)

    def odd(comm: rd.Comm) -> None:
        whole = np.arange(24.0) * (comm.rank + 1)
        shard = np.split(10 * np.arange(24.0), 4)[comm.rank]
        for algorithm in reduce_scatter.ALGORITHMS:
            x = whole.copy()
            np.testing.assert_array_equal(comm.reduce_scatter(x, algorithm=algorithm, out=x[3:9]), shard)
        with pytest.raises(ValueError, match="out is int64"):
            comm.all_gather(np.ones(4), algorithm="recursive_doubling", out=np.empty(16, np.int64))

    for checks, calls in ((True, 0), (False, 8)):
        with (mock.patch.object(_InProcess, "can_swap", True),
              mock.patch.object(_InProcess, "swap", autospec=True, side_effect=_InProcess.swap) as swap):
            rd.run(program, 4, checks=checks)
        assert swap.call_count == calls
    with mock.patch.object(_InProcess, "can_swap", True):
        rd.run(odd, 4)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("algorithm", all_gather.ALGORITHMS)
def test_all_gather_of_out_itself(algorithm: str, checks: bool) -> None:
    """All that there is on one rank; and a group of one rank, where ``out`` must be of the array's shape, too."""
    def program(comm: rd.Comm) -> np.ndarray:
        out = np.arange(8 * 513).reshape(8, 513) if comm.rank else np.zeros((8, 513), int)
        return comm.all_gather(out if comm.rank else out[:0], algorithm=algorithm, out=out)

    for result in rd.run(program, 2, checks=checks):
        np.testing.assert_array_equal(result, np.arange(8 * 513).reshape(8, 513))
    for rows in (1, 2):
        with pytest.raises(ValueError, match=rf"out is float64\[5, 3\] \(rank 0\): expected float64\[{rows}, 3\]"):
            rd.run(lambda comm, n=rows: comm.all_gather(np.ones((n, 3)), algorithm=algorithm, out=np.empty((5, 3))), 1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("accumulate", [None, "float64"])
def test_the_straight_way_adds_in_rank_order(ranks: int, accumulate: str | None) -> None:
    """Bit for bit what the general way gives; also where the result takes the input's place."""
    arrays = np.random.default_rng(ranks).standard_normal((ranks, 5000)).astype(np.float32)

    def program(comm: rd.Comm) -> list[bytes]:
        x = arrays[comm.rank]
        options: dict[str, Any] = {"order": "rank", "accumulate": accumulate}
        return [array.tobytes() for size in (41, 5000) for part in (x[:size].copy(),) for array in (
            comm.reduce_scatter(part, **options), comm.all_reduce(part, **options), comm.all_reduce(part, out=part, **options))]

    general = rd.run(program, ranks)
    with mock.patch.object(_InProcess, "can_swap", True):
        assert rd.run(program, ranks) == general


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_many_works_under_way(data: st.DataObject, ranks: int) -> None:
    """Several collectives of two groups at once, finished in another order on each rank."""
    several = [data.draw(cases(ranks=ranks)) for _ in range(data.draw(st.integers(2, 5)))]
    orders = [data.draw(st.permutations(range(len(several)))) for _ in range(ranks)]
    world = several[0].world

    def program(comm: rd.Comm) -> list[Any]:
        groups = comm, comm.split(0)
        works = []
        for index, case in enumerate(several):
            plain = Case(case.operation, case.arrays, case.kwargs)
            x: Any = plain.arrays[comm.rank]
            if plain.operation == "broadcast" and comm.rank != plain.kwargs["root"]:
                x = None
            if plain.operation == "scatter":
                x = plain.arrays if comm.rank == plain.kwargs["root"] else None
            works.append(groups[index % 2].start(plain.operation, x, **plain.kwargs))
        for index in orders[comm.rank]:
            works[index].test()
            works[index].wait()
        return [work.wait() for work in works]

    results = rd.run(program, ranks, **world)
    for index, case in enumerate(several):
        case.check([result[index] for result in results])


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8, 9, 13])
def test_all_ranks_get_the_same_bits(ranks: int, algorithm: str | None) -> None:
    """Rounding differs with the order of additions, so the order must be one for all ranks; also signed zeros."""
    generator = np.random.default_rng(3)
    arrays = generator.standard_normal((ranks, 41)).astype(np.float32)
    arrays[:, :2] = np.where(generator.integers(0, 2, (ranks, 2)), np.float32(0), np.float32(-0.0))
    for op in ("sum", "max", "prod"):
        results = rd.run(lambda comm, op=op: comm.all_reduce(arrays[comm.rank], op, algorithm), ranks)
        for result in results:
            assert result.tobytes() == results[0].tobytes()
    exact = arrays.astype(np.float64).sum(0)
    total = rd.run(lambda comm: comm.all_reduce(arrays[comm.rank], algorithm=algorithm), ranks)[0]
    np.testing.assert_allclose(total, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f4", "f2", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_rank_order_is_the_order_of_additions(ranks: int, dtype: str) -> None:
    generator = np.random.default_rng(ranks)
    arrays = generator.standard_normal((ranks, 5, 3)).astype(dtype)
    wanted = functools.reduce(np.add, arrays)
    for order, algorithm in (("rank", None), ("rank", "direct"), (None, "direct")):
        for total in rd.run(lambda comm, o=order, a=algorithm: comm.all_reduce(arrays[comm.rank], order=o, algorithm=a), ranks):
            assert total.tobytes() == wanted.tobytes()
        shards = rd.run(lambda comm, o=order, a=algorithm: comm.reduce_scatter(arrays[comm.rank], order=o, algorithm=a), ranks)
        assert np.concatenate(shards).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "i1"])
def test_accumulation_dtype(dtype: str) -> None:
    """Contributions that come together on one rank are added in the accumulation dtype and rounded once."""
    generator = np.random.default_rng(0)
    arrays = (generator.standard_normal((6, 33)) * 10).astype(dtype)
    accumulate = "i4" if dtype == "i1" else "f4"
    wanted = functools.reduce(np.add, arrays.astype(accumulate)).astype(dtype)
    plain = functools.reduce(np.add, arrays)
    assert dtype == "i1" or (wanted != plain).any()
    totals = rd.run(lambda comm: comm.all_reduce(arrays[comm.rank], algorithm="direct", accumulate=accumulate), 6)
    for total in totals:
        assert total.dtype == np.dtype(dtype)
        assert total.tobytes() == wanted.tobytes()
    shards = rd.run(lambda comm: comm.reduce_scatter(arrays[comm.rank], order="rank", accumulate=accumulate), 6)
    assert np.concatenate(shards).tobytes() == wanted.tobytes()
    for algorithm in ALGORITHMS["all_reduce"]:  # elsewhere a partial sum is rounded when it is sent on
        total = rd.run(lambda comm, a=algorithm: comm.all_reduce(arrays[comm.rank], algorithm=a, accumulate=accumulate), 6)[0]
        np.testing.assert_allclose(total.astype("f4"), wanted.astype("f4"), atol=0 if dtype == "i1" else 0.5)
    root = rd.run(lambda comm: comm.reduce(arrays[comm.rank], accumulate=accumulate), 6)[0]
    assert root is not None
    np.testing.assert_allclose(root.astype("f4"), wanted.astype("f4"), atol=0 if dtype == "i1" else 0.5)


def test_uneven_all_to_all_by_lengths() -> None:
    """Each rank says itself how much it sends to whom, as in the dispatch of tokens to experts."""
    generator = np.random.default_rng(5)
    counts = generator.integers(0, 4, (5, 5))  # counts[s, r]: rows that s sends to r
    counts[2] = 0
    blocks = [[generator.standard_normal((count, 3)) for count in row] for row in counts]
    for algorithm in ALGORITHMS["all_to_all"]:
        results = rd.run(lambda comm, a=algorithm: comm.all_to_all(np.concatenate(blocks[comm.rank]), algorithm=a,
                                                                   lengths=counts[comm.rank].tolist()), 5)
        for rank, result in enumerate(results):
            np.testing.assert_array_equal(result, np.concatenate([blocks[source][rank] for source in range(5)]))


def test_all_gather_with_known_lengths_and_out() -> None:
    """``out`` with shards that are not those of array_split, and with ``lengths``; all algorithms."""
    arrays = [np.arange(length * 2.0).reshape(length, 2) + 100 * length for length in (3, 0, 5, 1)]
    whole = np.concatenate(arrays)
    for algorithm in ALGORITHMS["all_gather"]:
        for kwargs in ({}, {"lengths": [3, 0, 5, 1]}):
            def program(comm: rd.Comm, algorithm: str | None = algorithm, kwargs: dict[str, Any] = kwargs) -> np.ndarray:
                return comm.all_gather(arrays[comm.rank], algorithm=algorithm, out=np.empty_like(whole), **kwargs)
            for checks in (False, True):
                for result in rd.run(program, 4, checks=checks):
                    np.testing.assert_array_equal(result, whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8])
def test_out_may_be_the_input(ranks: int) -> None:
    """Nothing of the input may be needed after its place in the result has been written."""
    arrays = np.random.default_rng(ranks).integers(-99, 99, (ranks, 3, 7)).astype(np.float64)

    def program(comm: rd.Comm) -> None:
        for algorithm in ALGORITHMS["all_reduce"]:
            for layout in ("plain", "transposed", "gaps"):
                x = laid_out(arrays[comm.rank].copy(), layout)
                assert comm.all_reduce(x, algorithm=algorithm, out=x) is x
                np.testing.assert_array_equal(x, arrays.sum(0))

    for checks in (False, True):
        rd.run(program, ranks, sends="rendezvous", checks=checks)


@pytest.mark.parametrize("groups", [[[0, 1, 2], [3, 4, 5]], [[5, 0], [1, 4], [3, 2]], [[0], [1, 2, 3], [4, 5]],
                                    [[0, 1, 2, 3, 4, 5]], [[2], [1], [0], [3], [5], [4]]])
def test_hierarchical_by_any_grouping(groups: list[list[int]]) -> None:
    arrays = np.random.default_rng(1).integers(-99, 99, (6, 13))
    for total in rd.run(lambda comm: comm.all_reduce(arrays[comm.rank], algorithm="hierarchical", groups=groups), 6):
        np.testing.assert_array_equal(total, arrays.sum(0))


def test_out_may_overlap_the_input() -> None:
    """``out`` that is a shifted view of the input's memory, and a rank's own shard of it."""
    def program(comm: rd.Comm) -> None:
        for algorithm in ALGORITHMS["all_reduce"]:
            memory = np.arange(12.0)
            comm.all_reduce(memory[1:], algorithm=algorithm, out=memory[:-1])
            np.testing.assert_array_equal(memory[:-1], np.arange(1.0, 12) * comm.size)
        for algorithm in ALGORITHMS["reduce_scatter"]:
            memory = np.arange(12.0)
            shard = np.array_split(memory, comm.size)[comm.rank]
            wanted = shard * comm.size
            comm.reduce_scatter(memory, algorithm=algorithm, out=shard)
            np.testing.assert_array_equal(shard, wanted)
        for algorithm in ALGORITHMS["all_gather"]:
            whole = np.zeros(11)
            shard = np.array_split(whole, comm.size)[comm.rank]
            shard[:] = comm.rank + 1
            comm.all_gather(shard, algorithm=algorithm, out=whole)
            for rank, part in enumerate(np.array_split(whole, comm.size)):
                assert (part == rank + 1).all()

    for ranks in (1, 2, 5):
        rd.run(program, ranks, sends="rendezvous", checks=True)


def test_errors_name_what_exists() -> None:
    x = np.zeros(3)

    def program(comm: rd.Comm) -> None:
        for operation, algorithms in ALGORITHMS.items():
            with pytest.raises(ValueError, match="algorithm='snail' does not exist") as caught:
                getattr(comm, operation)([x] * comm.size if operation == "scatter" else x, algorithm="snail")
            assert all(name in str(caught.value) for name in algorithms if name)
        with pytest.raises(ValueError, match="op='mean'"):
            comm.all_reduce(x, op="mean")
        with pytest.raises(ValueError, match="order='reverse'"):
            comm.all_reduce(x, order="reverse")
        with pytest.raises(ValueError, match="takes 'direct'"):
            comm.reduce_scatter(x, order="rank", algorithm="ring")
        with pytest.raises(ValueError, match="needs a floating-point array"):
            comm.all_reduce(np.zeros(3, np.int32), op="avg")
        with pytest.raises(ValueError, match="add up to 3"):
            comm.all_to_all(x, lengths=[1, 1])
        with pytest.raises(ValueError, match="out is"):
            comm.all_gather(x, out=np.zeros((2, 3)))
        with pytest.raises(TypeError, match="number dtype"):
            comm.all_reduce(np.array(["a"]))

    rd.run(program, 1)
    with pytest.raises(ValueError, match="must be in exactly one"):
        rd.run(lambda comm: comm.all_reduce(x, algorithm="hierarchical", groups=[[0], [0, 1]]), 2)
    with pytest.raises(ValueError, match="one dtype"):
        rd.run(lambda comm: comm.scatter([np.zeros(1), np.zeros((1, 1))]), 2)
    with pytest.raises(ValueError, match="arrays have"):
        rd.run(lambda comm: comm.all_gather(x, out=np.zeros(7), algorithm="direct"), 2)


@pytest.mark.parametrize("scheduler", range(4))
def test_works_on_two_views_of_one_group_do_not_collide(scheduler: int) -> None:
    """`bind` gives another view, whose calls are numbered with the group's own."""
    def program(comm: rd.Comm) -> list[list[float]]:
        view, generator = comm.bind(rd.Device()), np.random.default_rng([scheduler, comm.rank])
        works = [comm.start("all_reduce", np.full(50, 1.0 + comm.rank), algorithm="ring"),
                 view.start("all_reduce", np.full(50, 100.0 + comm.rank), algorithm="ring")]
        for _ in range(6):
            works[generator.integers(2)].test()
        sums: list[Any] = [None, None]
        for place in generator.permutation(2):  # each rank waits in an order of its own
            sums[place] = works[place].wait()
        return [sorted(set(total.tolist())) for total in sums]

    assert rd.run(program, ranks=4, scheduler=scheduler) == [[[10.0], [406.0]]] * 4


@pytest.mark.parametrize("scheduler", range(3))
def test_groups_that_only_some_ranks_have_made_do_not_confuse_later_ones(scheduler: int) -> None:
    def program(comm: rd.Comm) -> tuple[Any, ...]:
        group = comm.split(comm.rank % 2)
        assert group is not None
        if comm.rank % 2 == 0:
            group = group.split(0)  # these ranks have used one context id more
            assert group is not None
        mesh = rd.Mesh(comm, tp=2, dp=2)
        after = comm.split(0, key=-comm.rank)
        assert after is not None
        x = np.arange(2.0) + comm.rank
        return tuple(part.all_reduce(x).tolist() for part in (group, mesh.axis("tp"), mesh.axis("tp", "dp"), after))

    every = [6.0, 10.0]
    wanted = [([2.0, 4.0] if rank % 2 == 0 else [4.0, 6.0], [1.0, 3.0] if rank < 2 else [5.0, 7.0], every, every)
              for rank in range(4)]
    assert rd.run(program, ranks=4, scheduler=scheduler) == wanted


def test_only_a_loop_of_polls_in_which_nothing_moves_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess, "_FRUITLESS_POLLS", 50)

    def computes(comm: rd.Comm) -> Any:
        if comm.rank == 1:
            x = comm.recv(0)
            comm.send(2 * x, 0)
            return x
        bound = comm.bind(device := rd.Device())
        work = bound.irecv(1)
        for _ in range(1000):
            device.call(np.negative, np.ones(1))
        bound.send(np.ones(3), 1)
        return work.wait()

    assert [x.tolist() for x in rd.run(computes, 2)] == [[2.0] * 3, [1.0] * 3]

    def polls_while_others_talk(comm: rd.Comm) -> int:
        if comm.rank == 0:
            work, looks = comm.irecv(1), 0
            while not work.test():
                looks += 1
            return looks
        for _ in range(1000):
            comm.sendrecv(np.ones(1), 3 - comm.rank, 3 - comm.rank)
        if comm.rank == 1:
            comm.send(np.ones(1), 0)
        return 0

    assert rd.run(polls_while_others_talk, 3, scheduler=1)[0] > 200

    def polls_for_ever(comm: rd.Comm) -> None:
        work = comm.irecv(1 - comm.rank)
        while not work.test():
            pass

    with pytest.raises(rd.DeadlockError, match="polls, and in 50 polls a rank nobody has sent"):
        rd.run(polls_for_ever, 2)


@pytest.mark.parametrize(("dtype", "accumulate"), [("f2", "i4"), ("f2", "?"), ("c8", "f8"), ("f4", "O"), ("i4", "u1")])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "reduce"])
def test_sums_are_not_accumulated_in_what_cannot_hold_them(operation: str, dtype: str, accumulate: str) -> None:
    def program(comm: rd.Comm) -> None:
        with pytest.raises(ValueError, match=f"accumulate={np.dtype(accumulate)}: expected a dtype of the kind of"):
            getattr(comm, operation)(np.ones(4, dtype), accumulate=accumulate)

    rd.run(program, 2)


@pytest.mark.parametrize("algorithm", [None, "ring", "direct", "hierarchical"])
def test_an_out_that_is_no_plain_array_is_refused_before_anything_is_sent(algorithm: str | None) -> None:
    def program(comm: rd.Comm) -> float:
        for out in (np.zeros((3, 2)).view(np.matrix), np.ma.zeros((3, 2))):
            with pytest.raises(TypeError, match=f"out is a {type(out).__name__}"):
                comm.all_reduce(np.ones((3, 2)), algorithm=algorithm, out=out)
        with pytest.raises(TypeError, match="expected a number dtype"):
            comm.all_reduce(np.zeros(2, "V3"), algorithm=algorithm)
        return float(comm.all_reduce(np.ones(3))[0])

    assert rd.run(program, 3) == [3.0] * 3

"""What each collective must give, said by NumPy alone, and a case of a call to hold an implementation against it.

    @given(strategies.collective_cases("all_reduce"))
    def test_my_ring(case):
        case.check(lambda comm, x, op: my_ring(comm, x))

A case is a whole call: the world with its interleaving, the group within it, each rank's array with its memory layout, and the
arguments. :meth:`CollectiveCase.check` makes the call, then scribbles over input and result, as programs do, and makes it again:
a message that is still in flight, a result that aliases something, and a call that only works once all show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refdist.comm import Comm
from refdist.testing.worlds import World

__all__ = ["EXPECTED", "CollectiveCase", "Layout", "laid_out", "numbers"]

_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum,
                                              "prod": np.multiply}


def _reduced(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    total = functools.reduce(_REDUCTIONS[op], arrays)
    return (total / np.array(len(arrays), total.dtype)).astype(total.dtype) if op == "avg" else total


def _all_reduce(arrays: list[np.ndarray], op: str = "sum") -> list[Any]:
    return [_reduced(arrays, op)] * len(arrays)


def _reduce_scatter(arrays: list[np.ndarray], axis: int = 0, op: str = "sum") -> list[Any]:
    return list(np.array_split(_reduced(arrays, op), len(arrays), axis))


def _all_gather(arrays: list[np.ndarray], axis: int = 0) -> list[Any]:
    return [np.concatenate(arrays, axis)] * len(arrays)


def _broadcast(arrays: list[np.ndarray], root: int = 0) -> list[Any]:
    return [arrays[root]] * len(arrays)


def _reduce(arrays: list[np.ndarray], root: int = 0, op: str = "sum") -> list[Any]:
    return [_reduced(arrays, op) if rank == root else None for rank in range(len(arrays))]


def _gather(arrays: list[np.ndarray], root: int = 0) -> list[Any]:
    return [arrays if rank == root else None for rank in range(len(arrays))]


def _all_to_all(arrays: list[np.ndarray], split_axis: int = 0, concat_axis: int = 0) -> list[Any]:
    parts = [np.array_split(array, len(arrays), split_axis) for array in arrays]
    return [np.concatenate([part[rank] for part in parts], concat_axis) for rank in range(len(arrays))]


def _scatter(arrays: list[np.ndarray], root: int = 0) -> list[Any]:
    return list(arrays)


EXPECTED: dict[str, Callable[..., list[Any]]] = {
    "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather, "broadcast": _broadcast,
    "reduce": _reduce, "gather": _gather, "scatter": _scatter, "all_to_all": _all_to_all,
}
"""Operation -> function of all ranks' arrays and the call's arguments that gives each rank's result."""


@dataclass(frozen=True)
class Layout:
    """How an array lies in memory: the order of its axes from the outermost, steps along each (a negative one: backwards),
    and whether it is read-only. Steps of ±2 leave gaps."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    readonly: bool = False


def laid_out(array: np.ndarray, layout: Layout) -> np.ndarray:
    """The same numbers in another memory layout."""
    shape = tuple(array.shape[axis] * abs(layout.steps[axis]) for axis in layout.order)
    memory = np.empty_like(array, shape=shape, order="C")
    memory.reshape(-1).view(np.uint8).fill(0xA5)
    view = memory.transpose(np.argsort(layout.order)) if layout.order else memory
    index: Any = (*(slice(None, None, step) for step in layout.steps), ...)  # the dots keep a 0-d view an array
    view = view[index]
    view[...] = array
    view.flags.writeable = not layout.readonly
    return view


def numbers(dtype: np.dtype, shape: tuple[int, ...], seed: int, ranks: int, op: str = "sum") -> np.ndarray:
    """Distinct numbers of any dtype whose reduction over ``ranks`` ranks is exact, so that its order does not matter."""
    generator = np.random.default_rng(seed)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        whole = np.iinfo(dtype)
        return generator.integers(whole.min, whole.max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        real = np.empty(0, dtype).real.dtype
        parts = [numbers(real, shape, seed + part, ranks * 4, op) for part in range(2)]
        return np.asarray(parts[0] + 1j * parts[1], dtype)
    if op == "prod":
        return generator.choice([-1.0, 1.0, -1.0, 2.0] if ranks < 8 else [-1.0, 1.0], shape).astype(dtype)
    largest = _consecutive_integers(dtype) // max(ranks, 1)
    return generator.integers(-largest, largest, shape, endpoint=True).astype(np.float64).astype(dtype)


@functools.lru_cache(maxsize=64)
def _consecutive_integers(dtype: np.dtype) -> int:
    """The largest n up to 2**52 for which all integers to n are numbers of this floating-point dtype."""
    n = 1
    with np.errstate(all="ignore"):
        while n < 2**52 and all(float(np.float64(m).astype(dtype)) == m for m in (2 * n, 2 * n - 1)):
            n *= 2
    return n


@dataclass(frozen=True)
class CollectiveCase:
    """One call of one collective on one group of one world.

    Attributes:
        world: where.
        colors, keys: each world rank's arguments of ``split``; the groups call at the same time, ``None`` ranks do not. With
            ``colors=None`` the world itself is the group.
        operation: a key of :data:`EXPECTED`.
        arguments: what every rank passes, but for the array; ``groups`` is the number of ranks in each.
        dtype, shapes, seed: each group rank's array is made from them (``shapes[group rank % len(shapes)]``).
        layouts: memory layouts that ranks use in turn.
        started: call through ``comm.start`` with a second collective under way at the same time.
        out: pass ``out=``, an array of the result's shape that is not C-contiguous.
    """

    world: World
    operation: str
    dtype: np.dtype
    shapes: tuple[tuple[int, ...], ...]
    seed: int
    layouts: tuple[Layout, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    colors: tuple[int | None, ...] | None = None
    keys: tuple[int, ...] | None = None
    started: bool = False
    out: bool = False

    def check(self, collective: Callable[..., Any] | None = None) -> None:
        """Make the call and compare each rank's result with NumPy's.

        Args:
            collective: ``collective(comm, x, **arguments)``; by default the method of ``Comm``.
        """
        came: set[int] = set()
        self.world.run(lambda comm: self._on_one_rank(comm, collective, came))

    def _on_one_rank(self, world: Comm, collective: Callable[..., Any] | None, came: set[int]) -> None:
        comm = self._group(world)
        if comm is None:
            return
        came.add(world.rank)
        comm.barrier()
        missing = set(comm.members) - came
        assert not missing, f"rank {world.rank} left the barrier before ranks {sorted(missing)} had come"
        for repetition in range(2):
            arrays = [self._array(rank, comm.size, repetition) for rank in range(comm.size)]
            wanted = self._expected(arrays)[comm.rank]
            x = arrays[comm.rank]
            before = x.copy()
            out = np.empty_like(wanted, shape=wanted.shape, order="F") if self.out else None
            passed = arrays if self.operation == "scatter" else x
            got = self._call(comm, passed, collective, out)
            _require_equal(x, before, "the input was changed", comm)
            _require_equal(got, wanted, f"{self.operation} gives a wrong result", comm)
            assert out is None or got is out, f"the result is not in out= on rank {comm.rank} of {comm.size}"
            for array in got if isinstance(got, list) else [got]:
                assert array is None or not np.may_share_memory(array, x), \
                    f"the result aliases the input on rank {comm.rank} of {comm.size}"
                _scribble(array)
            _scribble(x)

    def _group(self, world: Comm) -> Comm | None:
        if self.colors is None:
            return world
        keys = self.keys or (0,) * world.size
        comm = world.split(self.colors[world.rank], keys[world.rank])
        mine = [rank for rank in range(world.size) if self.colors[rank] == self.colors[world.rank]]
        mine.sort(key=lambda rank: (keys[rank], rank))
        if self.colors[world.rank] is None:
            assert comm is None, "a rank without a colour got a group"
        else:
            assert comm is not None
            assert list(comm.members) == mine, f"split gives members {list(comm.members)}, expected {mine}"
        return comm

    def _array(self, rank: int, ranks: int, repetition: int) -> np.ndarray:
        """What a group rank passes; a root's is the same as anybody's."""
        shape = self.shapes[rank % len(self.shapes)]
        op = self.arguments.get("op", "sum")
        array = numbers(self.dtype, shape, 2 * (self.seed * 64 + rank) + repetition, ranks, op)
        return laid_out(array, self.layouts[rank % len(self.layouts)])

    def _expected(self, arrays: list[np.ndarray]) -> list[Any]:
        arguments = {name: value for name, value in self.arguments.items() if name not in ("algorithm", "order", "groups")}
        if "root" in arguments:
            arguments["root"] %= len(arrays)
        return EXPECTED[self.operation](arrays, **arguments)

    def _call(self, comm: Comm, x: Any, collective: Callable[..., Any] | None, out: np.ndarray | None) -> Any:
        arguments = dict(self.arguments)
        if out is not None:
            arguments["out"] = out
        passed = x
        if "groups" in arguments:
            ranks = list(range(comm.size))
            arguments["groups"] = [ranks[start:start + arguments["groups"]] for start in range(0, comm.size, arguments["groups"])]
        if "root" in arguments:
            arguments["root"] %= comm.size
            if self.operation in ("broadcast", "scatter") and comm.rank != arguments["root"] and comm.rank % 2:
                passed = None
        if collective is not None:
            return collective(comm, passed, **arguments)
        if not self.started:
            return getattr(comm, self.operation)(passed, **arguments)
        other = comm.start("all_reduce", np.array([comm.rank + 1]))
        work = comm.start(self.operation, passed, **arguments)
        result = work.wait()
        assert other.wait().tolist() == [comm.size * (comm.size + 1) // 2], "a second collective under way went wrong"
        return result


def _require_equal(got: Any, wanted: Any, what: str, comm: Comm) -> None:
    where = f"{what} on rank {comm.rank} of {comm.size}"
    if isinstance(wanted, list):
        assert isinstance(got, list), f"{where}: {type(got).__name__}, expected a list"
        assert len(got) == len(wanted), f"{where}: {len(got)} arrays, expected {len(wanted)}"
        for mine, theirs in zip(got, wanted, strict=True):
            _require_equal(mine, theirs, what, comm)
        return
    if wanted is None:
        assert got is None, f"{where}: got {got!r}, expected None"
        return
    assert isinstance(got, np.ndarray), f"{where}: got {type(got).__name__}, expected an array"
    assert got.dtype == wanted.dtype, f"{where}: dtype {got.dtype}, expected {wanted.dtype}"
    assert got.shape == wanted.shape, f"{where}: shape {got.shape}, expected {wanted.shape}"
    if got.tobytes() != wanted.tobytes() and not np.array_equal(got, wanted):
        raise AssertionError(f"{where}:\n{got}\nexpected\n{wanted}")


def _scribble(array: Any) -> None:
    """What a program does next with an array that it owns."""
    if isinstance(array, np.ndarray) and array.flags.writeable:
        array[...] = 1

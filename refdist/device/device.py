"""``Device``: the emulated GPU of one rank. It owns memory, runs kernels, and counts what happens.

    strategy ── device.empty(like, shape, category) ──▶ memory from the arena, counted by category
             ── device.call(kernel, …) ──▶ kernel(…, empty=, matmul=), FLOPs counted, Works progressed, an event made
    comm     ── device.message(…) ──▶ traffic by axis and operation

Memory comes back by itself when the last reference to an array, or to a view of it, dies (``arena.py``): strategies hold what
they need and drop it when they are done, and the ledger follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from refdist.device.arena import Arena, Pool
from refdist.device.events import Allocation, Event, Kernel, Message, Phase
from refdist.errors import OutOfDeviceMemory
from refdist.numerics.rounding import store

__all__ = ["CATEGORIES", "Device", "Traffic"]

_POOLS = 4096  # kinds of arrays that are remembered
CATEGORIES = ("parameter", "gradient", "master", "optimizer", "activation", "gathered", "communication")


class Traffic(NamedTuple):
    """What one rank has sent along one axis by one operation: messages, and bytes of payload."""

    axis: str
    operation: str
    messages: int
    bytes: int


class Device:
    """The emulated GPU of one rank.

    Args:
        capacity: bytes that may be alive at once; None: no limit.
        listeners: functions of one event (``refdist.device.events``), called as things happen.
        matmul: ``matmul(a, b, out=None)``, what kernels multiply matrices with; None: what the precision of a run asks for.

    Attributes:
        live, peak: bytes by category, now and at most; ``"total"`` is over all categories.
        flops: ``"executed"``: matrix-multiply FLOPs of every kernel call; ``"model"``: the same without recomputation.
        progress: called after each kernel, so that communication under way goes on; None while there is none to progress.
        before_kernel: called with a kernel's name and arguments before it runs, where communication is checked.
    """

    def __init__(self, capacity: int | None = None, listeners: Iterable[Callable[[Event], None]] = (),
                 matmul: Callable[..., np.ndarray] | None = None) -> None:
        self.capacity = capacity
        self.listeners = list(listeners)
        self.matmul = np.matmul if matmul is None else matmul
        self.matmul_is_given = matmul is not None
        self.live: dict[str, int] = dict.fromkeys((*CATEGORIES, "total"), 0)
        self.peak: dict[str, int] = dict.fromkeys((*CATEGORIES, "total"), 0)
        self.flops: dict[str, int] = {"model": 0, "executed": 0}
        self.progress: Callable[[], None] | None = None
        self.before_kernel: Callable[[str, tuple[Any, ...]], None] | None = None
        self._arena = Arena()
        self._traffic: dict[tuple[str, str], list[int]] = {}
        self._recomputing = False
        self._empty_of = {category: self._bound_empty(category) for category in CATEGORIES}
        self._pools: dict[tuple[str, tuple[int, ...], Any], Pool] = {}

    # ------------------------------------------------------------------------------------------------- memory

    def empty(self, like: np.ndarray, shape: int | tuple[int, ...] | None = None, category: str = "activation",
              dtype: Any = None) -> np.ndarray:
        """An uninitialised array of ``like``'s kind, with its shape and dtype unless others are given.

        Raises:
            OutOfDeviceMemory: it would take more than the capacity; the message has the table of what is alive.
        """
        if shape is None:
            shape = like.shape
        elif type(shape) is not tuple:
            shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        if dtype is None:
            dtype = like.dtype
        pool = self._pools.get((category, shape, dtype)) or self._pool(category, shape, dtype)
        self._take(category, pool.nbytes)
        return self._arena.array(shape, dtype, pool)

    def zeros(self, like: np.ndarray, shape: int | tuple[int, ...] | None = None, category: str = "activation",
              dtype: Any = None) -> np.ndarray:
        """As :meth:`empty`, filled with zeros."""
        array = self.empty(like, shape, category, dtype)
        array.fill(0)
        return array

    def copy(self, array: np.ndarray, category: str, dtype: Any = None) -> np.ndarray:
        """A C-ordered copy of ``array`` in this device's memory."""
        copied = self.empty(array, None, category, dtype)
        return store(array, copied)

    def in_dtype(self, array: np.ndarray, dtype: Any, category: str = "activation") -> np.ndarray:
        """``array`` itself if it has this dtype, else a copy that has it, rounded to nearest."""
        return array if array.dtype == dtype else self.copy(array, category, dtype)

    @property
    def reserved(self) -> int:
        """Bytes that the arena has taken from the operating system, whether in use or waiting to be used again."""
        return self._arena.reserved

    def _bound_empty(self, category: str) -> Callable[..., np.ndarray]:
        def empty(like: np.ndarray, shape: tuple[int, ...] | None = None, dtype: Any = None) -> np.ndarray:
            if shape is None:
                shape = like.shape
            if dtype is None:
                dtype = like.dtype
            pool = self._pools.get((category, shape, dtype))
            if pool is None:
                return self.empty(like, shape, category, dtype)
            self._take(category, pool.nbytes)
            return self._arena.array(shape, dtype, pool)
        return empty

    def _pool(self, category: str, shape: tuple[int, ...], dtype: Any) -> Pool:
        nbytes = np.dtype(dtype).itemsize * math.prod(shape)
        if len(self._pools) >= _POOLS:
            self._pools.clear()
        pool = self._pools[category, shape, dtype] = self._arena.pool(nbytes, partial(self._give_back, category, nbytes))
        return pool

    def _take(self, category: str, nbytes: int) -> None:
        live, peak = self.live, self.peak
        total = live["total"] + nbytes
        if self.capacity is not None and total > self.capacity:
            raise OutOfDeviceMemory(f"{nbytes:,} bytes more for category {category} exceed the device's {self.capacity:,} bytes; "
                                    f"alive:\n{self.memory_table()}")
        live["total"] = total
        live[category] = mine = live[category] + nbytes
        if total > peak["total"]:
            peak["total"] = total
        if mine > peak[category]:
            peak[category] = mine
        if self.listeners:
            self.emit(Allocation(category, nbytes, time.perf_counter()))

    def _give_back(self, category: str, nbytes: int) -> None:
        self.live["total"] -= nbytes
        self.live[category] -= nbytes
        if self.listeners:
            self.emit(Allocation(category, -nbytes, time.perf_counter()))

    def memory_table(self) -> str:
        """Bytes alive and at most, one line a category."""
        rows = [f"  {name:<14} {self.live[name]:>15,} now {self.peak[name]:>15,} at most" for name in (*CATEGORIES, "total")]
        return "\n".join(rows)

    # ------------------------------------------------------------------------------------------------ kernels

    def call(self, kernel: Callable[..., Any], *args: Any, category: str = "activation", **kwargs: Any) -> Any:
        """Run a kernel of ``refdist.ops`` on this device and return what it returns.

        Its arrays come from the arena under ``category``, its products from :attr:`matmul`.
        """
        wants = getattr(kernel, "wants", ())
        if "empty" in wants:
            kwargs["empty"] = self._empty_of[category]
        if "matmul" in wants:
            kwargs["matmul"] = self.matmul
        if self.before_kernel is not None:
            self.before_kernel(kernel.__name__, args)
        start = time.perf_counter() if self.listeners else 0.0
        result = kernel(*args, **kwargs)
        count = getattr(kernel, "flops", None)
        flops = 0
        if count is not None:
            flops = count(*args)
            self.flops["executed"] += flops
            if not self._recomputing:
                self.flops["model"] += flops
        if self.listeners:
            shapes = tuple(arg.shape for arg in args if isinstance(arg, np.ndarray))
            self.emit(Kernel(kernel.__name__, shapes, flops, start, time.perf_counter(), self._recomputing))
        if self.progress is not None:
            self.progress()
        return result

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Kernels called inside repeat a forward pass: their FLOPs are executed, but no part of the model's."""
        before, self._recomputing = self._recomputing, True
        try:
            yield
        finally:
            self._recomputing = before

    # ------------------------------------------------------------------------------------- messages and events

    def message(self, axis: str, operation: str, peer: int, nbytes: int, step: int) -> None:
        """Count a message that this rank sends."""
        row = self._traffic.get((axis, operation))
        if row is None:
            row = self._traffic[axis, operation] = [0, 0]
        row[0] += 1
        row[1] += nbytes
        if self.listeners:
            self.emit(Message(axis, operation, peer, nbytes, step, time.perf_counter()))

    @property
    def traffic(self) -> list[Traffic]:
        """What this rank has sent, one row for each axis and operation."""
        return [Traffic(axis, operation, *row) for (axis, operation), row in sorted(self._traffic.items())]

    @property
    def bytes_sent(self) -> int:
        """Bytes of payload that this rank has sent, over all axes and operations."""
        return sum(row[1] for row in self._traffic.values())

    def phase(self, name: str, begins: bool) -> None:
        """Tell the listeners that something named begins or ends."""
        if self.listeners:
            self.emit(Phase(name, begins, time.perf_counter()))

    def during(self, name: str, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The same steps, as a phase of this name from the first to the last."""
        self.phase(name, True)
        result = yield from steps
        self.phase(name, False)
        return result

    def emit(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

"""The arena: memory that is handed out, comes back, and is handed out again.

A training step asks for the same sizes over and over. Fresh memory from the operating system costs a page fault per 4 KiB,
which at these sizes takes longer than the arithmetic on it, so blocks are kept in one list a size class (eight classes per
power of two: at most an eighth is wasted). New small blocks are cut off a slab of 64 KiB, since asking for each costs more.

A block comes back when the last reference to its array dies. The memory beneath is a ctypes array, not a NumPy one, so that
NumPy makes every view refer to the array that was handed out: one weak reference to it sees the end of all of them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Arena", "Pool", "size_class"]

_ALIGNMENT = 64
_SLAB = 65536
_SMALL = 2048  # bytes of a block that is cut off a slab

# What kernels take for a moment comes from the C library. glibc gives large blocks back to the operating system when they are
# freed, "large" being what is above a threshold that rises to the largest block freed so far: this one, of which no page is used.
np.empty(1 << 24, np.uint8)


def size_class(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of 64 and of an eighth of the power of two below."""
    step = max(_ALIGNMENT, 1 << max(nbytes - 1, 0).bit_length() >> 4)
    return -(-nbytes // step) * step


class Pool:
    """What arrays of one size have in common.

    Attributes:
        nbytes: of an array.
        size: of the block that it gets.
        free: blocks of this size that nobody uses.
        alive: the leases of arrays that have not died.
        on_return: called when one dies.
    """

    __slots__ = ("alive", "free", "nbytes", "on_return", "size")

    def __init__(self, nbytes: int, size: int, free: list[tuple[Any, int]], alive: set[Any],
                 on_return: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self.size = size
        self.free = free
        self.alive = alive
        self.on_return = on_return


class _Lease(weakref.ref):
    """Sees an array's end; unlike other weak references, each is equal to itself only."""

    __slots__ = ("block", "pool")
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    block: tuple[Any, int]
    pool: Pool


def _died(lease: _Lease) -> None:
    pool = lease.pool
    pool.alive.discard(lease)
    pool.free.append(lease.block)
    pool.on_return()


class Arena:
    """Blocks of memory in size classes.

    Attributes:
        reserved: bytes that the arena has taken from the operating system, handed out or not.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._free: defaultdict[int, list[tuple[Any, int]]] = defaultdict(list)  # by size class
        self._alive: set[_Lease] = set()
        self._uncounted: dict[int, Pool] = {}  # by bytes
        self._slab: tuple[Any, int, int] = (None, 0, 0)  # memory, and where its unused part begins and ends

    def pool(self, nbytes: int, on_return: Callable[[], None]) -> Pool:
        """Where arrays of so many bytes come from; ``on_return`` is called when one and all its views are dead."""
        size = size_class(nbytes)
        return Pool(nbytes, size, self._free[size], self._alive, on_return)

    def uncounted(self, nbytes: int) -> Pool:
        """A pool for arrays of so many bytes whose end nobody wants to hear of."""
        return self._uncounted.get(nbytes) or self._uncounted.setdefault(nbytes, self.pool(nbytes, _nothing))

    def array(self, shape: tuple[int, ...], dtype: Any, pool: Pool) -> np.ndarray:
        """An uninitialised C-ordered array of the pool's bytes, aligned to 64."""
        free = pool.free
        block = free.pop() if free else self._reserve(pool.size)
        array = np.ndarray(shape, dtype, *block)
        lease = _Lease(array, _died)
        lease.block = block
        lease.pool = pool
        self._alive.add(lease)
        return array

    def _reserve(self, size: int) -> tuple[Any, int]:
        if size > _SMALL:
            return self._take(size)
        memory, start, end = self._slab
        if start + size > end:
            memory, start = self._take(_SLAB)
            end = start + _SLAB
        self._slab = memory, start + size, end
        return memory, start

    def _take(self, size: int) -> tuple[Any, int]:
        self.reserved += size
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        return (ctypes.c_char * memory.nbytes).from_buffer(memory.data), -memory.ctypes.data % _ALIGNMENT


def _nothing() -> None:
    """What happens when memory that nobody counts comes back."""

"""What a kernel is, and how it walks over big arrays.

A kernel is a plain function from arrays to arrays, with its backward written out next to it. Two things are handed in
by keyword, so that an emulated device can stand behind the same code:

    empty(like, shape=None, dtype=None)   makes every array of activation size (uninitialised)
    matmul(a, b, out=None)                does every matrix product

Arrays of 16 bits (float16, bfloat16) are read and written; arithmetic is in float32 meanwhile, as in a GPU's kernels. What a
kernel returns is rounded once, to the format of its arguments; statistics, softmax and losses stay in float32.

Passes over big arrays go block by block, so that the intermediate results of a formula stay in the processor's cache:
what FlashAttention (Dao et al. 2022, section 3) does on a GPU's shared memory, done here for every kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from ..numerics.rounding import has_16_bits, store, to_float32, widened

__all__ = ["BLOCK", "accumulation_dtype", "empty_like", "in_two_steps", "kernel", "row_blocks", "working"]

BLOCK = 32768  # elements of one array in a pass: a handful of such blocks fit the second-level cache
F = TypeVar("F", bound=Callable[..., Any])


def kernel(flops: Callable[..., int] | None = None) -> Callable[[F], F]:
    """Mark a function as a kernel.

    Args:
        flops: from the kernel's positional arguments to its matmul FLOPs (2·m·n·k a product); None: no matmul.

    Sets two attributes, `flops` and `wants` (which of `empty` and `matmul` it takes), and returns the function itself.
    """

    def mark(function: F) -> F:
        wants = frozenset(inspect.signature(function).parameters) & {"empty", "matmul"}
        function.flops = flops  # type: ignore[attr-defined]
        function.wants = wants  # type: ignore[attr-defined]
        return function

    return mark


def empty_like(like: np.ndarray, shape: tuple[int, ...] | None = None, dtype: Any = None) -> np.ndarray:
    """An uninitialised C-ordered array of the kind of `like`; the default `empty` of every kernel."""
    return np.empty_like(like, dtype=dtype, order="C", subok=False, shape=like.shape if shape is None else shape)


def accumulation_dtype(x: np.ndarray) -> np.dtype:
    """The format for statistics, softmax and losses: that of x, but at least float32."""
    return _at_least_float32(x.dtype)


@lru_cache(maxsize=64)
def _at_least_float32(dtype: np.dtype) -> np.dtype:
    return np.promote_types(dtype, np.float32)


def working(out: np.ndarray) -> np.ndarray:
    """Where a result is computed that `store` then rounds into `out`: out itself, or float32 in its place if it has 16 bits."""
    return empty_like(out, dtype=np.float32) if has_16_bits(out.dtype) else out


def in_two_steps(matmul: Callable[..., np.ndarray]) -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
    """Rounding an operand as `matmul` reads it, and multiplying operands that have been rounded (`numerics.Product`)."""
    return getattr(matmul, "round", widened), getattr(matmul, "exact", matmul)


def row_blocks(
    *arrays: np.ndarray, out: Sequence[np.ndarray] = (), scratch: int = 0, elements: int | None = None
) -> Iterable[tuple[np.ndarray, ...]]:
    """Walk over arrays [..., n_i] of equal leading dimensions, as views [rows, n_i] of at most `elements` elements.

    In place of a view of 16 bits there is a float32 block: a copy, or for `out` one that is rounded into the array when the
    next block is asked for.

    Args:
        arrays: those that are read.
        out: those that are written; C-contiguous; one may be among `arrays`. Their views come after those that are read.
        scratch: so many working blocks, shaped like the first array's and in its accumulation format, come after the
            views; their memory is the same from block to block.
        elements: of one block; BLOCK unless given.
    """
    flat: list[np.ndarray] = []
    widest, narrow = 1, list[int]()
    for a in (*arrays, *out):
        if a.ndim != 2:
            a = a.reshape(-1 if a.size else 0, a.shape[-1])
        if a.itemsize == 2 and has_16_bits(a.dtype):
            narrow.append(len(flat))
        flat.append(a)
        widest = max(widest, a.shape[1])
    first, step = flat[0], max(1, (elements or BLOCK) // widest)
    if not first.size:
        return ()
    if len(first) > step or narrow:
        return _row_blocks(flat, len(arrays), narrow, scratch, step)
    if scratch:  # in one block
        dtype = accumulation_dtype(first)
        flat += [empty_like(first, None, dtype) for _ in range(scratch)]
    return (tuple(flat),)


def _row_blocks(
    flat: list[np.ndarray], count: int, narrow: list[int], scratch: int, step: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """Blocks of ``step`` rows; ``count`` of the arrays are read, the ones at the places ``narrow`` have 16 bits."""
    rows, width = flat[0].shape
    work = [empty_like(flat[0], (min(step, rows), width), accumulation_dtype(flat[0])) for _ in range(scratch)]
    wide = {place: empty_like(flat[place], (min(step, rows), flat[place].shape[1]), np.float32) for place in narrow}
    for start in range(0, rows, step):
        views = [a[start : start + step] for a in flat]
        stored = [(place, views[place]) for place in wide]
        for place, view in stored:
            views[place] = wide[place][: len(view)]
            if place < count:
                to_float32(view, out=views[place])
        yield (*views, *(w[: len(views[0])] for w in work))
        for place, view in stored:
            if place >= count:
                store(views[place], view)

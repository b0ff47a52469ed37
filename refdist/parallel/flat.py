"""Arrays that lie one after the other in memory, so that one pass can go over many small ones.

    embedding ▇▇▇▇ layer 0: q ▇▇ k ▇ v ▇ o ▇▇ gate ▇▇▇ up ▇▇▇ down ▇▇▇ norms ▁▁ layer 1: q ▇▇ …

Within a layer matrices come before vectors: optimizers decay the ones and not the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np

from refdist.device import Device
from refdist.model.layout import ParameterLayout

__all__ = ["in_memory_order", "joined", "lay_out", "runs", "same"]


def in_memory_order(rows: Mapping[str, ParameterLayout]) -> list[str]:
    """The names of a layout table, layer by layer as in the table, matrices before vectors."""
    layers = list(dict.fromkeys(row.layer for row in rows.values()))
    return sorted(rows, key=lambda name: (layers.index(rows[name].layer), len(rows[name].shape) < 2))


def lay_out(device: Device, like: np.ndarray, shapes: Mapping[str, tuple[int, ...]], category: str,
            dtype: np.dtype) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """An uninitialised flat array, and the consecutive parts of it, by name and in these shapes."""
    flat = device.empty(like, sum(map(math.prod, shapes.values())), category, dtype)
    parts, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape)
        parts[name] = flat[start:end].reshape(shape)
    return flat, parts


def same(arrays: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Whether each array is the other one, or a like view of the same memory."""
    return len(arrays) == len(others) and all(
        a is b or (a.base is not None and a.base is b.base and (a.shape, a.strides, a.dtype) == (b.shape, b.strides, b.dtype)
                   and _address(a) == _address(b))
        for a, b in zip(arrays, others, strict=True))


def runs(arrays: Mapping[str, Sequence[np.ndarray]], key: Callable[[str], Hashable]) -> Iterator[list[str]]:
    """Cut names into runs of one key within which each of a name's arrays follows that of the name before in memory.

    Names whose arrays are empty are left out: NumPy does not say where these lie.
    """
    starts = {name: [_address(array) for array in arrays[name]] for name in arrays if arrays[name][0].size}
    run: list[str] = []
    ends: list[int] = []
    for name in sorted(starts, key=lambda name: starts[name][0]):
        if run and not (key(name) == key(run[0]) and starts[name] == ends and all(map(_of_one, arrays[name], arrays[run[0]]))):
            yield run
            run = []
        run.append(name)
        ends = [start + array.nbytes for start, array in zip(starts[name], arrays[name], strict=True)]
    if run:
        yield run


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One flat view of the arrays of a run of several: consecutive parts of one flat array, as :func:`runs` has found out."""
    whole = arrays[0].base
    assert isinstance(whole, np.ndarray)
    start = (_address(arrays[0]) - _address(whole)) // whole.itemsize
    return whole[start:start + sum(array.size for array in arrays)]


def _of_one(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether both are C-contiguous parts of one flat array."""
    base = array.base
    return (isinstance(base, np.ndarray) and base is other.base and base.ndim == 1 and base.dtype == array.dtype == other.dtype
            and base.flags.c_contiguous and array.flags.c_contiguous and other.flags.c_contiguous)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]

"""Reduce: the root gets the elementwise reduction of all ranks' arrays.

Binomial tree: in step k every rank whose distance from the root is an odd multiple of 2^k hands its partial sum to the one 2^k
closer, and is done. ⌈lg N⌉ steps; each rank but the root sends n bytes (Thakur, Rabenseifner & Gropp 2005, section 4.6).

    7 ─▶ 6 ──▶ 4 ────▶ 0      distances from the root
    5 ─▶ 4
    3 ─▶ 2 ──▶ 0
    1 ─▶ 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from refdist.comm.call import Call, Steps
from refdist.comm.reduction import Reduce, accumulation_dtype, divide, reduction

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "binomial", "reduce"]


def binomial(call: Call, x: np.ndarray, make_total: Callable[[], np.ndarray], reduce: Reduce, root: int) -> Steps:
    """Reduce the flat arrays ``x`` into the array that ``make_total`` gives, on the root; returns it there, None elsewhere.

    ``make_total`` is called on ranks that add something: a leaf of the tree needs no memory.
    """
    size, rank = call.size, call.rank
    away = (rank - root) % size
    partial, total = x, None
    distance = 1
    while distance < size:
        if away & distance:
            yield (call.isend(partial, (rank - distance) % size),)
            return None
        if away + distance < size:
            if total is None:
                total = make_total()
                incoming = call.buffer(x)
            yield (call.irecv(incoming, (rank + distance) % size),)
            partial = reduce(partial, incoming, out=total)
        distance *= 2
        call.step += 1
    return partial


ALGORITHMS = {"binomial": binomial}


def reduce(comm: Comm, x: np.ndarray, root: int = 0, op: str = "sum", algorithm: str | None = None,
           accumulate: Any = None) -> Steps:
    """The steps of :meth:`Comm.reduce`."""
    x = comm.check_array(x)
    comm.check_rank(root, "root")
    reducing = reduction(op, accumulate, x.dtype)
    call = comm.prepare("reduce", ALGORITHMS, algorithm, x.nbytes, x.dtype, x.shape, op, root, accumulation_dtype(reducing))
    flat = np.asarray(x, order="C").reshape(-1)
    total = yield from ALGORITHMS[call.algorithm](call, flat, lambda: np.empty_like(flat), reducing, root)
    if comm.rank != root:
        return None
    if comm.size == 1:
        total = flat.copy()
    if op == "avg":
        divide(total, comm.size, reducing)
    return total.reshape(x.shape)

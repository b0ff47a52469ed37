"""Broadcast: every rank gets the root's array; the others need not know its dtype or shape.

    binomial            ⌈lg N⌉ steps; the root sends n ⌈lg N⌉ bytes: for small arrays
    scatter_all_gather  a binomial scatter, then a ring all-gather: ⌈lg N⌉ + N - 1 steps, at most 2 n (N - 1) / N bytes. Thakur,
                        Rabenseifner & Gropp 2005, section 4.2 (van de Geijn's algorithm)
    chain               pieces walk from rank to rank, one behind the other: N - 2 + c steps for c pieces, n bytes. Träff, Ripke,
                        Siebert, Balaji, Thakur & Gropp 2008, "A simple, pipelined algorithm for large, irregular all-gather
                        problems", has the same pipeline on a ring

Binomial: in step k the ranks that have the array already send it 2^k further.

    root ─▶ +1                 step 0
    root ─▶ +2, +1 ─▶ +3       step 1 …

The two others need to know the size on all ranks: dtype and shape go down the binomial tree first, in messages that are counted
apart. When no algorithm is asked for, a small array travels in these messages itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from refdist.comm import all_gather as gathering
from refdist.comm.call import Call, Steps
from refdist.comm.reduction import bounds
from refdist.comm.transport import Request

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "PIECE", "binomial", "broadcast", "chain", "scatter_all_gather"]

PIECE = 1 << 17  # bytes of a piece of the chain
_SMALL = 1 << 11  # bytes of an array that travels with its announcement


def binomial(call: Call, x: np.ndarray | None, root: int, announce_above: float = math.inf) -> Steps:
    """``x``: the root's array, None elsewhere; returns the array.

    Of an array of more than ``announce_above`` bytes only dtype and shape go down the tree; it is returned uninitialised.
    """
    size, rank = call.size, call.rank
    distance = (rank - root) % size
    reach = 1  # ranks closer to the root than this have the array
    while reach < size:
        if distance < reach:
            assert x is not None
            if distance + reach < size:
                announced = x.nbytes > announce_above
                sender, message = (call.part("broadcast announcement"), x.reshape(-1)[:0]) if announced else (call, x)
                yield (sender.isend(message, (rank + reach) % size, describes=x),)
        elif distance < 2 * reach:
            request = call.irecv_described((rank - reach) % size)
            yield (request,)
            x = call.received(request)
        reach *= 2
        call.step += 1
    return x


def scatter_all_gather(call: Call, x: np.ndarray, root: int) -> Steps:
    """Every rank gets a part of the root's flat array down a binomial tree, and then the other parts round a ring."""
    size = call.size
    turned = call.among([(root + place) % size for place in range(size)])  # the root is rank 0, and owns part 0
    offsets, place = bounds(x.size, size), turned.rank
    reach = 1 << (size - 1).bit_length()  # the root has the parts of this many ranks
    if place > 0:
        reach = place & -place
        yield (turned.irecv(x[offsets[place]:offsets[min(place + reach, size)]], place - reach),)
        turned.step += 1
    while reach > 1:
        reach //= 2
        if place + reach < size:
            yield (turned.isend(x[offsets[place + reach]:offsets[min(place + 2 * reach, size)]], place + reach),)
        turned.step += 1
    yield from gathering.ring(turned, x, offsets)


def chain(call: Call, x: np.ndarray, root: int) -> Steps:
    """A piece is passed on while the next one comes in."""
    place, last = (call.rank - root) % call.size, call.size - 1
    length = max(1, PIECE // x.itemsize)
    sending: tuple[Request, ...] = ()
    for start in range(0, x.size, length):
        piece = x[start:start + length]
        receiving = (call.irecv(piece, (call.rank - 1) % call.size),) if place > 0 else ()
        yield sending + receiving
        call.step += 1
        sending = (call.isend(piece, (call.rank + 1) % call.size),) if place < last else ()
    yield sending


ALGORITHMS: dict[str, Callable[..., Steps]] = {"binomial": binomial, "scatter_all_gather": scatter_all_gather, "chain": chain}


def broadcast(comm: Comm, x: np.ndarray | None, root: int = 0, algorithm: str | None = None) -> Steps:
    """The steps of :meth:`Comm.broadcast`."""
    comm.check_rank(root, "root")
    if algorithm is not None:
        comm.choose("broadcast", algorithm, ALGORITHMS, 0)
    call = comm.call("broadcast", algorithm or "by size", root)
    # A result never aliases an input.
    x = np.array(comm.check_array(x), order="C") if comm.rank == root else None
    if algorithm == "binomial" or comm.size == 1:
        return (yield from binomial(call, x, root))
    limit = _SMALL if algorithm is None else -1
    x = yield from binomial(call, x, root, limit)
    if x.nbytes > limit:
        name = comm.choose("broadcast", algorithm, ALGORITHMS, x.nbytes)
        if name == "binomial":
            x = yield from binomial(call, x if comm.rank == root else None, root)
        else:
            yield from ALGORITHMS[name](call, x.reshape(-1), root)
    return x

"""All-gather: every rank gets the concatenation of all ranks' arrays, in rank order. Lengths along the axis may differ.

    ring                each rank passes on what it received last; N - 1 steps
    direct              everybody sends its shard to everybody; N - 1 messages
    bruck               step k sends all that one has to the rank 2^k before; ⌈lg N⌉ steps for every N. Bruck, Ho, Kipnis, Upfal &
                        Weathersby 1997, "Efficient algorithms for all-to-all communications in multiport message-passing
                        systems", section IV. Keeps the shards in an order of its own: one more copy of the result
    recursive_doubling  exchange all that one has with ranks 1, 2, 4, … apart; lg N steps. Thakur, Rabenseifner & Gropp 2005,
                        section 4.1; other numbers of ranks are folded first (``folding.py``)

Each sends n (N - 1) / N bytes a rank (folded ranks and their partners apart). Doubling, with 4 ranks, seen from rank 0:

    0             has its own
    0 1           after step 0, with rank 1
    0 1 2 3       after step 1, with rank 2

Every algorithm is a generator ``algorithm(call, whole, offsets)``: shard r is ``whole[offsets[r]:offsets[r + 1]]``; this rank's
own is there already, and the others are filled.

Unless the caller knows the lengths, they go round first, in ⌈lg N⌉ small messages, which are counted apart; or, with ``out``, in
a direct exchange and in a doubling of a power of two of ranks, what is of another length than expected brings its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from refdist.comm.call import Call, Steps
from refdist.comm.folding import fold
from refdist.comm.message import fingerprint
from refdist.comm.reduction import bounds, parts, pieces
from refdist.comm.transport import Request

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "all_gather", "bruck", "direct", "doubling", "doubling_described", "exchange_lengths", "find",
           "join_described", "recursive_doubling", "ring"]


def ring(call: Call, whole: np.ndarray, offsets: Sequence[int]) -> Steps:
    """Each shard walks the ring."""
    size, rank = call.size, call.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    shards = pieces(whole, offsets)
    for step in range(size - 1):
        yield call.irecv(shards[(rank - step - 1) % size], left), call.isend(shards[(rank - step) % size], right)
        call.step += 1


def direct(call: Call, whole: np.ndarray, offsets: Sequence[int]) -> Steps:
    """Everybody to everybody at once."""
    size, rank = call.size, call.rank
    shards = pieces(whole, offsets)
    receives = [call.irecv(shards[(rank - distance) % size], (rank - distance) % size) for distance in range(1, size)]
    sends = [call.isend(shards[rank], (rank + distance) % size) for distance in range(1, size)]
    yield receives + sends
    call.step += 1


def bruck(call: Call, whole: np.ndarray, offsets: Sequence[int]) -> Steps:
    """``turned`` has the shards of ranks r, r + 1, r + 2, …: what is known is always its beginning."""
    size, rank = call.size, call.rank
    shards = pieces(whole, offsets)
    order = [(rank + place) % size for place in range(size)]
    edges = [0, *accumulate(shards[owner].size for owner in order)]
    turned = call.buffer(whole)
    turned[:edges[1]] = shards[rank]
    known = 1
    while known < size:
        count = min(known, size - known)
        received = turned[edges[known]:edges[known + count]]
        theirs, mine = (rank + known) % size, (rank - known) % size
        yield call.irecv(received, theirs), call.isend(turned[:edges[count]], mine)
        known += count
        call.step += 1
    for place, owner in enumerate(order[1:], 1):
        shards[owner][...] = turned[edges[place]:edges[place + 1]]


def doubling(call: Call, whole: np.ndarray, offsets: Sequence[int]) -> Steps:
    """Recursive doubling among a power of two of ranks."""
    rank, distance = call.rank, 1
    while distance < call.size:
        peer = rank ^ distance
        mine, theirs = rank & -distance, peer & -distance  # the first of the ``distance`` shards that each has
        sent, received = (whole[offsets[first]:offsets[first + distance]] for first in (mine, theirs))
        yield call.exchange(sent, received, peer)
        distance *= 2
        call.step += 1


def recursive_doubling(call: Call, whole: np.ndarray, offsets: Sequence[int]) -> Steps:
    """Doubling among the core; a folded rank hands its shard to its partner first and gets everything at the end."""
    core, folded, partner, owners = fold(call.size, call.rank)
    rank = call.rank
    if folded:
        yield (call.isend(whole[offsets[rank]:offsets[rank + 1]], partner),)
        yield (call.irecv(whole, partner),)
        return
    if partner >= 0:
        yield (call.irecv(whole[offsets[partner]:offsets[partner + 1]], partner),)
        call.step += 1
    yield from doubling(call.among(core), whole, [offsets[first] for first in (*owners, call.size)])
    if partner >= 0:
        yield (call.isend(whole, partner),)


ALGORITHMS: dict[str, Callable[..., Steps]] = {"ring": ring, "direct": direct, "bruck": bruck,
                                               "recursive_doubling": recursive_doubling}


def exchange_lengths(call: Call, length: int) -> Steps:
    """Every rank's length, by Bruck's algorithm: after each step twice as many ranks' lengths are known."""
    size, rank = call.size, call.rank
    lengths = np.zeros(size, np.int64)
    lengths[rank] = length
    yield from bruck(call, lengths, range(size + 1))
    return lengths.tolist()


def _direct_described(call: Call, whole: np.ndarray, own: np.ndarray) -> Steps:
    """The direct exchange of arrays whose lengths nobody knows; ``whole`` [axis, …] is filled.

    Shards of the lengths that ``np.array_split`` gives are the rule and come straight into their places. Others describe
    themselves; everything then goes through memory of its own first.
    """
    size, rank = call.size, call.rank
    places = pieces(whole, bounds(len(whole), size))
    even = len(own) == len(places[rank])
    if size == 2 and even:
        exchanged = call.exchange(own, places[1 - rank], 1 - rank, or_described=True)
        yield exchanged
        requests = {1 - rank: exchanged[0]}
    else:
        requests = {source: call.irecv(places[source], source, or_described=True)
                    for source in [(rank - distance) % size for distance in range(1, size)]}
        sends = [call.isend(own, (rank + distance) % size, None if even else own) for distance in range(1, size)]
        yield [*requests.values(), *sends]
    described = {source: request for source, request in requests.items() if request.description}
    if described or not even:
        join_described(call, whole, own, described)
    else:
        places[rank][...] = own


def join_described(call: Call, whole: np.ndarray, own: np.ndarray, requests: Mapping[int, Request]) -> None:
    """Fill ``whole`` [axis, …] with arrays of other lengths than ``np.array_split`` gives.

    They are this rank's ``own``, those of the requests, by rank, which described themselves, and those that did not, which are in
    the places of shards of such lengths.
    """
    places = pieces(whole, bounds(len(whole), call.size))
    arrays = [own if source == call.rank else call.received(requests[source]) if source in requests else place.copy()
              for source, place in enumerate(places)]
    lengths = [len(array) for array in arrays]
    if sum(lengths) != len(whole):
        raise ValueError(f"out has length {len(whole)} along the axis, the arrays have {lengths} (rank {call.rank})")
    np.concatenate(arrays, out=whole)


def doubling_described(call: Call, whole: np.ndarray, own: np.ndarray | None, step: int = 0,
                       come: Request | None = None) -> Steps:
    """Recursive doubling, among a power of two of ranks, of arrays whose lengths nobody knows; ``whole`` [axis, …] is filled.

    As a rule what a rank has of several shards is as long as ``np.array_split`` makes them, and goes straight to its place. What
    is not describes itself.

    Args:
        own: this rank's array; None if all that it has before this ``step`` is in its place.
        come: the receive of this step, if that is over already.
    """
    rank, edges, mine = call.rank, bounds(len(whole), call.size), own
    while 1 << step < call.size:
        distance = 1 << step
        peer, first = rank ^ distance, rank & -2 * distance
        middle, last = edges[first + distance], edges[first + 2 * distance]
        places = whole[edges[first]:middle], whole[middle:last]
        here, there = places if rank < peer else places[::-1]
        if mine is not None and len(mine) == len(here):
            here[...] = mine
            mine = None
        if come is None:
            requests = (call.exchange(here, there, peer, or_described=True) if mine is None else
                        (call.irecv(there, peer, or_described=True), call.isend(mine, peer, mine)))
            yield requests
            come = requests[0]
        if mine is not None or come.description:
            both = [here if mine is None else mine, call.received(come) if come.description else there]
            mine = np.concatenate(both if rank < peer else both[::-1])
        call.step += 1
        step, come = step + 1, None
    if mine is not None:
        if len(mine) != len(whole):
            raise ValueError(f"out has length {len(whole)} along the axis, the arrays have {len(mine)} together (rank {rank})")
        whole[...] = mine


def find(comm: Comm, x: np.ndarray, axis: int, algorithm: str | None, total: int,
         lengths_unknown: bool) -> tuple[str, str, int, None]:
    """What all calls with such an array and these options have in common (see ``Comm.recall``); ``total`` is the length of the
    result along the axis, -1 if nobody knows yet."""
    rest = x.shape[:axis] + x.shape[axis + 1:]
    name = comm.choose("all_gather", algorithm, ALGORITHMS, total * math.prod(rest) * x.itemsize)
    lengths = ("go round" if total < 0 else "as in out") if lengths_unknown else "given"
    return "all_gather", name, fingerprint("all_gather", name, x.dtype, rest, axis, f"lengths {lengths}"), None


def all_gather(comm: Comm, x: np.ndarray, axis: int = 0, algorithm: str | None = None, out: np.ndarray | None = None,
               lengths: Sequence[int] | None = None) -> Steps:
    """The steps of :meth:`Comm.all_gather`."""
    x = comm.check_array(x)
    axis = comm.check_axis(axis, x.ndim)
    length, rest = x.shape[axis], x.shape[:axis] + x.shape[axis + 1:]
    if out is not None:
        comm.check_writeable(out)
    if lengths is not None:
        if len(lengths) != comm.size or lengths[comm.rank] != length:
            raise ValueError(f"lengths={list(lengths)}: expected {comm.size} lengths, {length} for rank {comm.rank}")
        total = sum(lengths)
    elif out is not None and out.ndim == x.ndim:
        total = out.shape[axis]
    else:
        total = -1  # nobody knows yet
    if comm.size == 1:
        lengths, total = [length], length
    inner = math.prod(rest)
    call, _ = comm.recall(find, x, axis, algorithm, total, lengths is None)
    doubles = call.algorithm == "recursive_doubling" and not comm.size & (comm.size - 1)
    if lengths is None and (total < 0 or not (doubles or call.algorithm == "direct")):
        lengths = yield from exchange_lengths(call.part("all_gather lengths"), length)
        total = sum(lengths)
        call.algorithm = comm.choose("all_gather", algorithm, ALGORITHMS, total * inner * x.itemsize)
    if out is not None:
        comm.check_out(out, (*x.shape[:axis], total, *x.shape[axis + 1:]), x.dtype)
    if axis != 0 and lengths is not None and comm.size > 1:
        return (yield from _along(call, x, axis, lengths, out))
    whole = out
    if (whole is None or axis != 0 or not whole.flags.c_contiguous or comm.overlaps(whole, x)
            or (lengths is None and np.may_share_memory(whole, x))):  # what comes in would take the place of what goes out
        whole = np.empty_like(x, order="C", shape=(total, *rest))  # [axis, …]
    lead = x if axis == 0 else np.moveaxis(x, axis, 0)
    if comm.size == 1:
        np.copyto(whole, lead)
    elif lengths is None:
        lead = lead if lead.flags.c_contiguous else np.array(lead, order="C")
        yield from (doubling_described if doubles else _direct_described)(call, whole, lead)
    else:
        offsets = [0, *accumulate(lengths)]
        np.copyto(whole[offsets[comm.rank]:offsets[comm.rank + 1]], lead)
        yield from ALGORITHMS[call.algorithm](call, whole.reshape(-1), [inner * offset for offset in offsets])
    if whole is out:
        return out
    result = whole if axis == 0 else np.moveaxis(whole, 0, axis)
    if out is None:
        return np.ascontiguousarray(result)
    np.copyto(out, result)
    return out


def _along(call: Call, x: np.ndarray, axis: int, lengths: Sequence[int], out: np.ndarray | None) -> Steps:
    """All-gather along an axis that is not the first: shards travel as they lie in memory, and are put in place at the end."""
    before, after = x.shape[:axis], x.shape[axis + 1:]
    inner = math.prod(before) * math.prod(after)
    offsets = [0, *accumulate(inner * length for length in lengths)]
    shards = call.scratch(x, offsets[-1])
    np.copyto(shards[offsets[call.rank]:offsets[call.rank + 1]].reshape(x.shape), x)
    yield from ALGORITHMS[call.algorithm](call, shards, offsets)
    if out is None:
        out = np.empty_like(x, order="C", shape=(*before, sum(lengths), *after))
    for part, length, place in zip(pieces(shards, offsets), lengths, parts(out, axis, lengths), strict=True):
        np.copyto(place, part.reshape(*before, length, *after))
    return out

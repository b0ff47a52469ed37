"""Reduce-scatter: the arrays of all ranks are reduced, and rank r gets shard r of the result.

    ring               a partial sum starts next to its owner and walks the whole ring towards it; N - 1 steps
    direct             everybody sends its shard r to rank r, which adds them in rank order; N - 1 messages
    recursive_halving  exchange half of what is left with ranks N/2, N/4, … apart; lg N steps (Thakur, Rabenseifner & Gropp 2005,
                       section 4.4); other numbers of ranks are folded first (``folding.py``)
    recursive_doubling the whole sum on every rank, of which each keeps its shard: for very small arrays, where steps are all that
                       counts; ⌊lg N⌋ steps of n bytes (2 more if N is no power of two), as the all-reduce of this name

Each of the others sends n (N - 1) / N bytes a rank, where N is a power of two for halving, and needs memory for at most as many;
the partner of a folded rank needs up to 2 n / 3 more, since the folded rank's whole array comes in as well. Doubling needs two
arrays like the input.

Halving, with 4 ranks, seen from rank 0:

    0 1 2 3   has all four shards
    ▇ ▇ ┄ ┄   sends shards 2 3 to rank 2, adds 0 1 of rank 2
    ▇ ┄       sends shard 1 to rank 1, adds 0 of rank 1

Every algorithm is a generator ``algorithm(call, x, offsets, own, reduce)``: of this rank's flat ``x``, which is not changed,
``x[offsets[r]:offsets[r + 1]]`` is its contribution to the result of rank r; the flat ``own`` is filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from refdist.comm.call import Call, Steps
from refdist.comm.folding import fold
from refdist.comm.message import fingerprint
from refdist.comm.reduction import Reduce, accumulation_dtype, accumulator, bounds, divide, parts, pieces, reduction

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "direct", "doubling", "find", "halving", "ordered", "recursive_doubling", "recursive_halving",
           "reduce_scatter", "ring"]


def ring(call: Call, x: np.ndarray, offsets: Sequence[int], own: np.ndarray, reduce: Reduce) -> Steps:
    """The partial sum of shard r starts at rank r + 1 and has been everywhere when it comes to rank r."""
    size, rank = call.size, call.rank
    shards = pieces(x, offsets)
    left, right = (rank - 1) % size, (rank + 1) % size
    longest = max(shard.size for shard in shards)
    buffers = [call.buffer(own, longest) for _ in range(min(2, size - 1))]  # one is sent while the other one is filled
    partial = shards[left]
    for step in range(size - 1):
        mine = shards[(rank - 2 - step) % size]
        received = buffers[step % 2][:mine.size]
        yield call.irecv(received, left), call.isend(partial, right)
        partial = reduce(mine, received, out=own if step == size - 2 else received)
        call.step += 1


def direct(call: Call, x: np.ndarray, offsets: Sequence[int], own: np.ndarray, reduce: Reduce) -> Steps:
    """All contributions to a shard come to its owner, which adds each as soon as it and all lower ranks' are there."""
    size, rank = call.size, call.rank
    shards = pieces(x, offsets)
    incoming = call.buffer(own, own.size * (size - 1))
    contributions = [incoming[own.size * index:own.size * (index + 1)] for index in range(size - 1)]
    contributions.insert(rank, shards[rank])
    receives = {source: call.irecv(contributions[source], source) for source in _others(size, rank, -1)}
    sends = [call.isend(shards[dest], dest) for dest in _others(size, rank, +1)]
    partial = accumulator(reduce, incoming[:own.size])  # not ``own``, which may be this rank's contribution itself
    total = contributions[0]
    for source in range(size):
        if source != rank:
            yield (receives[source],)
            call.step += 1
        if source > 0:
            total = reduce(total, contributions[source], out=own if source == size - 1 else partial)
    yield sends


def _others(size: int, rank: int, direction: int) -> list[int]:
    """The other ranks, beginning with the next one, so that not everybody sends to the same rank at once."""
    return [(rank + direction * distance) % size for distance in range(1, size)]


def halving(call: Call, x: np.ndarray, offsets: Sequence[int], own: np.ndarray, reduce: Reduce,
            sums: np.ndarray | None = None) -> Steps:
    """Recursive halving among a power of two of ranks; the shard of rank i is ``x[offsets[i]:offsets[i + 1]]``.

    Partial sums are kept in ``sums``, an array like ``x`` or ``x`` itself; without it, where they came in.
    """
    rank = call.rank
    first, last = 0, call.size  # the shards whose partial sum this rank still holds
    partial, start = x, 0  # partial[0] belongs to element ``start``
    incoming: np.ndarray | None = None
    while last - first > 1:
        middle = (first + last) // 2
        peer = rank ^ (last - first) // 2
        kept, given = ((first, middle), (middle, last)) if rank < middle else ((middle, last), (first, middle))
        send, keep = (partial[offsets[a] - start:offsets[b] - start] for a, b in (given, kept))
        if sums is None or incoming is None:
            incoming = call.buffer(own, keep.size)
        received = incoming[:keep.size]
        yield call.exchange(send, received, peer)
        lower, upper = (keep, received) if rank < peer else (received, keep)
        first, last = kept
        start = offsets[first]
        target = received if sums is None else sums[start:offsets[last]]
        partial = reduce(lower, upper, out=own if last - first == 1 else target)
        call.step += 1
    if partial is x:
        np.copyto(own, x)


def recursive_halving(call: Call, x: np.ndarray, offsets: Sequence[int], own: np.ndarray, reduce: Reduce) -> Steps:
    """Halving among the core; a folded rank hands its whole array to its partner first and gets its shard at the end."""
    core, folded, partner, owners = fold(call.size, call.rank)
    if folded:
        yield (call.isend(x, partner),)
        yield (call.irecv(own, partner),)
        return
    if partner >= 0:
        received = call.buffer(x)
        yield (call.irecv(received, partner),)
        x = reduce(received, x, out=received)
        call.step += 1
    among = call.among(core)
    edges = [offsets[first] for first in (*owners, call.size)]  # of what each core rank and its partner own
    if partner < 0:
        yield from halving(among, x, edges, own, reduce)
        return
    pair = x[edges[among.rank]:edges[among.rank + 1]]  # its partner's shard, then its own
    yield from halving(among, x, edges, pair, reduce, sums=x)
    theirs = pair.size - own.size
    np.copyto(own, pair[theirs:])
    yield (call.isend(pair[:theirs], partner),)


def doubling(call: Call, x: np.ndarray, total: np.ndarray, incoming: np.ndarray, reduce: Reduce) -> Steps:
    """The sum of whole arrays among a power of two of ranks: each step doubles the number of ranks whose sum everybody has."""
    rank, distance = call.rank, 1
    while distance < call.size:
        peer = rank ^ distance
        yield call.exchange(x, incoming, peer)
        # The same order on both, so that both get the same bits.
        x = reduce(x, incoming, out=total) if rank < peer else reduce(incoming, x, out=total)
        distance *= 2
        call.step += 1


def recursive_doubling(call: Call, x: np.ndarray, offsets: Sequence[int], own: np.ndarray, reduce: Reduce) -> Steps:
    """Doubling among the core; a folded rank hands its whole array to its partner first and gets its shard at the end."""
    core, folded, partner, _ = fold(call.size, call.rank)
    if folded:
        yield (call.isend(x, partner),)
        yield (call.irecv(own, partner),)
        return
    total, incoming = call.buffer(x), call.buffer(x)
    if partner >= 0:
        yield (call.irecv(incoming, partner),)
        x = reduce(incoming, x, out=total)
        call.step += 1
    yield from doubling(call.among(core), x, total, incoming, reduce)
    shards = pieces(total, offsets)
    np.copyto(own, shards[call.rank])
    if partner >= 0:
        yield (call.isend(shards[partner], partner),)


ALGORITHMS = {"ring": ring, "direct": direct, "recursive_halving": recursive_halving, "recursive_doubling": recursive_doubling}


def ordered(algorithm: str | None, order: str | None) -> str | None:
    """The algorithm that keeps the order asked for: only a direct exchange adds contributions in rank order."""
    if order is None:
        return algorithm
    if order != "rank":
        raise ValueError(f"order={order!r}: expected 'rank' or None")
    if algorithm not in (None, "direct"):
        raise ValueError(f"algorithm={algorithm!r} does not add in rank order: order='rank' takes 'direct'")
    return "direct"


def find(comm: Comm, x: np.ndarray, axis: int, op: str, algorithm: str | None, order: str | None,
         accumulate: Any) -> tuple[str, str, int, tuple[Reduce, tuple[int, ...]]]:
    """What all calls with such an array and these options have in common (see ``Comm.recall``), ``offsets`` of shards with it."""
    reduce = reduction(op, accumulate, x.dtype)
    algorithm = comm.choose("reduce_scatter", ordered(algorithm, order), ALGORITHMS, x.nbytes)
    mark = fingerprint("reduce_scatter", algorithm, x.dtype, x.shape, axis, op, accumulation_dtype(reduce))
    return "reduce_scatter", algorithm, mark, (reduce, bounds(x.shape[axis], comm.size))


def reduce_scatter(comm: Comm, x: np.ndarray, axis: int = 0, op: str = "sum", algorithm: str | None = None,
                   order: str | None = None, out: np.ndarray | None = None, accumulate: Any = None) -> Steps:
    """The steps of :meth:`Comm.reduce_scatter`."""
    x = comm.check_array(x)
    axis = comm.check_axis(axis, x.ndim)
    call, (reduce, offsets) = comm.recall(find, x, axis, op, algorithm, order, accumulate)
    length = offsets[comm.rank + 1] - offsets[comm.rank]
    if out is not None:
        comm.check_out(out, (*x.shape[:axis], length, *x.shape[axis + 1:]), x.dtype)
    inner = x.size // x.shape[axis] if x.shape[axis] else 0
    flat = _end_to_end(call, x, axis, offsets)
    if inner != 1:
        offsets = tuple([inner * offset for offset in offsets])
    own = out
    if own is None or not own.flags.c_contiguous or comm.overlaps(own, x):
        own = np.empty_like(x, order="C", shape=(*x.shape[:axis], length, *x.shape[axis + 1:]))
    if comm.size == 1:
        np.copyto(own, x)
    else:
        yield from ALGORITHMS[call.algorithm](call, flat, offsets, own if own.ndim == 1 else own.reshape(-1), reduce)
    if op == "avg":
        divide(own, comm.size, reduce)
    if own is out or out is None:
        return own
    np.copyto(out, own)
    return out


def _end_to_end(call: Call, x: np.ndarray, axis: int, offsets: Sequence[int]) -> np.ndarray:
    """The shards of x along an axis, each in its own order, one after the other, flat: x itself where they lie so."""
    if x.flags.c_contiguous and x.size == math.prod(x.shape[axis:]):
        return x.reshape(-1)
    flat = call.scratch(x, x.size)
    end = 0
    for part in parts(x, axis, np.diff(offsets).tolist()):
        start, end = end, end + part.size
        np.copyto(flat[start:end].reshape(part.shape), part)
    return flat

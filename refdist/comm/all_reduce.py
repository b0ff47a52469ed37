"""All-reduce: every rank gets the elementwise reduction of all ranks' arrays.

    ring                2 (N - 1) steps, 2 n (N - 1) / N bytes: no algorithm sends less. Patarasuk & Yuan 2009, "Bandwidth optimal
                        all-reduce algorithms for clusters of workstations", section 3
    direct              the same bytes; every rank adds its chunk of all ranks, in rank order, and sends the sum to all
    recursive_doubling  ⌊lg N⌋ steps (2 more if N is no power of two), n ⌊lg N⌋ bytes: for small arrays. Thakur, Rabenseifner &
                        Gropp 2005, "Optimization of collective communication operations in MPICH", section 4.5
    rabenseifner        recursive halving, then recursive doubling: 2 lg N steps, 2 n (N - 1) / N bytes. The same, section 4.5
    tree                binomial tree up, binomial tree down: 2 ⌈lg N⌉ steps
    double_tree         each half of the array on a tree of its own, ~2 lg N steps, at most 2 n bytes
    hierarchical        within each node, then across nodes, then within each node, by rings. Mikami et al. 2018, "Massively
                        distributed SGD: ImageNet/ResNet-50 training in a flash", section 2.3

The ring: the array is cut into N chunks. A reduce-scatter sends partial sums round the ring, an all-gather sends the finished
chunks round once more.

        step 0        step 1        step 2                  step 3 …
    0   c0 ─▶ 1       c2 ─▶ 1       c1 complete  ─▶ 1       c0 complete ─▶ 1
    1   c1 ─▶ 2       c0 ─▶ 2       c2 complete  ─▶ 2       …
    2   c2 ─▶ 0       c1 ─▶ 0       c0 complete  ─▶ 0

Every algorithm is a generator ``algorithm(call, x, total, reduce)`` of flat arrays: ``x`` is this rank's contribution and is not
changed, unless ``total``, the result, is ``x`` itself. All ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from refdist.comm import all_gather as gathering
from refdist.comm import reduce_scatter as scattering
from refdist.comm.call import Call, Steps
from refdist.comm.double_tree import double_tree
from refdist.comm.folding import fold
from refdist.comm.message import fingerprint
from refdist.comm.reduce import binomial
from refdist.comm.reduction import Reduce, accumulation_dtype, bounds, divide, pieces, reduction

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["ALGORITHMS", "all_reduce", "direct", "find", "hierarchical", "rabenseifner", "recursive_doubling", "ring", "tree"]


def ring(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce) -> Steps:
    """A partial sum of each chunk walks the ring and grows; then the complete chunks walk it once more."""
    size, rank = call.size, call.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    offsets = bounds(total.size, size)
    own, chunks = pieces(x, offsets), pieces(total, offsets)
    incoming = call.buffer(total, chunks[0].size)  # the first chunk is the longest
    mine = own[rank]
    for step in range(size - 1):
        part = (rank - step - 1) % size
        theirs = chunks[part]
        received = incoming[:theirs.size]
        yield call.irecv(received, left), call.isend(mine, right)
        mine = reduce(own[part], received, out=theirs)
        call.step += 1
    for step in range(size - 1):
        theirs = chunks[(rank - step) % size]
        yield call.irecv(theirs, left), call.isend(mine, right)
        mine = theirs
        call.step += 1


def direct(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce) -> Steps:
    """Rank r adds chunk r of all ranks, in rank order, and sends the sum to everybody."""
    offsets = bounds(total.size, call.size)
    yield from scattering.direct(call, x, offsets, total[offsets[call.rank]:offsets[call.rank + 1]], reduce)
    yield from gathering.direct(call, total, offsets)


def recursive_doubling(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce) -> Steps:
    """Whole arrays between ranks 1, 2, 4, … apart."""
    core, folded, partner, _ = fold(call.size, call.rank)
    if folded:
        yield (call.isend(x, partner),)
        yield (call.irecv(total, partner),)
        return
    incoming = call.buffer(total)
    if partner >= 0:
        yield (call.irecv(incoming, partner),)
        x = reduce(incoming, x, out=total)
        call.step += 1
    yield from scattering.doubling(call.among(core), x, total, incoming, reduce)
    if partner >= 0:
        yield (call.isend(total, partner),)


def rabenseifner(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce) -> Steps:
    """Halving: each step exchanges half of what is left, with ranks N/2, N/4, … apart. Doubling: the same way back."""
    core, folded, partner, _ = fold(call.size, call.rank)
    if folded:
        yield (call.isend(x, partner),)
        yield (call.irecv(total, partner),)
        return
    if partner >= 0:
        incoming = call.buffer(total)
        yield (call.irecv(incoming, partner),)
        x = reduce(incoming, x, out=total)
        del incoming
        call.step += 1
    among = call.among(core)
    offsets = bounds(total.size, among.size)
    chunk = total[offsets[among.rank]:offsets[among.rank + 1]]
    yield from scattering.halving(among, x, offsets, chunk, reduce, sums=total)
    yield from gathering.doubling(among, total, offsets)
    if partner >= 0:
        yield (call.isend(total, partner),)


def tree(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce) -> Steps:
    """Partial sums go up a binomial tree to rank 0, the result comes down the same tree."""
    size, rank = call.size, call.rank
    yield from binomial(call, x, lambda: total, reduce, root=0)
    reach = 1
    while reach < size:
        if rank < reach and rank + reach < size:
            yield (call.isend(total, rank + reach),)
        elif reach <= rank < 2 * reach:
            yield (call.irecv(total, rank - reach),)
        reach *= 2
        call.step += 1


def hierarchical(call: Call, x: np.ndarray, total: np.ndarray, reduce: Reduce, nodes: Sequence[Sequence[int]]) -> Steps:
    """Reduce-scatter within each node, all-reduce of each chunk across the nodes, all-gather within each node; rings all three.

    With g ranks on each of m nodes a rank sends 2 n (g - 1) / g bytes within its node and 2 (n / g) (m - 1) / m to others. Nodes
    may differ in size: the array is cut into as many chunks as the smallest node has ranks, and ranks beyond that own none.
    """
    if sorted(rank for node in nodes for rank in node) != list(range(call.size)):
        raise ValueError(f"groups={[list(node) for node in nodes]} (rank {call.rank}): every rank of 0 to {call.size - 1} "
                         "must be in exactly one")
    within = call.among(next(list(node) for node in nodes if call.rank in node))
    place, owners = within.rank, min(len(node) for node in nodes)
    offsets = [*bounds(total.size, owners), *[total.size] * (within.size - owners)]
    chunk = total[offsets[place]:offsets[place + 1]]
    if within.size > 1:
        yield from scattering.ring(within, x, offsets, chunk, reduce)
    elif total is not x:
        np.copyto(total, x)
    if place < owners and len(nodes) > 1:
        yield from ring(call.among([node[place] for node in nodes]), chunk, chunk, reduce)
    yield from gathering.ring(within, total, offsets)


ALGORITHMS: dict[str, Callable[..., Steps]] = {
    "ring": ring, "direct": direct, "recursive_doubling": recursive_doubling, "rabenseifner": rabenseifner, "tree": tree,
    "double_tree": double_tree, "hierarchical": hierarchical,
}


def find(comm: Comm, x: np.ndarray, op: str, algorithm: str | None, order: str | None,
         accumulate: Any) -> tuple[str, str, int, Reduce]:
    """What all calls with such an array and these options have in common (see ``Comm.recall``)."""
    reduce = reduction(op, accumulate, x.dtype)
    algorithm = comm.choose("all_reduce", scattering.ordered(algorithm, order), ALGORITHMS, x.nbytes)
    mark = fingerprint("all_reduce", algorithm, x.dtype, x.shape, op, accumulation_dtype(reduce))
    return "all_reduce", algorithm, mark, reduce


def all_reduce(comm: Comm, x: np.ndarray, op: str = "sum", algorithm: str | None = None, order: str | None = None,
               out: np.ndarray | None = None, accumulate: Any = None, groups: Sequence[Sequence[int]] | None = None) -> Steps:
    """The steps of :meth:`Comm.all_reduce`."""
    x = comm.check_array(x)
    call, reduce = comm.recall(find, x, op, algorithm, order, accumulate)
    if groups is not None and call.algorithm != "hierarchical":
        raise ValueError(f"groups (rank {comm.rank}): for algorithm='hierarchical', not {call.algorithm!r}")
    if out is not None:
        comm.check_out(out, x.shape, x.dtype)
    if not x.flags.c_contiguous:
        x = np.array(x, order="C")
    total = out
    if total is None or not total.flags.c_contiguous or comm.overlaps(total, x):
        total = np.empty_like(x)
    mine, result = (x, total) if x.ndim == 1 else (x.reshape(-1), total.reshape(-1))
    if comm.size == 1:
        np.copyto(total, x)
    elif call.algorithm == "hierarchical":
        yield from hierarchical(call, mine, result, reduce, comm.nodes() if groups is None else groups)
    else:
        yield from ALGORITHMS[call.algorithm](call, mine, result, reduce)
    if op == "avg":
        divide(total, comm.size, reduce)
    if out is None or total is out:
        return total
    np.copyto(out, total)
    return out

"""Calls of a rank that has nothing else under way: the messages of the general algorithms, in a straight line.

For small arrays the general way (a generator, a request, a turn of the driver a step) takes longer than the messages themselves.
Here all that calls with one kind of array have in common is found out once, and a step is one ``transport.swap`` with a peer, or
one ``transport.trade`` with all of them. What travels is the same, header by header, so that one rank may come this way and its
peer, which has a Work under way, the other. Groups without a device that counts, on a transport that can swap:

    all_reduce      direct; with a power of two of ranks recursive doubling, and rabenseifner of as many elements on each rank
    reduce_scatter  direct, along the first axis; with a power of two of ranks recursive halving, of shards of one length
    all_gather      direct, along the first axis, into ``out``, of shards as ``np.array_split`` cuts them

Each function returns None when a call is not one of these, before anything has been sent. Calls with bad arguments go the
general way too, which raises the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from refdist.comm import all_gather as gathering
from refdist.comm import all_reduce as reducing
from refdist.comm import reduce_scatter as scattering
from refdist.comm.call import Call
from refdist.comm.message import pack_header
from refdist.comm.reduction import Reduce, accumulator, bounds, divide
from refdist.comm.transport import EAGER, Request

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["MOST", "Straight"]

MOST = 1 << 30  # bytes of an array up to which calls go this way: what fits into one message
_KNOWN = 1024  # kinds of calls that are remembered
_SCRATCH = 1 << 18  # bytes of the memory for incoming messages that is kept

_Headers: TypeAlias = tuple[Sequence[bytes], Sequence[bytes], Sequence[bytes]]


class _Kind(NamedTuple):
    """What calls with one kind of array have in common.

    Attributes:
        call: is used again and again.
        shape: of the result.
        reduce: the addition; None for an all-gather.
        own: where this rank's shard is in the flat whole array.
        ahead, others: where those of the next ranks and of all others in order are.
        sizes: of these shards in bytes: of this rank's, of ``ahead``, of ``others``.
        even: whether all are of one size.
        small: whether all are small.
    """

    call: Call
    shape: tuple[int, ...]
    reduce: Any
    own: slice
    ahead: Sequence[slice]
    others: Sequence[slice]
    sizes: tuple[int, Sequence[int], Sequence[int]]
    even: bool
    small: bool


class Straight:
    """The straight way for one group; not to be used where :meth:`fits` is false."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.transport = comm.transport
        self.known: dict[Any, _Kind | None] = {}
        self.scratch: np.ndarray | None = None
        rank, size = comm.rank, comm.size
        self.count = size - 1
        self.none = [None] * self.count
        self.ahead = [(rank + distance) % size for distance in range(1, size)]
        self.others = sorted(self.ahead)
        self.peers_ahead, self.peers = ([comm.members[other] for other in ranks] for ranks in (self.ahead, self.others))
        self.algorithms = {("all_reduce", "direct"), ("reduce_scatter", "direct"), ("all_gather", "direct")}
        self.steps: list[tuple[int, bool]] = []  # (world rank, whether this rank is the lower one) of peers 1, 2, 4, … apart
        if not size & (size - 1):
            distances = [1 << step for step in range(size.bit_length() - 1)]
            self.steps = [(comm.members[rank ^ distance], not rank & distance) for distance in distances]
            self.algorithms |= {("all_reduce", "recursive_doubling"), ("all_reduce", "rabenseifner"),
                                ("reduce_scatter", "recursive_halving")}

    @staticmethod
    def fits(comm: Comm) -> bool:
        """Whether calls on a group may go this way."""
        return comm.device is None and comm.transport.can_swap and comm.size > 1

    def all_reduce(self, x: np.ndarray, op: str, algorithm: str | None, order: str | None, out: np.ndarray | None,
                   accumulate: Any) -> np.ndarray | None:
        """As :meth:`Comm.all_reduce`."""
        kind = self._kind(Straight._all_reduce, x, op, algorithm, order, accumulate)
        if kind is None or not x.flags.c_contiguous:
            return None
        call, shape, reduce = kind[:3]
        if out is None:
            out = np.empty_like(x)
        elif (type(out) is not np.ndarray or out.shape != shape or out.dtype != x.dtype or not out.flags.carray
              or self.comm.overlaps(out, x)):
            return None
        self.comm.renew(call)
        partial, total = (x, out) if x.ndim == 1 else (x.reshape(-1), out.reshape(-1))
        if call.algorithm == "recursive_doubling":
            incoming = None if x.nbytes <= EAGER else self._memory(call, total, total.size)
            for peer, lower in self.steps:
                received = self._swap(peer, call, partial, incoming)
                partial = reduce(partial, received, out=total) if lower else reduce(received, partial, out=total)
        elif call.algorithm == "rabenseifner":
            own = total[kind.own]
            self._halve(call, self.steps[::-1], partial, own, reduce, total)
            known, start = own.size, kind.own.start
            for peer, lower in self.steps:
                other = start + known if lower else start - known
                self._swap(peer, call, total[start:start + known], total[other:other + known])
                start, known = min(start, other), 2 * known
        else:
            own, headers = total[kind.own], self._headers(kind)
            apart = kind.even and not np.may_share_memory(out, x)  # what comes in then needs no memory of its own
            self._scatter(kind, headers, partial, own, [total[shard] for shard in kind.others] if apart else None)
            self._gather(kind, headers, own, total)
        if op == "avg":
            divide(total, call.size, reduce)
        return out

    def reduce_scatter(self, x: np.ndarray, axis: int, op: str, algorithm: str | None, order: str | None,
                       out: np.ndarray | None, accumulate: Any) -> np.ndarray | None:
        """As :meth:`Comm.reduce_scatter`."""
        if axis != 0 or x.ndim == 0:
            return None
        kind = self._kind(Straight._reduce_scatter, x, op, algorithm, order, accumulate)
        if kind is None or not x.flags.c_contiguous:
            return None
        call, shape, reduce = kind[:3]
        if out is None:
            out = np.empty_like(x, shape=shape)
        elif (type(out) is not np.ndarray or out.shape != shape or out.dtype != x.dtype or not out.flags.carray
              or self.comm.overlaps(out, x)):
            return None
        self.comm.renew(call)
        mine, own = (x, out) if x.ndim == 1 else (x.reshape(-1), out.reshape(-1))
        if call.algorithm == "recursive_halving":
            self._halve(call, self.steps[::-1], mine, own, reduce)
        else:
            self._scatter(kind, self._headers(kind), mine, own)
        if op == "avg":
            divide(own, call.size, reduce)
        return out

    def all_gather(self, x: np.ndarray, axis: int, algorithm: str | None, out: np.ndarray | None,
                   lengths: Sequence[int] | None) -> np.ndarray | None:
        """As :meth:`Comm.all_gather`."""
        if type(out) is not np.ndarray or axis != 0 or lengths is not None or x.ndim == 0:
            return None
        kind = self._kind(Straight._all_gather, x, algorithm, out.dtype, out.shape)
        if (kind is None or not out.flags.carray or not x.flags.c_contiguous
                or (x.base is not None and self.comm.overlaps(out, x))):
            return None
        call = kind.call
        self.comm.renew(call)
        own, whole = (x, out) if x.ndim == 1 else (x.reshape(-1), out.reshape(-1))
        if call.size == 2 and kind.even:
            theirs = whole[kind.others[0]]
            received = self._swap(self.peers[0], call, own, None if kind.small else theirs)
            if kind.small:
                theirs[...] = received
            whole[kind.own] = own
            return out
        described: dict[int, Request] = {}
        self._gather(kind, self._headers(kind), own, whole, described)
        if described:
            gathering.join_described(call, out, x, {call.members.index(peer): request for peer, request in described.items()})
        return out

    # -------------------------------------------------------------------------------------------------- steps

    def _halve(self, call: Call, steps: Sequence[tuple[int, bool]], partial: np.ndarray, own: np.ndarray, reduce: Reduce,
               sums: np.ndarray | None = None) -> None:
        """Recursive halving of ``partial``; partial sums go to ``sums``, which may be ``partial``, or to memory of their own."""
        for peer, lower in steps:
            half = partial.size // 2
            keep, send = (partial[:half], partial[half:]) if lower else (partial[half:], partial[:half])
            received = self._swap(peer, call, send, None if send.nbytes <= EAGER else self._memory(call, own, half))
            if sums is not None:
                sums = sums[:half] if lower else sums[half:]
            target = own if half == own.size else call.buffer(own, half) if sums is None else sums
            partial = reduce(keep, received, out=target) if lower else reduce(received, keep, out=target)

    def _scatter(self, kind: _Kind, headers: _Headers, x: np.ndarray, own: np.ndarray,
                 theirs: list[np.ndarray] | None = None) -> None:
        """The direct exchange of contributions; ``own``, which may be this rank's contribution itself, is filled.

        What comes in goes to ``theirs``, in order of ranks, or to memory of its own.
        """
        call, size, count = kind.call, own.size, self.count
        mine = [x[shard] for shard in kind.ahead]
        if kind.sizes[0] <= EAGER:
            received = self.transport.trade(self.comm.context, call.tag, call, self.peers_ahead, headers[1], mine,
                                            self.peers, headers[0], self.none)
            theirs = [np.frombuffer(content, own.dtype, size) for content in received[:count]]
        else:
            if theirs is None:
                memory = self._memory(call, own, size * count)
                theirs = [memory[start:start + size] for start in range(0, size * count, size)]
            self.transport.trade(self.comm.context, call.tag, call, self.peers_ahead, headers[1], mine,
                                 self.peers, headers[0], theirs)
        reduce = kind.reduce
        partial = accumulator(reduce, theirs[0])
        theirs.insert(call.rank, x[kind.own])
        total = theirs[0]
        for contribution in theirs[1:-1]:
            total = reduce(total, contribution, out=partial)
        reduce(total, theirs[-1], out=own)

    def _gather(self, kind: _Kind, headers: _Headers, own: np.ndarray, whole: np.ndarray,
                described: dict[int, Request] | None = None) -> None:
        """The direct exchange of shards into the flat ``whole``; for an all-reduce ``own`` is a part of it."""
        call, small, sizes = kind.call, kind.small, kind.sizes[2]
        theirs: Sequence[np.ndarray | None] = self.none
        if not small:
            theirs = [None if length <= EAGER else whole[shard] for shard, length in zip(kind.others, sizes, strict=True)]
        received = self.transport.trade(self.comm.context, call.tag, call, self.peers_ahead, headers[0], [own] * self.count,
                                        self.peers, headers[2], theirs, described)
        if small and not described:
            parts = [content[:length] for content, length in zip(received, sizes, strict=False)]
            parts.insert(call.rank, own.tobytes())
            whole[...] = np.frombuffer(b"".join(parts), whole.dtype, whole.size)
            return
        if described is not None:
            whole[kind.own] = own
        if not kind.even or small:
            for peer, shard, length, content in zip(self.peers, kind.others, sizes, received, strict=False):
                if length <= EAGER and not (described and peer in described):
                    whole[shard] = np.frombuffer(content, whole.dtype, length // whole.itemsize)

    def _headers(self, kind: _Kind) -> _Headers:
        """The headers of this rank's shard, as often as there are others, of those ahead and of all others."""
        call, (own, ahead, others) = kind.call, kind.sizes
        mark, sequence, epoch = call.mark, call.sequence, self.transport.epoch
        headers = [pack_header(mark, sequence, own, epoch, 0)] * self.count
        if kind.even:
            return headers, headers, headers
        return (headers, [pack_header(mark, sequence, size, epoch, 0) for size in ahead],
                [pack_header(mark, sequence, size, epoch, 0) for size in others])

    def _memory(self, call: Call, like: np.ndarray, size: int) -> np.ndarray:
        """A flat array of ``size`` elements for what comes in, to be used again by the next call."""
        nbytes = size * like.itemsize
        if nbytes > _SCRATCH:
            return call.scratch(like, size)
        if self.scratch is None:
            self.scratch = np.empty(_SCRATCH, np.uint8)
        return self.scratch[:nbytes].view(like.dtype)

    def _swap(self, peer: int, call: Call, mine: np.ndarray, theirs: np.ndarray | None) -> np.ndarray:
        transport = self.transport
        header = pack_header(call.mark, call.sequence, mine.nbytes, transport.epoch, 0)
        return transport.swap(peer, self.comm.context, call.tag, header, mine, theirs, call)

    # ------------------------------------------------------------------------------------ kinds of calls

    def _kind(self, find: Callable[..., _Kind | None], x: np.ndarray, *options: Any) -> _Kind | None:
        """What is known of calls with such an array and these options; None if they go the general way."""
        transport = self.transport
        if transport.active or transport.checks or transport.rendezvous:
            return None
        key = find, x.dtype, x.shape, options
        try:
            return self.known[key]
        except KeyError:
            pass
        if len(self.known) >= _KNOWN:
            self.known.clear()
        kind = self.known[key] = find(self, x, *options) if self.comm.check_array(x) is x and x.nbytes <= MOST else None
        return kind

    def _all_reduce(self, x: np.ndarray, *options: Any) -> _Kind | None:
        name, algorithm, mark, reduce = reducing.find(self.comm, x, *options)
        if algorithm == "rabenseifner" and x.size % self.comm.size:
            return None
        return self._new(name, algorithm, mark, x.shape, bounds(x.size, self.comm.size), x.itemsize, reduce)

    def _reduce_scatter(self, x: np.ndarray, *options: Any) -> _Kind | None:
        name, algorithm, mark, (reduce, offsets) = scattering.find(self.comm, x, 0, *options)
        if algorithm == "recursive_halving" and x.shape[0] % self.comm.size:
            return None
        shape = (offsets[self.comm.rank + 1] - offsets[self.comm.rank], *x.shape[1:])
        inner = math.prod(shape[1:])
        return self._new(name, algorithm, mark, shape, [inner * offset for offset in offsets], x.itemsize, reduce)

    def _all_gather(self, x: np.ndarray, algorithm: str | None, dtype: np.dtype, shape: tuple[int, ...]) -> _Kind | None:
        if dtype != x.dtype or len(shape) != x.ndim or shape[1:] != x.shape[1:]:
            return None
        offsets, rank, inner = bounds(shape[0], self.comm.size), self.comm.rank, math.prod(shape[1:])
        if x.shape[0] != offsets[rank + 1] - offsets[rank]:
            return None
        name, algorithm, mark, _ = gathering.find(self.comm, x, 0, algorithm, shape[0], True)
        return self._new(name, algorithm, mark, shape, [inner * offset for offset in offsets], x.itemsize, None)

    def _new(self, name: str, algorithm: str, mark: int, shape: tuple[int, ...], offsets: Sequence[int], itemsize: int,
             reduce: Any) -> _Kind | None:
        """``offsets``: where each rank's shard begins in the flat whole array, and where the last one ends."""
        if (name, algorithm) not in self.algorithms:
            return None
        shards = [slice(*edges) for edges in pairwise(offsets)]
        sizes = [itemsize * (shard.stop - shard.start) for shard in shards]
        rank, ahead, others = self.comm.rank, self.ahead, self.others
        return _Kind(Call(self.comm, name, algorithm, 0, 0, mark), shape, reduce, shards[rank],
                     [shards[other] for other in ahead], [shards[other] for other in others],
                     (sizes[rank], [sizes[other] for other in ahead], [sizes[other] for other in others]),
                     len({*sizes}) == 1, max(sizes) <= EAGER)

"""Calls of a rank that has nothing else under way: the messages of the general algorithms, in a straight line.

For small arrays the general way (a generator, a request, a turn of the driver a step) takes longer than the messages themselves.
Here all that calls with one kind of array have in common is found out once, and a step is one ``transport.swap`` with a peer, or
one ``transport.trade`` with all of them. What travels is the same, header by header, so that one rank may come this way and its
peer, which has a Work under way, the other. Groups without a device that counts, on a transport that can swap:

    all_reduce      direct; with a power of two of ranks recursive doubling and rabenseifner
    reduce_scatter  direct, along the first axis; with a power of two of ranks recursive doubling and halving
    all_gather      direct, along the first axis, into ``out``, of shards as ``np.array_split`` cuts them; with a power of two of
                    ranks recursive doubling

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
from refdist.comm.work import drive

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
        halving: of each step of a recursive halving the peer, whether this rank is the lower one, what is kept of the partial
            sum, what is sent of it, and where what comes in goes in memory for ``incoming`` elements.
        doubling: of each step of a recursive doubling the peer, what this rank has of the flat whole array, and what it has.
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
    halving: Sequence[tuple[int, bool, slice, slice, slice]] = ()
    incoming: int = 0
    doubling: Sequence[tuple[int, slice, slice]] = ()


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
                                ("reduce_scatter", "recursive_doubling"), ("reduce_scatter", "recursive_halving"),
                                ("all_gather", "recursive_doubling")}

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
            self._double_sums(call, partial, total, reduce)
        elif call.algorithm == "rabenseifner":
            self._halve(kind, partial, total)
            self._double(kind, total[kind.own], total)
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
            self._halve(kind, mine, own)
        elif call.algorithm == "recursive_doubling":
            total = np.empty_like(mine)
            self._double_sums(call, mine, total, reduce)
            own[...] = total[kind.own]
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
        if call.algorithm == "recursive_doubling" or (call.size == 2 and kind.even):  # of two ranks, direct is the same
            self._double(kind, own, whole, out)
            return out
        described: dict[int, Request] = {}
        self._gather(kind, self._headers(kind), own, whole, described)
        if described:
            gathering.join_described(call, out, x, {call.members.index(peer): request for peer, request in described.items()})
        return out

    # -------------------------------------------------------------------------------------------------- steps

    def _halve(self, kind: _Kind, partial: np.ndarray, target: np.ndarray) -> None:
        """Recursive halving of ``partial``: the sum of its own shard goes to ``target``, or, if that is an array like the whole
        one, which ``partial`` may be, each partial sum to its place there."""
        call, reduce, size = kind.call, kind.reduce, target.size
        memory, in_place = self._memory(call, target, kind.incoming), call.name == "all_reduce"
        for peer, lower, keep, send, place in kind.halving:
            kept, room = partial[keep], memory[place]
            self._swap(peer, call, partial[send], room)
            if in_place:
                total = target = target[keep]
            else:
                total = target if kept.size == size else room
            partial = reduce(kept, room, out=total) if lower else reduce(room, kept, out=total)

    def _double(self, kind: _Kind, own: np.ndarray, whole: np.ndarray, out: np.ndarray | None = None) -> None:
        """Recursive doubling of shards into the flat ``whole``. ``own`` is a part of it already, unless there is ``out``, which
        is the same in its own shape: the shards of others may then be of other lengths, too."""
        call = kind.call
        described: list[Request] | None = None if out is None else []
        for step, (peer, mine, theirs) in enumerate(kind.doubling):
            self._swap(peer, call, whole[mine] if step else own, whole[theirs], described)
            if out is not None:
                if not step:
                    whole[mine] = own
                if described:
                    drive(self.transport, gathering.doubling_described(call, out, None, step, described[0]))
                    call.step = 0  # it is used again
                    return

    def _double_sums(self, call: Call, partial: np.ndarray, total: np.ndarray, reduce: Reduce) -> None:
        """Recursive doubling of the sum of whole arrays."""
        swap, context, tag, nbytes = self.transport.swap, self.comm.context, call.tag, partial.nbytes
        header = pack_header(call.mark, call.sequence, nbytes, self.transport.epoch, 0)
        incoming = None if nbytes <= EAGER else self._memory(call, total, total.size)
        for peer, lower in self.steps:
            received = swap(peer, context, tag, header, partial, incoming, call)
            partial = reduce(partial, received, out=total) if lower else reduce(received, partial, out=total)

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

    def _swap(self, peer: int, call: Call, mine: np.ndarray, theirs: np.ndarray, described: list[Request] | None = None) -> None:
        """``transport.swap`` of two flat arrays, also of different lengths; the second one is filled."""
        transport, nbytes = self.transport, mine.nbytes
        header = pack_header(call.mark, call.sequence, nbytes, transport.epoch, 0)
        if theirs.nbytes == nbytes:
            transport.swap(peer, self.comm.context, call.tag, header, mine, theirs, call, described)
            return
        incoming = pack_header(call.mark, call.sequence, theirs.nbytes, transport.epoch, 0)
        small, odd = theirs.nbytes <= EAGER, None if described is None else dict[int, Request]()
        received = transport.trade(self.comm.context, call.tag, call, [peer], [header], [mine], [peer], [incoming],
                                   [None if small else theirs], odd)
        if described is not None and odd:
            described += odd.values()
        elif small:
            theirs[...] = np.frombuffer(received[0], theirs.dtype, theirs.size)

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
        return self._new(name, algorithm, mark, x.shape, bounds(x.size, self.comm.size), x.itemsize, reduce)

    def _reduce_scatter(self, x: np.ndarray, *options: Any) -> _Kind | None:
        name, algorithm, mark, (reduce, offsets) = scattering.find(self.comm, x, 0, *options)
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
        kind = _Kind(Call(self.comm, name, algorithm, 0, 0, mark), shape, reduce, shards[rank],
                     [shards[other] for other in ahead], [shards[other] for other in others],
                     (sizes[rank], [sizes[other] for other in ahead], [sizes[other] for other in others]),
                     len({*sizes}) == 1, max(sizes) <= EAGER)
        return self._in_steps(kind, offsets) if self.steps else kind

    def _in_steps(self, kind: _Kind, offsets: Sequence[int]) -> _Kind:
        """With what each step of a halving and of a doubling sends."""
        rank, start = self.comm.rank, 0
        first, last = 0, self.comm.size  # the shards whose partial sum this rank still holds
        halving = []
        for peer, lower in self.steps[::-1]:
            middle, begin = (first + last) // 2, offsets[first]
            halves = slice(0, offsets[middle] - begin), slice(offsets[middle] - begin, offsets[last] - begin)
            keep = halves[not lower]
            first, last = (first, middle) if lower else (middle, last)
            end = start + keep.stop - keep.start
            halving.append((peer, lower, keep, halves[lower], slice(start, end)))
            start = 0 if kind.call.name == "all_reduce" else end  # there partial sums have memory of their own
        places = []
        for step, (peer, _) in enumerate(self.steps):
            distance = 1 << step
            mine, theirs = (slice(offsets[first], offsets[first + distance])
                            for first in (rank & -distance, (rank ^ distance) & -distance))
            places.append((peer, mine, theirs))
        return kind._replace(halving=halving, incoming=max(step[-1].stop for step in halving), doubling=places)

"""The one primitive under everything: a message from one rank to another.

A transport moves messages between *world ranks*. It knows nothing of groups, operations or arrays' meaning: a message is a
header (bytes, see ``message.py``), possibly a description, and a payload of bytes; it is matched by (source, context, tag),
first sent first received. A third transport (sockets, threads, a simulator) has to write the methods of :class:`Transport`.

What a transport promises
- messages with the same (source, destination, context, tag) arrive in the order in which they were sent;
- a send's payload is not read any more once its request is ``done``; a receive's payload is complete then;
- nothing is matched by contents: a receive takes the next message of its key, and ``Request.verify`` then holds the header
  against what was expected;
- ``wait`` and ``wait_any`` return, or raise what explains why they never could.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from refdist.comm.message import as_bytes, meaning, unpack_header
from refdist.device.arena import Arena

if TYPE_CHECKING:
    from refdist.comm.diagnosis import Doing

__all__ = ["EAGER", "Request", "Settled", "Transport", "call_site", "poison"]

EAGER = 2048  # bytes of a payload up to which it travels with its header, where a transport sends the two apart


class Request:
    """One send or receive under way.

    Attributes:
        kind: ``"send"`` or ``"receive"``.
        peer: world rank of the other side.
        context, tag: what it is matched by.
        payload: the flat uint8 view that is sent or filled; a self-describing receive has the right one once it is done.
        header, description: of the message (a receive has them once it is done).
        expected: the header that a receive must find; None accepts every one.
        what: whoever issued it; its ``str`` says which call this belongs to.
        done: True once the transport has no more use for the payload.
    """

    __slots__ = ("checksum", "context", "description", "done", "expected", "guarded", "header", "kind", "payload",
                 "peer", "sender", "state", "tag", "what")

    def __init__(self, kind: str, peer: int, context: int, tag: int, payload: np.ndarray | None, header: bytes,
                 description: bytes, expected: bytes | None, what: Any) -> None:
        self.kind = kind
        self.peer = peer
        self.context = context
        self.tag = tag
        self.payload = payload
        self.header = header
        self.description = description
        self.expected = expected
        self.what = what
        self.done = False
        self.sender: Any = None  # in process: the sender's ``what``, for the text of a mismatch
        self.state: Any = None  # the transport's own
        self.guarded: np.ndarray | None = None
        self.checksum: int | None = None

    def guard(self, array: np.ndarray) -> None:
        """With checks on: the sent array is read-only until completion, and must still hold the same bytes then."""
        assert self.payload is not None
        self.checksum = zlib.crc32(self.payload.data)
        if array.flags.writeable:
            self.guarded = array
            array.flags.writeable = False

    def verify(self, transport: Transport) -> None:
        """Raise MismatchError when the message is not the expected one, or a guarded array has changed in flight."""
        if self.kind == "receive":
            if transport.awaited:
                transport.awaited = [request for request in transport.awaited if request is not self]
            if self.expected is not None and self.header != self.expected:
                transport.mismatch(self._mismatch(transport.rank), self)
        elif self.checksum is not None:
            if self.guarded is not None:
                self.guarded.flags.writeable = True
            checksum, self.checksum, self.guarded = self.checksum, None, None
            if self.payload is not None and zlib.crc32(self.payload.data) != checksum:
                transport.mismatch(f"the array that rank {transport.rank} sends to rank {self.peer} was changed in flight", self)

    def _mismatch(self, rank: int) -> str:
        assert self.expected is not None
        found, wanted = unpack_header(self.header), unpack_header(self.expected)
        theirs = f"; rank {self.peer} is in {self.sender}" if self.sender is not None else ""
        if found[0] != wanted[0]:
            call = " ".join(str(part) for part in meaning(found[0]))
            differs = f"another call{' (' if call else ''}{call}{')' if call else ''}"
        else:
            names = ("sequence number", "length in bytes", "epoch", "length of its description")
            differs = ", ".join(f"{name} {theirs} where {ours} was expected"
                                for name, theirs, ours in zip(names, found[1:], wanted[1:], strict=True) if theirs != ours)
        return f"rank {rank} is in {self.what}, but the message from rank {self.peer} is of {differs}{theirs}"

    def __str__(self) -> str:
        arrow = "to" if self.kind == "send" else "from"
        tag = f", tag {self.tag}" if self.tag < Transport.user_tags else ""
        size = f" of {self.payload.nbytes} bytes" if self.payload is not None else ""
        return f"{self.kind}{size} {arrow} rank {self.peer}{tag} in {self.what}"


class Settled(NamedTuple):
    """What ranks know when they have settled.

    Attributes:
        outcomes: what each rank has told the others.
        left_over: messages that nobody had received and receives that nothing had come for, in words.
    """

    outcomes: list[bytes]
    left_over: list[str]


class Transport(abc.ABC):
    """Point-to-point messages between the ranks of one world, as one rank sees them.

    Attributes:
        rank, size: of the world.
        checks: whether sent arrays are guarded and receive buffers poisoned.
        rendezvous: whether a send is done only when its receive has been posted.
        epoch: goes into every header.
        active: the Works under way on this rank; whoever waits progresses them too.
        next_context: the smallest context id that this rank has not used yet.
        awaited: with checks on, receives whose buffers hold poison and may not be read yet.
        sequences: of each group that this rank has made, the number of its next collective call, in a list of one.
        name: ``"mpi"`` or ``"in-process"``, for people.
        contexts, user_tags: how many context ids and tags of users there are.
        nodes: the number of the host of each world rank; None: all share one.
        can_swap: whether it has :meth:`swap` and :meth:`trade` that take less time than requests that are then waited for.
        arena: memory for incoming messages of groups that have no device, used again and again.
    """

    rank: int
    size: int
    name: str
    checks: bool = False
    rendezvous: bool = False
    epoch: int = 0
    contexts: int = 1 << 30
    user_tags: int = 1 << 15
    nodes: Sequence[int] | None = None
    can_swap: bool = False

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.next_context = 1
        self.sequences: list[list[int]] = []
        self.awaited: list[Request] = []
        self.arena = Arena()

    @abc.abstractmethod
    def isend(self, dest: int, context: int, tag: int, header: bytes, description: bytes, payload: np.ndarray,
              what: Any) -> Request:
        """Start to send ``payload`` (flat uint8); it must not change before the request is done."""

    @abc.abstractmethod
    def irecv(self, source: int, context: int, tag: int, expected: bytes | None, payload: np.ndarray | None,
              what: Any, described: bool = False) -> Request:
        """Start to receive the message with the header ``expected`` into ``payload`` (flat uint8).

        With ``described`` it may also be one that describes itself: header and description are then looked at by whoever receives
        it, and ``expected`` is set to None. ``payload`` is used if it has the very length of the message, and replaced by new
        memory if it is None or has another one.
        """

    def exchange(self, peer: int, context: int, tag: int, header: bytes, mine: np.ndarray, theirs: np.ndarray,
                 what: Any, described: bool = False) -> Sequence[Request]:
        """Send ``mine`` (C-contiguous) to a rank and receive ``theirs`` (flat uint8, of as many bytes) from it, with one header.

        ``described`` as for :meth:`irecv`; the receive is the first of the requests. A transport that can do this in fewer calls
        has a method of its own.
        """
        receive = self.irecv(peer, context, tag, header, theirs, what, described)
        return receive, self.isend(peer, context, tag, header, b"", as_bytes(mine), what)

    def swap(self, peer: int, context: int, tag: int, header: bytes, mine: np.ndarray, theirs: np.ndarray | None,
             what: Any, described: list[Request] | None = None) -> np.ndarray:
        """Send ``mine`` to a rank and wait for as much from it, under one header. Arrays are C-contiguous.

        What comes may also describe itself, if ``described`` is given: its request is then put there, and counts.

        Only for a rank that has no Work under way. A transport that can do this in less time than an exchange takes has a method
        of its own, and says so with ``can_swap``.

        Returns:
            ``theirs``, filled; if it is None, which is for small arrays, what has come, flat, in the dtype of ``mine``, until the
            next call.
        """
        payload = np.empty_like(mine, np.uint8, order="C", shape=mine.nbytes) if theirs is None else as_bytes(theirs)
        requests = self.exchange(peer, context, tag, header, mine, payload, what, described is not None)
        self.wait(requests)
        if described is not None and requests[0].description:
            described.append(requests[0])
        return payload.view(mine.dtype) if theirs is None else theirs

    def trade(self, context: int, tag: int, what: Any, dests: Sequence[int], outgoing: Sequence[bytes],
              mine: Sequence[np.ndarray], sources: Sequence[int], incoming: Sequence[bytes], theirs: Sequence[np.ndarray | None],
              described: dict[int, Request] | None = None) -> Sequence[Any]:
        """Send to many ranks, receive from many, and wait for all of it; under the same conditions as :meth:`swap`.

        Args:
            dests, outgoing, mine: of each message out the destination, the header, and the array.
            sources, incoming, theirs: of each message in the source, the header, and the array to be filled; None if it is small.
            described: given if those that come in may also describe themselves: is filled with the requests of such, by source.

        Returns:
            For each incoming message without an array in ``theirs`` its bytes, flat, possibly followed by others, valid until the
            next call.
        """
        payloads = [np.empty(unpack_header(header)[2], np.uint8) if array is None else as_bytes(array)
                    for header, array in zip(incoming, theirs, strict=True)]
        receives = [self.irecv(source, context, tag, header, payload, what, described is not None)
                    for source, header, payload in zip(sources, incoming, payloads, strict=True)]
        self.wait([*receives, *[self.isend(dest, context, tag, header, b"", as_bytes(array), what)
                                for dest, header, array in zip(dests, outgoing, mine, strict=True)]])
        if described is not None:
            described.update((request.peer, request) for request in receives if request.description)
        return payloads

    @abc.abstractmethod
    def test(self, requests: Sequence[Request]) -> bool:
        """Make progress without blocking; True if all are done and verified."""

    @abc.abstractmethod
    def pause(self, polls: bool = False) -> None:
        """Let time pass for a rank that computes, or that ``polls`` and does nothing else: in process, other ranks run."""

    @abc.abstractmethod
    def wait(self, requests: Sequence[Request]) -> None:
        """Return when all are done and verified."""

    @abc.abstractmethod
    def wait_any(self, requests: Sequence[Request]) -> None:
        """Return when at least one more of them is done."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed, so that they raise PeerFailed."""

    @abc.abstractmethod
    def mismatch(self, cause: str, request: Request) -> NoReturn:
        """Raise MismatchError with the cause and what every rank is doing; the other ranks raise it as well."""

    @abc.abstractmethod
    def account(self, kind: str, cause: str, site: str) -> dict[int, Doing | str]:
        """Let the others know that this rank fails with an error of this kind, at ``site``; what each rank is doing."""

    @abc.abstractmethod
    def settle(self, outcome: bytes) -> Settled:
        """Come together with all ranks of the world, whatever has happened to each, and start afresh. Collective.

        Ranks that wait for one that has come here raise DeadlockError. When all have come, what was sent and not received is
        drained, the failure is forgotten, the epoch is raised, and the collective calls of every group count from 0 again:
        nothing of the time before reaches the time after. Works under way are given up.
        """

    def expect(self, request: Request) -> None:
        """With checks on: poison the receive buffer, and let no kernel read it before the request has been waited for."""
        if request.payload is not None:
            poison(request.payload)
            self.awaited.append(request)

    def check_reads(self, kernel: str, arrays: Sequence[Any]) -> None:
        """Raise MismatchError if a kernel is given an array in a receive buffer that has not been waited for."""
        for request in self.awaited:
            for array in arrays:
                if isinstance(array, np.ndarray) and request.payload is not None and np.shares_memory(array, request.payload):
                    self.mismatch(f"kernel {kernel} on rank {self.rank} reads a receive buffer before its data is there", request)

    def _forget(self, next_context: int) -> None:
        """The part of settling that all transports share."""
        self.epoch += 1
        self.next_context = next_context
        self.active.clear()
        self.awaited.clear()
        for sequence in self.sequences:
            sequence[0] = 0


def poison(payload: np.ndarray) -> None:
    """Fill a receive buffer with ones in every bit: NaN in every float format, -1 or the largest number in the integers."""
    payload.fill(0xFF)


def call_site(frame: Any) -> str:
    """File, line and function of the innermost frame outside this package: where the communication was called for."""
    package = __name__.rpartition(".")[0]
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}."):
        frame = frame.f_back
    if frame is None:
        return "unknown place"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"

"""Ranks under ``mpirun``: messages through the MPI library, by mpi4py, from raw buffers. The only module that imports mpi4py.

    small message    [header | description | payload]            one MPI message, copied on both sides
    large message    [header | description]   [payload]          two MPI messages of one tag, the second one not copied

The payloads of large messages travel on a communicator of their own, so that they cannot be taken for headers. The receive of a
payload is posted when its header is here and right, in the order of the headers: Open MPI 5 writes what is longer than expected
beyond the end of the memory that it was given. Small messages take as few calls as possible: one byte string to send, one slot to
receive into, which is used again. Waiting means polling: ``MPI_Test`` in a loop, which first spins, then gives way to other
processes (ranks may be more than cores), and when it gets long lets the :class:`~refdist.comm.watchdog.Watchdog` look whether it
can still end.

How a job ends when a rank raises: it says so on the :class:`~refdist.comm.board.Board`; the first one prints its traceback; the
others find it while they wait, raise as well, and end without a word. Whoever cannot be reached that way (it computes) is ended
by ``MPI_Abort`` after a few seconds. A rank that ends normally waits for the others, and for what they have sent it: a message
that nobody has received is an error.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import threadpoolctl

from refdist.comm.board import LEFT, Board, MessageBoard, SharedBoard
from refdist.comm.communicator import Comm
from refdist.comm.diagnosis import Doing, as_text, printable
from refdist.comm.meeting import limited_meeting
from refdist.comm.message import HEADER_BYTES, as_bytes, unpack_header
from refdist.comm.transport import EAGER, Request, Settled, Transport
from refdist.comm.watchdog import FAREWELL, Watchdog
from refdist.comm.work import Work
from refdist.errors import OutOfDeviceMemory

__all__ = ["mpi_world"]

_SLOT = HEADER_BYTES + 1024 + EAGER
_SPINS = 64  # polls before giving way, where each rank has a core
_PATIENCE = 2000  # polls of a swap before it becomes a request that the watchdog can look at
_YIELDS = 10_000  # polls that only give way, before sleeping: a large message takes some milliseconds
_MOST = 1 << 30  # bytes of one of MPI's messages
_KEPT = 64  # requests of MPI that are kept before those that are done are dropped
_LEAVE_SECONDS = 3.0  # how long a failed rank waits for the others to notice
_LAUNCHER_SECONDS = 0.5  # for the launcher to pass on what was printed: MPICH's drops it when MPI_Abort comes first

_world: Comm | None = None


def mpi_world() -> Comm:
    """The group of all ranks that ``mpirun`` started (one rank, if it did not).

    Sets one BLAS thread for this process, and arranges that an exception on any rank ends the whole job. A rank that has waited
    ``REFDIST_MEETING_SECONDS`` (300) for the others to call it says so, and the job ends.

    Raises:
        ImportError: mpi4py finds no MPI library; says what to install.
    """
    global _world
    if _world is None:
        with limited_meeting():
            mpi = _import_mpi()
            try:
                transport = _MPI(mpi)
            except BaseException:  # the others are on their way to meet this rank, and cannot be told yet
                traceback.print_exc()
                sys.stderr.flush()
                time.sleep(_LAUNCHER_SECONDS)
                mpi.COMM_WORLD.Abort(1)
                os._exit(1)  # MPICH's MPI_Abort may come back, before the job is ended
        threadpoolctl.threadpool_limits(1, user_api="blas")
        sys.excepthook = transport.end_with_exception
        atexit.register(transport.leave)
        leaves = mpi.Comm.Create_keyval(delete_fn=lambda *_: transport.leave())  # what MPI deletes first in MPI_Finalize
        mpi.COMM_SELF.Set_attr(leaves, None)
        _world = Comm(transport, range(transport.size), 0)
    return _world


def _import_mpi() -> Any:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.thread_level = "funneled"  # only the main thread communicates: no locks in the library
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError("no MPI library was found: `pip install 'refdist[mpi]'` brings one as a wheel, "
                          f"or install Open MPI or MPICH ({str(error).splitlines()[0]})") from error
    return MPI


class _Slot:
    """Reusable memory for a header and a small payload: as bytes, as an array, and as mpi4py wants it."""

    __slots__ = ("array", "buffer", "memory", "payload")

    def __init__(self, byte: Any) -> None:
        self.memory = bytearray(_SLOT)
        self.array = np.frombuffer(self.memory, np.uint8)
        self.payload = memoryview(self.memory)[HEADER_BYTES:]
        self.buffer = (self.memory, byte)


class _Request(Request):
    """A request with its MPI side.

    ``slot`` is a receive's until the header is there, ``head`` MPI's request for it, ``body`` that for a large payload;
    ``queue`` has the receives of the same source and tag whose payloads travel by themselves, or may, and whose headers have not
    come, in order; ``described`` says whether the message may describe itself; ``sending`` is MPI's request for the large payload
    that goes out in an exchange.
    """

    __slots__ = ("body", "described", "head", "queue", "sending", "slot")
    slot: _Slot | None
    head: Any
    body: Any
    described: bool
    queue: deque[Any] | None
    sending: Any

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
        self.sender = self.state = self.guarded = self.checksum = None
        self.described = False
        self.slot = self.head = self.body = self.queue = self.sending = None


class _Pieces:
    """Several of MPI's requests as one."""

    def __init__(self, requests: list[Any]) -> None:
        self.requests = requests

    def Test(self) -> bool:
        return all(request.Test() for request in self.requests)

    def Cancel(self) -> None:
        for request in self.requests:
            request.Cancel()

    def __bool__(self) -> bool:
        return any(self.requests)


class _MPI(Transport):
    name = "mpi"
    can_swap = True

    def __init__(self, mpi: Any) -> None:
        super().__init__()
        self.mpi = mpi
        self.comm = mpi.COMM_WORLD.Dup()
        self.payloads = mpi.COMM_WORLD.Dup()
        self.control = mpi.COMM_WORLD.Dup()  # what ranks tell each other about themselves
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.contexts = ((self.comm.Get_attr(mpi.TAG_UB) + 1) >> 16) - 1  # 32,767 where tags go up to 2 ** 31 - 1
        self.mark_tag = self.contexts << 16
        self.farewell_tag = self.mark_tag | 1
        self.byte = mpi.BYTE
        self.sent = _Request("send", self.rank, 0, 0, None, b"", b"", None, "a small message")  # any that is on its way
        self.sent.done = True
        self.slots: list[_Slot] = []
        self.swapping = [_Slot(mpi.BYTE)]
        self.outgoing: deque[Any] = deque()  # headers that MPI has not taken yet
        self.sending: list[Any] = []  # MPI's requests for large payloads that go out
        self.posted: list[Any] = []  # MPI's requests for what has not come yet
        self.unopened: dict[tuple[int, int], deque[Any]] = {}  # receives of a source and tag that wait for their header
        self.marks_seen: dict[int, int] = {}
        self.telling: list[Any] = []
        self.nodes = self._hosts()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        sharing = self.size if self.nodes is None else self.nodes.count(self.nodes[self.rank])  # ranks on this host
        self.spins = _SPINS if sharing <= cores else 0
        self.board = self._make_board()
        self.watchdog = Watchdog(self.board, self)
        self.ended = False

    def _hosts(self) -> list[int] | None:
        """The first rank on each rank's host; None if all share one."""
        node = self.control.Split_type(self.mpi.COMM_TYPE_SHARED)
        first = np.array([node.allreduce(self.rank, self.mpi.MIN)])
        node.Free()
        hosts = np.empty(self.size, first.dtype)
        self.control.Allgather(first, hosts)
        return hosts.tolist() if hosts.any() else None

    def _make_board(self) -> Board:
        """On one host a shared file; across hosts copies that are kept true by messages."""
        if self.nodes is not None:
            return MessageBoard(self.size, self.rank, self._tell_all, self._told)
        path = np.zeros(1024, np.uint8)
        if self.rank == 0:
            name = SharedBoard.create(self.size).encode()
            path[:len(name)] = np.frombuffer(name, np.uint8)
        self.control.Bcast(path)
        name = path.tobytes().rstrip(b"\0")
        board = SharedBoard(name.decode(), self.size, self.rank)
        self.control.Barrier()
        if self.rank == 0:
            os.unlink(name)  # it lives on as long as a rank has it mapped
        return board

    def _tell_all(self, record: bytes) -> None:
        self.telling = [request for request in self.telling if not request.Test()]
        self.telling += [self.control.Isend((record, self.byte), rank) for rank in range(self.size) if rank != self.rank]

    def _told(self) -> Iterator[tuple[int, bytearray]]:
        for source, _, record in self._pending(self.control, self.mpi.ANY_SOURCE, 0):
            yield source, record

    # ---------------------------------------------------------------------------------------------- messages

    def isend(self, dest: int, context: int, tag: int, header: bytes, description: bytes, payload: np.ndarray,
              what: Any) -> Request:
        if self.outgoing:
            self.outgoing = deque(head for head in self.outgoing if not head.Test())
        mpi_tag = context << 16 | tag
        small = payload.nbytes <= EAGER
        if small and not (self.checks or self.rendezvous):
            head = self.comm.Isend((header + description + payload.tobytes(), self.byte), dest, mpi_tag)
            if not head.Test():
                self.outgoing.append(head)
            return self.sent
        request = _Request("send", dest, context, tag, payload, header, description, None, what)
        if self.rendezvous:
            return self._issend(request, header + description, payload, mpi_tag)
        text = header + description + payload.tobytes() if small else header + description
        head = self.comm.Isend((text, self.byte), dest, mpi_tag)
        if not head.Test():
            self.outgoing.append(head)
        if small:
            request.done = True  # what travels is a copy
        else:
            request.body = self._start(self.payloads.Isend, payload, dest, mpi_tag)
            if len(self.sending) > _KEPT:
                self.sending = [body for body in self.sending if body]
            self.sending.append(request.body)
        return request

    def irecv(self, source: int, context: int, tag: int, expected: bytes | None, payload: np.ndarray | None,
              what: Any, described: bool = False) -> Request:
        request = _Request("receive", source, context, tag, payload, b"", b"", expected, what)
        mpi_tag = context << 16 | tag
        request.slot = slot = self._slot()
        request.head = head = self.comm.Irecv(slot.buffer, source, mpi_tag)
        posted = self.posted
        posted.append(head)
        if len(posted) > _KEPT:
            posted[:] = [request for request in posted if request]
        if described or (payload is not None and payload.nbytes > EAGER):
            request.described = described
            request.queue = queue = self.unopened.setdefault((source, mpi_tag), deque())
            queue.append(request)
        if self.checks:
            self.expect(request)
        return request

    def exchange(self, peer: int, context: int, tag: int, header: bytes, mine: np.ndarray, theirs: np.ndarray,
                 what: Any, described: bool = False) -> Sequence[Request]:
        if self.checks or self.rendezvous:
            return super().exchange(peer, context, tag, header, mine, theirs, what, described)
        request: Any = self.irecv(peer, context, tag, header, theirs, what, described)
        comm, mpi_tag = self.comm, context << 16 | tag
        if self.outgoing:
            self.outgoing = deque(head for head in self.outgoing if not head.Test())
        if theirs.size <= EAGER:
            head = comm.Isend((header + mine.tobytes(), self.byte), peer, mpi_tag)
        else:
            head = comm.Isend((header, self.byte), peer, mpi_tag)
            request.sending = self._start(self.payloads.Isend, mine, peer, mpi_tag)
            if len(self.sending) > _KEPT:
                self.sending = [body for body in self.sending if body]
            self.sending.append(request.sending)
        if not head.Test():
            self.outgoing.append(head)
        return (request,)

    def swap(self, peer: int, context: int, tag: int, header: bytes, mine: np.ndarray, theirs: np.ndarray | None,
             what: Any, described: list[Request] | None = None) -> np.ndarray:
        comm, byte, slot, mpi_tag = self.comm, self.byte, self.swapping[0], context << 16 | tag
        head = comm.Irecv(slot.buffer, peer, mpi_tag)
        body = going = None
        try:
            if mine.nbytes <= EAGER:
                sent = comm.Isend((header + mine.tobytes(), byte), peer, mpi_tag)
            else:
                sent = comm.Isend((header, byte), peer, mpi_tag)
                going = self._start(self.payloads.Isend, mine, peer, mpi_tag)
            polls = 0 if head.Test() else self._spin(head, 0)
            if not sent.Test():  # not before: a look at what is not done gives way, where ranks are more than cores
                self._later(sent)
            if polls <= _PATIENCE and slot.memory.startswith(header):
                if going is None:
                    received = np.frombuffer(slot.memory, mine.dtype, mine.size, HEADER_BYTES)
                    if theirs is None:
                        return received
                    theirs[...] = received if mine.ndim == 1 else received.reshape(mine.shape)
                    return theirs
                assert theirs is not None
                body = self._start(self.payloads.Irecv, theirs, peer, mpi_tag)
                for part in (body, going):
                    if not part.Test():
                        polls = self._spin(part, polls)
                if polls <= _PATIENCE:
                    return theirs
        except BaseException:
            self._keep((head, body), (going,))
            raise
        payload = np.empty(mine.nbytes, np.uint8) if theirs is None else as_bytes(theirs)
        request = _Request("receive", peer, context, tag, payload, b"", b"", header, what)
        request.slot, request.head, request.body, request.sending = slot, head, body, going
        request.described = described is not None
        self._keep((head, body), (going,))
        self.wait((request,))
        if described is not None and request.description:
            described.append(request)
        return payload.view(mine.dtype) if theirs is None else theirs

    def trade(self, context: int, tag: int, what: Any, dests: Sequence[int], outgoing: Sequence[bytes],
              mine: Sequence[np.ndarray], sources: Sequence[int], incoming: Sequence[bytes], theirs: Sequence[np.ndarray | None],
              described: dict[int, Request] | None = None) -> Sequence[Any]:
        comm, byte, slots, mpi_tag = self.comm, self.byte, self.swapping, context << 16 | tag
        while len(slots) < len(sources):
            slots.append(self._slot())
        heads = list(map(comm.Irecv, [slot.buffer for slot in slots], sources, repeat(mpi_tag)))
        bodies: list[Any] = []
        going: list[Any] = []
        sent: list[Any] = []
        last: Any = None
        try:
            for dest, header, x in zip(dests, outgoing, mine, strict=True):
                if x is not last:
                    last = x
                    small = x.nbytes <= EAGER
                    message = (header + x.tobytes() if small else header), byte
                sent.append(comm.Isend(message, dest, mpi_tag))
                if not small:
                    going.append(self._start(self.payloads.Isend, x, dest, mpi_tag))
            polls = right = 0
            for head, slot, source, header, array in zip(heads, slots, sources, incoming, theirs, strict=False):
                if not head.Test():
                    polls = self._spin(head, polls)
                if polls > _PATIENCE or not slot.memory.startswith(header):
                    break
                right += 1
                if array is not None:
                    bodies.append(self._start(self.payloads.Irecv, array, source, mpi_tag))
            for request in sent:  # not before: a look at what is not done gives way, where ranks are more than cores
                if not request.Test():
                    self._later(request)
            if right == len(heads):
                for part in bodies + going:
                    if not part.Test():
                        polls = self._spin(part, polls)
                if polls <= _PATIENCE:
                    return [slot.payload for slot in slots]
        except BaseException:
            self._keep((*heads, *bodies), going)
            raise
        receives: list[Any] = []
        started = iter(bodies)
        for slot, head, source, header, array in zip(slots, heads, sources, incoming, theirs, strict=False):
            payload = np.empty(unpack_header(header)[2], np.uint8) if array is None else as_bytes(array)
            request = _Request("receive", source, context, tag, payload, b"", b"", header, what)
            request.slot, request.head, request.described = slot, head, described is not None
            request.body = None if array is None else next(started, None)
            receives.append(request)
        sends: list[Any] = []
        large = [message for message in zip(dests, outgoing, mine, strict=True) if message[2].nbytes > EAGER]
        for (dest, header, x), body in zip(large, going, strict=True):
            request = _Request("send", dest, context, tag, as_bytes(x), header, b"", None, what)
            request.body = body
            sends.append(request)
        self._keep((*heads, *bodies), going)
        self.wait((*receives[right:], *receives[:right], *sends))  # first the one whose header is wrong, or has not come
        if described is not None:
            described.update((request.peer, request) for request in receives if request.description)
        return [request.payload for request in receives]

    def _spin(self, request: Any, polls: int) -> int:
        """Poll one of MPI's requests, which is not done, until it is or patience is at its end; returns all polls so far.

        Where ranks are more than cores every eighth poll gives way: that takes as long as several looks at a message.
        """
        spins = self.spins
        while polls <= _PATIENCE:
            polls += 1
            if polls > spins and polls % 8 == 0:
                os.sched_yield()
            if request.Test():
                break
        return polls

    def _slot(self) -> _Slot:
        return self.slots.pop() if self.slots else _Slot(self.byte)

    def _later(self, head: Any) -> None:
        """A header that MPI has not taken yet: keep it in mind."""
        self.outgoing = deque(request for request in (*self.outgoing, head) if not request.Test())

    def _keep(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        """A swap or trade is not over yet, or never will be: keep its messages in mind, and leave it the slots of its headers."""
        self.swapping = [self._slot()]
        for kept, more in ((self.posted, receives), (self.sending, sends)):
            if len(kept) > _KEPT:
                kept[:] = [request for request in kept if request]
            kept += [request for request in more if request is not None]

    def _issend(self, request: _Request, start: bytes, payload: np.ndarray, mpi_tag: int) -> _Request:
        """A send that is done only when its receive has been posted."""
        if payload.nbytes <= EAGER:
            request.body = self.comm.Issend((start + payload.tobytes(), self.byte), request.peer, mpi_tag)
        else:
            self.outgoing.append(self.comm.Isend((start, self.byte), request.peer, mpi_tag))
            request.body = self._start(self.payloads.Issend, payload, request.peer, mpi_tag)
        self.sending.append(request.body)
        return request

    def _start(self, operation: Any, payload: np.ndarray, peer: int, mpi_tag: int) -> Any:
        """Send or receive a large payload, in pieces where an MPI count (a C int) would not hold its bytes."""
        if payload.nbytes <= _MOST:
            return operation((payload, self.byte), peer, mpi_tag)
        payload = as_bytes(payload)
        return _Pieces([operation((payload[start:start + _MOST], self.byte), peer, mpi_tag)
                        for start in range(0, payload.nbytes, _MOST)])

    def _progress(self, request: Any) -> bool:
        """One look at a request that was not done; True when it is."""
        slot = request.slot
        if slot is not None:
            if request.queue is not None and not self._earlier_are_open(request):
                return False
            if not request.head.Test():
                return False
            request.slot = None
            self._open(request, slot)
            self.slots.append(slot)
        if not request.done and (request.body is None or request.body.Test()):
            request.done = request.sending is None or request.sending.Test()
        return request.done

    def _open(self, request: Any, slot: _Slot) -> None:
        """The header is here: take a small payload out of the slot, or see that the large one is being received."""
        expected, payload, queue = request.expected, request.payload, request.queue
        if queue is not None:
            queue.popleft()
            if not queue:
                del self.unopened[request.peer, request.context << 16 | request.tag]
        start = HEADER_BYTES
        if expected is not None and slot.memory.startswith(expected):
            request.header = expected
            length = payload.size
        else:
            request.header = header = bytes(slot.memory[:HEADER_BYTES])
            _, _, length, _, described = unpack_header(header)
            start += described
            request.description = bytes(slot.memory[HEADER_BYTES:start])
            if not request.described or (expected is not None and not described):  # verify will say what is wrong
                request.done = True
                return
            request.expected = None
            if payload is None or payload.size != length:
                request.payload = payload = np.empty(length, np.uint8)
        if length <= EAGER:
            payload[...] = slot.array[start:start + length]
            request.done = request.sending is None
        elif request.body is None:
            request.body = self._start(self.payloads.Irecv, payload, request.peer, request.context << 16 | request.tag)
            self.posted.append(request.body)

    def _earlier_are_open(self, request: Any) -> bool:
        """Whether the receives before this one, of the same source and tag, have their header; a look at them if not."""
        while request.queue[0] is not request:
            first = request.queue[0]
            self._progress(first)
            if request.queue[0] is first:
                return False
        return True

    # ----------------------------------------------------------------------------------------------- waiting

    def test(self, requests: Sequence[Request]) -> bool:
        for request in requests:
            if not request.done:
                self._progress(request)
        done = all(request.done for request in requests)  # a look at one may complete those before it
        if done:
            for request in requests:
                request.verify(self)
        return done

    def pause(self, polls: bool = False) -> None:
        self.watchdog.check()

    def wait(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request is self.sent:
                continue
            polls = 0
            while not (request.done or self._progress(request)):
                polls += 1
                if polls > self.spins:
                    self._give_way(polls - self.spins, requests, False)
            if polls > self.spins:
                self.watchdog.end()
            if request.header is not request.expected:
                request.verify(self)

    def wait_any(self, requests: Sequence[Request]) -> None:
        polls = 0
        while not any(request.done or self._progress(request) for request in requests):
            polls += 1
            if polls > self.spins:
                self._give_way(polls - self.spins, requests, True)
        if polls > self.spins:
            self.watchdog.end()

    def _give_way(self, polls: int, requests: Sequence[Request], any_of: bool) -> None:
        """Let other processes have the core, sleep when the wait is long, and look whether it can still end."""
        if polls < _YIELDS:
            os.sched_yield()
            return
        time.sleep(2e-5 if polls < 2 * _YIELDS else 2e-4)
        if polls % 16 == 0:
            self.watchdog.look(requests, any_of)

    def mismatch(self, cause: str, request: Request) -> NoReturn:
        self.watchdog.tell(cause, [request])

    def account(self, kind: str, cause: str, site: str) -> dict[int, Doing | str]:
        return self.watchdog.account(kind, cause, Doing((), False, (), site))

    # ------------------------------------------------------------------------------- what the watchdog is given

    def moving(self, requests: Sequence[Any]) -> bool:
        moved = False
        for request in requests:
            if not request.done and (self._progress(request) or (request.body is not None and request.kind == "receive"
                                                                 and not request.body.Test())):
                moved = True
        return moved

    def send_mark(self, rank: int, mark: int) -> None:
        self.outgoing.append(self.comm.Isend((mark.to_bytes(8, "little"), self.byte), rank, self.mark_tag))

    def marks(self) -> dict[int, int]:
        for source, _, mark in self._pending(self.comm, self.mpi.ANY_SOURCE, self.mark_tag):
            self.marks_seen[source] = int.from_bytes(mark, "little")
        left = {rank: FAREWELL for rank in self.board.ranks_with(LEFT) if self.comm.Iprobe(rank, self.farewell_tag)}
        return {**self.marks_seen, **left}

    def _pending(self, comm: Any, source: int, tag: int) -> Iterator[tuple[int, int, bytearray]]:
        """Receive what has come on one of MPI's communicators: source, tag and contents of each message."""
        status = self.mpi.Status()
        while comm.Iprobe(source, tag, status):
            message = bytearray(status.Get_count(self.byte))
            found = status.Get_source(), status.Get_tag()
            comm.Recv((message, self.byte), *found)
            yield *found, message

    # ----------------------------------------------------------------------------------------------- settling

    def settle(self, outcome: bytes) -> Settled:
        self._say_farewell()
        while len(self.board.ranks_with(LEFT)) < self.size:
            self._let_pass(1e-4)
        left = self._drain()
        mine = json.dumps([outcome.hex(), self.next_context, left])
        told = [json.loads(text) for text in self._exchange(mine.encode())]
        self.board.reset()
        self._forget(max(context for _, context, _ in told))
        self.unopened.clear()
        self.marks_seen.clear()
        self.watchdog = Watchdog(self.board, self)
        self.control.Barrier()
        return Settled([bytes.fromhex(text) for text, _, _ in told], [line for _, _, lines in told for line in lines])

    def _let_pass(self, seconds: float) -> None:
        """Wait for the others to come here too; what they still receive of this rank may need its MPI library to move on."""
        time.sleep(seconds)
        self.comm.Iprobe(self.mpi.ANY_SOURCE, self.farewell_tag)
        self.board.refresh()

    def _say_farewell(self) -> None:
        """Nothing follows from this rank: a mark behind its last message to each rank, and a word on the board."""
        for comm in (self.comm, self.payloads):
            self.outgoing += [comm.Isend((b"", self.byte), rank, self.farewell_tag) for rank in range(self.size)]
        self.board.leave()

    def _drain(self) -> list[str]:
        """When all have said farewell: take back the receives that nothing came for, receive what nobody has asked for, and
        see all sends to their end. Returns what was left over, in words."""
        for rank in range(self.size):
            while not (self.comm.Iprobe(rank, self.farewell_tag) and self.payloads.Iprobe(rank, self.farewell_tag)):
                time.sleep(1e-5)
        left = [line for work in self.active for line in self._unfinished(work)]
        for queue in list(self.unopened.values()):
            for request in list(queue):
                self._progress(request)
        for pending in self.posted:
            if pending:
                pending.Cancel()
                self._wait_through(pending)
        self.posted.clear()
        for rank in range(self.size):
            for _, tag, message in self._pending(self.comm, rank, self.mpi.ANY_TAG):
                if tag not in (self.mark_tag, self.farewell_tag):
                    left.append(self._leftover(rank, tag, message))
            for _ in self._pending(self.payloads, rank, self.mpi.ANY_TAG):
                pass
        for sent in (*self.outgoing, *self.sending):
            self._wait_through(sent)
        self.outgoing.clear()
        self.sending.clear()
        return left

    def _unfinished(self, work: Work) -> list[str]:
        """A Work that is under way at the end, in words: the receives that nothing came for, or else itself."""
        receives = [f"rank {self.rank}: {request}" for request in work.pending if request.kind == "receive"]
        return receives or [f"rank {self.rank}: a {work} that was started and never waited for"]

    def _wait_through(self, request: Any) -> None:
        """Wait for one of MPI's requests, whatever becomes of it: a payload of another length than expected is an error of a
        call that has failed already."""
        try:
            while request and not request.Test():
                os.sched_yield()
        except self.mpi.Exception:
            pass

    def _leftover(self, source: int, tag: int, message: bytearray) -> str:
        _, sequence, length, _, described = unpack_header(message)
        what = message[HEADER_BYTES:HEADER_BYTES + described].decode() or f"{length} bytes"
        context, tag = tag >> 16, tag & 0xFFFF
        which = f"tag {tag}" if tag < self.user_tags else f"collective number {sequence}"
        return f"rank {self.rank}: a message of {what} from rank {source} ({which}, context {context})"

    def _exchange(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by the MPI library."""
        lengths = np.empty(self.size, np.int64)
        self.control.Allgather(np.array([len(mine)], np.int64), lengths)
        everything = bytearray(int(lengths.sum()))
        self.control.Allgatherv((mine, self.byte), (everything, lengths.tolist(), None, self.byte))
        ends = np.cumsum(lengths).tolist()
        return [bytes(everything[end - length:end]) for end, length in zip(ends, lengths.tolist(), strict=True)]

    # ------------------------------------------------------------------------------------------------ ending

    def fail(self, error: BaseException) -> None:
        self.board.fail(type(error).__name__, as_text(error), complete=True)

    def end_with_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """``sys.excepthook``: let the others know, print the cause once in the whole job, and end."""
        self.board.fail(kind.__name__, as_text(error), complete=True)
        time.sleep(self.board.settling)
        self.board.refresh()
        if self.board.first_failure() == self.rank:
            whole = not isinstance(error, OutOfDeviceMemory)  # what is alive tells more than where it ran out
            text = "".join(traceback.format_exception(kind, error, trace)) if whole else f"{kind.__name__}: {error}\n"
            sys.stderr.write(printable(f"refdist: rank {self.rank} of {self.size} failed\n{text}"))
        self.end_job(1)

    def end_job(self, status: int) -> None:
        """End this process with ``status`` without MPI's collective farewell, once the other ranks end too."""
        self.ended = True
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        self.board.leave()
        end = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < end:
            if len(self.board.ranks_with(LEFT)) == self.size:
                time.sleep(self.board.settling)
                os._exit(status)
            time.sleep(0.01)
            self.board.refresh()
        time.sleep(_LAUNCHER_SECONDS)
        self.comm.Abort(status)
        os._exit(status)

    def leave(self) -> None:
        """At a normal exit: wait until all others end as well; if one has failed, end with it."""
        if self.ended:
            return
        self._say_farewell()
        while len(self.board.ranks_with(LEFT)) < self.size:
            self._let_pass(1e-3)
            if self.board.first_failure() >= 0:
                self.end_job(1)
        if self.board.first_failure() >= 0:
            self.end_job(1)
        self.ended = True
        left = [line for text in self._exchange("\n".join(self._drain()).encode()) for line in text.decode().splitlines()]
        if left:
            if self.rank == 0:
                sys.stderr.write("refdist: MismatchError: messages are left over at the end:\n  " + "\n  ".join(left[:20]) + "\n")
            self.end_job(1)

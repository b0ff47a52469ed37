"""Ranks as greenlets in one Python process.

    run(program, ranks=4)
        hub ──switch──▶ rank 0 ── isend, irecv … wait ──switch──▶ hub ──switch──▶ rank 1 ── …

Exactly one rank runs at a time, until it has to wait; then the scheduler picks the next runnable one. So the interleaving is
an argument (first-in-first-out, random by seed, or a function), a run is repeatable, and a deadlock is seen at once: nobody is
runnable and somebody has not finished. Greenlets (Python frames on C stacks that are swapped) switch in under a microsecond,
and each rank runs in a copy of the caller's context, so that ``np.errstate`` and context variables hold in all of them.

Sends are *buffered* (done at once, the payload is copied) or *rendezvous* (done when the receive has been posted, no copy):
a program that is right must work with both.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import greenlet
import numpy as np
import threadpoolctl

from refdist.comm.communicator import Comm
from refdist.comm.diagnosis import Doing, described, explain, named_error, report
from refdist.comm.transport import Request, Settled, Transport, call_site
from refdist.errors import DeadlockError, MismatchError

__all__ = ["Scheduler", "run"]

Result = TypeVar("Result")
Scheduler = Callable[[list[int]], int]
_FRUITLESS_POLLS = 100_000  # a rank, after which a loop of nothing else is taken to be endless


def run(program: Callable[[Comm], Result], ranks: int, scheduler: str | int | Scheduler = "fifo", sends: str = "buffered",
        checks: bool = False) -> list[Result]:
    """Run ``program(comm)`` on each of ``ranks`` in-process ranks, with one BLAS thread as long as it lasts.

    Args:
        program: called once a rank with that rank's world :class:`Comm`.
        ranks: how many, at least 1.
        scheduler: who runs next: ``"fifo"``; an integer, the seed of a random choice; or a function that gets the list of
            runnable ranks and returns an index into it.
        sends: ``"buffered"`` or ``"rendezvous"``.
        checks: sent arrays are read-only and checksummed while in flight, receive buffers are poisoned until they are filled.

    Returns:
        What each rank returned, in rank order.

    Raises:
        DeadlockError: every rank that has not finished waits; lists what for.
        MismatchError: two ranks met in different calls, or a message was never received.
        Exception: the first failing rank's own exception, its type unchanged; the other ranks see PeerFailed.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1 is needed")
    if sends not in ("buffered", "rendezvous"):
        raise ValueError(f"sends={sends!r}: expected 'buffered' or 'rendezvous'")
    world = _World(ranks, _make_scheduler(scheduler), sends == "rendezvous", checks)
    with _thread_pools().limit(limits=1, user_api="blas"):
        return world.run(program)


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    """Those of the libraries that are loaded, NumPy's BLAS among them; to look for them takes a millisecond."""
    return threadpoolctl.ThreadpoolController()


def _make_scheduler(scheduler: str | int | Scheduler) -> Scheduler | None:
    """None stands for first-in-first-out, which needs no list of the runnable ranks."""
    if callable(scheduler):
        return scheduler
    if scheduler == "fifo":
        return None
    if isinstance(scheduler, (int, np.integer)) and not isinstance(scheduler, bool):
        generator = random.Random(int(scheduler))
        return lambda runnable: generator.randrange(len(runnable))
    raise ValueError(f"scheduler={scheduler!r}: expected 'fifo', an integer seed or a function")


class _World:
    """The ranks of one run, the hub that switches between them, and the messages that have not met their receives."""

    def __init__(self, size: int, scheduler: Scheduler | None, rendezvous: bool, checks: bool) -> None:
        self.size = size
        self.scheduler = scheduler
        self.rendezvous = rendezvous
        self.checks = checks
        self.error: BaseException | None = None
        self.failed_rank = -1
        self.outcomes: dict[int, bytes] = {}  # of the ranks that have come to settle
        self.settled = Settled([], [])
        self.stranded = False  # a rank has finished without coming to settle
        self.runnable: deque[int] = deque(range(size))
        self.transports = [_InProcess(self, rank) for rank in range(size)]
        self.idle_polls = 0  # since anybody has sent, received or run a kernel

    def run(self, program: Callable[[Comm], Result]) -> list[Result]:
        self.hub = greenlet.getcurrent()
        results: list[Any] = [None] * self.size
        members = range(self.size)

        def body(rank: int) -> None:
            try:
                results[rank] = program(Comm(self.transports[rank], members, 0))
            except greenlet.GreenletExit:
                raise
            except BaseException as error:
                self.transports[rank].fail(error)

        for transport in self.transports:
            transport.greenlet = greenlet.greenlet(body)
            transport.greenlet.gr_context = contextvars.copy_context()
        try:
            self._switch_until_done()
        finally:
            self._abandon()
        if self.error is not None:
            raise self.error
        self._no_leftovers()
        return results

    def _switch_until_done(self) -> None:
        """Switch to one runnable rank after the other; when none is left and some have not finished, they are deadlocked."""
        runnable, transports = self.runnable, self.transports
        while True:
            while runnable:
                rank = runnable.popleft() if self.scheduler is None else self._pick()
                transport = transports[rank]
                transport.scheduled = False
                if transport.started:
                    transport.greenlet.switch()
                else:
                    transport.started = True
                    transport.greenlet.switch(rank)
            alive = [transport for transport in transports if not transport.greenlet.dead]
            if not alive:
                return
            waiting = {transport.rank: transport.doing() for transport in alive}
            others = {transport.rank: "has finished" for transport in transports if transport.greenlet.dead}
            error = explain({rank: doing for rank, doing in waiting.items() if isinstance(doing, Doing)},
                            {**others, **{rank: doing for rank, doing in waiting.items() if isinstance(doing, str)}})
            self.stranded = all(transport.waiting_for is None for transport in alive)
            if self.stranded and (self.failed_rank < 0 or not transports[self.failed_rank].greenlet.dead):
                self.error = None  # that failure was met; what is wrong now is that not all have come to settle
            self.fail_all(alive[0].rank, error)
            if self.stranded:
                for transport in alive:
                    self.wake(transport)

    def _pick(self) -> int:
        assert self.scheduler is not None
        index = self.scheduler(list(self.runnable))
        if not 0 <= index < len(self.runnable):
            raise IndexError(f"the scheduler chose {index} of {len(self.runnable)} runnable ranks")
        rank = self.runnable[index]
        del self.runnable[index]
        return rank

    def wake(self, transport: _InProcess) -> None:
        if not transport.scheduled:
            transport.scheduled = True
            self.runnable.append(transport.rank)

    def fail_all(self, rank: int, error: BaseException) -> None:
        """Keep the first failure; whoever waits, or communicates from now on, sees it."""
        if self.error is None:
            self.error = error
            self.failed_rank = rank
        for transport in self.transports:
            if transport.waiting_for is not None:
                self.wake(transport)

    def check_failure(self) -> None:
        if self.error is not None:
            raise named_error(type(self.error).__name__, str(self.error), self.failed_rank)

    def _abandon(self) -> None:
        """After an exception in the hub itself (Ctrl-C, a broken scheduler) end the ranks, so that none lives on."""
        for transport in self.transports:
            if not transport.greenlet.dead:
                transport.greenlet.throw()

    def _no_leftovers(self) -> None:
        """A message that nobody received, a receive that nothing arrived for, or a Work that nobody waited for is a mistake."""
        left = self._leftovers()
        if left:
            more = f"\n  … and {len(left) - 20} more" if len(left) > 20 else ""
            raise MismatchError("messages are left over at the end:\n  " + "\n  ".join(left[:20]) + more)

    def _leftovers(self) -> list[str]:
        unmet = [(transport.rank, request) for transport in self.transports
                 for request in itertools.chain.from_iterable(transport.unmet.values())]
        left = [f"rank {rank if request.kind == 'receive' else request.state.rank}: {request}" for rank, request in unmet]
        if not left:
            left += [f"rank {transport.rank}: a {work} that was started and never waited for"
                     for transport in self.transports for work in transport.active]
        return left

    def settle(self) -> None:
        """All ranks have come: forget the messages that have not met, and the failure, and let all of them go on."""
        left = self._leftovers()
        next_context = max(transport.next_context for transport in self.transports)
        for transport in self.transports:
            transport.unmet.clear()
            transport._forget(next_context)
            if transport.settling:
                transport.settling = False
                self.wake(transport)
        self.error, self.failed_rank = None, -1
        self.settled = Settled([self.outcomes[rank] for rank in range(self.size)], left)
        self.outcomes = {}


class _InProcess(Transport):
    """One rank's end of an in-process world.

    Attributes:
        unmet: by (source, context, tag), messages to this rank that nobody has received, or receives that nothing has come for.
    """

    name = "in-process"

    def __init__(self, world: _World, rank: int) -> None:
        super().__init__()
        self.world = world
        self.rank = rank
        self.size = world.size
        self.checks = world.checks
        self.rendezvous = world.rendezvous
        self.unmet: dict[tuple[int, int, int], deque[Request]] = {}
        self.waiting_for: Sequence[Request] | None = None
        self.any_of = False
        self.pending = 0
        self.scheduled = True
        self.started = False
        self.settling = False
        self.greenlet: Any = None

    def doing(self) -> Doing | str:
        """What this rank, which does not run now, is doing."""
        if self.greenlet.dead:
            return "has finished"
        site = call_site(self.greenlet.gr_frame) if self.started else "its start"
        if self.waiting_for is not None:
            return described(self.waiting_for, self.any_of, site)
        return f"has come to settle, at {site}" if self.settling else f"is at {site}"

    def isend(self, dest: int, context: int, tag: int, header: bytes, description: bytes, payload: np.ndarray,
              what: Any) -> Request:
        world = self.world
        self._check()
        send = Request("send", dest, context, tag, payload, header, description, None, what)
        send.state = self
        receiver = world.transports[dest]
        key = self.rank, context, tag
        unmet = receiver.unmet.get(key)
        if unmet is not None and unmet[0].kind == "receive":
            self._deliver(send, receiver.next_of(key, unmet), receiver)
            return send
        waiting = send
        if not self.rendezvous:
            send.done = True
            waiting = Request("send", dest, context, tag, payload.copy(), header, description, None, what)
            waiting.state = self
        if unmet is None:
            receiver.unmet[key] = deque((waiting,))
        else:
            unmet.append(waiting)
        return send

    def irecv(self, source: int, context: int, tag: int, expected: bytes | None, payload: np.ndarray | None,
              what: Any, described: bool = False) -> Request:
        self._check()
        receive = Request("receive", source, context, tag, payload, b"", b"", expected, what)
        receive.state = described
        if self.checks:
            self.expect(receive)
        key = source, context, tag
        unmet = self.unmet.get(key)
        if unmet is None:
            self.unmet[key] = deque((receive,))
        elif unmet[0].kind == "send":
            self._deliver(self.next_of(key, unmet), receive, self)
        else:
            unmet.append(receive)
        return receive

    def next_of(self, key: tuple[int, int, int], unmet: deque[Request]) -> Request:
        """The oldest of the requests that have not met, which does so now."""
        if len(unmet) == 1:
            del self.unmet[key]
        return unmet.popleft()

    def _check(self) -> None:
        """Refuse to communicate after a failure, and for another rank than the one that runs."""
        self.world.idle_polls = 0
        if self.world.error is not None:
            self.world.check_failure()
        if greenlet.getcurrent() is not self.greenlet:
            running = next((other.rank for other in self.world.transports if other.greenlet is greenlet.getcurrent()), "outside")
            raise MismatchError(f"rank {running} makes a call on a group of rank {self.rank}, which it is not in")

    def _deliver(self, send: Request, receive: Request, receiver: _InProcess) -> None:
        """The message meets its receive: one copy, and whoever waits for either of them may run."""
        receive.header, receive.description, receive.sender = send.header, send.description, send.what
        assert send.payload is not None
        if receive.payload is not None and receive.payload.nbytes == send.payload.nbytes:
            receive.payload[...] = send.payload
        elif receive.state:
            receive.payload = send.payload.copy()
        if receive.state and send.description:
            receive.expected = None
        for request, side in ((receive, receiver), (send, send.state)):
            request.done = True
            if side.waiting_for is not None and request in side.waiting_for:
                side.pending -= 1
                if side.pending <= 0:
                    self.world.wake(side)

    def test(self, requests: Sequence[Request]) -> bool:
        for request in requests:
            if not request.done:
                return False
        for request in requests:
            request.verify(self)
        return True

    def pause(self, polls: bool = False) -> None:
        self.world.idle_polls = self.world.idle_polls + 1 if polls else 0
        if self.world.idle_polls > _FRUITLESS_POLLS * self.size:
            raise DeadlockError(f"rank {self.rank} polls, and in {_FRUITLESS_POLLS} polls a rank nobody has sent, received or "
                                "computed")
        self.world.wake(self)
        self._switch()

    def wait(self, requests: Sequence[Request]) -> None:
        pending = 0
        for request in requests:
            if not request.done:
                pending += 1
        if pending:
            self._block(requests, pending)
        for request in requests:
            request.verify(self)

    def wait_any(self, requests: Sequence[Request]) -> None:
        self._block([request for request in requests if not request.done], 1, True)

    def _block(self, requests: Sequence[Request], pending: int, any_of: bool = False) -> None:
        self.pending = pending
        self.any_of = any_of
        self.waiting_for = requests
        self._switch()

    def _switch(self) -> None:
        if self.world.error is None:
            self.world.hub.switch()
        self.waiting_for = None
        self.world.check_failure()

    def fail(self, error: BaseException) -> None:
        self.world.fail_all(self.rank, error)

    def mismatch(self, cause: str, request: Request) -> NoReturn:
        doings = self.account("MismatchError", cause, "")
        doings[self.rank] = described([request], False, call_site(sys._getframe(1)))
        raise MismatchError(report(cause, doings))

    def account(self, kind: str, cause: str, site: str) -> dict[int, Doing | str]:
        others = {transport.rank: transport.doing() for transport in self.world.transports if transport is not self}
        return {self.rank: f"is at {site}", **others}

    def settle(self, outcome: bytes) -> Settled:
        world = self.world
        world.outcomes[self.rank] = outcome
        if len(world.outcomes) == world.size:
            world.settle()
            return world.settled
        self.settling = True
        while self.settling:
            world.hub.switch()
            if world.stranded:
                self.settling = False
                world.check_failure()
        return world.settled

"""Failing together: every rank learns what has happened on every other one, and all go on or fail as one.

    run_example     one run of a rank program on ranks that exist already (MPI); whatever happens, the next one starts afresh
    raises          asserts an expected error on all ranks together, and the program goes on after it
    alarm           ends a run that takes too long with what every rank was doing

Both rest on ``Transport.settle``: ranks come together, drain what was sent, raise the epoch, forget the failure.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

from refdist.comm import Comm
from refdist.comm.diagnosis import report
from refdist.comm.transport import Transport, call_site
from refdist.errors import DeadlockError, MismatchError, PeerFailed

__all__ = ["Outcome", "RankError", "TimeLimitExceeded", "alarm", "explained", "note_rank", "raise_at", "raise_together",
           "raises", "run_example"]

_FIRST_CONTEXT = 1
_INSIDE = r"refdist[/\\](comm|testing)[/\\]\w+\.py$|[/\\]contextlib\.py$"  # frames that are not the program's


class RankError(Exception):
    """Stands for an exception of another rank that cannot be sent (it cannot be pickled)."""


class TimeLimitExceeded(BaseException):
    """A test has run for longer than its limit; says what every rank was doing. Not an Exception, so that nothing catches it."""


@dataclass
class Outcome:
    """What has happened on one rank.

    Attributes:
        error: what it raised, or None.
        text: the traceback.
        place: file, line and function where it was raised.
        own: whether it failed by itself, not because another rank did.
        output: what it printed.
        finished: whether its program is over.
    """

    error: BaseException | None = None
    text: str = ""
    place: tuple[str, int, str] = ("", 0, "")
    own: bool = False
    output: str = ""
    finished: bool = False

    @classmethod
    def of(cls, error: BaseException | None, output: str = "", finished: bool = False) -> Outcome:
        """The outcome of a rank that has raised ``error`` (None: nothing)."""
        if error is None:
            return cls(output=output, finished=finished)
        text = "".join(traceback.format_exception(error))
        own = not isinstance(error, (PeerFailed, DeadlockError, MismatchError))
        return cls(error, text, _place(error), own, output, finished)

    def encode(self) -> bytes:
        """As bytes; an exception that cannot be pickled becomes a :class:`RankError` with its words."""
        try:
            error = pickle.dumps(self.error)
            pickle.loads(error)
        except Exception:
            error = pickle.dumps(RankError(f"{type(self.error).__name__}: {self.error}"))
        return pickle.dumps((error, self.text, self.place, self.own, self.output, self.finished))

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        """The inverse of :meth:`encode`."""
        error, *rest = pickle.loads(data)
        return cls(pickle.loads(error), *rest)


def _place(error: BaseException) -> tuple[str, int, str]:
    """Where the program, not this package's communication, raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not re.search(_INSIDE, frame.filename)]
    if not frames:
        return "", 0, ""
    return frames[-1].filename, frames[-1].lineno or 1, frames[-1].name


def run_example(world: Comm, program: Callable[[Comm], Any], ranks: int, checks: bool = False, rendezvous: bool = False,
                limit: float | None = None) -> tuple[list[Outcome], list[str]]:
    """Run ``program(comm)`` on the first ``ranks`` ranks of a world; collective over all of it.

    The group and everything in it is new in each run, and nothing of one run reaches the next, also when ranks fail.

    Returns:
        Each rank's outcome, and, if nobody failed, the messages that were left over.
    """
    transport = world.transport
    transport.next_context = _FIRST_CONTEXT + 1
    groups = len(transport.sequences)
    error = None
    output = io.StringIO()
    if world.rank < ranks:
        comm = Comm(transport, range(ranks), _FIRST_CONTEXT)
        transport.checks, transport.rendezvous = checks, rendezvous
        try:
            with contextlib.redirect_stdout(output), alarm(limit), explained(comm):
                program(comm)
        except (Exception, TimeLimitExceeded) as caught:
            error = caught
            transport.fail(caught)
        transport.checks = transport.rendezvous = False
    outcomes, left_over = _settle(transport, Outcome.of(error, output.getvalue(), finished=True))
    while not all(outcome.finished for outcome in outcomes):  # others have come to a `raises` in the middle of the program
        outcomes, left_over = _settle(transport, Outcome.of(error, output.getvalue(), finished=True))
    del transport.sequences[groups:]
    return outcomes, left_over if not any(outcome.error for outcome in outcomes) else []


def _settle(transport: Transport, outcome: Outcome) -> tuple[list[Outcome], list[str]]:
    settled = transport.settle(outcome.encode())
    return [Outcome.decode(data) for data in settled.outcomes], settled.left_over


def first_failure(outcomes: list[Outcome]) -> int:
    """The rank whose failure is the cause of the others', or -1 if nobody failed."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    return next((rank for rank in failed if outcomes[rank].own), failed[0] if failed else -1)


def raise_together(outcomes: list[Outcome], left_over: list[str], mine: int) -> None:
    """Raise on every rank the exception of the rank that failed first; each other rank's traceback is in its notes.

    A rank raises its own exception as it is. One of another rank is raised anew at the place where it was raised there, so that
    it looks, and shrinks, like that one.
    """
    rank = first_failure(outcomes)
    if rank < 0:
        if left_over:
            raise MismatchError("messages are left over at the end:\n  " + "\n  ".join(left_over[:20]))
        return
    error = outcomes[rank].error
    assert error is not None
    texts = {}
    for other, outcome in enumerate(outcomes):
        if outcome.own and other != mine and (other == rank or str(outcome.error) != str(error)):
            texts[other] = outcome.text
    note_rank(error, rank, len(outcomes), texts)
    __tracebackhide__ = True
    raise_at(error, *outcomes[rank].place)


def note_rank(error: BaseException, rank: int, size: int, texts: dict[int, str] | None = None) -> None:
    """Keep on an exception which rank raised it, of how many, and what other ranks' tracebacks add to it."""
    if not hasattr(error, "failed_rank"):
        vars(error).update(failed_rank=rank, world_size=size, rank_texts=texts or {})


def raise_at(error: BaseException, filename: str, line: int, function: str) -> None:
    """Raise an exception whose traceback ends at a place of a file, though nothing runs there."""
    __tracebackhide__ = True
    code: CodeType = compile("\n" * (line - 1) + "raise error", filename or "<another rank>", "exec")
    exec(code.replace(co_name=function or "rank"), {"error": error.with_traceback(None)})


class raises:
    """Assert, on all ranks together, that a part of the program fails.

        with raises(comm, rd.MismatchError, match="another call"):
            comm.barrier() if comm.rank else comm.all_reduce(x)

    Every rank of the program must come here. At least one must raise ``expected``; the others may raise it too, or the PeerFailed
    that follows from it. Otherwise every rank raises AssertionError with what happened on each. Afterwards the program goes on
    as if the part had never been: messages of it are drained, and collective calls count from 0 again. No message and no Work
    may be under way when it begins.

    Args:
        comm: the group of all ranks that run the program.
        expected: the type, or types, of the error.
        match: a regular expression that is found in the error's words.
        everywhere: whether every rank must raise, or some may come through.

    Attributes:
        errors: after the block, each rank's error (None if it came through).
    """

    def __init__(self, comm: Comm, expected: type[BaseException] | tuple[type[BaseException], ...], match: str = "",
                 everywhere: bool = True) -> None:
        self.comm = comm
        self.expected = expected
        self.match = match
        self.everywhere = everywhere
        self.errors: list[BaseException | None] = []

    def __enter__(self) -> raises:
        """All ranks meet, so that none is still in a call before this part when another one fails in it."""
        outcomes, left_over = _settle(self.comm.transport, Outcome())
        for rank in self.comm.members:
            if outcomes[rank].finished or outcomes[rank].error is not None:
                raise PeerFailed(rank, _words(outcomes[rank]))
        if left_over:
            raise MismatchError("messages are under way where an error is expected:\n  " + "\n  ".join(left_over[:20]))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None:
            if not isinstance(error, Exception):
                return False
            self.comm.transport.fail(error)
        outcomes, _ = _settle(self.comm.transport, Outcome.of(error))
        outcomes = [outcomes[rank] for rank in self.comm.members]
        self.errors = [None if outcome.finished else outcome.error for outcome in outcomes]
        meant = [isinstance(found, self.expected) and bool(re.search(self.match, str(found))) for found in self.errors]
        fine = [good or isinstance(found, PeerFailed) or (found is None and not self.everywhere)
                for good, found in zip(meant, self.errors, strict=True)]
        if not (any(meant) and all(fine)) or any(outcome.finished for outcome in outcomes):
            names = [kind.__name__ for kind in (self.expected if isinstance(self.expected, tuple) else (self.expected,))]
            lines = [f"  rank {rank}: {_words(outcome)}" for rank, outcome in enumerate(outcomes)]
            matching = f" matching {self.match!r}" if self.match else ""
            raise AssertionError(f"expected {' or '.join(names)}{matching} on all ranks together:\n" + "\n".join(lines)) from None
        return True


def _words(outcome: Outcome) -> str:
    if outcome.finished:
        return "has finished and did not come here"
    return "nothing was raised" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"


@contextlib.contextmanager
def alarm(seconds: float | None) -> Iterator[None]:
    """Inside, TimeLimitExceeded is raised after so many seconds; needs SIGALRM and the main thread, else without effect."""
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise TimeLimitExceeded(f"the test has run for {seconds:g} s", call_site(frame))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def explained(comm: Comm) -> Iterator[None]:
    """A time limit that is reached inside says what every rank was doing."""
    try:
        yield
    except TimeLimitExceeded as reached:
        if len(reached.args) == 1:
            raise
        cause, site = reached.args
        doings = comm.transport.account("TimeLimitExceeded", cause, f"{site}")
        raise TimeLimitExceeded(report(cause, doings)) from None

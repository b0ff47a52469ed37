"""The watchdog: proof that a set of ranks waits for ever, and one account of a failure for all ranks.

A rank that has waited for some milliseconds publishes on the board what it waits for, and from then on looks at the board now
and then. Elapsed time alone never counts: a rank that computes for an hour is not waiting, so nobody that needs it is stuck.

The proof (compare Chandy, Misra & Haas 1983, "Distributed deadlock detection"). From the published states each rank finds the
stuck set S: waiting ranks of which each needs something of another one of S, or of a rank that has left. What the states cannot
show is a message that is still under way. So each rank of S sends every other one a *mark* through the same channel as its
messages. Messages do not overtake each other: once the marks of all of S are here, so is everything that was sent before them.

    suspect    S, and the number of the wait that each member is in: a fingerprint of both is the suspicion
    mark       send it to all of S; a rank that leaves has sent a farewell mark to everybody
    confirm    marks of this suspicion from all of S are here, and still nothing that this rank waits for: say so on the board
    proven     all of S have confirmed, and nobody's number has changed

A member that received anything, or did anything, between its mark and its confirmation would have another number. The first one
to go on would need a message that another member sent after its mark, so that one would have gone on before: nobody can.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Sequence
from typing import NoReturn, Protocol

from refdist.comm.board import LEFT, TEXT_BYTES, WAITING, Board
from refdist.comm.diagnosis import Doing, described, explain, named_error, report, stuck
from refdist.comm.transport import Request, call_site
from refdist.errors import MismatchError

__all__ = ["FAREWELL", "Channel", "Watchdog"]

FAREWELL = 1  # the mark of a rank that leaves; suspicions are larger
_PUBLISH_SECONDS = 0.004  # a wait of this length is published
_LOOK_SECONDS = 0.01  # between two looks at what the others have published
_ANSWER_SECONDS = 1.0  # how long a failed rank waits for the others to say what they are doing
_ACCOUNT_SECONDS = 3.0  # how long the others wait for its account


class Channel(Protocol):
    """What the watchdog needs of its transport."""

    rank: int
    size: int

    def moving(self, requests: Sequence[Request]) -> bool:
        """Make progress; True if one of the requests was not done and now is, or its payload is under way."""

    def send_mark(self, rank: int, mark: int) -> None:
        """Send a mark to a rank through the channel of this rank's messages."""

    def marks(self) -> dict[int, int]:
        """The last mark that has come from each rank."""


class Watchdog:
    """Watches one rank's long waits.

    Args:
        board: of all ranks.
        channel: this rank's transport.
    """

    def __init__(self, board: Board, channel: Channel) -> None:
        self.board = board
        self.channel = channel
        self.rank = channel.rank
        self.published = False
        self._since: float | None = None
        self._next_look = 0.0
        self._waits_for: tuple[int, ...] = ()
        self._suspicion = 0
        self._decoded: dict[int, tuple[int, Doing]] = {}

    # ------------------------------------------------------------------------------------------------ long waits

    def look(self, requests: Sequence[Request], any_of: bool) -> None:
        """Called now and then in a long wait: raise what another rank has failed with, or what this wait is proven to be.

        Args:
            requests: those that are waited for.
            any_of: whether one of them is enough.
        """
        self.check(requests, any_of)
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._since + _PUBLISH_SECONDS:
            return
        if self.channel.moving(requests):
            self.end()
            self._since = now
            return
        pending = tuple(id(request) for request in requests if not request.done)
        if pending != self._waits_for or not self.published:
            self._waits_for = pending
            self.published = True
            self._suspicion = 0
            self.board.publish(described(requests, any_of, call_site(sys._getframe(1))).encode(TEXT_BYTES))
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._suspect(requests)

    def end(self) -> None:
        """The wait is over."""
        self._since = None
        if self.published:
            self.published = False
            self._suspicion = 0
            self.board.resume()

    def _suspect(self, requests: Sequence[Request]) -> None:
        found, left = self._stuck()
        if self.rank not in found:
            return
        suspicion = self._fingerprint(found, left)
        if suspicion != self._suspicion:
            self._suspicion = suspicion
            for rank in found:
                self.channel.send_mark(rank, suspicion)
        marks = self.channel.marks()
        if any(marks.get(rank) != suspicion for rank in found) or any(marks.get(rank) != FAREWELL for rank in left):
            return
        if self.channel.moving(requests):
            return
        self.board.confirm(suspicion)
        if self.rank == min(found) and all(self.board.confirmed(rank) == suspicion for rank in found):
            self.board.refresh()
            again, still_left = self._stuck()
            if (again, still_left) == (found, left) and self._fingerprint(again, left) == suspicion:
                error = explain({rank: self._doing(rank) for rank in sorted(found)}, self._others(found))
                self.board.fail(type(error).__name__, str(error), complete=True)

    def _stuck(self) -> tuple[set[int], set[int]]:
        """The stuck set, and the ranks that its members need and that have left."""
        waiting = {rank: self._doing(rank) for rank in self.board.ranks_with(WAITING)}
        left = set(self.board.ranks_with(LEFT))
        found = stuck(waiting, left)
        return found, {peer for rank in found for peer in waiting[rank].peers if peer in left}

    def _fingerprint(self, found: set[int], left: set[int]) -> int:
        numbers = [(rank, self.board.number(rank)) for rank in sorted(found | left)]
        return FAREWELL + 1 + zlib.crc32(repr(numbers).encode())

    def _doing(self, rank: int) -> Doing:
        number = self.board.number(rank)
        known = self._decoded.get(rank)
        if known is None or known[0] != number:
            known = self._decoded[rank] = number, Doing.decode(self.board.doing(rank))
        return known[1]

    def _others(self, found: set[int]) -> dict[int, str]:
        """What the ranks that are not stuck are doing, in a few words."""
        words = {LEFT: "has finished", WAITING: "waits for one of them or for a rank that computes"}
        return {rank: words.get(self.board.status(rank), "computes") for rank in range(self.board.ranks) if rank not in found}

    # -------------------------------------------------------------------------------------------------- failures

    def check(self, requests: Sequence[Request] = (), any_of: bool = False) -> None:
        """Raise if a rank has failed; this one's state becomes a part of the account."""
        self.board.refresh()
        if self.board.first_failure() < 0:
            return
        if not self.board.answered(self.rank):
            self.board.answer(described(requests, any_of, call_site(sys._getframe(1))).encode(TEXT_BYTES))
        end = time.monotonic() + _ACCOUNT_SECONDS
        time.sleep(self.board.settling)
        while True:
            self.board.refresh()
            first = self.board.first_failure()
            if self.board.complete(first) or time.monotonic() > end:
                break
            time.sleep(1e-3)
        kind, account = self.board.account(first)
        raise named_error(kind, account, first)

    def tell(self, cause: str, requests: Sequence[Request]) -> NoReturn:
        """This rank has found a mismatch: collect what the others are doing, and raise one error with all of it everywhere."""
        kind = "MismatchError"
        doings = self.account(kind, cause, described(requests, False, call_site(sys._getframe(1))))
        self.board.fail(kind, report(cause, doings), complete=True)
        self.check()
        raise MismatchError(cause)

    def account(self, kind: str, cause: str, mine: Doing) -> dict[int, Doing | str]:
        """This rank fails: tell the others, and collect for a second at most what each of them is doing."""
        self.board.fail(kind, cause, complete=False)
        self.board.answer(mine.encode(TEXT_BYTES))
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end and not all(self.board.answered(rank) or self.board.status(rank) == LEFT
                                                 for rank in range(self.board.ranks)):
            time.sleep(1e-3)
            self.board.refresh()
        doings: dict[int, Doing | str] = {}
        for rank in range(self.board.ranks):
            if self.board.answered(rank):
                doing = Doing.decode(self.board.doing(rank))
                doings[rank] = doing if doing.waits else f"is at {doing.site}"
            else:
                doings[rank] = "has finished" if self.board.status(rank) == LEFT else "computes"
        return doings

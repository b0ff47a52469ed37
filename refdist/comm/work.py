"""Driving collectives: to the end at once, or bit by bit as a ``Work``.

Several Works can be under way on one rank. Whoever waits, for whatever, progresses all of them: a rank that waits for its
second Work while its peers wait for the first would hang otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from refdist.comm.call import Steps
from refdist.comm.transport import Request, Transport

__all__ = ["Work", "drive", "progress"]


class Work:
    """A collective under way.

    It is progressed by :meth:`test` and :meth:`wait`, by whatever else this rank waits for, and after each kernel that the
    group's device runs.
    """

    __slots__ = ("_error", "_pending", "_result", "_steps", "_transport", "done")

    def __init__(self, transport: Transport, steps: Steps) -> None:
        self._transport = transport
        self._steps = steps
        self._pending: Sequence[Request] = ()
        self._result: Any = None
        self._error: BaseException | None = None
        self.done = False
        transport.active.append(self)
        self._step()  # and no further: what the caller does next happens while these messages are under way

    def advance(self) -> bool:
        """Take every step that is ready; True when the collective is done. Never blocks and lets no other rank run.

        A collective that has failed raises its error whenever it is asked.
        """
        if self._error is not None:
            raise self._error
        test = self._transport.test
        while not self.done and test(self._pending):
            self._step()
        return self.done

    def _step(self) -> None:
        """Go on to where the collective yields the next requests, or to its end."""
        self._pending = ()  # requests that are done keep no buffer alive
        try:
            self._pending = next(self._steps)
        except StopIteration as stop:
            self._finish(stop.value)
        except BaseException as error:
            self._error = error
            self._finish(None)
            raise

    def _finish(self, result: Any) -> None:
        self._result = result
        self._pending = ()
        self.done = True
        self._transport.active.remove(self)

    def test(self) -> bool:
        """Progress; True when the result is there.

        In process a loop of nothing but this, in which no message moves, ends with a DeadlockError at some time.
        """
        if not self.advance():
            self._transport.pause(polls=True)
            self.advance()
        return self.done

    def wait(self) -> Any:
        """Progress to the end and return what the blocking call would have returned."""
        while not self.advance():
            wait_among_others(self._transport, self._pending)
        return self._result

    def __str__(self) -> str:
        return f"Work ({self._pending[0].what if self._pending else 'no message under way'})"

    @property
    def pending(self) -> list[Request]:
        """The requests that the next step depends on and that are not done."""
        return [request for request in self._pending if not request.done]


def drive(transport: Transport, steps: Steps) -> Any:
    """Run a collective to its end and return its result."""
    result: list[Any] = []
    for requests in _to_the_end(steps, result):
        if transport.active:
            wait_among_others(transport, requests)
        else:
            transport.wait(requests)
        requests = ()  # those that are done keep no buffer alive
    return result[0]


def _to_the_end(steps: Steps, result: list[Any]) -> Iterator[Sequence[Request]]:
    """The steps, and then the result into that list: a loop over this costs less than to catch StopIteration."""
    result.append((yield from steps))


def wait_among_others(transport: Transport, requests: Sequence[Request]) -> None:
    """Wait for ``requests`` and progress every Work of this rank meanwhile."""
    while True:
        # What is open before anything is looked at: a look at one request may complete others, also of those looked at before.
        pending = [request for request in requests if not request.done]
        for work in transport.active:
            pending += work.pending
        if transport.test(requests):
            return
        advanced = [work for work in list(transport.active) if not work.done and transport.test(work._pending)]
        for work in advanced:
            work.advance()
        if not advanced:
            transport.wait_any(pending)


def progress(transport: Transport) -> None:
    """Give every Work of this rank a chance; called after each kernel."""
    if transport.active:
        transport.pause()
        for work in list(transport.active):
            work.advance()

"""One rank's events as others' viewers read them: Google's Trace Event Format, for ui.perfetto.dev or chrome://tracing.

    recording = Recording(device, comm.rank)         begins to listen
    trainer.step(ids, labels)
    recording.stop()
    Path("step.json").write_text(as_json([recording.events]))          of one rank or of several

Each rank is a process there. It has a track of kernels, one of what encloses them (actions of a pipeline schedule), one of each
kind of collective while it is under way, one of messages, and a counter of live memory by category.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from refdist.device.device import CATEGORIES, Device
from refdist.device.events import Allocation, Event, Kernel, Message, Phase

__all__ = ["Recording", "as_json"]

_ACTION = re.compile(r"[FBIW] \d+ \d+")  # of a pipeline's schedule, which follow one another
_KERNELS, _ACTIONS, _MESSAGES = 1, 2, 3  # tracks of a rank


class Recording:
    """The events of one device while it listens.

    Args:
        device: of this rank.
        rank: its number.

    Attributes:
        events: dictionaries of the format, with times in microseconds of ``time.perf_counter()``.
    """

    def __init__(self, device: Device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.events: list[dict[str, Any]] = [self._event("M", "process_name", 0, args={"name": f"rank {rank}"})]
        self.events += [self._event("M", "thread_name", 0, track, args={"name": name})
                        for track, name in ((_KERNELS, "kernels"), (_ACTIONS, "actions"), (_MESSAGES, "messages"))]
        self._live = {category: device.live[category] for category in CATEGORIES}
        self._open: defaultdict[str, deque[int]] = defaultdict(deque)  # collectives under way, by name, the oldest first
        self._number = 0
        device.listeners.append(self)

    def stop(self) -> None:
        """Listen no longer."""
        self.device.listeners.remove(self)

    def __call__(self, event: Event) -> None:
        """Note an event."""
        if isinstance(event, Kernel):
            about = {"shapes": [list(shape) for shape in event.shapes], "flops": event.flops, "recomputed": event.recomputed}
            self._add("X", event.name, event.start, _KERNELS, dur=round(1e6 * (event.end - event.start), 3), args=about)
        elif isinstance(event, Message):
            about = {"to": event.peer, "bytes": event.nbytes, "step": event.step}
            self._add("i", f"{event.operation} on {event.axis}", event.time, _MESSAGES, s="t", args=about)
        elif isinstance(event, Allocation):
            self._live[event.category] += event.nbytes
            self._add("C", "live bytes", event.time, args=dict(self._live))
        elif isinstance(event, Phase):
            self._phase(event)

    def _phase(self, phase: Phase) -> None:
        if _ACTION.fullmatch(phase.name):
            self._add("B" if phase.begins else "E", phase.name, phase.time, _ACTIONS)
            return
        waiting = self._open[phase.name]
        if phase.begins:
            self._number += 1
            waiting.append(self._number)
        elif not waiting:
            return  # had begun before
        number = waiting[-1] if phase.begins else waiting.popleft()
        self._add("b" if phase.begins else "e", phase.name, phase.time, cat="collective", id=f"{self.rank}.{number}")

    def _add(self, kind: str, name: str, seconds: float, track: int = 0, **more: Any) -> None:
        self.events.append(self._event(kind, name, 1e6 * seconds, track, **more))

    def _event(self, kind: str, name: str, time: float, track: int = 0, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "ts": time, "pid": self.rank, "tid": track, **more}


def as_json(of_ranks: Iterable[list[dict[str, Any]]]) -> str:
    """A file of the format from the events of some ranks; the first moment is 0."""
    events = [event for events in of_ranks for event in events]
    first = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
    moved = [event if event["ph"] == "M" else {**event, "ts": round(event["ts"] - first, 3)} for event in events]
    return json.dumps({"traceEvents": moved, "displayTimeUnit": "ms"})

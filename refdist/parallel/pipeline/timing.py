"""How long a schedule takes: every action as early as its stage and its inputs allow; bubble, micro-batches in flight, memory.

    stage 0   ┃F0┃F1┃········┃  B0  ┃  B1  ┃      ·  bubble: the stage waits, between its first action and its last
    stage 1      ┃F0┃  B0  ┃F1┃  B1  ┃

Times are those of one micro-batch in all layers of a stage (Qi et al. 2023): F forward, B input gradient, W weight gradient, so
that a whole backward takes B + W. A stage with V chunks of a micro-batch's path does each of them in 1/V of that. The bubble is
the idle time of a stage between its first action and its last, at most over the stages: the paper's definition, which counts
no time for a stage that begins late and ends as much later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from refdist.device.events import Event, Phase
from refdist.errors import PlanError
from refdist.parallel.pipeline.action import Action, Place, Schedule, result_kind

__all__ = ["UNIT", "Recorder", "Span", "Times", "bubble", "idle", "in_flight", "lower_bound", "makespan", "peak_in_flight",
           "peak_memory", "simulate"]


class Times(NamedTuple):
    """Times in all layers of a stage, in any unit and number type.

    Attributes:
        F, B, W: of a micro-batch's forward, input gradient and weight gradient.
        FB: of a forward and the whole backward of another micro-batch that directly follows it, when the two overlap (DualPipe's
            F&B); both begin together and end together then. None: nothing overlaps.
    """

    F: Any = 1
    B: Any = 1
    W: Any = 1
    FB: Any = None

    def of(self, kind: str) -> Any:
        """The time of an action of this kind in all layers of a stage."""
        return {"F": self.F, "I": self.B, "W": self.W, "B": self.B + self.W}[kind]


UNIT = Times()


class Span(NamedTuple):
    """An action with its beginning and end."""

    action: Action
    start: Any
    end: Any


def simulate(schedule: Schedule, times: Times = UNIT, latency: Any = 0) -> list[list[Span]]:
    """When each stage does what, if everything begins as early as it can.

    Args:
        schedule: a valid one.
        times: of actions.
        latency: from the end of an action to when another stage has its result.

    Raises:
        PlanError: the stages wait for each other in a circle (with ``FB`` that can happen to a valid schedule).
    """
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    ends: dict[tuple[str, int, Place], Any] = {}  # (F or B, micro-batch, place) -> when that result is there
    blocks = [_blocks(actions, times.FB is not None) for actions in schedule.actions]
    ready = deque(range(schedule.stages))
    while ready:
        stage = ready.popleft()
        while blocks[stage]:
            block = blocks[stage][0]
            needed = _inputs(schedule, stage, block)
            if any(need not in ends for need in needed):
                break
            blocks[stage].popleft()
            there = [ends[need] + (latency if need[2].stage != stage else 0) for need in needed]
            start = max([spans[stage][-1].end if spans[stage] else 0, *there])
            end = start + (times.of(block[0].kind) if len(block) == 1 else times.FB) / schedule.visits
            for action in block:
                spans[stage].append(Span(action, start, end))
                if action.kind != "W":
                    ends[result_kind(action), action.micro_batch, Place(stage, action.chunk)] = end
                    target = schedule.target(stage, action)
                    ready.extend([] if target is None or target.stage == stage else [target.stage])
    for stage, rest in enumerate(blocks):
        if rest:
            raise PlanError(f"stage {stage} never comes to action {len(spans[stage])}, {rest[0][0]}")
    return spans


def _blocks(actions: Sequence[Action], overlap: bool) -> deque[tuple[Action, ...]]:
    """A stage's actions one by one, or with a forward and a whole backward of another micro-batch after it as one."""
    blocks: deque[tuple[Action, ...]] = deque()
    for action in actions:
        before = blocks[-1] if blocks else ()
        if overlap and action.kind == "B" and [a.kind for a in before] == ["F"] and before[0].micro_batch != action.micro_batch:
            blocks[-1] = (before[0], action)
        else:
            blocks.append((action,))
    return blocks


def _inputs(schedule: Schedule, stage: int, block: tuple[Action, ...]) -> list[tuple[str, int, Place]]:
    sources = [(action, schedule.source(stage, action)) for action in block]
    return [(result_kind(action), action.micro_batch, source) for action, source in sources if source is not None]


class Recorder:
    """A listener of a device: when the actions of a run really began and ended, in seconds.

    Attributes:
        spans: of this rank's stage, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._start = 0.0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Phase) or event.name[:2] not in ("F ", "B ", "I ", "W "):
            return
        if event.begins:
            self._start = event.time
        else:
            kind, micro_batch, chunk = event.name.split()
            self.spans.append(Span(Action(kind, int(micro_batch), int(chunk)), self._start, event.time))


def makespan(spans: Sequence[Sequence[Span]]) -> Any:
    """From the first beginning to the last end."""
    return max(stage[-1].end for stage in spans if stage) - min(stage[0].start for stage in spans if stage)


def idle(spans: Sequence[Sequence[Span]]) -> list[Any]:
    """Each stage's idle time between its first action and its last."""
    return [sum(max(after.start - before.end, 0) for before, after in pairwise(stage)) for stage in spans]


def bubble(spans: Sequence[Sequence[Span]]) -> Any:
    """The largest idle time of a stage between its first action and its last."""
    return max(idle(spans))


def in_flight(actions: Sequence[Action]) -> list[int]:
    """After each action of a stage, how many (micro-batch, chunk) have begun forward and not ended their weight gradient."""
    counts, now = [], 0
    for action in actions:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        counts.append(now)
    return counts


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Each stage's largest number of (micro-batch, chunk) in flight; divide by the chunks for whole micro-batches."""
    return [max(in_flight(actions), default=0) for actions in schedule.actions]


def peak_memory(actions: Sequence[Action], whole: Any = 1, for_weights: Any = 1) -> Any:
    """A stage's largest memory for saved activations.

    Args:
        actions: of the stage.
        whole: what a micro-batch's chunk keeps from its forward on (M_B).
        for_weights: what is left of that between its input gradient and its weight gradient (M_W).
    """
    change = {"F": whole, "B": -whole, "I": for_weights - whole, "W": -for_weights}
    now, peak = 0, 0
    for action in actions:
        now += change[action.kind]
        peak = max(peak, now)
    return peak


def lower_bound(schedule: Schedule, times: Times = UNIT) -> Any:
    """What no schedule of these stages and micro-batches can beat, whatever its order.

    Either a stage's own work, after the earliest time that a micro-batch can reach it; or one micro-batch's way through all
    layers and back, and its last weight gradient.
    """
    forward, backward, weights = (time / schedule.visits for time in times[:3])
    path = schedule.paths[0]
    through = len(path) * (forward + backward) + weights
    work = [sum(times.of(action.kind) / schedule.visits for action in actions) for actions in schedule.actions]
    arrival = [min(position for path in schedule.paths for position, place in enumerate(path) if place.stage == stage)
               for stage in range(schedule.stages)]
    return max(through, *(forward * steps + own for steps, own in zip(arrival, work, strict=True)))

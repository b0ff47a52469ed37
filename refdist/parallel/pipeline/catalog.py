"""The table of schedules: their functions, how many chunks they have and where these lie, and what their papers promise.

The formulas are those of the papers (p stages, m micro-batches, V chunks a stage; F, B, W as in ``timing.py``, so that a whole
backward is B+W). They hold where ``holds`` says so; elsewhere a schedule is right, and takes what ``timing.simulate`` finds.
DualPipe's hold exactly when an overlapped pair F&B takes as long as its two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from refdist.errors import PlanError
from refdist.parallel.pipeline import schedules
from refdist.parallel.pipeline.action import Action, Schedule, from_lists, load_schedule
from refdist.parallel.pipeline.timing import UNIT, Times

__all__ = ["SCHEDULES", "Entry", "OwnSchedule", "Promise", "make_schedule", "promise"]

OwnSchedule: TypeAlias = Callable[[int, int, int], Any]


class Entry(NamedTuple):
    """A schedule that has a name.

    Attributes:
        function: (stages, micro-batches, chunks) -> the actions of each stage.
        chunks: how many each stage holds; None: any number.
        placement: of the chunks.
        title: for people.
        bubble: the formula of the bubble, and its value from (p, m, V, times).
        peak: the formula of the micro-batches in flight, and its value from (p, m, V, stage).
        holds: whether the two are promised for (p, m, V, times).
    """

    function: Callable[..., list[list[Action]]]
    chunks: int | None
    placement: str
    title: str
    bubble: tuple[str, Callable[[int, int, int, Times], Any]]
    peak: tuple[str, Callable[[int, int, int, int], Any]]
    holds: Callable[[int, int, int, Times], bool]


def _always(p: int, m: int, V: int, t: Times) -> bool:
    return True


def _usual(p: int, m: int, V: int, t: Times) -> bool:
    return m >= p and t.W <= t.F <= t.B


SCHEDULES = {
    "gpipe": Entry(
        schedules.gpipe, 1, "loop", "GPipe",
        ("(p-1)(F+B+W)", lambda p, m, V, t: (p - 1) * (t.F + t.B + t.W)),
        ("m", lambda p, m, V, stage: m), _always),
    "1f1b": Entry(
        schedules.one_f_one_b, 1, "loop", "1F1B",
        ("(p-1)(F+B+W)", lambda p, m, V, t: (p - 1) * (t.F + t.B + t.W)),
        ("min(p-stage, m)", lambda p, m, V, stage: min(p - stage, m)), _always),
    "interleaved": Entry(
        schedules.interleaved, None, "loop", "Interleaved 1F1B",
        ("(p-1)(F+B+W)/V", lambda p, m, V, t: (p - 1) * (t.F + t.B + t.W) / V),
        ("min(p+(p-1-2·stage)/V, m)", lambda p, m, V, stage: Fraction(min(p * V + p - 1 - 2 * stage, m * V), V)),
        lambda p, m, V, t: m % p == 0 and V > 1),
    "zb_h1": Entry(
        schedules.zb_h1, 1, "loop", "ZB-H1",
        ("(p-1)(F+B-W)", lambda p, m, V, t: (p - 1) * (t.F + t.B - t.W)),
        ("p", lambda p, m, V, stage: p), _usual),
    "zb_h2": Entry(
        schedules.zb_h2, 1, "loop", "ZB-H2",
        ("(p-1)(F+B-2W)", lambda p, m, V, t: (p - 1) * (t.F + t.B - 2 * t.W)),
        ("2p-1", lambda p, m, V, stage: 2 * p - 1), lambda p, m, V, t: m >= 2 * p - 1 and t.W <= t.F <= t.B),
    "zb_v": Entry(
        schedules.zb_v, 2, "v", "ZB-V",
        ("0 when F=B=W", lambda p, m, V, t: 0),
        ("p", lambda p, m, V, stage: p), lambda p, m, V, t: m >= 2 * p - 1 and t.F == t.B == t.W),
    "dualpipe_v": Entry(
        schedules.dualpipe_v, 2, "v", "DualPipe-V",
        ("(p-1)(F&B+B-2W)/2", lambda p, m, V, t: (p - 1) * (t.FB + t.B - 2 * t.W) / 2),
        ("p+1/2", lambda p, m, V, stage: Fraction(2 * p + 1, 2)), lambda p, m, V, t: _paired(t) and m >= 2 * p),
    "dualpipe": Entry(
        schedules.dualpipe, 2, "bidirectional", "DualPipe",
        ("(p/2-1)(F&B+B-2W)", lambda p, m, V, t: (p - 2) * (t.FB + t.B - 2 * t.W) / 2),
        ("p+1", lambda p, m, V, stage: p + 1), lambda p, m, V, t: _paired(t) and m % 2 == 0 and m >= 2 * p),
}


def _paired(t: Times) -> bool:
    """A forward and a backward that stand together begin and end together, and take as long as one after the other."""
    return t.FB == t.F + t.B + t.W and t.W <= t.F <= t.B


class Promise(NamedTuple):
    """What a schedule's paper promises: the formulas, and their values where they hold (None elsewhere)."""

    bubble_formula: str
    bubble: Any
    peak_formula: str
    peaks: list[Any] | None


def promise(schedule: Schedule, times: Times = UNIT) -> Promise | None:
    """The formulas of a named schedule in whole micro-batches; None for one of somebody's own."""
    entry = SCHEDULES.get(schedule.name)
    if entry is None:
        return None
    p, m, V = schedule.stages, schedule.micro_batches, schedule.chunks
    holds = entry.holds(p, m, V, times)
    return Promise(entry.bubble[0], entry.bubble[1](p, m, V, times) if holds else None,
                   entry.peak[0], [entry.peak[1](p, m, V, stage) for stage in range(p)] if holds else None)


def make_schedule(schedule: str | OwnSchedule | Schedule | Sequence[Any], stages: int, micro_batches: int, chunks: int = 1,
                  group: int | None = None) -> Schedule:
    """The schedule for so many stages and micro-batches.

    Args:
        schedule: a name of :data:`SCHEDULES`; a path to a ``.json`` file (``action.read_schedule``); a function of (stages,
            micro-batches, chunks) that returns a list of actions a stage, or a Schedule; such lists; or a Schedule.
        stages, micro_batches: what it must be for.
        chunks: how many a stage holds; 1 stands for the only possible number where there is one.
        group: contiguous micro-batches of an interleaved schedule (Llama 3's N); by default the number of stages.

    Raises:
        PlanError: no such schedule, or not for these sizes.
    """
    if isinstance(schedule, str) and not schedule.endswith(".json"):
        return _named(schedule, stages, micro_batches, chunks, group)
    if isinstance(schedule, str):
        made: Any = load_schedule(schedule)
    else:
        made = schedule(stages, micro_batches, chunks) if callable(schedule) else schedule
    if not isinstance(made, Schedule):
        made = from_lists(made)
    found = {"stages": made.stages, "micro_batches": made.micro_batches}
    wanted = {"stages": stages, "micro_batches": micro_batches}
    if found != wanted:
        raise PlanError(f"the schedule {made.name} is for {found['stages']} stages and {found['micro_batches']} micro-batches, "
                        f"not for {stages} and {micro_batches}")
    return made


def _named(name: str, stages: int, micro_batches: int, chunks: int, group: int | None) -> Schedule:
    entry = SCHEDULES.get(name)
    if entry is None:
        raise PlanError(f"schedule={name!r}: expected one of {', '.join(SCHEDULES)}, or a .json file")
    if stages < 1 or micro_batches < 1 or chunks < 1:
        raise PlanError(f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks: each must be at least 1")
    if entry.chunks is not None and chunks not in (1, entry.chunks):
        raise PlanError(f"virtual_stages={chunks}: {name} has {entry.chunks} chunk{'s' * (entry.chunks > 1)} a stage")
    if group is not None and name != "interleaved":
        raise PlanError(f"interleave_group={group}: {name} is not interleaved")
    chunks = entry.chunks or chunks
    options = {} if group is None else {"group": group}
    actions = entry.function(stages, micro_batches, chunks, **options)
    return Schedule(tuple(map(tuple, actions)), micro_batches, chunks, entry.placement, name)

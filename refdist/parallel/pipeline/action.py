"""The words of a pipeline schedule: actions, where chunks of the model lie, and ``Schedule``.

    stage 0   F0 F1 F2 F3          B0 …      F  forward of a micro-batch through a chunk of layers
    stage 1      F0 F1 F2       B0 B1 …      B  backward, whole
    stage 2         F0 F1    B0 B1 …         I  its first half: the gradient of the chunk's input
    stage 3            F0 B0 F1 B1 …         W  its second half: the gradients of the chunk's weights

A schedule is data: one list of actions a stage. A stage is one pipeline rank; it holds one or more *chunks* of the model. A
micro-batch visits the chunks along a *path* of places (stage, chunk). Splitting backward into I and W is from Qi et al. 2023,
"Zero Bubble Pipeline Parallelism", section 2.

    loop            chunk 0: stages 0 … p-1, chunk 1: 0 … p-1 again, …       (Narayanan et al. 2021, figure 4)
    v               chunk 0: stages 0 … p-1, chunk 1 back: p-1 … 0, …        (Qi et al. 2024, section 4)
    bidirectional   two paths: half of the micro-batches go 0 … p-1 through chunks 0, half p-1 … 0 through chunks 1, which
                    hold the same layers: every stage of the model lies on two ranks    (DeepSeek-V3 2024, figure 5)
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from refdist.errors import PlanError

__all__ = ["KINDS", "PLACEMENTS", "Action", "Place", "Schedule", "from_lists", "load_schedule", "read_actions", "read_schedule",
           "result_kind"]

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
PLACEMENTS = ("loop", "v", "bidirectional")


class Action(NamedTuple):
    """What a stage does: ``kind`` (F, B, I or W) on a micro-batch in one of the stage's chunks."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


def result_kind(action: Action) -> str:
    """What an action makes: ``"F"``, an activation, or ``"B"``, the gradient of an activation (of a W, that of its I)."""
    return "F" if action.kind == "F" else "B"


class Place(NamedTuple):
    """One of the chunks of one of the stages."""

    stage: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What every stage does, in order.

    Attributes:
        actions: one tuple of actions a stage.
        micro_batches: how many there are, numbered from 0.
        chunks: how many each stage holds.
        placement: in which order a micro-batch visits them: ``"loop"``, ``"v"`` or ``"bidirectional"``.
        name: for people.

    Raises:
        PlanError: a placement that does not exist, or sizes below 1.
    """

    actions: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1
    placement: str = "loop"
    name: str = "own"

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise PlanError(f"placement={self.placement!r}: expected one of {', '.join(PLACEMENTS)}")
        if self.placement == "bidirectional" and self.chunks != 2:
            raise PlanError(f"a bidirectional placement has 2 chunks a stage, not {self.chunks}")
        if min(self.stages, self.micro_batches, self.chunks) < 1:
            raise PlanError(f"a schedule of {self.stages} stages, {self.micro_batches} micro-batches and {self.chunks} chunks: "
                            "each must be at least 1")

    @property
    def stages(self) -> int:
        """How many pipeline ranks there are."""
        return len(self.actions)

    @cached_property
    def paths(self) -> tuple[tuple[Place, ...], ...]:
        """The places that a micro-batch visits in forward; two ways to go when bidirectional."""
        way = range(self.stages)
        if self.placement == "bidirectional":
            return tuple(Place(stage, 0) for stage in way), tuple(Place(stage, 1) for stage in reversed(way))
        turns = self.placement == "v"
        ways = [way[::-1] if turns and chunk % 2 else way for chunk in range(self.chunks)]
        return (tuple(Place(stage, chunk) for chunk, way in enumerate(ways) for stage in way),)

    @cached_property
    def _positions(self) -> tuple[dict[Place, int], ...]:
        return tuple({place: position for position, place in enumerate(path)} for path in self.paths)

    @property
    def visits(self) -> int:
        """How many of a stage's chunks one micro-batch goes through."""
        return len(self.paths[0]) // self.stages

    def path(self, micro_batch: int) -> tuple[Place, ...]:
        """The places that this micro-batch visits in forward."""
        return self.paths[micro_batch * len(self.paths) // self.micro_batches]

    def position(self, stage: int, action: Action) -> int | None:
        """Where on its micro-batch's path an action of a stage is; None if the path does not go there."""
        way = action.micro_batch * len(self.paths) // self.micro_batches
        return self._positions[way].get(Place(stage, action.chunk))

    def source(self, stage: int, action: Action) -> Place | None:
        """The place whose result an action needs: the one before for F, the one after for B and I, None at the ends."""
        position = self.position(stage, action)
        if position is None or action.kind == "W":
            return None
        path = self.path(action.micro_batch)
        position += -1 if action.kind == "F" else 1
        return path[position] if 0 <= position < len(path) else None

    def target(self, stage: int, action: Action) -> Place | None:
        """The place that an action's result goes to: the one after for F, the one before for B and I, None at the ends."""
        position = self.position(stage, action)
        if position is None or action.kind == "W":
            return None
        path = self.path(action.micro_batch)
        position += 1 if action.kind == "F" else -1
        return path[position] if 0 <= position < len(path) else None

    def to_lists(self) -> list[list[list[Any]]]:
        """The plain form: ``[[["F", micro_batch, chunk], …], …]``, one list a stage."""
        return [[list(action) for action in actions] for actions in self.actions]


def read_actions(lists: Any) -> tuple[tuple[Action, ...], ...]:
    """Actions from their plain form ``[[["F", micro_batch, chunk], …], …]``; the chunk may be left out where it is 0.

    Raises:
        PlanError: something else than that; says where.
    """
    if not isinstance(lists, Sequence) or isinstance(lists, str) or not lists:
        raise PlanError(f"expected a list with one list of actions for each stage, not {reprlib.repr(lists)}")
    return tuple(tuple(_read_stage(stage, actions)) for stage, actions in enumerate(lists))


def _read_stage(stage: int, actions: Any) -> Iterable[Action]:
    if not isinstance(actions, Sequence) or isinstance(actions, str):
        raise PlanError(f"stage {stage}: expected a list of actions, not {actions!r}")
    for index, action in enumerate(actions):
        right = isinstance(action, Sequence) and 2 <= len(action) <= 3 and isinstance(action[0], str) and action[0] in KINDS
        if not right or not all(isinstance(number, int) and not isinstance(number, bool) for number in action[1:]):
            raise PlanError(f"stage {stage}, action {index}: {action!r} is no [kind, micro_batch, chunk] with a kind of "
                            f"{', '.join(KINDS)}")
        yield Action(*action)


def read_schedule(text: str, placement: str | None = None, name: str = "own") -> Schedule:
    """A schedule from JSON: the plain list of lists, or ``{"actions": …, "placement": "v"}``.

    How many micro-batches and chunks there are follows from the largest numbers in it.

    Raises:
        PlanError: not JSON, or not of that form.
    """
    try:
        read = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"the schedule {name} is not JSON, or deeper than a schedule is: {error}") from None
    if isinstance(read, dict):
        placement = placement or read.get("placement")
        read = read.get("actions")
    try:
        return from_lists(read, placement or "loop", name)
    except PlanError as error:
        raise PlanError(f"the schedule {name}: {error}") from None


def load_schedule(path: str, placement: str | None = None) -> Schedule:
    """As :func:`read_schedule`, from a file.

    Raises:
        PlanError: a file that cannot be read, too.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"schedule={path!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"schedule={path!r} is no text in UTF-8: {error}") from None
    return read_schedule(text, placement, path)


def from_lists(lists: Any, placement: str = "loop", name: str = "own") -> Schedule:
    """As :func:`read_schedule`, from what JSON has been read to."""
    actions = read_actions(lists)
    flat = [action for stage in actions for action in stage]
    micro_batches = 1 + max((action.micro_batch for action in flat), default=0)
    chunks = 1 + max((action.chunk for action in flat), default=0)
    for what, number in (("micro-batch", micro_batches), ("chunk", chunks)):
        if number > max(1, len(flat)):
            raise PlanError(f"{what} {number - 1} of a schedule of {len(flat)} actions: they are counted from 0, without gaps")
    return Schedule(actions, max(micro_batches, 1), max(chunks, 1), placement, name)

"""``RandomSchedule``: a pipeline schedule that nobody has thought of, for testing what executes schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass

from refdist.parallel.pipeline.action import Action, Schedule

__all__ = ["RandomSchedule"]


@dataclass(frozen=True)
class RandomSchedule:
    """A schedule as ``rd.Plan(schedule=…)`` takes it: a valid one, chosen by a seed among all that there are.

    Action by action, one of those whose inputs are there is drawn, on whichever stage. Some backwards are whole, some in halves.

    Attributes:
        seed: of the choice.
        placement: of the chunks, ``"loop"`` or ``"v"``.
    """

    seed: int
    placement: str = "loop"

    def __call__(self, stages: int, micro_batches: int, chunks: int) -> Schedule:
        """The schedule for these sizes."""
        generator = random.Random(self.seed)
        lists: list[list[Action]] = [[] for _ in range(stages)]
        path = Schedule(tuple(() for _ in range(stages)), micro_batches, chunks, self.placement).paths[0]
        halves = {(position, number): generator.random() < 0.5
                  for position in range(len(path)) for number in range(micro_batches)}
        ready = [("F", 0, number) for number in range(micro_batches)]  # (kind, position on the path, micro-batch)
        while ready:
            kind, position, number = ready.pop(generator.randrange(len(ready)))
            lists[path[position].stage].append(Action(kind, number, path[position].chunk))
            if kind == "F" and position + 1 < len(path):
                ready.append(("F", position + 1, number))
            elif kind != "W":
                before = position if kind == "F" else position - 1  # backward goes on here, or at the place before
                if before >= 0:
                    ready.append(("I" if halves[before, number] else "B", before, number))
            if kind == "I":
                ready.append(("W", position, number))
        return Schedule(tuple(map(tuple, lists)), micro_batches, chunks, self.placement, f"random {self.seed}")

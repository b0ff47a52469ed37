"""``StageWriter``: writes down one stage's actions phase by phase, numbering the micro-batches of each kind and chunk itself."""

from __future__ import annotations

from collections import Counter

from refdist.parallel.pipeline.action import Action

__all__ = ["StageWriter"]


class StageWriter:
    """A stage's actions so far. ``do("F", 1)`` adds the forward of the next micro-batch in chunk 1.

    Attributes:
        count: how many actions there are of each (kind, chunk); a whole backward counts as an I and a W.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.count: Counter[tuple[str, int]] = Counter()
        self._waiting: list[tuple[int, int]] = []  # (micro-batch, chunk) with an input gradient and no weight gradient, in order

    def __call__(self, kind: str, chunk: int) -> None:
        counted = "I" if kind == "B" else kind
        micro_batch = self.count[counted, chunk]
        self.count[counted, chunk] += 1
        self.actions.append(Action(kind, micro_batch, chunk))
        if kind == "I":
            self._waiting.append((micro_batch, chunk))
        elif kind == "W":
            self._waiting.remove((micro_batch, chunk))
        elif kind == "B":
            self.count["W", chunk] += 1

    def oldest_weight_gradient(self) -> None:
        """Add the weight gradient that has waited longest, of whichever chunk."""
        _, chunk = self._waiting[0]
        self("W", chunk)

    def remaining_weight_gradients(self) -> None:
        """Add all weight gradients that wait, the oldest first."""
        while self._waiting:
            self.oldest_weight_gradient()

    def up_to(self, micro_batches: int) -> list[Action]:
        """The actions of the first ``micro_batches`` micro-batches: leaving out whole ones keeps a schedule valid."""
        return [action for action in self.actions if action.micro_batch < micro_batches]

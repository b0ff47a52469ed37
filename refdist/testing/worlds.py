"""``World``: on how many ranks, in which interleaving and with what kind of sends a program runs; an argument like any other.

Strategies draw worlds, so that a failing example prints the interleaving that it needs, and shrinks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from refdist.comm import Comm, run

__all__ = ["Choices", "World"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Choices:
    """An interleaving as data: which of the runnable ranks runs next, choice by choice; first-in-first-out when they run out.

    Numbers count modulo the ranks that are runnable, so that every list is an interleaving.
    """

    numbers: tuple[int, ...] = ()

    def scheduler(self) -> Callable[[list[int]], int]:
        """A scheduler for one run, from the first choice on."""
        numbers = iter(self.numbers)
        return lambda runnable: next(numbers, 0) % len(runnable)


@dataclass(frozen=True)
class World:
    """A set of in-process ranks to be.

    Attributes:
        ranks: how many.
        scheduler: ``"fifo"``, a seed, or :class:`Choices`.
        sends: ``"buffered"`` or ``"rendezvous"``.
        checks: whether arrays in flight are guarded.
    """

    ranks: int = 2
    scheduler: str | int | Choices = "fifo"
    sends: str = "buffered"
    checks: bool = False

    def run(self, program: Callable[[Comm], Result]) -> list[Result]:
        """What ``program(comm)`` returns on each rank."""
        scheduler = self.scheduler.scheduler() if isinstance(self.scheduler, Choices) else self.scheduler
        return run(program, self.ranks, scheduler=scheduler, sends=self.sends, checks=self.checks)

"""The property tests' bodies by axis, whether they notice a mutation, and how long they take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from refdist.testing import faults, strategies
from refdist.testing.collectives import CollectiveCase
from refdist.testing.faults import FAULTS, Fault
from refdist.testing.mutate import Mutation, mutated
from refdist.testing.precision import PrecisionCase
from refdist.testing.training import TrainingCase

__all__ = ["notices", "property_of", "seconds_by_ranks"]


def property_of(axis: str) -> tuple[SearchStrategy[Any], Callable[[Any], None]]:
    """The draws of one axis (``"comm:all_reduce"`` is one operation of an axis), and what must hold for each of them."""
    room, _, operation = axis.partition(":")
    if room == "comm":
        return strategies.collective_cases(operation), CollectiveCase.check
    if room == "faults":
        return st.sampled_from([fault for fault in FAULTS if fault.in_process]), _found
    if axis == "optimizer":
        return strategies.training_cases(["dp"], largest=1), TrainingCase.check
    if axis in ("tp", "cp"):  # whatever goes wrong there does so on four ranks, and they take half the time
        return strategies.training_cases([axis], largest=4), TrainingCase.check
    if axis == "precision":
        return strategies.precision_cases(), PrecisionCase.check
    if axis in strategies.PLAN_AXES:
        return strategies.training_cases([axis]), TrainingCase.check
    raise ValueError(f"axis={axis!r}: no property test draws it")


def _found(fault: Fault) -> None:
    seen = faults.in_process(fault)
    assert seen.right(fault), seen


def notices(mutation: Mutation, examples: int | None = None) -> BaseException | None:
    """What the property test of the mutation's axis fails with while the mutation holds; None if it passes.

    The examples are the same in every run, and the first failing one ends the search: nothing is shrunk. By default there are at
    most 1000.
    """
    if examples is None:
        examples = 1000
    strategy, check = property_of(mutation.axis)

    @settings(max_examples=examples, derandomize=True, database=None, phases=[Phase.generate], deadline=None,
              report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def search(drawn: Any) -> None:
        check(drawn)

    with mutated(mutation):
        try:
            search()
        except Exception as error:
            return error
    return None


def seconds_by_ranks(examples: int, largest: int, draws: int = 0) -> dict[int, list[float]]:
    """How long examples of the property test of training take, by number of ranks: to draw, and to check.

    Args:
        examples: how many; one more, that is not counted, comes first.
        largest: ranks of a plan, at most.
        draws: the seed of the draws.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    before: list[float] = []

    @seed(draws)
    @settings(max_examples=examples + 1, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))
    @given(strategies.training_cases(largest=largest))
    def run(case: TrainingCase) -> None:
        case.check()
        now = time.perf_counter()
        if before:
            seconds[case.world.ranks].append(now - before.pop())
        before.append(now)

    run()
    return dict(seconds)

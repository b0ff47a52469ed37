"""The property test of training on MPI ranks: rank 0 draws, every rank runs; tests/test_property_mpi.py runs it on eight.

The second test breaks refdist, and must fail: a suite that passes under MPI whatever happens would prove nothing.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import refdist as rd
from refdist.testing import TrainingCase, mutations, strategies
from refdist.testing.tiles import small_tiles

ON_MPI = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))


def check_on_some(comm: rd.Comm, case: TrainingCase) -> None:
    """Run the case on as many of the ranks as its plan needs; the others wait."""
    some = comm.split(0 if comm.rank < case.plan.world_size else None)
    if some is not None:
        expected = case.expected()
        with small_tiles() if case.tiled else nullcontext():
            case.check_rank(some, expected)


@pytest.mark.ranks(8, limit=200)
@settings(ON_MPI, max_examples=25 * settings().max_examples // 100)
@given(case=strategies.training_cases(largest=8))
def test_training_equals_the_single_device(comm: rd.Comm, case: TrainingCase) -> None:
    check_on_some(comm, case)


@pytest.mark.ranks(8, limit=100)
@settings(ON_MPI, max_examples=25)
@given(case=strategies.training_cases(["fsdp"], largest=8))
def test_fails_on_purpose(comm: rd.Comm, case: TrainingCase) -> None:
    with mutations.apply("fsdp/gradients_averaged_over_ranks"):
        check_on_some(comm, case)

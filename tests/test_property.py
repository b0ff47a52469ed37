"""The property tests: everything drawn, held against NumPy's own sums and against the single-device reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import refdist as rd
from refdist.testing import World, strategies
from refdist.testing.collectives import CollectiveCase
from refdist.testing.precision import PrecisionCase
from refdist.testing.training import TrainingCase

pytestmark = pytest.mark.drawn
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
PROFILE = settings().max_examples  # 100 usually; `pytest --hypothesis-profile long` draws more of everything


@settings(ANY_SPEED, max_examples=2 * PROFILE)
@given(strategies.collective_cases())
def test_collectives_equal_numpy(case: CollectiveCase) -> None:
    case.check()


@settings(ANY_SPEED, max_examples=PROFILE // 4)
@given(strategies.meshes())
def test_groups_of_a_mesh_differ_along_their_axes_only(sizes: dict[str, int]) -> None:
    """Rank order: ((((dp · FSDP + fsdp) · PP + pp) · CP + cp) · TP + tp."""
    axes = ("tp", "cp", "pp", "fsdp", "dp")

    def program(comm: rd.Comm) -> None:
        mesh = rd.Mesh(comm, **sizes)
        place = {axis: mesh.coordinate(axis) for axis in axes}
        number = 0
        for axis in reversed(axes):
            number = number * sizes[axis] + place[axis]
        assert number == comm.rank
        for chosen in (("tp",), ("cp",), ("pp",), ("fsdp",), ("dp",), ("fsdp", "dp"), ("tp", "pp")):
            group = mesh.axis(*chosen)
            assert group.size == math.prod(sizes[axis] for axis in chosen)
            places = group.all_gather(np.array([[place[axis] for axis in axes]]))
            wanted = [index[::-1] for index in np.ndindex(*(sizes[axis] for axis in reversed(axes) if axis in chosen))]
            columns = [axes.index(axis) for axis in axes if axis in chosen]
            assert [tuple(row) for row in places[:, columns].tolist()] == wanted
            others = [axes.index(axis) for axis in axes if axis not in chosen]
            assert (places[:, others] == places[0, others]).all()

    World(math.prod(sizes.values())).run(program)


@settings(ANY_SPEED, max_examples=PROFILE // 2)
@given(strategies.training_cases(largest=16))
def test_training_equals_the_single_device(case: TrainingCase) -> None:
    case.check()


@settings(ANY_SPEED, max_examples=15)
@given(strategies.precision_cases())
def test_training_in_16_bits_is_near_the_single_device(case: PrecisionCase) -> None:
    case.check()

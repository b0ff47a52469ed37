"""The plugin that runs a marked test on its ranks, in process or (with --mpi) on those of mpirun; Hypothesis under CI."""

import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["refdist.testing.plugin"]

# How long something takes is the machine's affair: no deadlines, no complaint about slow draws. Under CI all runs draw the same.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("any speed"), derandomize=True, database=None, print_blob=True)
settings.register_profile("long", settings.get_profile("ci"), max_examples=2000)  # thousands: pytest --hypothesis-profile long
settings.load_profile("ci" if os.environ.get("CI") else "any speed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that another worker does the rest meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("drawn") is None)

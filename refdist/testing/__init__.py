"""The test kit: strategies, worlds, collectives and training held against NumPy and a single device, mutations, planted faults.

``pytest_plugins = ["refdist.testing.plugin"]`` in a ``conftest.py`` adds the ``ranks`` marker and ``--mpi``. What needs
Hypothesis (``strategies``, ``properties``) and what has a command (``mutations``, ``faults``) is imported from its module.
"""

from refdist.testing.collectives import CollectiveCase
from refdist.testing.together import TimeLimitExceeded, raises
from refdist.testing.training import TrainingCase
from refdist.testing.worlds import Choices, World

__all__ = ["Choices", "CollectiveCase", "TimeLimitExceeded", "TrainingCase", "World", "raises"]

"""The property test of training under MPI, on up to eight ranks (tests/mpi/property_suite.py)."""

from __future__ import annotations

import re
from pathlib import Path

from mpirun import run_ranks

SUITE = Path(__file__).parent / "mpi" / "property_suite.py"
PYTEST = ["-m", "pytest", "-p", "refdist.testing.plugin", "-p", "no:cacheprovider", "--tb=short", "--color=no", "-o", "addopts=",
          "-q", "-rf", "--strict-markers", "--mpi", str(SUITE)]


def test_training_equals_the_single_device_on_mpi_ranks_and_a_mistake_is_noticed() -> None:
    done = run_ranks(8, PYTEST, timeout=280)
    assert re.search(r"^1 failed, 1 passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert re.findall(r"^FAILED \S+::(\S+)\[8-ranks\]", done.stdout, re.MULTILINE) == ["test_fails_on_purpose"], done.stdout
    ratios = [float(ratio) for ratio in re.findall(r"parallel/single = .*?([\d.e-]+)\]?$", done.stdout, re.MULTILINE)]
    assert ratios, done.stdout
    assert max(ratios) < 1  # a mean where a sum is due

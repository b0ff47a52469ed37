"""On four MPI ranks: every planted fault one after the other in one job, each followed by a program that is right.

Arguments: "messages" where the ranks must not share a file, and names of faults (all by default). Prints one line of JSON: for
each fault the errors of all ranks, and how long it took until all of them had them.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import refdist as rd
from refdist.comm.board import MessageBoard
from refdist.testing.faults import FAULTS, RANKS
from refdist.testing.together import run_example


def right(comm: rd.Comm) -> None:
    for length in (1, 7, 5000, 100_000):
        wanted = np.arange(length) * float(sum(range(comm.size)))
        assert np.array_equal(comm.all_reduce(np.arange(length) * float(comm.rank)), wanted)
    comm.send(np.array([comm.rank]), (comm.rank + 1) % comm.size, tag=2)
    assert comm.recv((comm.rank - 1) % comm.size, tag=2) == (comm.rank - 1) % comm.size


def main() -> None:
    world = rd.mpi_world()
    if "messages" in sys.argv:
        assert isinstance(world.transport.board, MessageBoard)
    names = [name for name in sys.argv[1:] if name != "messages"]
    report = {}
    for fault in FAULTS:
        if not fault.in_process or (names and fault.name not in names):
            continue
        start = time.monotonic()
        outcomes, left_over = run_example(world, fault.program, RANKS, fault.checks)
        seconds = time.monotonic() - start
        errors = [[type(outcome.error).__name__, str(outcome.error)] for outcome in outcomes if outcome.error is not None]
        report[fault.name] = {"errors": errors, "left_over": left_over, "seconds": seconds}
        outcomes, left_over = run_example(world, right, RANKS)
        texts = [outcome.text for outcome in outcomes if outcome.error is not None]
        assert not texts, f"after {fault.name}: {texts}"
        assert not left_over, f"after {fault.name}: {left_over}"
    report["epoch"] = world.transport.epoch
    if world.rank == 0:
        print(json.dumps(report))


main()

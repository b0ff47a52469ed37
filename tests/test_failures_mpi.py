"""Failing under mpirun: proof of deadlocks, one story on all ranks, the end of the job, and going on in a new epoch."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from mpirun import PROMISED, run_ranks

from refdist.testing.faults import FAULTS, RANKS, find

FOLDER = Path(__file__).parent / "mpi"


@pytest.mark.parametrize("hosts", ["one host", "as if on several hosts"])
def test_every_fault_in_one_job(hosts: str) -> None:
    """Each fault is found, all ranks tell one story, and nothing of it reaches the next example."""
    script = [FOLDER / "faults_in_epochs.py"]
    if hosts != "one host":
        script = [FOLDER / "as_if_on_several_hosts.py", *script, "messages"]  # type: ignore[list-item]
    done = run_ranks(RANKS, script, timeout=150)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("epoch") == 2 * len(report)
    assert len(report) >= 30
    for name, seen in report.items():
        fault = find(name)
        assert seen["seconds"] < PROMISED, (name, seen)
        if fault.says == "left over":
            assert seen["left_over"], name
            assert not seen["errors"], (name, seen)
            continue
        own = [(kind, words) for kind, words in seen["errors"] if kind != "PeerFailed"]
        assert own, (name, seen)
        assert all(re.fullmatch(fault.error, kind) for kind, _ in own), (name, seen)
        assert any(re.search(fault.says, words) for _, words in own), (name, seen)
        if own[0][0] in ("DeadlockError", "MismatchError"):
            assert len({words for _, words in own}) == 1, (name, seen)


@pytest.mark.parametrize("name", ["another order of calls", "one rank has one batch less", "one rank raises",
                                  "a message that nobody receives"])
def test_the_job_ends(name: str) -> None:
    """All ranks end within ten seconds, the status is not zero, the cause is printed once."""
    done = run_ranks(RANKS, ["-m", "refdist.testing.faults", "--run", name])
    begun = max(float(stamp) for stamp in re.findall(r"fault at (\d+\.\d+)", done.stdout))
    assert time.time() - begun < PROMISED
    assert done.returncode != 0
    assert len(re.findall(r"^refdist: (?:rank \d+ of|\w+:)", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert re.search(find(name).error, done.stderr), done.stderr


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if not fault.in_process])
def test_a_process_that_dies_ends_the_job(name: str) -> None:
    done = run_ranks(RANKS, ["-m", "refdist.testing.faults", "--run", name])
    begun = max(float(stamp) for stamp in re.findall(r"fault at (\d+\.\d+)", done.stdout))
    assert time.time() - begun < PROMISED
    assert done.returncode != 0


def test_a_rank_that_computes_for_half_a_minute_is_no_fault() -> None:
    program = """
import sys, time, numpy as np, refdist as rd
comm = rd.mpi_world()
if comm.rank == 1:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        sum(range(10_000))
assert comm.all_reduce(np.array(comm.rank)) == 3
comm.barrier()
print("fine", flush=True)
"""
    done = run_ranks(3, ["-c", program])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 3
    assert not done.stderr.strip()


def test_deadlocked_ranks_do_not_wait_for_one_that_computes() -> None:
    program = """
import time, refdist as rd
comm = rd.mpi_world()
comm.barrier()
if comm.rank < 2:
    try:
        comm.recv(1 - comm.rank)
    except rd.DeadlockError as error:
        assert "rank 2 computes" in str(error), error
        print("proven", flush=True)
        raise
else:
    time.sleep(600)
    comm.barrier()
"""
    done = run_ranks(3, ["-c", program])
    assert done.returncode != 0
    assert done.stdout.count("proven") == 2, done.stderr


MEETING = """
import sys, time
if RANK == "1":
    WHAT
import refdist as rd
rd.mpi_world().barrier()
"""


@pytest.mark.parametrize(("what", "limit"), [("sys.exit()", "2"), ("time.sleep(4)", "60")])
def test_a_rank_that_never_comes_to_the_meeting_ends_the_job_and_a_late_one_does_not(what: str, limit: str,
                                                                                     tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    rank = 'import os; RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))'
    script.write_text(rank + MEETING.replace("WHAT", what))
    done = run_ranks(3, script, env={"REFDIST_MEETING_SECONDS": limit})
    never = what == "sys.exit()"
    assert (done.returncode != 0) is never, done.stderr
    assert ("rank 0 has waited 2 s in mpi_world() for the other ranks" in done.stderr) is never, done.stderr
    assert "Fatal Python error" not in done.stderr


def test_a_meeting_takes_a_number_of_seconds() -> None:
    done = run_ranks(1, ["-c", "import refdist; refdist.mpi_world()"], env={"REFDIST_MEETING_SECONDS": "soon"})
    assert done.returncode != 0
    assert "REFDIST_MEETING_SECONDS=soon: expected a number of seconds, more than 0" in done.stderr

"""The pytest plugin, in process and under mpirun: the same suite (tests/mpi/example_suite.py), and what its report says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpirun import run_ranks

FOLDER = Path(__file__).parent / "mpi"
ARGUMENTS = ["-m", "pytest", "-p", "refdist.testing.plugin", "-p", "no:cacheprovider", "--tb=short", "--color=no", "-o",
             "addopts=", "-q", "-rfEs", "--strict-markers", str(FOLDER / "example_suite.py")]


def check_report(out: str, skipped: int) -> None:
    """What both ways of running must say."""
    failed = set(re.findall(r"^FAILED \S+::(\S+)", out, re.MULTILINE))
    assert failed == {"test_fails_on_rank_3_only[4-ranks]", "test_takes_too_long[3-ranks]", "test_output_does_not_mix[4-ranks]",
                      "test_leaves_a_message[2-ranks]", "test_sends_first[2-ranks]", "test_changes_what_it_sends[2-ranks]"}, out
    assert re.search(r"^ERROR \S+::test_with_a_broken_fixture\[3-ranks\]", out, re.MULTILINE), out
    tail = f", {skipped} skipped" if skipped else ""
    assert re.search(rf"^6 failed, {8 - skipped} passed{tail}(, \d+ warnings?)?, 1 error", out, re.MULTILINE), out[-600:]
    assert len(re.findall(r"^=+ FAILURES =+$", out, re.MULTILINE)) == 1, "reported more than once"
    assert re.search(r"_ test_fails_on_rank_3_only\[4-ranks\] \[rank 3 of 4\] _", out), out
    shrunk = re.search(r"Failing test case: test_fails_on_rank_3_only\((.*?)\n\w? *\)", out, re.DOTALL)
    assert shrunk, out
    assert re.search(r"\bn=17,", shrunk.group(1))
    assert re.search(r"\bx=\[\],", shrunk.group(1))
    assert "assert 17 < 17" in out
    explained = r"the test has run for 2 s:\n.*rank 0 (waits: .* in barrier|is at).*\n.*rank 1 is at .*example_suite.py:\d+"
    assert re.search(explained, out), out
    lines = [f"rank {rank} line {line}" for rank in range(4) for line in range(3)]
    assert re.findall(r"^rank \d line \d$", out, re.MULTILINE) == lines, "the output of ranks is mixed"
    assert "messages are left over at the end" in out
    assert "DeadlockError: 2 " in out
    assert "assignment destination is read-only" in out
    assert "no such machine" in out


def test_in_process() -> None:
    done = subprocess.run([sys.executable, *ARGUMENTS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    check_report(done.stdout, 0)


def test_under_mpirun() -> None:
    done = run_ranks(4, [*ARGUMENTS, "--mpi"], timeout=150)
    assert done.returncode != 0
    check_report(done.stdout, 1)
    assert "needs 9 ranks, there are 4" in done.stdout


def test_more_options(pytester_like: Runner) -> None:
    pytester_like.refuses("@pytest.mark.ranks(0)", "def test(comm): pass", "expected numbers of ranks")
    pytester_like.refuses("@pytest.mark.ranks(2, colour=1)", "def test(comm): pass", "expected numbers of ranks")
    pytester_like.refuses("@pytest.mark.ranks(2)", "def test(): pass", "no argument comm")


class Runner:
    """Runs a small test file in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refuses(self, mark: str, test: str, words: str) -> None:
        path = self.folder / "test_it.py"
        path.write_text(f"import pytest\n{mark}\n{test}\n")
        command = [sys.executable, "-m", "pytest", "-p", "refdist.testing.plugin", "-q", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=self.folder, check=False)
        assert done.returncode != 0
        assert words in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.fixture
def pytester_like(tmp_path: Path) -> Runner:
    return Runner(tmp_path)

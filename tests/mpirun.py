"""Start Python on MPI ranks from a test, with a limit in seconds after which nothing of it is left.

    done = run_ranks(3, "program.py")                      # a script
    done = run_ranks(3, ["-m", "refdist", "check", "--dp", "3"])
    done = run_ranks(3, ["-c", "import refdist as rd; …"])

Each rank runs this file first: it arms faulthandler, so that at the limit every rank prints the stacks of its threads,
and then runs what was asked for. Some seconds after the limit the whole tree of processes is killed.

Limits are for what hangs, not for what is slow: on a busy machine everything takes several times as long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refdist.cli import launch


SOON = 30.0  # seconds in which a busy machine has done what takes one or two
PROMISED = 10.0  # seconds from a fault to the end of all ranks, of which it takes some tenths
GRACE = 5.0  # seconds from the limit of a run, when its ranks print their stacks, to its end


def run_ranks(
    ranks: int,
    program: str | os.PathLike[str] | Sequence[str],
    timeout: float = 120,
    *,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or a list of arguments for Python, on `ranks` MPI ranks; its status, stdout and stderr.

    `env` is added to the environment. A run over `timeout` seconds fails the test with the output that was there.
    """
    from refdist.cli import launch

    runtime = find_runtime()
    arguments = [os.fspath(program)] if isinstance(program, (str, os.PathLike)) else [os.fspath(a) for a in program]
    command = launch.command_line(runtime, ranks, [os.path.abspath(__file__), str(timeout), *arguments])
    with tempfile.TemporaryDirectory(prefix="refdist-") as folder:
        environ = {**launch.rank_environment(runtime, os.environ, folder), **(env or {})}
        return run_limited(command, timeout + GRACE, env=environ, cwd=cwd)


@functools.cache
def find_runtime() -> launch.Runtime:
    """The runtime that refdist finds: three processes are asked, once."""
    from refdist.cli import launch

    runtime = launch.find_runtime()
    assert isinstance(runtime, launch.Runtime), f"the tests under mpirun need an MPI runtime: {runtime}"
    return runtime


def run_limited(
    command: Sequence[str],
    timeout: float,
    *,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, and kill all of it when `timeout` seconds have passed."""
    process = subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        out, err = process.communicate(timeout=SOON)
        raise AssertionError(f"no end after {timeout:g} s: {' '.join(command)}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started (mpirun gives each rank a process group of its own)."""
    family = [pid]
    for parent in family:
        family += children(parent)
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that `pid` started itself."""
    if Path("/proc/self/task").exists():
        found = []
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in task.read_text().split()]
        return found
    listing = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listing.splitlines() if int(line.split()[1]) == pid]


def main() -> None:
    """What each rank runs: `mpirun.py LIMIT script …`, `mpirun.py LIMIT -m module …` or `mpirun.py LIMIT -c code …`."""
    faulthandler.dump_traceback_later(float(sys.argv[1]))
    first, *rest = sys.argv[2:]
    if first == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = os.getcwd()
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()

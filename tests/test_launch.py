"""Who has started this process, and which mpirun belongs to the MPI library that mpi4py loads."""

from __future__ import annotations

import ast
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpirun import PROMISED, SOON, children, find_runtime, kill_tree, run_limited, run_ranks

from refdist.cli import launch

ENVIRONMENTS = {
    "open mpi": ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "2"}, ("mpirun", 2, 4)),
    "mpich": ({"PMI_RANK": "0", "PMI_SIZE": "3", "PMI_FD": "9"}, ("mpiexec", 0, 3)),
    "intel mpi": ({"PMI_RANK": "1", "PMI_SIZE": "2", "I_MPI_ROOT": "x", "MPI_LOCALRANKID": "1"}, ("mpiexec", 1, 2)),
    "srun": (
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "64"},
        ("srun", 5, 8),
    ),
    "srun with pmix": (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3", "PMIX_RANK": "1"},
        ("srun", 1, 2),
    ),
    "mpirun in an allocation": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "9"},
        ("mpirun", 1, 4),
    ),
    "another pmix launcher": ({"PMIX_RANK": "3"}, ("a PMIx launcher", 3, None)),
    "a shell": ({"HOME": "/"}, None),
    "salloc": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "4"}, None),
    "sbatch": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
    "salloc's interactive step": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"},
        None,
    ),
    "srun --pty": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "4242"},
        None,
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_launchers_are_recognised(name: str) -> None:
    environ, expected = ENVIRONMENTS[name]
    found = launch.launched(environ)
    assert (found and (found.launcher, found.rank, found.size)) == expected


def test_versions_are_read() -> None:
    library = {
        "Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11": ("Open MPI", "5.0.11"),
        "MPICH Version:      4.3.1\nMPICH Release date: x": ("MPICH", "4.3.1"),
        "Intel(R) MPI Library 2021.14 for Linux* OS\n": ("Intel MPI", "2021.14"),
        "Microsoft MPI 10.1.12498.18": ("MS-MPI", "10.1.12498.18"),
    }
    for said, expected in library.items():
        assert launch.library_kind(said) == expected
    assert launch.launcher_kind("mpirun (Open MPI) 5.0.11\n") == "Open MPI"
    assert launch.launcher_kind("HYDRA build details:\n    Version: 4.3") == "MPICH"
    assert launch.launcher_kind("Intel(R) MPI Library for Linux* OS, Version 2021.14") == "Intel MPI"
    assert launch.launcher_kind("something else") == ""


def fake_mpirun(folder: Path, says: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "mpirun"
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def test_an_mpirun_of_another_library_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = fake_mpirun(tmp_path / "other", "HYDRA build details:")
    right = fake_mpirun(tmp_path / "right", "mpirun (Open MPI) 4.1.4")
    said = {"--mpi-lib-version": "Open MPI v4.1.4, package: x", "--mpi-library": "libmpi.so"}
    output = launch._output
    monkeypatch.setattr(launch, "_output", lambda command: said.get(command[-1]) or output(command))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}{right.parent}")
    assert launch.find_runtime() == launch.Runtime("Open MPI", "4.1.4", str(right))
    monkeypatch.setenv("PATH", str(other.parent))
    assert launch.find_runtime() == "no mpirun that belongs to Open MPI 4.1.4"


def test_without_an_mpi_library_there_is_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    assert launch.find_runtime() == "mpi4py finds no MPI library"


@pytest.mark.parametrize("root", [True, False])
def test_command_lines(monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    five = launch.command_line(launch.Runtime("Open MPI", "5.0.11", "mpirun"), 3, ["x.py"])
    assert ("--allow-run-as-root" in five) == root
    assert five[-4:] == ["-n", "3", sys.executable, "x.py"]
    assert ":OVERSUBSCRIBE" in five
    four = launch.command_line(launch.Runtime("Open MPI", "4.1.4", "mpirun"), 3, ["x.py"])
    assert "--oversubscribe" in four
    hydra = launch.command_line(launch.Runtime("MPICH", "5.0.2", "mpirun"), 3, ["x.py"])
    assert hydra == ["mpirun", "-n", "3", sys.executable, "x.py"]


def test_ranks_get_one_blas_thread_each() -> None:
    environ = launch.rank_environment(launch.Runtime("MPICH", "5.0.2", "mpirun"), {"OMP_NUM_THREADS": "8", "KEPT": "1"}, "new")
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == "1"
    assert environ["KEPT"] == "1"


def test_open_mpi_starts_without_the_transport_that_waits_for_a_second_unless_told_otherwise() -> None:
    runtime = launch.Runtime("Open MPI", "5.0.11", "mpirun")
    assert launch.rank_environment(runtime, {}, "new")["OMPI_MCA_btl"] == "^ofi"
    assert launch.rank_environment(runtime, {"OMPI_MCA_btl": "tcp,self"}, "new")["OMPI_MCA_btl"] == "tcp,self"
    assert "OMPI_MCA_btl" not in launch.rank_environment(launch.Runtime("MPICH", "5.0.2", "mpirun"), {}, "new")


def test_files_of_a_killed_mpirun_with_the_same_process_number_are_no_hindrance(tmp_path: Path) -> None:
    runtime = find_runtime()
    command = launch.command_line(runtime, 1, ["-c", "from mpi4py import MPI; print('up', MPI.COMM_WORLD.Get_size())"])
    host = os.uname().nodename.split(".")[0]
    environ = launch.rank_environment(runtime, os.environ, str(tmp_path))
    # The shell takes the number that mpirun will have, and leaves what an mpirun of that number, killed, would have left.
    leave = f'mkdir -p "$TMPDIR/ompi.$$" && touch "$TMPDIR/ompi.$$/pmix.{host}.tool" && exec "$@"'
    old = tmp_path / "old"
    old.mkdir()
    done = run_limited(["sh", "-c", leave, "sh", *command], 60, env={**environ, "TMPDIR": str(old)})
    assert (done.returncode, done.stdout) == (0, "up 1\n"), done.stderr


def test_mpi_ranks_see_each_other() -> None:
    done = run_ranks(3, ["-c", "import refdist as rd; c = rd.mpi_world(); print(f'rank {c.rank} of {c.size}\\n', end='')"])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]


def test_the_helper_ends_an_mpi_run_that_hangs_and_shows_where(tmp_path: Path) -> None:
    program = tmp_path / "hang.py"
    program.write_text("import time\nprint('before', flush=True)\n\ndef stuck():\n    time.sleep(600)\n\nstuck()\n")
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)no end after 8 s.*before.*in stuck") as caught:
        run_ranks(2, program, timeout=3)
    assert str(caught.value).count("in stuck") == 2
    assert time.monotonic() - start < SOON


def test_the_helper_kills_the_whole_tree() -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    process = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
    while not children(process.pid):
        time.sleep(0.05)
    grandchild = children(process.pid)[0]
    kill_tree(process.pid)
    process.wait(timeout=SOON)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline and _runs(grandchild):
        time.sleep(0.05)
    assert not _runs(grandchild)
    with pytest.raises(AssertionError, match="no end after 1 s"):
        run_limited([sys.executable, "-c", inner], timeout=1)


def test_tests_that_start_mpirun_are_picked_by_name_for_the_mpich_environment() -> None:
    for file in Path(__file__).parent.glob("test_*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == "run_ranks"]
                assert not calls or "mpi" in function.name or re.search("mpi|launch", file.name), (file.name, function.name)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z")


STARTER = """
import os, sys, tempfile
from refdist.cli import launch
runtime = launch.find_runtime()
command = launch.command_line(runtime, 2, ["-c", sys.argv[1]])
with tempfile.TemporaryDirectory(prefix="refdist-") as folder:
    sys.exit(launch.run_and_pass_signals(command, launch.rank_environment(runtime, os.environ, folder)))
"""
SLEEPS = """
from mpi4py import MPI; import sys, time
MPI.COMM_WORLD.Barrier(); sys.stdout.write("up\\n"); sys.stdout.flush(); time.sleep(600)
"""


def start(program: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", STARTER, program], stdout=pipe, stderr=pipe, text=True)


def family(pid: int) -> list[int]:
    members = [pid]
    for member in members:
        members += children(member)
    return members


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_mpi_ranks_quickly_and_quietly(number: signal.Signals) -> None:
    process = start(SLEEPS)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    members = family(process.pid)
    assert len(members) >= 4  # parent, mpirun, two ranks
    began = time.monotonic()
    process.send_signal(number)
    output, errors = process.communicate(timeout=2 * SOON)
    assert process.returncode == 128 + number
    assert time.monotonic() - began < PROMISED
    assert (output, errors) == ("", "refdist: interrupted\n")
    assert not any(_runs(member) for member in members)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_mpi_ranks_do_not_outlive_a_killed_parent() -> None:
    process = start("from refdist.cli import launch; launch.die_with_parent()" + SLEEPS)  # as refdist's own ranks do
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    members = family(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline and any(_runs(member) for member in members):
        time.sleep(0.1)
    assert not any(_runs(member) for member in members)


def test_the_exit_status_of_the_ranks_is_returned() -> None:
    process = start("from mpi4py import MPI; import sys; MPI.COMM_WORLD.Barrier(); sys.exit(3)")
    process.communicate(timeout=120)
    assert process.returncode == 3

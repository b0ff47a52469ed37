"""How a command gets its ranks.

1. A launcher (mpirun, mpiexec, srun) has started this process as one rank of several: use those ranks.
2. Nobody has, and an MPI runtime is there: start `mpirun` on this same command line, and pass on signals and status.
3. Otherwise, or when asked for: in-process ranks, in this one Python process.

A launcher is recognised by the environment variables that it gives to each rank:

    Open MPI (and jsrun)          OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
    MPICH, Intel MPI, MS-MPI      PMI_RANK, PMI_SIZE                        (Hydra's process management interface)
    srun                          SLURM_PROCID, SLURM_STEP_NUM_TASKS        (of a job step, not of an allocation)
    another PMIx launcher         PMIX_RANK                                 (says no size; MPI itself does)

The `mpirun` that is started must belong to the MPI library that mpi4py loads: with another one each process would
be alone in a world of its own. The wheels of Open MPI, MPICH and Intel MPI put it beside the Python executable.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from refdist.cli.options import counted, forget
from refdist.parallel.plan import Plan

NOTE = "REFDIST_PARENT"  # the parent's note to the ranks that it starts, in their environment
SLURM_SPECIAL_STEPS = 0xFFFF_FFF0  # step ids from here on are batch scripts, interactive shells and the like
RANKS_A_CORE = 32  # MPI ranks that are started without being asked for; more would take longer to start than to run
_ELSEWHERE = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from refdist.cli.main import main; sys.exit(main())"
SESSION_FOLDER = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")  # of Open MPI 5, and of 4
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class LaunchError(ValueError):
    """The ranks that a command needs cannot be had in the way that was asked for."""


@dataclass(frozen=True)
class Launched:
    """This process is one rank of a launcher's: by whom it was started, its rank, and of how many (None: not said)."""

    launcher: str
    rank: int
    size: int | None


HOME = {"HOME": os.sep}  # where there is none: Open MPI's mpirun does not even say its version then


@dataclass(frozen=True)
class Runtime:
    """An MPI runtime that can be started: the kind of library, its version, and the `mpirun` that belongs to it."""

    kind: str
    version: str
    mpirun: str


@dataclass(frozen=True)
class Note:
    """What a parent tells the ranks that it starts: where rank 0 writes its exit status, and the parent's terminal."""

    status_file: str
    terminal: bool
    columns: int


def launched(environ: Mapping[str, str]) -> Launched | None:
    """The launcher that `environ` speaks of, or None in a plain shell, also one inside a Slurm allocation."""
    pairs = [
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ]
    if in_slurm_step(environ):
        pairs.append(("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    for launcher, rank, size in pairs:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            return Launched(launcher, int(environ[rank]), int(environ[size]))
    if environ.get("PMIX_RANK", "").isdigit():
        return Launched("a PMIx launcher", int(environ["PMIX_RANK"]), None)
    return None


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process as a task.

    `salloc` and `sbatch` set SLURM_NTASKS and more in a shell that runs once; where salloc opens an interactive step,
    even SLURM_PROCID and SLURM_STEP_NUM_TASKS. Such a step has a special number; and `srun --pty` shows by its window.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < SLURM_SPECIAL_STEPS and "SLURM_PTY_PORT" not in environ


def check_size(plan: Plan, world: Launched, size: int) -> None:
    """Refuse a plan for another number of ranks than the `size` that the launcher started."""
    if plan.world_size != size:
        axes = " × ".join(f"{axis}={length}" for axis, length in plan.sizes.items() if length > 1) or "dp=1"
        ranks = counted(plan.world_size, "rank")
        raise LaunchError(f"{axes} needs {ranks}, {world.launcher} started {size}")


def refuse_alone(world: Launched, problem: str) -> int:
    """Refuse where the ranks cannot talk to each other: rank 0 prints, the others give it the time to."""
    if world.rank == 0:
        print(f"refdist: {problem}", file=sys.stderr, flush=True)
    time.sleep(0.5)
    return 2


# ---------------------------------------------------------------- the MPI runtime


def find_runtime() -> Runtime | str:
    """The MPI runtime of the library that mpi4py loads; or, in a few words, why there is none.

    mpi4py is asked in a process of its own, since a broken MPI library can end the process that loads it.
    """
    said = _output([sys.executable, "-m", "mpi4py", "--mpi-lib-version"])
    if said is None:
        return "mpi4py finds no MPI library"
    kind, version = library_kind(said)
    library = _output([sys.executable, "-m", "mpi4py", "--mpi-library"]) or ""
    for mpirun in _candidates(library.strip()):
        if launcher_kind(_output([mpirun, "--version"]) or "") == kind:
            return Runtime(kind, version, mpirun)
    return f"no mpirun that belongs to {kind} {version}"


def library_kind(said: str) -> tuple[str, str]:
    """(kind, version) from the text of MPI_Get_library_version."""
    words = said.replace(",", " ").split()
    version = next((w.lstrip("v") for w in words if w.lstrip("v")[:1].isdigit()), "")
    for kind, mark in (("Open MPI", "Open MPI"), ("Intel MPI", "Intel"), ("MPICH", "MPICH"), ("MS-MPI", "Microsoft")):
        if mark in said:
            return kind, version
    return (words[0] if words else "an unknown MPI"), version


def launcher_kind(said: str) -> str:
    """The kind of library that an `mpirun` belongs to, from what its --version prints; "" when it is none we know."""
    for kind, mark in (("Open MPI", "Open MPI"), ("Intel MPI", "Intel"), ("MPICH", "HYDRA"), ("MS-MPI", "Microsoft")):
        if mark in said:
            return kind
    return ""


def _candidates(library: str) -> list[str]:
    folders = [os.path.dirname(sys.executable)]
    if os.path.isabs(library):
        folders.append(os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(library))), "bin"))
    folders += os.environ.get("PATH", "").split(os.pathsep)
    found = [shutil.which(name, path=folder) for folder in folders if folder for name in ("mpirun", "mpiexec")]
    return list(dict.fromkeys(path for path in found if path))


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, env={**HOME, **os.environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def shortened(path: str) -> str:
    """A path as seen from the current folder, where it lies below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def command_line(runtime: Runtime, ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts `ranks` ranks of `python arguments…`, also as root and with more ranks than cores."""
    flags: list[str] = []
    if runtime.kind == "Open MPI":
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        old = runtime.version.split(".")[0] in ("2", "3", "4")
        flags += ["--oversubscribe"] if old else ["--map-by", ":OVERSUBSCRIBE"]
        flags += ["--bind-to", "none"]
    return [runtime.mpirun, *flags, "-n", str(ranks), sys.executable, *arguments]


def rank_environment(runtime: Runtime, environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment of mpirun and its ranks: one BLAS thread each, cores shared freely, a start that is quick and certain.

    Quick: a second of it is Open MPI's transport for one-sided messages on network fabrics, which nothing here uses.
    Certain: Open MPI's mpirun names its files by its process number; one that is killed leaves them behind, and one that later
    gets the same number then refuses to start. So each run gets a new `folder` for them, which the caller removes.
    """
    changed = dict.fromkeys(BLAS_THREADS, "1")
    if runtime.kind == "Open MPI":
        changed["OMPI_MCA_btl"] = environ.get("OMPI_MCA_btl", "^ofi")
        changed |= {name: environ.get(name, folder) for name in SESSION_FOLDER}
    if runtime.kind == "Intel MPI":
        changed["I_MPI_PIN"] = "0"
    return {**HOME, **environ, **changed}


# ---------------------------------------------------------------- starting mpirun, and being started by it


def start_ranks(runtime: Runtime, ranks: int, arguments: Sequence[str]) -> int:
    """Run `refdist arguments…` on `ranks` MPI ranks and return its exit status.

    Rank 0 writes its status to a file, since mpirun prints a page of its own about a rank that exits with 1. Ctrl-C and
    the other signals that end a program are passed on; after them mpirun's own words on the matter, on either stream
    (MPICH's are on standard output), are dropped.
    """
    with tempfile.TemporaryDirectory(prefix="refdist-") as folder:
        note = Note(os.path.join(folder, "status"), sys.stdout.isatty(), shutil.get_terminal_size().columns)
        environ = {**rank_environment(runtime, os.environ, folder), NOTE: json.dumps(asdict(note))}
        status = run_and_pass_signals(command_line(runtime, ranks, [*_program(), *arguments]), environ)
        written = Path(note.status_file)
        if status == 0 and written.exists():
            return int(written.read_text())
        return status


def _program() -> list[str]:
    """What makes Python run refdist, with modules from the working directory only where this process takes them from there."""
    return ["-m", "refdist"] if sys.path[:1] in ([""], [os.getcwd()]) else ["-c", _ELSEWHERE]


def run_and_pass_signals(command: list[str], environ: dict[str, str]) -> int:
    """Run a command that starts ranks; its exit status, or 128 + the signal that ended it."""
    got: list[int] = []
    lost: list[str] = []
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that a Ctrl-C of the terminal reaches the ranks once, through us
        preexec_fn=die_with_parent,
    )

    def pass_on(number: int, frame: object) -> None:
        # The second time, or where mpirun does not listen, without asking.
        got.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if len(got) == 1 else signal.SIGKILL)

    def copy(source: IO[bytes], target: IO[bytes]) -> None:
        # What mpirun prints about an end that was asked for is dropped. Where the reader has gone, or what is written is lost,
        # there is no more to do.
        while chunk := os.read(source.fileno(), 65536):
            if not got and not lost:
                try:
                    target.write(chunk)
                    target.flush()
                except BrokenPipeError:
                    pass_on(signal.SIGPIPE, None)
                except OSError as error:
                    lost.append(f"{getattr(target, 'name', '')}: {error.strerror}")
                    forget(target)
                    with contextlib.suppress(ProcessLookupError):
                        process.terminate()

    assert process.stdout is not None
    assert process.stderr is not None
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), pass_on) for name in names}
    streams = ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
    pumps = [threading.Thread(target=copy, args=pair, daemon=True) for pair in streams]
    try:
        for pump in pumps:
            pump.start()
        status = process.wait()
        for pump in pumps:
            pump.join()
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
    if lost:
        raise LaunchError(f"output is lost: {lost[0]}")
    if got and got[0] != signal.SIGPIPE:
        print("refdist: interrupted", file=sys.stderr)
    elif status < 0:
        print(f"refdist: {command[0]} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return 128 + got[0] if got else status if status >= 0 else 128 - status


def die_with_parent() -> None:
    """Ask Linux to end this process when the one that started it has died (PR_SET_PDEATHSIG).

    mpirun asks for it, since whoever started it may be killed without a chance to pass that on; and so does each rank, since
    mpirun, ended by that, does not always end all of its ranks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def read_note(environ: Mapping[str, str]) -> Note | None:
    """The note of the parent that started this rank, or None if another launcher did."""
    text = environ.get(NOTE)
    return Note(**json.loads(text)) if text else None

"""The `refdist` command: read the command line, get the ranks, run the command on each, and report errors in one line.

    refdist train --dp 4                      in a shell: starts mpirun, or in-process ranks where there is no MPI
    mpirun -n 4 refdist train --dp 4          one of four ranks: uses them
    refdist train --dp 4 --in-process         in-process ranks, whatever is installed

A command is a module with three functions: `add_arguments(parser)`, `prepare(args)`, which checks all that can be checked
and returns a job with a plan, and `program(comm, job)`, which runs on each rank and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

import refdist as rd
from refdist.cli import bench, check, launch, plan, sample, show, train
from refdist.cli.options import Parser, add_command, counted, forget, refuse_unknown, say
from refdist.train.data import DataError

__all__ = ["main"]

COMMANDS = {"train": train, "sample": sample, "check": check, "show": show, "plan": plan, "bench": bench}
GONE = 141  # 128 + SIGPIPE: the exit status when the reader of our output has gone
ERRORS_OF_USE = (rd.PlanError, rd.ConfigError, DataError, launch.LaunchError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv's by default); returns the exit status: 0, 1 (failed check), 2 (error of use, or a file or
    stream that cannot be written), 130."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: what is written goes nowhere
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(getattr(sys, name), io.TextIOWrapper):  # "?" for what its encoding lacks
            getattr(sys, name).reconfigure(errors="replace")
    args, unknown = parser().parse_known_args(words)
    if unknown:
        refuse_unknown(args.parser, unknown)
    world = launch.launched(os.environ)
    try:
        status = start(args, words) if world is None else join(args, world)
        if status == GONE:
            forget(sys.stdout)
        return status
    except ERRORS_OF_USE as error:
        say(f"refdist {args.command}: {error}")
        return 2
    except rd.OutOfDeviceMemory as error:
        if world is not None:
            raise  # the other ranks have to know, and the cause to be printed once
        say(f"refdist {args.command}: {error}")
        return 1
    except KeyboardInterrupt:
        return interrupted(world)
    except BrokenPipeError:  # the reader of our output has gone, as in `refdist train --json | head`
        forget(sys.stdout)
        return GONE
    except OSError as error:
        if world is not None:
            raise
        say(f"refdist {args.command}: {error}")
        forget(sys.stdout)
        return 2


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = Parser(prog="refdist", description="A pure-NumPy reference emulator of distributed training.")
    top.add_argument("--version", action="version", version=f"refdist {importlib.metadata.version('refdist')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, module in COMMANDS.items():
        add_command(commands, name, module)
    return top


def start(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Nobody has started ranks: start as many as the plan needs."""
    command = COMMANDS[args.command]
    job: Any = command.prepare(args)
    if job.plan is None:  # nothing runs on ranks
        return command.program(None, job)
    ranks = job.plan.world_size
    why = "--in-process" if args.in_process else "one rank needs no other"
    most = launch.RANKS_A_CORE * (os.cpu_count() or 1)
    if ranks > most and not args.in_process:
        why = f"{ranks} MPI ranks would be more than {launch.RANKS_A_CORE} a core; `mpirun -n {ranks} refdist …` has them"
    elif ranks > 1 and not args.in_process:
        runtime = launch.find_runtime()
        if isinstance(runtime, launch.Runtime):
            say(f"refdist: {ranks} MPI ranks ({runtime.kind} {runtime.version}, {launch.shortened(runtime.mpirun)})")
            return launch.start_ranks(runtime, ranks, words)
        why = f"{runtime}; `pip install 'refdist[mpi]'` brings one"
    say(f"refdist: {counted(ranks, 'in-process rank')} ({why})")
    threadpoolctl.threadpool_limits(1, user_api="blas")  # a rank has one BLAS thread, wherever it runs
    return rd.run(lambda comm: on_rank(command, comm, job), ranks=ranks)[0]


def on_rank(command: Any, comm: rd.Comm, job: Any) -> int:
    """A command's program on one rank, whose number a device's error does not know."""
    try:
        return command.program(comm, job)
    except rd.OutOfDeviceMemory as error:
        raise rd.OutOfDeviceMemory(f"rank {comm.rank}: {error}") from None


def join(args: argparse.Namespace, world: launch.Launched) -> int:
    """A launcher has started this process as one rank: run the command with the others."""
    try:
        comm = rd.mpi_world()
    except ImportError as error:
        return launch.refuse_alone(world, f"{world.launcher} started this rank, but {error}")
    if world.size not in (None, comm.size):
        hint = "it belongs to another MPI library than the one that mpi4py loads"
        return launch.refuse_alone(world, f"{world.launcher} started {world.size} ranks, MPI sees {comm.size}: {hint}")
    note = launch.read_note(os.environ)
    if note is not None:
        launch.die_with_parent()
    command, job, problem, status = COMMANDS[args.command], argparse.Namespace(plan=None), "", 0
    try:
        job = prepare_rank(args, world, comm)
    except ERRORS_OF_USE as error:
        problem = str(error)
    if refused(comm, problem, args.command):
        return 2
    if comm.rank == 0 and note is None:
        say(f"refdist: {counted(comm.size, 'MPI rank')}, started by {world.launcher}")
    try:
        if job.plan is not None:
            status = on_rank(command, comm, job)
        elif comm.rank == 0:  # nothing runs on ranks
            status = command.program(None, job)
    except ERRORS_OF_USE as error:  # what only the trainer could see, and then on every rank
        refused(comm, str(error), args.command)
        status = 2
    if comm.rank == 0 and note is not None:
        Path(note.status_file).write_text(str(status))
    return 0 if note is not None else status


def prepare_rank(args: argparse.Namespace, world: launch.Launched, comm: rd.Comm) -> Any:
    """The job of this rank, if the plan fits the ranks that were started."""
    if getattr(args, "in_process", False) and comm.size > 1:
        raise launch.LaunchError(f"--in-process starts its own ranks; {world.launcher} started {comm.size} already")
    job: Any = COMMANDS[args.command].prepare(args)
    if job.plan is not None:
        launch.check_size(job.plan, world, comm.size)
    return job


def refused(comm: rd.Comm, problem: str, command: str) -> bool:
    """Whether any rank has a problem; the first that has one prints it. All ranks call this."""
    having = np.flatnonzero(comm.all_gather(np.array([problem != ""])))  # [size] -> the ranks with a problem
    if having.size and comm.rank == having[0]:
        say(f"refdist {command}: {problem}")
    comm.barrier()  # a launcher ends the others when the first one exits: not before the line is out
    return bool(having.size)


def interrupted(world: launch.Launched | None) -> int:
    """After Ctrl-C: 130, and under a launcher at once, since the other ranks will not come to MPI's farewell."""
    if world is None or world.rank == 0:
        say("refdist: interrupted")
    if world is not None:
        os._exit(130)
    return 130

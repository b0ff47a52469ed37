"""Planted faults: small rank programs that are wrong on purpose, each with what a user must see.

    python -m refdist.testing.faults                               every fault in process and under mpirun, as a table
    python -m refdist.testing.faults --python PATH --python PATH   under the MPI library of each of these interpreters
    python -m refdist.testing.faults --markdown                    the table of docs/diagnosis.md

"Seconds" are from the last thing that a program does right until all of its ranks have ended.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import refdist as rd
from refdist import ops
from refdist.comm import Comm
from refdist.comm.call import Call, Steps
from refdist.comm.work import drive

__all__ = ["FAULTS", "RANKS", "Fault"]

RANKS = 4
_LIMIT = 60.0  # seconds; a fault that is not noticed by then hangs


@dataclass(frozen=True)
class Fault:
    """A fault and what it must lead to.

    Attributes:
        name: of the program, in words.
        report: id of the public report of such a mistake (``mutations.REPORTS``), or "".
        program: what each rank runs.
        error: the error that a user sees.
        says: what its words contain.
        checks, sends: how it is run in process; under MPI, checks too.
        in_process: whether it can be planted in process at all.
    """

    name: str
    report: str
    program: Callable[[Comm], Any]
    error: str
    says: str
    checks: bool = False
    sends: str = "buffered"
    in_process: bool = True


FAULTS: list[Fault] = []


def fault(error: str, says: str, report: str = "", **options: Any) -> Callable[[Callable[[Comm], Any]], Callable[[Comm], Any]]:
    """Decorator: the program below is a fault, its name that of the function."""
    def add(program: Callable[[Comm], Any]) -> Callable[[Comm], Any]:
        FAULTS.append(Fault(program.__name__.replace("_", " "), report, program, error, says, **options))
        return program
    return add


def _x(length: int = 3, dtype: Any = np.float64) -> np.ndarray:
    return np.arange(length, dtype=dtype) + 1


_LONG = 1 << 17  # elements: long enough that no MPI library buffers the message

# ---------------------------------------------------------------------------------------------- mismatched calls


@fault("MismatchError", "all_gather")
def another_operation(comm: Comm) -> None:
    comm.all_reduce(_x()) if comm.rank else comm.all_gather(_x(), lengths=[3] * comm.size)


@fault("MismatchError", "another call")
def another_dtype(comm: Comm) -> None:
    comm.all_reduce(_x(dtype=np.float32 if comm.rank == 1 else np.float64), algorithm="ring")


@fault("MismatchError", "all_reduce")
def another_shape(comm: Comm) -> None:
    comm.all_reduce(_x(4 if comm.rank == 2 else 3), algorithm="ring")


@fault("MismatchError", "another call")
def another_large_shape(comm: Comm) -> None:
    comm.all_reduce(_x(_LONG + (comm.rank == 2)), algorithm="ring")


@fault("MismatchError", "broadcast", report="K3")
def another_root(comm: Comm) -> None:
    comm.broadcast(_x(), root=1 if comm.rank == 1 else 0)


@fault("MismatchError", "different calls|another call", report="H2")
def another_order_of_calls(comm: Comm) -> None:
    calls: list[Callable[[], Any]] = [comm.barrier, lambda: comm.all_reduce(_x())]
    for call in reversed(calls) if comm.rank == 1 else calls:
        call()


@fault("MismatchError", "different calls", report="H2")
def calls_whose_messages_never_meet(comm: Comm) -> None:
    comm.reduce(_x()) if comm.rank == 0 else comm.broadcast(None)


@fault("MismatchError", "another call")
def another_reduction(comm: Comm) -> None:
    comm.all_reduce(_x(), op="max" if comm.rank == 1 else "sum", algorithm="ring")


@fault("MismatchError", "reduce_scatter")
def another_axis(comm: Comm) -> None:
    comm.reduce_scatter(np.ones((4, 4)), axis=1 if comm.rank == 1 else 0, algorithm="ring")


@fault("MismatchError", "tree|ring")
def another_algorithm(comm: Comm) -> None:
    comm.all_reduce(_x(64), algorithm="tree" if comm.rank == 1 else "ring")


@fault("MismatchError", "all_gather")
def wrong_lengths_of_other_ranks(comm: Comm) -> None:
    lengths = [2] * comm.size
    if comm.rank == 1:
        lengths[0] = 3
    comm.all_gather(_x(2), lengths=lengths, algorithm="ring")


@fault("MismatchError|DeadlockError", "all_reduce|broadcast")
def works_started_in_another_order(comm: Comm) -> None:
    operations = ["all_reduce", "broadcast"]
    works = [comm.start(operation, _x()) for operation in (reversed(operations) if comm.rank == 1 else operations)]
    for work in works:
        work.wait()


@fault("MismatchError|DeadlockError", "tp", report="K3")
def meshes_of_another_shape(comm: Comm) -> None:
    mesh = rd.Mesh(comm, tp=2, dp=2) if comm.rank else rd.Mesh(comm, tp=4)
    mesh.axis("tp").all_reduce(_x(), algorithm="ring")


@fault("MismatchError", "another call")
def a_message_of_a_program_meets_a_collective(comm: Comm) -> None:
    if comm.rank == 0:
        call = comm.call("my exchange", "first version")
        drive(comm.transport, iter([(call.isend(_x(), 1),)]))  # type: ignore[arg-type]
    elif comm.rank == 1:
        call = comm.call("my exchange", "second version")
        drive(comm.transport, iter([(call.irecv(np.empty(3), 0),)]))  # type: ignore[arg-type]
    comm.barrier()


# ------------------------------------------------------------------------- ranks that stop, raise, or come alone


@fault("DeadlockError", "has finished", report="H1")
def one_rank_has_one_batch_less(comm: Comm) -> None:
    for _ in range(2 if comm.rank == 1 else 3):
        comm.all_reduce(_x(), algorithm="ring")


@fault("DeadlockError", "has finished", report="H7")
def collective_on_rank_0_only(comm: Comm) -> None:
    if comm.rank == 0:
        comm.all_reduce(_x())


@fault("DeadlockError", "has finished", report="H5")
def group_made_by_its_members_only(comm: Comm) -> None:
    if comm.rank < 2:
        comm.split(0)


@fault("DeadlockError", "has finished")
def work_that_is_never_waited_for(comm: Comm) -> None:
    work = comm.start("all_reduce", _x(), algorithm="ring")
    if comm.rank != 1:
        work.wait()


@fault("ValueError", "a bad batch", report="H7")
def one_rank_raises(comm: Comm) -> None:
    if comm.rank == 1:
        raise ValueError("a bad batch")
    comm.all_reduce(_x())


@fault("ValueError", "a bad batch")
def one_rank_raises_with_works_under_way(comm: Comm) -> None:
    work = comm.start("all_reduce", _x(_LONG), algorithm="ring")
    if comm.rank == 2:
        raise ValueError("a bad batch")
    work.wait()
    comm.barrier()


@fault("ValueError", "a bad shard")
def one_rank_of_a_group_raises(comm: Comm) -> None:
    group = comm.split(comm.rank // 2)
    assert group is not None
    if comm.rank == 3:
        raise ValueError("a bad shard")
    group.all_reduce(_x())
    comm.barrier()


@fault("ZeroDivisionError", "zero")
def all_ranks_raise(comm: Comm) -> None:
    comm.barrier()
    1 // 0  # noqa: B018


@fault("OutOfDeviceMemory", "exceed")
def one_device_runs_out_of_memory(comm: Comm) -> None:
    device = rd.Device(capacity=1000 if comm.rank == 1 else None)
    group = comm.bind(device)
    device.empty(_x(), 1000)
    group.all_reduce(_x())


@fault("ValueError", "not in the group")
def a_group_that_the_rank_is_not_in(comm: Comm) -> None:
    group = Comm(comm.transport, [0, 1, 3], 7)
    group.all_reduce(_x())


@fault("AttributeError", "NoneType")
def a_call_on_the_group_that_split_left_it_out_of(comm: Comm) -> None:
    group = comm.split(None if comm.rank == 2 else 0)
    group.all_reduce(_x())  # type: ignore[union-attr]


@fault("TypeError|ValueError|AttributeError", "")
def root_that_passes_nothing(comm: Comm) -> None:
    comm.broadcast(None, root=0)


@fault("ValueError", "root=4")
def root_outside_of_the_group(comm: Comm) -> None:
    comm.broadcast(_x(), root=4 if comm.rank == 1 else 0)


# ------------------------------------------------------------------------------------------------- wait cycles


@fault("DeadlockError", "recv", report="H2")
def every_rank_receives_first(comm: Comm) -> None:
    comm.recv((comm.rank - 1) % comm.size)
    comm.send(_x(), (comm.rank + 1) % comm.size)


@fault("DeadlockError", "send", report="H9", sends="rendezvous")
def every_rank_sends_a_large_array_first(comm: Comm) -> None:
    comm.send(_x(_LONG), (comm.rank + 1) % comm.size)
    comm.recv((comm.rank - 1) % comm.size)


@fault("DeadlockError", "recv", report="H2")
def two_stages_wait_for_each_other_while_others_work(comm: Comm) -> None:
    if comm.rank < 2:
        comm.recv(1 - comm.rank)
    elif comm.rank == 2:
        comm.send(_x(), 3)
    else:
        comm.recv(2)
    comm.barrier()


@fault("DeadlockError", "tag 2", report="H2")
def tags_that_differ(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(_x(), 1, tag=1)
    elif comm.rank == 1:
        comm.recv(0, tag=2)
    comm.barrier()


@fault("DeadlockError", "recv")
def receives_from_the_wrong_rank(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(_x(), 1)
    elif comm.rank == 1:
        comm.recv(2)
    comm.barrier()


@fault("DeadlockError", "recv")
def receives_from_itself(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv(1)
    comm.barrier()


@fault("DeadlockError", "recv.*|barrier")
def a_collective_against_a_receive(comm: Comm) -> None:
    comm.recv(0) if comm.rank == 1 else comm.barrier()


@fault("DeadlockError", "tp|dp")
def groups_in_another_order(comm: Comm) -> None:
    mesh = rd.Mesh(comm, tp=2, dp=2)
    axes = ["tp", "dp"]
    for axis in reversed(axes) if comm.rank in (0, 3) else axes:
        mesh.axis(axis).barrier()


@fault("DeadlockError", "recv")
def tp_groups_in_different_calls_while_stages_wait(comm: Comm) -> None:
    mesh = rd.Mesh(comm, tp=2, pp=2)
    if comm.rank % 2 == 0:
        mesh.axis("pp").recv(1 - comm.rank // 2)
    mesh.axis("tp").all_reduce(_x()) if comm.rank < 2 else mesh.axis("tp").all_gather(_x(), lengths=[3, 3])


@fault("DeadlockError", "number", report="O7")
def a_step_is_skipped_by_one_rank_alone(comm: Comm) -> None:
    for step in range(3):
        found_infinity = comm.rank == 1 and step == 1
        if not found_infinity:
            comm.all_reduce(_x(), algorithm="ring")


# ------------------------------------------------------------------------------------- messages left, and buffers


@fault("MismatchError", "left over")
def a_send_that_nobody_waits_for(comm: Comm) -> None:
    if comm.rank == 0:
        comm.isend(_x(), 1)
    elif comm.rank == 1:
        comm.recv(0)


@fault("MismatchError", "left over")
def a_message_that_nobody_receives(comm: Comm) -> None:
    if comm.rank == 0:
        comm.send(_x(), 1)
    comm.barrier()


@fault("MismatchError", "left over")
def a_receive_that_nothing_comes_for(comm: Comm) -> None:
    if comm.rank == 0:
        comm.irecv(1)


@fault("ValueError", "read-only", report="K11", checks=True, sends="rendezvous")
def a_send_buffer_is_written_to_in_flight(comm: Comm) -> None:
    x = _x(_LONG)
    if comm.rank == 0:
        work = comm.isend(x, 1)
        x[0] = 7
        work.wait()
    elif comm.rank == 1:
        comm.recv(0)


@fault("MismatchError", "changed in flight", report="K11", checks=True, sends="rendezvous")
def a_send_buffer_is_changed_through_another_view(comm: Comm) -> None:
    x = _x(_LONG)
    view = x[:1]
    if comm.rank == 0:
        work = comm.isend(x, 1)
        view[0] = 7
        work.wait()
    elif comm.rank == 1:
        comm.recv(0)


@fault("MismatchError", "kernel linear on rank .* reads a receive buffer", report="O3", checks=True)
def a_receive_buffer_is_read_too_early(comm: Comm) -> None:
    device = rd.Device()
    group = comm.bind(device)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def steps(call: Call) -> Steps:
        incoming = np.ones((3, 3))
        requests = call.irecv(incoming, left), call.isend(np.ones((3, 3)), right)
        device.call(ops.linear, incoming, np.ones((2, 3)))
        yield requests

    drive(group.transport, steps(group.call("my exchange", "too early")))


# -------------------------------------------------------------------------------------------- processes that die


@fault("", "", in_process=False)
def a_process_is_killed(comm: Comm) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


@fault("", "", in_process=False)
def a_process_exits_without_a_word(comm: Comm) -> None:
    if comm.rank == 1:
        os._exit(3)
    comm.barrier()


# ------------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Seen:
    """What a user saw of a fault.

    Attributes:
        where: ``"in process"``, or the MPI library.
        error, words: type and first line of the error.
        seconds: until all ranks had ended; None: they had not.
        status: exit status of the job.
    """

    where: str
    error: str
    words: str
    seconds: float | None
    status: int

    def right(self, fault: Fault) -> bool:
        """Whether that is what must be seen."""
        if self.seconds is None or self.seconds > 10 or self.status == 0:
            return False
        return re.fullmatch(fault.error, self.error) is not None and re.search(fault.says, self.words) is not None \
            if fault.error else True


def find(name: str) -> Fault:
    """The fault of this name; LookupError, with all names, if there is none."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise LookupError(f"no fault is named {name!r}: expected one of {', '.join(fault.name for fault in FAULTS)}")


def in_process(fault: Fault) -> Seen:
    """Run a fault on in-process ranks."""
    start = time.monotonic()
    try:
        rd.run(fault.program, RANKS, checks=fault.checks, sends=fault.sends)
    except Exception as error:
        return Seen("in process", type(error).__name__, str(error), time.monotonic() - start, 1)
    return Seen("in process", "nothing", "", time.monotonic() - start, 0)


def under_mpirun(fault: Fault, python: str, kind: str, mpirun: list[str]) -> Seen:
    """Run a fault under ``mpirun``, as a user would."""
    command = [*mpirun, "-n", str(RANKS), python, "-m", "refdist.testing.faults", "--run", fault.name]
    with tempfile.TemporaryDirectory(prefix="refdist-") as folder:  # for the files of an mpirun that is killed
        environment = {**os.environ, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"}
        return _run_command(fault, kind, command, environment)


def _run_command(fault: Fault, kind: str, command: list[str], environment: dict[str, str]) -> Seen:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                               env=environment)
    try:
        out, err = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return Seen(kind, "hangs", err[-500:], None, -1)
    begun = [float(stamp) for stamp in re.findall(r"fault at (\d+\.\d+)", out)]
    errors = re.findall(r"^(?:refdist: )?(?:[\w.]+\.)?(\w+(?:Error|Failed|Memory|Exception)): (.*(?:\n  .*)*)", err, re.MULTILINE)
    error, words = errors[-1] if errors else ("", "")
    printed = len(re.findall(r"^refdist: (?:rank \d+ of|\w+:)", err, re.MULTILINE))
    if printed > 1:
        words = f"printed {printed} times: {words}"
    return Seen(kind, error, words, time.time() - max(begun, default=0.0), process.returncode)


def launcher(python: str) -> tuple[str, list[str]]:
    """The MPI library of an interpreter, with its ``mpirun`` and the flags for it."""
    code = ("from refdist.cli import launch; runtime = launch.find_runtime(); "
            "print(runtime.kind, runtime.version, sep='\\t'); print(*launch.command_line(runtime, 0, []), sep='\\t')")
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    kind, version = out[0].split("\t")
    command = out[1].split("\t")
    return f"{kind} {version}", command[:command.index("-n")]


def table(chosen: list[Fault], pythons: list[str], markdown: bool) -> bool:
    """Run each fault everywhere and print a row for it; whether all were as they must be."""
    runtimes = [(python, *launcher(python)) for python in pythons]
    heads = ["fault", "report", "what a user sees", "in process", *(kind for _, kind, _ in runtimes)]
    if markdown:
        print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    fine = True
    for fault in chosen:
        seen = [in_process(fault)] if fault.in_process else []
        seen += [under_mpirun(fault, python, kind, mpirun) for python, kind, mpirun in runtimes]
        right = [each.right(fault) for each in seen]
        fine = fine and all(right)
        times = ["hangs" if each.seconds is None else f"{each.seconds:.2f} s" for each in seen]
        times = ["" if fault.in_process else "–", *times][fault.in_process:]
        shown = seen[0] if fault.error else seen[-1]
        what = f"{shown.error}: {shown.words.splitlines()[0].rstrip(':')}" if shown.words else "the launcher's own message"
        if markdown:
            print(f"| {fault.name} | {fault.report} | {what} | " + " | ".join(times) + " |", flush=True)
        else:
            print(f"{'ok  ' if all(right) else 'NOT '} {fault.name:<52} {'  '.join(times)}  {what}", flush=True)
        for each, good in zip(seen, right, strict=True):
            if not good:
                print(f"NOT as it must be: {fault.name}: {each}", file=sys.stderr)
    return fine


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Planted faults, in process and under mpirun.")
    parser.add_argument("--python", action="append", help="an interpreter whose MPI library is used; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="print the table for the documentation")
    parser.add_argument("names", nargs="*", metavar="FAULT", help="only these; all by default")
    parser.add_argument("--run", metavar="NAME", help="run one fault on the ranks of mpirun")
    arguments = parser.parse_args()
    for name in (*arguments.names, *([arguments.run] if arguments.run else [])):
        try:
            find(name)
        except LookupError as error:
            parser.error(str(error))
    if arguments.run:
        comm = rd.mpi_world()
        chosen = find(arguments.run)
        comm.transport.checks = chosen.checks
        comm.barrier()
        os.write(1, f"fault at {time.time()}\n".encode())  # at once, so that lines of ranks do not mix
        chosen.program(comm)
        return
    named = [find(name) for name in arguments.names] or FAULTS
    sys.exit(0 if table(named, arguments.python or [sys.executable], arguments.markdown) else 1)


if __name__ == "__main__":
    main()

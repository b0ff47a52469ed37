"""Time the collectives against the MPI library's own.

    refdist bench collectives --ranks 2
    refdist bench collectives --ranks 4 --collectives all_reduce --algorithms all --sizes 8,64K,1M,16M --json
    refdist bench collectives --ranks 4 --table table.json

As in the OSU and nccl tests, `bytes` is the whole array; algbw = bytes / time; busbw = algbw × 2 (N - 1) / N for an
all-reduce, × (N - 1) / N for reduce-scatter, all-gather and all-to-all, × 1 for the others. Both sides get arrays that exist
already, also for the result where there is such an argument. They are measured in turn, a millisecond or one call each, as often
as `--seconds` allows; a time is the slowest rank's, of the best turn. Results are compared with the MPI library's first.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import refdist as rd
from refdist.cli.options import above_0, counted, output_file, positive
from refdist.comm import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter
from refdist.comm.choose import ANY, FASTEST, Row, Table
from refdist.comm.reduction import bounds

ALGORITHMS: dict[str, Any] = {"all_reduce": all_reduce.ALGORITHMS, "reduce_scatter": reduce_scatter.ALGORITHMS,
                              "all_gather": all_gather.ALGORITHMS, "broadcast": broadcast.ALGORITHMS,
                              "reduce": reduce.ALGORITHMS, "all_to_all": all_to_all.ALGORITHMS}
USUAL = ("all_reduce", "reduce_scatter", "all_gather")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TURN = 1e-3  # seconds of a turn


@dataclass
class Ranks:
    """How many ranks the benchmark needs, in the words of a plan."""

    world_size: int

    @property
    def sizes(self) -> dict[str, int]:
        """The one axis."""
        return {"--ranks": self.world_size}


@dataclass
class Job:
    """What is measured.

    Attributes:
        algorithms: their names; None stands for the table's choice, ``"all"`` for every one.
        seconds: for each size of each collective and algorithm.
        table: the file to write the fastest algorithms to.
    """

    plan: Ranks
    collectives: list[str]
    algorithms: list[str | None]
    sizes: list[int]
    dtype: np.dtype
    seconds: float
    json: bool
    table: str | None
    topic: str = "collectives"


@dataclass
class Pair:
    """The same collective by refdist and by the MPI library (None without one), and a check that they agree."""

    ours: Callable[[], Any]
    native: Callable[[], Any] | None
    agree: Callable[[], bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist bench collectives`."""
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="default 2")
    parser.add_argument("--collectives", default=",".join(USUAL), metavar="NAME,…",
                        help=f"of {', '.join(ALGORITHMS)}; or all (default {', '.join(USUAL)})")
    parser.add_argument("--algorithms", "--algorithm", default="", metavar="NAME,…", help="or all (default: the table's choice)")
    parser.add_argument("--sizes", default="8,64,512,4K,32K,64K,256K,1M,4M,16M,64M", metavar="BYTES,…",
                        help="of the whole array (default 8 to 64M)")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="default float32")
    parser.add_argument("--seconds", type=above_0, default=0.5, metavar="T", help="for each line (default 0.5)")
    parser.add_argument("--table", type=output_file, metavar="FILE",
                        help="measure all algorithms, for some minutes, and write a table of the fastest")
    parser.add_argument("--in-process", action="store_true", help="ranks in this one process, also where MPI is installed")
    parser.add_argument("--json", action="store_true", help="one object a line")


def prepare(args: argparse.Namespace) -> Job:
    """Check what was asked for."""
    collectives = list(ALGORITHMS) if args.collectives == "all" else args.collectives.split(",")
    for name in collectives:
        if name not in ALGORITHMS:
            raise rd.ConfigError(f"--collectives {name}: expected some of {', '.join(ALGORITHMS)}")
    known = {name for collective in collectives for name in ALGORITHMS[collective]}
    algorithms: list[str | None] = [*(name or None for name in args.algorithms.split(","))]
    if args.table is not None:
        algorithms = ["all"]
    for algorithm in algorithms:
        if algorithm not in (None, "all") and algorithm not in known:
            raise rd.ConfigError(f"--algorithms {algorithm}: expected some of {', '.join(sorted(known))}")
    try:
        dtype = np.dtype(args.dtype)
        if dtype.kind not in "iuf":
            raise TypeError
    except TypeError:
        raise rd.ConfigError(f"--dtype {args.dtype}: expected the dtype of real numbers, such as float32") from None
    if not re.fullmatch(r"\d+[KMG]?(,\d+[KMG]?)*", args.sizes):
        raise rd.ConfigError(f"--sizes {args.sizes}: expected bytes with commas, as in 8,64K,1M")
    sizes = [int(word.rstrip("KMG")) * UNITS[word.lstrip("0123456789")] for word in args.sizes.split(",")]
    return Job(Ranks(args.ranks), collectives, algorithms, sizes, dtype, args.seconds, args.json, args.table)


def program(comm: rd.Comm, job: Job) -> int:
    """Measure, and print line by line on rank 0; exit status 1 if a result is wrong."""
    records = []
    if comm.rank == 0 and not job.json:
        print(_title(comm, job), flush=True)
    for record in measure(comm, job):
        records.append(record)
        if comm.rank == 0:
            print(json.dumps(record) if job.json else _line(record), flush=True)
    if comm.rank == 0 and not job.json:
        for line in summary(records):
            print(line)
    if comm.rank == 0 and job.table is not None:
        fastest(records).save(job.table)
    return int(not all(record["correct"] for record in records))


def measure(comm: rd.Comm, job: Job) -> Iterator[dict[str, Any]]:
    """One record for each collective, algorithm and size; all ranks get the same ones."""
    for collective in job.collectives:
        algorithms = [name for name in ALGORITHMS[collective] if name != "hierarchical"] if "all" in job.algorithms else \
            [name for name in job.algorithms if name is None or name in ALGORITHMS[collective]]
        for algorithm in algorithms:
            for nbytes in job.sizes:
                pair = make_pair(comm, collective, algorithm, max(1, nbytes // job.dtype.itemsize), job.dtype)
                correct = bool(comm.all_reduce(np.array([pair.agree()], np.int64), "min")[0])
                ours, native = _in_turn(comm, pair, job.seconds)
                used = algorithm or comm.table.pick(collective, comm.size, nbytes) or next(iter(ALGORITHMS[collective]))
                algbw = nbytes / ours / 1e9
                yield {"collective": collective, "algorithm": used, "chosen": algorithm is None, "ranks": comm.size,
                       "bytes": nbytes, "time_us": ours * 1e6, "native_time_us": native and native * 1e6,
                       "ratio": native and ours / native, "algbw_gb_s": algbw,
                       "busbw_gb_s": algbw * _bus_factor(collective, comm.size),
                       "correct": correct}


def _bus_factor(collective: str, ranks: int) -> float:
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "all_to_all": share}.get(collective, 1.0)


def _in_turn(comm: rd.Comm, pair: Pair, seconds: float) -> tuple[float, float | None]:
    """Seconds a call of ours and of the MPI library's, alternately: the slowest rank's mean of the best turn."""
    calls = [pair.ours] if pair.native is None else [pair.ours, pair.native]
    counts = [_repeats(comm, call) for call in calls]
    total = sum(count * once for count, once in counts)
    turns: list[list[float]] = [[] for _ in calls]
    for _ in range(min(2000, max(3, int(seconds / max(total, 1e-6))))):
        for call, (count, _), times in zip(calls, counts, turns, strict=True):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - start) / count)
    slowest = comm.all_reduce(np.array(turns), "max")  # [sides, turns]
    best = slowest.min(axis=1).tolist()
    return best[0], best[1] if len(best) > 1 else None


def _repeats(comm: rd.Comm, call: Callable[[], Any]) -> tuple[int, float]:
    """How many calls fill a turn, the same on all ranks, and about how long one takes."""
    call()
    comm.barrier()
    start = time.perf_counter()
    call()
    once = float(comm.all_reduce(np.array([time.perf_counter() - start]), "max")[0])
    return max(1, min(1000, round(_TURN / once))), once


def make_pair(comm: rd.Comm, collective: str, algorithm: str | None, count: int, dtype: np.dtype) -> Pair:
    """Arrays of ``count`` elements in all, and the two calls on them."""
    mpi = getattr(comm.transport, "mpi", None)
    world = mpi.COMM_WORLD if mpi is not None else None
    offsets, size, rank = bounds(count, comm.size), comm.size, comm.rank
    counts = [offsets[part + 1] - offsets[part] for part in range(size)]
    even, own = count % size == 0, slice(offsets[rank], offsets[rank + 1])
    whole = np.arange(count).astype(dtype) % dtype.type(7) + dtype.type(rank)
    result, ours = np.zeros_like(whole), np.zeros_like(whole)
    shard, our_shard = np.zeros_like(whole[own]), np.zeros_like(whole[own])
    if collective == "all_reduce":
        native = world and (lambda: world.Allreduce(whole, result))
        return _pair(lambda: comm.all_reduce(whole, algorithm=algorithm, out=ours), native, ours, result)
    if collective == "reduce_scatter":
        native = world and ((lambda: world.Reduce_scatter_block(whole, shard)) if even
                            else (lambda: world.Reduce_scatter(whole, shard, counts)))
        return _pair(lambda: comm.reduce_scatter(whole, algorithm=algorithm, out=our_shard), native, our_shard, shard)
    if collective == "all_gather":
        mine = np.ascontiguousarray(whole[own])
        native = world and ((lambda: world.Allgather(mine, result)) if even
                            else (lambda: world.Allgatherv(mine, (result, counts))))
        return _pair(lambda: comm.all_gather(mine, algorithm=algorithm, out=ours), native, ours, result)
    if collective == "broadcast":
        result[...] = whole
        return _pair(lambda: comm.broadcast(whole, algorithm=algorithm), world and (lambda: world.Bcast(result)), None, result)
    if collective == "reduce":
        native = world and (lambda: world.Reduce(whole, result))
        return _pair(lambda: comm.reduce(whole, algorithm=algorithm), native, None, result if rank == 0 else None)
    whole = np.resize(whole, size * -(-count // size))  # all-to-all: blocks of one length, as MPI's has them
    result = np.zeros_like(whole)
    native = world and (lambda: world.Alltoall(whole, result))
    return _pair(lambda: comm.all_to_all(whole, algorithm=algorithm), native, None, result)


def _pair(ours: Callable[[], Any], native: Callable[[], Any] | None, got: np.ndarray | None, want: np.ndarray | None) -> Pair:
    """``got`` and ``want``: where the two put their results; without ``got`` ours returns a new array."""
    def agree() -> bool:
        returned = ours()
        if native is None:
            return True
        native()
        return want is None or np.array_equal(returned if got is None else got, want)

    return Pair(ours, native, agree)


# ------------------------------------------------------------------------------------------------------- printing


def _title(comm: rd.Comm, job: Job) -> str:
    mpi = getattr(comm.transport, "mpi", None)
    library = "in process" if mpi is None else mpi.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
    names = f"{'collective':<15} {'algorithm':<19} {'bytes':>10} {'time us':>11}"
    return (f"# {counted(comm.size, 'rank')}, {library}, {job.dtype}; bandwidths in GB/s\n"
            f"{names} {'native us':>11} {'ratio':>6} {'algbw':>8} {'busbw':>8}")


def _line(record: dict[str, Any]) -> str:
    native, ratio = record["native_time_us"], record["ratio"]
    native_text, ratio_text = ("-", "-") if native is None else (f"{native:.2f}", f"{ratio:.2f}")
    wrong = "" if record["correct"] else "  WRONG"
    return (f"{record['collective']:<15} {record['algorithm']:<19} {record['bytes']:>10} {record['time_us']:>11.2f} "
            f"{native_text:>11} {ratio_text:>6} {record['algbw_gb_s']:>8.3f} {record['busbw_gb_s']:>8.3f}{wrong}")


def summary(records: list[dict[str, Any]]) -> list[str]:
    """The geometric mean of the ratios from 1 MiB on, for each collective and algorithm that has them."""
    lines = []
    kinds = dict.fromkeys((record["collective"], record["chosen"] or record["algorithm"]) for record in records)
    for collective, algorithm in kinds:
        ratios = [record["ratio"] for record in records if record["collective"] == collective and record["bytes"] >= 1 << 20
                  and (record["chosen"] or record["algorithm"]) == algorithm and record["ratio"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            name = collective if algorithm is True else f"{collective} by {algorithm}"
            lines.append(f"# {name}: geometric mean of the ratios from 1 MiB on {mean:.2f}, worst {max(ratios):.2f}")
    return lines


def fastest(records: list[dict[str, Any]]) -> Table:
    """The default table with rows of the fastest algorithm up to each size that was measured."""
    rows = dict(FASTEST.rows)
    for collective in dict.fromkeys(record["collective"] for record in records):
        mine = [record for record in records if record["collective"] == collective]
        found: list[Row] = []
        for nbytes in sorted({record["bytes"] for record in mine}):
            of_size = [record for record in mine if record["bytes"] == nbytes]
            best = min(of_size, key=lambda record: record["time_us"])["algorithm"]
            if found and found[-1].algorithm == best:
                found.pop()
            found.append(Row(ANY, nbytes, best))
        rows[collective] = (*found[:-1], found[-1]._replace(nbytes=ANY))
    return Table(rows)

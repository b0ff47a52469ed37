"""Time a training step: forward, backward, clipping and AdamW, as a fraction of this machine's matrix product.

    refdist bench step                                  one rank, one BLAS thread, the 256-wide model
    refdist bench step --ranks 2                        two replicas, against one rank with the same global batch
    refdist bench step --fsdp 2 --zero 3 --steps 10
    refdist bench step --hidden-size 64 --num-hidden-layers 2 --intermediate-size 176 --num-attention-heads 4 --seq 64 --batch 4

A step's time is the slowest rank's, of the best step. sgemm is the best of 8 products of 1024³ in float32 in the same run, on
all ranks at once, one BLAS thread each. Model FLOPs count every matrix product once, the head's too, and causal attention at
half; what is computed again is not counted. With several ranks, steps of one rank alone are timed in turn with theirs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import threadpoolctl
from rich.table import Table

import refdist as rd
from refdist.cli import utilization
from refdist.cli.display import make_console
from refdist.cli.job import RankJob, add_common, check_fit, make_config, make_plan
from refdist.cli.options import positive
from refdist.device.events import Event, Kernel

SECONDS = 1.0  # for which steps are timed, at least
CLIP_NORM = 1.0


@dataclass
class Job(RankJob):
    """What is timed."""

    steps: int
    json: bool
    topic: str = "step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist bench step`."""
    add_common(parser, model="bench", batch=8, seq=256, precision="fp32")
    run = parser.add_argument_group("timing")
    run.add_argument("--ranks", type=positive, metavar="N", help="ranks; those that the plan does not name are --dp")
    run.add_argument("--steps", type=positive, default=6, metavar="N",
                     help="steps that are timed, at least, and at least a second (default 6)")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options, and refuse what cannot run."""
    plan = make_plan(args)
    if args.ranks is not None and args.ranks != plan.world_size:
        if args.ranks % plan.world_size or plan.dp > 1:
            raise rd.PlanError(f"--ranks {args.ranks}: the plan needs {plan.world_size}")
        plan = replace(plan, dp=args.ranks // plan.world_size)
    job = Job(plan, make_config(args), args.batch, args.seq, args.seed, args.precision, args.steps, args.json)
    check_fit(job)
    return job


def program(comm: rd.Comm, job: Job) -> int:
    """Run on each rank; rank 0 prints."""
    threadpoolctl.threadpool_limits(1, user_api="blas")
    before = _rss_mb()
    trainer = _trainer(comm, job, job.plan)
    batch = _batch(job)
    trainer.step(*batch)  # memory is taken, tables are made
    alone = _single(comm, job, batch)
    seconds, single = _in_turn(comm, job, trainer, alone, batch)
    peak = float(comm.all_reduce(np.array(_rss_mb()), op="max"))
    flops = _model_flops(comm, trainer, batch)
    kernels = _kernels(trainer, batch)
    sgemm = float(comm.all_reduce(np.array(2 * utilization.SIZE**3 / utilization.best_product(comm.barrier))))
    tokens = job.batch * job.seq
    record: dict[str, Any] = {
        "tokens_per_s": tokens / seconds, "step_seconds": seconds, "model_flops_per_s": flops / seconds,
        "sgemm_flops_per_s": sgemm, "fraction_of_sgemm": flops / seconds / sgemm, "peak_rss_mb": peak, "rss_before_mb": before,
        "world_size": comm.size, "transport": comm.transport.name, "parameters": job.config.num_parameters(), "kernels": kernels,
    }
    if single is not None:
        record |= {"single_rank_tokens_per_s": tokens / single, "speedup": single / seconds}
    if comm.rank == 0:
        print(json.dumps(record), flush=True) if job.json else show(job, record)
    return 0


def _trainer(comm: rd.Comm, job: Job, plan: rd.Plan) -> rd.Trainer:
    return rd.Trainer(job.config, plan, comm, rd.AdamW(), precision=job.precision, seed=job.seed, clip_norm=CLIP_NORM)


def _batch(job: Job) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(job.seed).integers(0, job.config.vocab_size, (job.batch, job.seq + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _single(comm: rd.Comm, job: Job, batch: tuple[np.ndarray, np.ndarray]) -> rd.Trainer | None:
    """On rank 0, when there are others: the same work for one rank alone, warmed up."""
    group = comm.split(0 if comm.rank == 0 else None)
    if comm.size == 1 or group is None:
        return None
    trainer = _trainer(group, job, rd.Plan(micro_batches=job.plan.micro_batches, recompute=job.plan.recompute,
                                           recompute_blocks=job.plan.recompute_blocks))
    trainer.step(*batch)
    return trainer


def _in_turn(comm: rd.Comm, job: Job, trainer: rd.Trainer, alone: rd.Trainer | None,
             batch: tuple[np.ndarray, np.ndarray]) -> tuple[float, float | None]:
    """Seconds of the best step of all ranks, and of rank 0 alone, in turn; None where there is one rank only."""
    best, best_alone = math.inf, math.inf
    steps, total = 0, 0.0
    while steps < job.steps or total < SECONDS:
        if comm.size > 1:
            if alone is not None:
                start = time.perf_counter()
                alone.step(*batch)
                best_alone = min(best_alone, time.perf_counter() - start)
            comm.barrier()
        start = time.perf_counter()
        trainer.step(*batch)
        slowest = comm.all_reduce(np.array(time.perf_counter() - start), op="max")
        best = min(best, float(slowest))
        steps, total = steps + 1, total + float(slowest)
    return best, best_alone if comm.size > 1 else None


def _model_flops(comm: rd.Comm, trainer: rd.Trainer, batch: tuple[np.ndarray, np.ndarray]) -> float:
    """Model FLOPs of one step, over all ranks."""
    before = trainer.device.flops["model"]
    trainer.step(*batch)
    return float(comm.all_reduce(np.array(trainer.device.flops["model"] - before, np.float64)))


def _kernels(trainer: rd.Trainer, batch: tuple[np.ndarray, np.ndarray]) -> dict[str, dict[str, float]]:
    """Where the time of one step of this rank goes: calls, seconds and FLOPs by kernel; the rest is ``other``."""
    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "seconds": 0.0, "flops": 0})

    def listen(event: Event) -> None:
        if isinstance(event, Kernel):
            row = rows[event.name]
            row["calls"] += 1
            row["seconds"] += event.end - event.start
            row["flops"] += event.flops

    trainer.device.listeners.append(listen)
    start = time.perf_counter()
    trainer.step(*batch)
    seconds = time.perf_counter() - start
    trainer.device.listeners.remove(listen)
    rest = max(0.0, seconds - sum(row["seconds"] for row in rows.values()))
    ordered = dict(sorted(rows.items(), key=lambda item: -item[1]["seconds"]))
    return {**ordered, "other (optimizer, communication, Python)": {"calls": 1, "seconds": rest, "flops": 0}}


def _rss_mb() -> float:
    """The largest resident memory of this process so far, in MB."""
    import resource  # Unix has it

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def show(job: Job, record: dict[str, Any]) -> None:
    """The figures for a person."""
    console = make_console(soft_wrap=True)
    sizes = " × ".join(f"{axis}={size}" for axis, size in job.plan.sizes.items() if size > 1) or "one rank"
    console.print(f"{job.config.num_hidden_layers} layers of {job.config.hidden_size}, {record['parameters']:,} parameters, "
                  f"batch {job.batch} × {job.seq}, {job.precision}, {sizes} ({record['transport']}), {os.cpu_count()} cores")
    console.print(f"{record['tokens_per_s']:,.0f} tokens/s   {record['step_seconds'] * 1e3:.1f} ms a step   "
                  f"{record['model_flops_per_s'] / 1e9:.1f} GFLOP/s = {record['fraction_of_sgemm']:.3f} of sgemm "
                  f"({record['sgemm_flops_per_s'] / 1e9:.1f})   memory {record['peak_rss_mb']:.0f} MB, "
                  f"{record['rss_before_mb']:.0f} before")
    if "speedup" in record:
        console.print(f"one rank alone: {record['single_rank_tokens_per_s']:,.0f} tokens/s; all ranks {record['speedup']:.2f} ×")
    table = Table("kernel, in one step more", *(("calls", "ms", "share", "GFLOP/s")), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    total = sum(row["seconds"] for row in record["kernels"].values())
    for name, row in record["kernels"].items():
        speed = f"{row['flops'] / row['seconds'] / 1e9:.1f}" if row["flops"] else ""
        table.add_row(name, f"{row['calls']:.0f}", f"{row['seconds'] * 1e3:.1f}", f"{row['seconds'] / total:.1%}", speed)
    console.print(table)

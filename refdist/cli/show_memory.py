"""Train two steps and show where a rank's memory goes: now and at most, by category, and live over one step; or on paper.

    refdist show memory --fsdp 4 --zero 3
    refdist show memory --dp 4 --rank 1 --svg memory.svg
    refdist show memory --dp 2 --device-memory 4MiB
    refdist show memory --model llama3-405b --tp 8 --pp 14 --fsdp 16 --micro-batches 16        on paper: nothing runs
    refdist show memory --fsdp 4 --on-paper --stored fp32                                      the same for a small model
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np

import refdist as rd
from refdist.aside import write_aside
from refdist.cli import show_memory_on_paper as paper
from refdist.cli.job import RankJob, add_common, check_fit, make_config, make_plan
from refdist.cli.options import memory_size, output_file
from refdist.device import CATEGORIES, Timeline
from refdist.device.ledger import readable
from refdist.numerics.random import random_words, stream

Live = dict[str, int]


@dataclass
class Job(RankJob):
    """What is run and drawn."""

    rank: int
    capacity: int | None
    svg: str | None
    json: bool
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show memory`."""
    add_common(parser, model="tiny", batch=8, seq=64, precision="fp32")
    paper.add_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="whose memory is drawn (default 0)")
    parser.set_defaults(precision=None)
    parser.add_argument("--device-memory", type=memory_size, metavar="SIZE", help="capacity of each device, such as 64MiB")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture as SVG")


def prepare(args: argparse.Namespace) -> Job | paper.Job:
    """Read the options."""
    if paper.wanted(args):
        return paper.prepare(args)
    if args.stored is not None:
        raise rd.ConfigError("--stored is for paper: what is run stores what --precision and the plan say")
    args.batch, args.seq, args.rank, args.precision = args.batch or 8, args.seq or 64, args.rank or 0, args.precision or "fp32"
    job = Job(make_plan(args), make_config(args), args.batch, args.seq, args.seed, args.precision, args.rank, args.device_memory,
              args.svg, args.json)
    check_fit(job)
    if not 0 <= job.rank < job.plan.world_size:
        raise rd.PlanError(f"--rank {job.rank}: the plan has ranks 0 to {job.plan.world_size - 1}")
    return job


def program(comm: rd.Comm | None, job: Job | paper.Job) -> int:
    """Run on each rank; the one that is asked for sends its picture to rank 0, which prints."""
    if isinstance(job, paper.Job):
        return paper.program(job)
    assert comm is not None
    device = rd.Device(capacity=job.capacity)
    trainer = rd.Trainer(job.config, job.plan, comm, precision=job.precision, seed=job.seed, device=device)
    trainer.step(*_batch(job))  # after the first step the arena is warm
    timeline = Timeline(device)
    trainer.step(*_batch(job))
    timeline.stop()
    title = f"live memory of rank {job.rank} over one training step"
    picture = (timeline.text() + "\0" + timeline.svg(title)).encode() if comm.rank == job.rank else b""
    text, svg = comm.broadcast(np.frombuffer(picture, np.uint8), root=job.rank).tobytes().decode().split("\0")
    everybody = all_figures(comm, device)
    if comm.rank > 0:
        return 0
    if job.svg:
        write_aside(job.svg, svg)
    if job.json:
        print(json.dumps({"parameters": job.config.num_parameters(), "ranks": as_json(everybody)}), flush=True)
    else:
        print(f"{memory_tables(everybody)}\n\n{title}\n{text}", flush=True)
    return 0


def all_figures(comm: rd.Comm, device: rd.Device) -> list[np.ndarray]:
    """Each rank's bytes [category, (now, at most)], the total last; on rank 0, nothing elsewhere. Collective."""
    return comm.gather(np.array([[device.live[name], device.peak[name]] for name in (*CATEGORIES, "total")])) or []


def as_json(everybody: list[np.ndarray]) -> list[dict[str, Live]]:
    """The same with names."""
    return [{name: {"now": int(now), "peak": int(most)}
             for name, (now, most) in zip((*CATEGORIES, "total"), figures, strict=True)} for figures in everybody]


def memory_tables(everybody: list[np.ndarray]) -> str:
    """Bytes of each category and rank, now and at most; ``everybody[rank]`` is [category, 2]."""
    names = [name for i, name in enumerate((*CATEGORIES, "total")) if any(figures[i].any() for figures in everybody)]
    index = [(*CATEGORIES, "total").index(name) for name in names]
    lines = []
    for column, when in ((0, "now"), (1, "at most")):
        lines.append("".join([f"{when:<9}", *(f"{name:>14}" for name in names)]))
        for rank, figures in enumerate(everybody):
            lines.append("".join([f"  rank {rank:<2}", *(f"{readable(int(figures[i, column])):>14}" for i in index)]))
    return "\n".join(lines)


def _batch(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and labels [batch, seq]."""
    shape = (job.batch, job.seq)
    ids, labels = (random_words(stream(job.seed, "memory", what), shape).astype(np.int64) % job.config.vocab_size
                   for what in ("ids", "labels"))
    return ids, labels

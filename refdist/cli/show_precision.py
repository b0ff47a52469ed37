"""Train one step, and list every matrix product: shapes, formats, tensor cores or FP32 cores, and its time on an H100 at peak.

    refdist show precision                                     the 256-wide model in fp16
    refdist show precision --precision fp32 --tensor-core h100
    refdist show precision --model tiny --all --json           each product on its own

A product of two matrices of 16 bits (or of tf32) runs in tensor cores. Where one operand is FP32, by an oversight in a cast, the
product goes to the FP32 cores, 15 times slower on an H100: such a line is marked, with what it costs. Listed is what was really
multiplied in the step, by the formats of the arrays; the time is FLOPs over the dense peak.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

import refdist as rd
from refdist.cli.job import RankJob, add_common, check_fit, make_config, make_plan
from refdist.cli.tables import table
from refdist.device.audit import FP32_CORES, FP64_CORES, TENSOR_CORES, Audit, Row, grouped
from refdist.numerics.random import random_words, stream
from refdist.paper.hardware import accelerator

FP64_PEAKS = {TENSOR_CORES: 66.9e12, FP64_CORES: 33.5e12}  # NVIDIA H100 Tensor Core GPU architecture (2022), table 3


@dataclass
class Job(RankJob):
    """What is run and listed."""

    all: bool
    json: bool
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show precision`."""
    add_common(parser, model="bench", batch=8, seq=256, precision="fp16")
    parser.add_argument("--all", action="store_true", help="a line for each layer, also where layers do the same")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    job = Job(make_plan(args), make_config(args), args.batch, args.seq, args.seed, args.precision, args.all, args.json)
    check_fit(job)
    return job


def program(comm: rd.Comm, job: Job) -> int:
    """Run on each rank; rank 0 lists its products."""
    trainer = rd.Trainer(job.config, job.plan, comm, precision=job.precision, seed=job.seed)
    audit = Audit(trainer.device, trainer.replica.storage, job.plan.tensor_core)
    trainer.step(*_batch(job))
    audit.stop()
    if comm.rank == 0:
        rows = audit.rows if job.all else grouped(audit.rows, job.config.num_hidden_layers)
        print(json.dumps(as_json(rows)) if job.json else text(rows), flush=True)
    return 0


def peak(row: Row) -> float:
    """FLOP/s of an H100 in this row's unit and format, dense."""
    return FP64_PEAKS[row.unit] if row.format == "fp64" else accelerator("h100").flops(row.format)


def seconds(row: Row) -> float:
    """What an H100 would take for all calls of a row, at peak."""
    return row.calls * row.flops / peak(row)


def lost(row: Row) -> float:
    """Of these seconds, those that are lost because a 16-bit operand has met one in FP32; 0 if that did not happen."""
    narrow = [name for name in row.inputs if name in ("fp16", "bf16")]
    if row.unit != FP32_CORES or not narrow:
        return 0.0
    return seconds(row) - row.calls * row.flops / accelerator("h100").flops(narrow[0])


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The list and its sums."""
    return {
        "products": [{**row._asdict(), "peak_flops_per_s": peak(row), "seconds": seconds(row), "lost_seconds": lost(row)}
                     for row in rows],
        "flops": sum(row.calls * row.flops for row in rows),
        "seconds": sum(map(seconds, rows)),
        "lost_seconds": sum(map(lost, rows)),
    }


def text(rows: list[Row]) -> str:
    """The list for a person."""
    lines = []
    for row in rows:
        shape = f"{row.shape[0]} × " * (len(row.shape) > 3) + " × ".join(map(str, row.shape[-3:]))
        mark = f"◀ {lost(row) * 1e6:.3g} µs lost to a cast" if lost(row) else ""
        name = row.parameter.removeprefix("model.").removesuffix(".weight")
        lines.append((row.kernel, name, shape, " × ".join(row.inputs), row.accumulate, row.unit, str(row.calls),
                      f"{row.calls * row.flops / 1e9:.3g}", f"{seconds(row) * 1e6:.3g}", mark))
    head = ("kernel", "parameter", "m × k × n", "inputs", "sums", "unit", "calls", "GFLOP", "µs on H100", "")
    total, time, wasted = (sum(map(of, rows)) for of in (lambda row: row.calls * row.flops, seconds, lost))
    h100 = accelerator("h100").flops
    said = [table(head, lines, right=(2, 6, 7, 8)), "",
            f"{total / 1e9:.4g} GFLOP, {time * 1e6:.4g} µs on an H100 at peak ({h100('fp16') / 1e12:.1f} TFLOP/s in tensor cores "
            f"with 16 bits, {h100('fp32') / 1e12:.1f} in FP32 cores)"]
    if wasted:
        said.append(f"{wasted * 1e6:.3g} µs of them, {wasted / time:.0%}, are lost where 16 bits meet FP32")
    return "\n".join(said)


def _batch(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and labels [batch, seq]."""
    shape = (job.batch, job.seq)
    ids, labels = (random_words(stream(job.seed, "precision", what), shape).astype(np.int64) % job.config.vocab_size
                   for what in ("ids", "labels"))
    return ids, labels

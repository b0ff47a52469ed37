"""Hold the gradients of a parallel plan against those of a single device, parameter by parameter.

One global batch of random tokens, with different numbers of ignored labels in each sequence, goes through the plan and
through the reference. In float64 a gradient passes where, for each of its elements,

    |parallel - single|  <=  1e-10 · max(max|single| of this parameter, 1e-3 · max|single| of all parameters)

and in float32 where that difference is at most 16 times the single device's own rounding error, which is measured against
float64. In fp16 and bf16, or with tensor cores, the single device is a plan of one rank, and the difference must also be at most
64 units in the last place, so that an error that one rank makes too cannot hide behind itself. The ratio parallel/single names
many a bug: 1/dp, tp, or the number of micro-batches.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

import refdist as rd
from refdist.cli.job import RankJob, add_common, check_fit, make_config, make_plan
from refdist.numerics.random import normal, random_words, stream
from refdist.ops import IGNORED
from refdist.parallel import loss_and_grads

FP64_BOUND = 1e-10
SMALL_GRADIENT = 1e-3  # a gradient is held against at least this part of the largest one
ROUNDING_MULTIPLE = 16.0  # of the single device's own error in lower precision
LAST_PLACES = 64.0  # units in the last place of 16 bits
LAST_PLACE = {"fp64": 2.0**-52, "fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}

Gradients = dict[str, np.ndarray]


@dataclass
class Job(RankJob):
    """What one check runs."""

    json: bool


@dataclass(frozen=True)
class Row:
    """How one parameter's gradient compares."""

    max_abs: float
    max_rel: float
    ratio: float
    ok: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison: the model, the batch and the plan."""
    add_common(parser, model="tiny", batch=8, seq=32, precision="fp64")


def make_job(args: argparse.Namespace) -> Job:
    """The comparison that the options ask for."""
    job = Job(make_plan(args), make_config(args), args.batch, args.seq, args.seed, args.precision, args.json)
    check_fit(job)
    return job


def measure(comm: rd.Comm, job: Job) -> tuple[dict[str, Row], float, bool] | None:
    """On rank 0 how each gradient compares, the loss's error, and whether all is well; None elsewhere. Collective."""
    params = random_params(job)
    input_ids, labels = random_batch(job)
    scale = loss_scale(job, labels)
    parallel = rd.loss_and_grads(job.config, job.plan, params, input_ids, labels, comm=comm, precision=job.precision,
                                 loss_scale=scale, dropout_seed=dropout_seed(job))
    alone = comm.split(0 if comm.rank == 0 else None)
    if alone is None:
        return None
    single, bounds = reference(job, params, input_ids, labels, alone)
    rows = compare(parallel[1], single[1], bounds)
    loss_error = abs(float(parallel[0]) - float(single[0]))
    return rows, loss_error, all(row.ok for row in rows.values()) and loss_error <= bounds["loss"]


def random_params(job: Job) -> Gradients:
    """Initial weights with random values added everywhere: gains of exactly one and biases of zero would hide mistakes."""
    params = rd.init_params(job.config, seed=job.seed, dtype=np.float64)
    for name, value in params.items():
        value += normal(stream(job.seed, "check", name), value.shape, None, 0.1, np.float64)
    return params


def random_batch(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels [batch, seq], where sequence b ignores about a part b / (2 · batch) of its labels."""
    shape = (job.batch, job.seq)
    drawn = [random_words(stream(job.seed, "check", what), shape).astype(np.int64) for what in ("ids", "labels", "mask")]
    input_ids, labels = drawn[0] % job.config.vocab_size, drawn[1] % job.config.vocab_size
    ignored = drawn[2] * 2 * job.batch < 2**32 * np.arange(job.batch)[:, None]
    return input_ids, np.where(ignored, IGNORED, labels)


def loss_scale(job: Job, labels: np.ndarray) -> float:
    """With fp16 about the number of labels that count: backward then runs on the sum of their losses. A power of two."""
    return 2.0 ** int(np.count_nonzero(labels != IGNORED)).bit_length() if job.precision == "fp16" else 1.0


def dropout_seed(job: Job) -> int | None:
    """The seed of the dropout masks, if the model drops anything."""
    return job.seed if job.config.attention_dropout or job.config.hidden_dropout else None


def reference(
    job: Job, params: Gradients, input_ids: np.ndarray, labels: np.ndarray, alone: rd.Comm
) -> tuple[tuple[float, Gradients], dict[str, float]]:
    """The single device's loss and gradients in float64, and the largest error to allow for each of them."""
    loss, grads = rd.reference.loss_and_grads(job.config, params, input_ids, labels, dropout_seed=dropout_seed(job))
    largest = {name: float(np.abs(g).max()) for name, g in grads.items()}
    floor = SMALL_GRADIENT * max(largest.values())
    bounds = {name: FP64_BOUND * max(value, floor) for name, value in largest.items()} | {"loss": FP64_BOUND * abs(loss)}
    unit = last_place(job)
    if unit > LAST_PLACE["fp64"]:
        if unit == LAST_PLACE["fp32"]:
            rough = {name: value.astype(np.float32) for name, value in params.items()}
            rough_loss, rough_grads = rd.reference.loss_and_grads(job.config, rough, input_ids, labels,
                                                                  dropout_seed=dropout_seed(job))
        else:
            plan = rd.Plan(tensor_core=job.plan.tensor_core)
            rough_loss, rough_grads = loss_and_grads(job.config, plan, params, input_ids, labels, comm=alone,
                                                     precision=job.precision, loss_scale=loss_scale(job, labels),
                                                     dropout_seed=dropout_seed(job))
        own = {name: float(np.abs(rough_grads[name] - grads[name]).max()) for name in grads}
        bounds = {name: ROUNDING_MULTIPLE * max(own[name], unit * max(largest[name], floor)) for name in grads}
        bounds["loss"] = ROUNDING_MULTIPLE * max(abs(float(rough_loss) - loss), unit * abs(loss))
        if unit > LAST_PLACE["fp32"]:
            bounds = {name: min(bound, LAST_PLACES * unit * max(largest[name], floor) if name in largest else bound)
                      for name, bound in bounds.items()}
    return (loss, grads), bounds


def last_place(job: Job) -> float:
    """The distance of 1 and the next number, in the coarsest of the formats that the run computes in."""
    formats = {job.precision, job.plan.reduce_dtype or job.precision, job.plan.accumulate_dtype or job.precision}
    if job.precision == "fp32" and job.plan.tensor_core is not None:
        formats.add("tf32")
    return max(LAST_PLACE[name] for name in formats)


def compare(parallel: Gradients, single: Gradients, bounds: dict[str, float]) -> dict[str, Row]:
    """Each parameter's errors, the ratio parallel/single (a least-squares fit), and whether it is within its bound."""
    floor = SMALL_GRADIENT * max(float(np.abs(g).max()) for g in single.values())
    rows = {}
    for name, want in single.items():
        got = np.asarray(parallel[name], dtype=np.float64)
        max_abs = float(np.abs(got - want).max())
        scale = max(float(np.abs(want).max()), floor)
        square = float(np.vdot(want, want))
        ratio = float(np.vdot(got, want)) / square if square else 1.0
        rows[name] = Row(max_abs, max_abs / scale if scale else max_abs, ratio, max_abs <= bounds[name])
    return rows


def as_json(rows: dict[str, Row], loss_error: float, ok: bool) -> dict[str, Any]:
    """The comparison for machines."""
    values = {name: {"max_abs": r.max_abs, "max_rel": r.max_rel, "ratio": r.ratio} for name, r in rows.items()}
    return {"ok": ok, "loss_error": loss_error, "parameters": values}


def table_of(rows: dict[str, Row]) -> Table:
    """The comparison for people."""
    table = Table("parameter", box=None, pad_edge=False)
    for title in ("max abs error", "relative", "parallel/single", "verdict"):
        table.add_column(title, justify="right")
    for name, row in rows.items():
        figures = (f"{row.max_abs:.1e}", f"{row.max_rel:.1e}", f"{row.ratio:.9f}")
        table.add_row(name, *figures, "ok" if row.ok else "DIFFERS")
    return table


def verdict_on(rows: dict[str, Row], loss_error: float, precision: str) -> str:
    """The last line of a table."""
    good = sum(row.ok for row in rows.values())
    return f"loss error {loss_error:.1e}; {good} of {len(rows)} gradients agree ({precision})"

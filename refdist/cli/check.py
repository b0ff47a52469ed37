"""Each gradient of a plan against the single device's, as a table; with `--mutate`, those of a refdist broken on purpose.

    refdist check --fsdp 2 --tp 2
    refdist check --pp 4 --micro-batches 8 --schedule zb_h1 --recompute full --num-hidden-layers 4
    refdist check --mutate data/gradients_averaged_over_ranks_again --dp 3
    refdist check --mutate list

Each line of the table is a parameter: the largest difference of its gradient from the single device's, absolute and relative,
and the ratio of the two, which names many a bug (1/dp, tp, the number of micro-batches). Exit status 1: the loss or a gradient
differs by more than rounding explains.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import refdist as rd
from refdist.cli import comparison, lesson
from refdist.cli.display import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist check`."""
    comparison.add_options(parser)
    parser.add_argument("--mutate", metavar="NAME", help="break refdist in one way and see what the check says: "
                        "a name, or, to be guessed, a hash; `list` and `hashes` print what there is")


def prepare(args: argparse.Namespace) -> comparison.Job | lesson.Lesson:
    """Read the options, and refuse what cannot run."""
    return comparison.make_job(args) if args.mutate is None else lesson.prepare(args)


def program(comm: rd.Comm | None, job: comparison.Job | lesson.Lesson) -> int:
    """Run on each rank: 0 if every gradient agrees, else 1."""
    if isinstance(job, lesson.Lesson):
        return lesson.program(job)
    assert comm is not None
    measured = comparison.measure(comm, job)
    verdict = np.zeros(1, np.int64)
    if measured is not None:
        report(job, *measured)
        verdict[0] = 0 if measured[2] else 1
    return int(comm.broadcast(verdict, root=0)[0])


def report(job: comparison.Job, rows: dict[str, comparison.Row], loss_error: float, ok: bool) -> None:
    """Print the comparison, as a table or as JSON."""
    if job.json:
        print(json.dumps(comparison.as_json(rows, loss_error, ok)), flush=True)
        return
    console = make_console()
    console.width = max(100, console.width)
    console.print(comparison.table_of(rows))
    console.print(comparison.verdict_on(rows, loss_error, job.precision))

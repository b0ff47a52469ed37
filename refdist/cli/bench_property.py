"""Time the property test of training: examples a second, by number of ranks, in this one process.

    refdist bench property                              200 examples of up to 16 ranks
    refdist bench property --largest 4 --examples 400

The examples are those of `tests/test_property.py` with another seed: a plan, a model, a batch, an interleaving are drawn, and the
loss, each gradient, and each parameter and moment after two steps of SGD and of AdamW held against the single device. The first
example is not counted; drawing is.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import threadpoolctl
from rich.console import Console
from rich.table import Table

from refdist.cli.options import positive
from refdist.errors import ConfigError

FEW = 4  # ranks


@dataclass
class Job:
    """What is timed."""

    examples: int
    largest: int
    seed: int
    json: bool
    plan: None = None
    topic: str = "property"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist bench property`."""
    parser.add_argument("--examples", type=positive, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--largest", type=positive, default=16, metavar="N", help="ranks of a plan, at most (default 16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    parser.add_argument("--json", action="store_true", help="results as JSON on standard output")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    return Job(args.examples, args.largest, args.seed, args.json)


def program(comm: Any, job: Job) -> int:
    """Run the examples and print."""
    try:
        from refdist.testing.properties import seconds_by_ranks
    except ImportError as error:
        raise ConfigError(f"{error}: `pip install 'refdist[test]'` brings it") from None
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        seconds = seconds_by_ranks(job.examples, job.largest, job.seed)
    rows = [(str(ranks), seconds[ranks]) for ranks in sorted(seconds)]
    rows.append((f"up to {FEW}", [second for ranks in seconds for second in seconds[ranks] if ranks <= FEW]))
    rows.append(("all", [second for each in seconds.values() for second in each]))
    record = {ranks: {"examples": len(each), "examples_per_s": len(each) / sum(each) if each else None} for ranks, each in rows}
    print(json.dumps(record), flush=True) if job.json else show(record)
    return 0


def show(record: dict[str, dict[str, Any]]) -> None:
    """The figures for a person."""
    table = Table("ranks", "examples", "a second", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for ranks, row in record.items():
        table.add_row(ranks, str(row["examples"]), f"{row['examples_per_s']:.1f}" if row["examples"] else "")
    Console(soft_wrap=True, highlight=False).print(table)

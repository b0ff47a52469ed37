"""Measure how fast something is: `refdist bench TOPIC …`.

A topic is a module like that of a command, with `add_arguments(parser)`, `prepare(args)` and `program(comm, job)`.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import refdist as rd
from refdist.cli import bench_collectives, bench_numerics, bench_property, bench_step

TOPICS: dict[str, ModuleType] = {"collectives": bench_collectives, "step": bench_step, "numerics": bench_numerics,
                                 "property": bench_property}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the topics."""
    topics = parser.add_subparsers(dest="topic", required=True, metavar="|".join(TOPICS))
    for name, module in TOPICS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add_arguments(topics.add_parser(name, help=summary, description=summary))


def prepare(args: argparse.Namespace) -> Any:
    """The topic's job."""
    return TOPICS[args.topic].prepare(args)


def program(comm: rd.Comm, job: Any) -> int:
    """Run the topic; on rank 0 it prints."""
    return TOPICS[job.topic].program(comm, job)

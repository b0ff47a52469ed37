"""Measure how fast something is: `refdist bench TOPIC …`.

Each topic has a help of its own: `refdist bench TOPIC --help`.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import refdist as rd
from refdist.cli import bench_collectives, bench_numerics, bench_property, bench_step
from refdist.cli.options import add_command

TOPICS: dict[str, ModuleType] = {"collectives": bench_collectives, "step": bench_step, "numerics": bench_numerics,
                                 "property": bench_property}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the topics."""
    topics = parser.add_subparsers(dest="topic", required=True, metavar="|".join(TOPICS))
    for name, module in TOPICS.items():
        add_command(topics, name, module)


def prepare(args: argparse.Namespace) -> Any:
    """The topic's job."""
    return TOPICS[args.topic].prepare(args)


def program(comm: rd.Comm, job: Any) -> int:
    """Run the topic; on rank 0 it prints."""
    return TOPICS[job.topic].program(comm, job)

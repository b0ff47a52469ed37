"""Show how something works: `refdist show TOPIC …`.

Each topic has a help of its own: `refdist show TOPIC --help`.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import refdist as rd
from refdist.cli import (
    show_attention,
    show_balance,
    show_cluster,
    show_collective,
    show_flops,
    show_hardware,
    show_layout,
    show_memory,
    show_plan,
    show_precision,
    show_schedule,
)
from refdist.cli.options import add_command

TOPICS: dict[str, ModuleType] = {"schedule": show_schedule, "layout": show_layout, "memory": show_memory,
                                 "attention": show_attention, "hardware": show_hardware, "cluster": show_cluster,
                                 "flops": show_flops, "precision": show_precision, "plan": show_plan, "balance": show_balance,
                                 **dict.fromkeys(show_collective.TOPICS, show_collective)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the topics."""
    topics = parser.add_subparsers(dest="topic", required=True, metavar="|".join(TOPICS))
    for name, module in TOPICS.items():
        add_command(topics, name, module)


def prepare(args: argparse.Namespace) -> Any:
    """The topic's job."""
    job = TOPICS[args.topic].prepare(args)
    job.topic = args.topic
    return job


def program(comm: rd.Comm | None, job: Any) -> int:
    """Run the topic; on rank 0 it prints."""
    return TOPICS[job.topic].program(comm, job)

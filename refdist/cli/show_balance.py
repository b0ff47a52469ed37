"""When a strategy is communication-bound on a cluster, given its compute and bandwidth, level by level.

    refdist show balance --model llama3-405b --cluster llama3
    refdist show balance --cluster llama3 --compute 3 --network 2       compute grows faster than bandwidth
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import refdist as rd
from refdist.cli.job import add_plan_and_model, make_config
from refdist.cli.on_paper import stored_of
from refdist.cli.show_plan import add_where
from refdist.cli.tables import table
from refdist.paper.balance import borders
from refdist.paper.cluster import Cluster, cluster
from refdist.paper.draw import bandwidth
from refdist.paper.state import Stored


@dataclass
class Job:
    """What is shown; nothing runs on ranks."""

    name: str
    config: rd.ModelConfig
    stored: Stored
    cluster: Cluster
    format: str
    efficiency: float
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show balance`."""
    group = parser.add_argument_group("run")
    add_where(group)
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    add_plan_and_model(parser, "llama3-405b")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    where = cluster(args.cluster).scaled(args.compute, args.network)
    where.accelerator.flops(args.format)
    return Job(args.model, make_config(args, on_paper=True), stored_of(args), where, args.format, args.efficiency, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print the table."""
    found = borders(job.config, job.stored, job.cluster, job.format, job.efficiency)
    if job.json:
        print(json.dumps([border._asdict() for border in found]), flush=True)
        return 0
    reached = job.cluster.accelerator.flops(job.format) * job.efficiency
    server = job.cluster.levels[0].children
    print(f"{job.name} on {job.cluster.name}: {job.cluster.accelerator.name}, {reached / 1e12:,.0f} TFLOP/s reached\n")
    rows = [[border.level, bandwidth(border.bandwidth), f"{reached / border.bandwidth:,.0f}", f"{border.dp:,.0f}",
             f"{border.fsdp:,.0f}", f"{border.tp:.1f}", f"{100 * border.tp_share:.0f} %"] for border in found]
    head = ["across a", "one way", "FLOP/byte", "DP below", "FSDP below", "TP above", f"tp={server} sends"]
    print(table(head, rows, range(1, 7)))
    print("\nDP below: tokens a rank and step; FSDP below: tokens a rank and micro-batch; TP above: ranks; beyond these\n"
          "communication lasts longer than what could hide it. "
          f"tp={server} sends: its time as a part of a block's matrix products.")
    return 0

"""Draw a cluster on paper: its levels, how many accelerators each holds, how fast they are connected, and all FLOP/s.

    refdist show cluster llama3
    refdist show cluster llama3 --svg cluster.svg
    refdist show cluster own.json --json

A cluster of your own is a file: {"name": "lab", "accelerator": "a100", "levels": [{"name": "server", "children": 4,
"bandwidth": 300e9, "latency": 2e-6}, {"name": "room", "children": 2, "bandwidth": 25e9, "latency": 5e-6}]}. Bandwidths are
bytes per second, accelerator and direction; an accelerator may be an object too (`refdist show hardware --json`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.options import output_file
from refdist.paper.cluster import CLUSTERS, Cluster, cluster
from refdist.paper.draw import cluster_svg, cluster_text, gigabytes


@dataclass
class Job:
    """What is shown; nothing runs on ranks."""

    cluster: Cluster
    svg: str | None
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show cluster`."""
    parser.add_argument("cluster", metavar="NAME", help=f"{', '.join(CLUSTERS)}, or a .json file")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--json", action="store_true", help="the cluster as JSON")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    return Job(cluster(args.cluster), args.svg, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print the picture."""
    shown = job.cluster
    if job.svg:
        write_aside(job.svg, cluster_svg(shown))
    if job.json:
        peaks = {name: shown.flops(name) for name in shown.accelerator.peak}
        print(json.dumps({**dataclasses.asdict(shown), "size": shown.size, "flops": peaks}), flush=True)
        return 0
    print(f"{shown.name}: {shown.size:,} × {shown.accelerator.name}\n")
    print(cluster_text(shown) + "\n")
    for name, peak in shown.accelerator.peak.items():
        print(f"  {name:<6}{peak / 1e12:>9,.1f} TFLOP/s each {shown.flops(name) / 1e18:>9,.3g} EFLOP/s in all   (dense)")
    memory = shown.accelerator.memory
    print(f"  memory{gigabytes(memory):>9} each {gigabytes(memory * shown.size):>17} in all")
    if shown.source:
        print(f"\n{shown.source}")
    return 0

"""Print the table of accelerators: dense peak by number format, memory, links, with the source of every figure.

    refdist show hardware
    refdist show hardware --from k40:fp32 --to b200:fp8        what a comparison over the years compares
    refdist show hardware --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass

import refdist as rd
from refdist.cli.tables import table
from refdist.paper.draw import bandwidth, gigabytes
from refdist.paper.hardware import ACCELERATORS, FORMATS, Accelerator, accelerator, growth


@dataclass
class Job:
    """What is shown; nothing runs on ranks."""

    compared: tuple[tuple[Accelerator, str], tuple[Accelerator, str]] | None
    sparse: bool
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show hardware`."""
    parser.add_argument("--from", dest="older", metavar="NAME:FORMAT", help="compare this one, in this number format, …")
    parser.add_argument("--to", dest="newer", metavar="NAME:FORMAT", help="… with this one")
    parser.add_argument("--sparse", action="store_true", help="count the newer one's peak as its vendor does with sparsity")
    parser.add_argument("--json", action="store_true", help="the table as JSON")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    if (args.older is None) != (args.newer is None):
        raise rd.ConfigError("--from and --to belong together: expected both, as NAME:FORMAT")
    compared = None if args.older is None else (_read(args.older), _read(args.newer))
    if args.sparse and compared is None:
        raise rd.ConfigError("--sparse belongs to a comparison: expected --from and --to as well")
    return Job(compared, args.sparse, args.json)


def _read(text: str) -> tuple[Accelerator, str]:
    name, _, format_ = text.rpartition(":")
    if format_ not in FORMATS:
        raise rd.ConfigError(f"{text!r}: expected NAME:FORMAT with a format of {', '.join(FORMATS)}")
    found = accelerator(name)
    found.flops(format_)
    return found, format_


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print the table, or the comparison."""
    if job.compared is not None:
        (older, older_format), (newer, newer_format) = job.compared
        result = growth(older, newer, older_format, newer_format, job.sparse)
        if job.json:
            print(json.dumps({"older": older.name, "newer": newer.name, **result}), flush=True)
            return 0
        print(f"{older.name}: {result['from'] / 1e12:,.1f} TFLOP/s in {older_format}")
        print(f"{newer.name}: {result['to'] / 1e12:,.1f} TFLOP/s in {newer_format}{' with sparsity' if job.sparse else ''}")
        changed = f"; the comparison changes {' and '.join(result['changed'])}" if result["changed"] else ", like with like"
        years = newer.year - older.year if newer.year and older.year else None
        print(f"{result['times']:,.0f} times as fast{f' in {years} years' if years else ''}{changed}")
        print(f"memory {newer.memory / older.memory:.1f} times as large, {newer.memory_bandwidth / older.memory_bandwidth:.1f} "
              "times as fast")
        return 0
    if job.json:
        print(json.dumps({name: dataclasses.asdict(shown) for name, shown in ACCELERATORS.items()}), flush=True)
        return 0
    rows = [[name, str(shown.year), *(f"{shown.peak[f] / 1e12:,.1f}" if f in shown.peak else "–" for f in FORMATS),
             f"× {shown.sparse}" if shown.sparse > 1 else "–", gigabytes(shown.memory), bandwidth(shown.memory_bandwidth),
             "–" if shown.link is None else bandwidth(shown.link)] for name, shown in ACCELERATORS.items()]
    print(table(["", "year", *FORMATS, "sparse", "memory", "bandwidth", "link, one way"], rows, range(1, 12)))
    print("\nTFLOP/s, dense; fp32 outside of matrix units. Links: to the accelerators of the same server.\n")
    for name, shown in ACCELERATORS.items():
        print(f"{name:<10}{'; '.join(shown.sources)}" + (f". Not found: {', '.join(shown.missing)}" if shown.missing else ""))
    return 0

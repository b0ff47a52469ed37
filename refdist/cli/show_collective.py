"""Draw a collective, step by step: who sends which chunk to whom, and what each rank holds then.

    refdist show all-reduce --algorithm ring --ranks 4
    refdist show broadcast --algorithm scatter_all_gather --ranks 8 --root 3 --svg broadcast.svg
    refdist show all-reduce --algorithm hierarchical --ranks 6 --groups 0,1,2/3,4,5

In a cell, `01··` is a sum of the contributions of ranks 0 and 1; `*` marks what has just come. In a notebook,
`refdist.comm.trace("all_reduce", algorithm="ring", ranks=4)` shows the picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Collection
from dataclasses import dataclass

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.options import output_file, positive
from refdist.comm.tracing import COLLECTIVES, Trace, trace

ROOTED = ("broadcast", "reduce", "gather", "scatter")
TOPICS = tuple(operation.replace("_", "-") for operation in COLLECTIVES)


@dataclass
class Job:
    """What is shown; nothing runs on ranks of its own."""

    trace: Trace
    svg: str | None
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show` for the collective that the parser is named after."""
    operation = (parser.prog.split() or [""])[-1].replace("-", "_")
    names = _algorithms(operation) if operation in COLLECTIVES else ()
    said = f"{', '.join(names)} (default: what a small array gets)" if names else "there is one only"
    parser.add_argument("--algorithm", metavar="NAME", help=said)
    parser.add_argument("--ranks", type=positive, default=4, metavar="N", help="default 4")
    parser.set_defaults(root=0, groups=None)
    if operation in ROOTED:
        parser.add_argument("--root", type=int, default=0, metavar="RANK", help="default 0")
    if "hierarchical" in names:
        parser.add_argument("--groups", type=_groups, metavar="0,1/2,3", help="which ranks share a node, for hierarchical")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--json", action="store_true", help="one object a step: its messages, and what each rank holds")


def _algorithms(operation: str) -> Collection[str]:
    """The names of a collective's algorithms; none where there is one only."""
    return getattr(importlib.import_module(f"refdist.comm.{operation}"), "ALGORITHMS", ())


def _groups(words: str) -> list[list[int]]:
    try:
        return [[int(rank) for rank in group.split(",")] for group in words.split("/")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ranks with commas and slashes, as in 0,1/2,3, not {words!r}") from None


def prepare(args: argparse.Namespace) -> Job:
    """Run the collective on a few ranks in this process."""
    operation = args.topic.replace("-", "_")
    if args.algorithm is not None and not _algorithms(operation):
        raise rd.ConfigError(f"--algorithm {args.algorithm}: {args.topic} has one algorithm only")
    try:
        picture = trace(operation, args.algorithm, args.ranks, args.root, args.groups)
    except ValueError as error:
        raise rd.ConfigError(str(error)) from None
    return Job(picture, args.svg, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print it, and write the picture."""
    if comm is not None and comm.rank > 0:
        return 0
    if job.svg is not None:
        write_aside(job.svg, job.trace.svg())
    if job.json:
        for number, step in enumerate(job.trace.steps):
            held = [[dataclasses.asdict(content) for contents in columns.values() for content in contents]
                    for columns in step.held]
            messages = [{"source": message.source, "dest": message.dest,
                         "contents": [dataclasses.asdict(content) for content in message.contents]} for message in step.messages]
            print(json.dumps({"operation": job.trace.operation, "algorithm": job.trace.algorithm, "ranks": job.trace.ranks,
                              "step": number, "messages": messages, "held": held}))
    elif job.svg is None:
        print(job.trace)
    else:
        print(f"{job.trace.title}: {len(job.trace.steps) - 1} steps, drawn in {job.svg}")
    return 0

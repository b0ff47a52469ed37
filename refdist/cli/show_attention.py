"""Draw context parallelism: which rank computes which block of the attention matrix at which step, and how busy each is.

    refdist show attention --cp 4 --method ring
    refdist show attention --cp 4 --method ring --layout contiguous          the last rank does almost all the work
    refdist show attention --cp 4 --method ring --ulysses 2 --svg attention.svg

In a notebook, `print(refdist.parallel.context.tracing.trace(cp=4, method="ring"))`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.job import refuse_groups
from refdist.cli.options import output_file, positive
from refdist.parallel.context import LAYOUTS, METHODS
from refdist.parallel.context.tracing import AttentionTrace, trace


@dataclass
class Job:
    """What is shown; nothing runs on ranks of its own."""

    trace: AttentionTrace
    svg: str | None
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show attention`."""
    parser.add_argument("--cp", type=positive, default=4, metavar="N", help="context-parallel ranks (default 4)")
    parser.add_argument("--method", choices=list(METHODS), default="ring", help="default ring")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="zigzag", help="default zigzag")
    parser.add_argument("--ulysses", type=positive, default=1, metavar="N", help="neighbours that exchange heads (default 1)")
    parser.add_argument("--seq", type=positive, metavar="N", help="positions (default: four a chunk)")
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="query heads (default 8)")
    parser.add_argument("--kv-heads", type=positive, default=4, metavar="N", help="KV heads (default 4)")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--json", action="store_true", help="one object a block, and one a rank with its work at each step")


def prepare(args: argparse.Namespace) -> Job:
    """Run the attention on a few ranks in this process."""
    refuse_groups("--ulysses", args.ulysses, "--method", args.method, args.cp)
    picture = trace(args.cp, args.method, args.layout, args.ulysses, args.seq, args.heads, args.kv_heads)
    return Job(picture, args.svg, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print it, and write the picture."""
    if comm is not None and comm.rank > 0:
        return 0
    if job.svg is not None:
        write_aside(job.svg, job.trace.svg())
    if job.json:
        for block in job.trace.blocks:
            print(json.dumps(block._asdict()))
        for rank, work in enumerate(job.trace.work.tolist()):
            print(json.dumps({"rank": rank, "work": work}))
    elif job.svg is None:
        print(job.trace)
    else:
        print(f"{job.trace.title}: drawn in {job.svg}")
    return 0

"""Search for a plan on paper: those that fit so many accelerators, the best estimate first, and why, in words.

    refdist plan --model llama3-405b --gpus 16384 --cluster llama3 --batch 2048 --seq 8192
    refdist plan --model llama3-8b --gpus 64
    refdist plan --model llama3-405b --gpus 16384 --batch 2048 --tp 8 --cp 1      fields of a plan that are given are kept

Nothing runs; times are estimates (`docs/choosing-a-plan.md` says what is in them).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass

import refdist as rd
from refdist.cli.job import add_plan_and_model, make_config
from refdist.cli.on_paper import SEQ, plan_text, stored_of
from refdist.cli.options import given, positive
from refdist.cli.show_plan import add_where
from refdist.cli.tables import table
from refdist.paper.cluster import cluster
from refdist.paper.draw import gigabytes, seconds
from refdist.paper.flops import RUNS
from refdist.paper.models import PLANS
from refdist.paper.search import SEARCHED, Found, Problem, of_plan, reasons, search

TOKENS = 16 * 2**20  # in a global batch, unless said otherwise: Llama 3's


@dataclass
class Job:
    """What is searched; nothing runs on ranks."""

    name: str
    problem: Problem
    top: int
    json: bool
    plan: None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist plan`."""
    group = parser.add_argument_group("run")
    group.add_argument("--gpus", type=positive, required=True, metavar="N", help="accelerators")
    add_where(group)
    group.add_argument("--batch", type=positive, metavar="N", help="sequences in a global batch (default 16 Mi tokens)")
    group.add_argument("--seq", type=positive, metavar="N", help=f"tokens in a sequence (default {SEQ})")
    group.add_argument("--top", type=positive, default=8, metavar="N", help="plans that are listed (default 8)")
    group.add_argument("--json", action="store_true", help="the plans as JSON")
    add_plan_and_model(parser, "llama3-8b", SEARCHED)


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    config = make_config(args, on_paper=True)
    where = cluster(args.cluster).scaled(args.compute, args.network)
    where.accelerator.flops(args.format)
    if args.efficiency > 1:
        raise rd.ConfigError(f"--efficiency {args.efficiency:g}: expected at most 1")
    seq = args.seq or min(SEQ, config.max_position_embeddings)
    if seq > config.max_position_embeddings:
        raise rd.PlanError(f"--seq {seq} is longer than max_position_embeddings={config.max_position_embeddings}")
    fixed = given(rd.Plan, args)
    stored = stored_of(args).under(rd.Plan(**fixed))
    problem = Problem(config, args.gpus, args.batch or max(1, TOKENS // seq), seq, stored, where, args.format, args.efficiency,
                      fixed)
    return Job(args.model, problem, args.top, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Search, and print the list."""
    problem = job.problem
    found = search(problem)
    why = reasons(problem, found)
    if job.json:
        plans = [{"plan": dataclasses.asdict(one.plan), "seconds": one.seconds, "mfu": one.mfu, "memory": one.memory}
                 for one in found[:job.top]]
        print(json.dumps({"fit": len(found), "plans": plans, "reasons": why}), flush=True)
        return 0
    print(f"{job.name}, batch {problem.batch:,} × {problem.seq:,} tokens, {problem.gpus:,} × "
          f"{problem.cluster.accelerator.name} of {problem.cluster.name}; {problem.stored.text}\n")
    print("\n".join(f"- {line}" for line in why) + "\n")
    print(table(["", "a step", "MFU", "memory", "plan"], [_row(str(place), one) for place, one in enumerate(found[:job.top], 1)],
                [1, 2, 3]))
    print(f"\n{len(found):,} plans were found that fit; times are estimates, plans within some per cent of each other are alike")
    print(_published(job, found), end="")
    return 0


def _row(place: str, one: Found) -> list[str]:
    return [place, seconds(one.seconds), f"{100 * one.mfu:.1f} %", gigabytes(one.memory), plan_text(one.plan)]


def _published(job: Job, found: list[Found]) -> str:
    """The published plan for the same model, number of accelerators and batch, if there is one."""
    problem, lines = job.problem, []
    for name, published in PLANS.items():
        plan = rd.Plan(**published["plan"])
        same = (published["model"], plan.world_size, published["batch"], published["seq"])
        if same == (job.name, problem.gpus, problem.batch, problem.seq) and not problem.fixed:
            own = of_plan(problem, plan)
            lines.append(f"\npublished, {RUNS[name].published:g} %:")
            lines.append("  ".join(_row("", own)).strip())
            lines.append(f"{100 * (own.seconds / found[0].seconds - 1):.0f} % slower by this estimate than the first, which "
                         "hides what it sends perfectly")
            lines.append("and knows neither congestion nor stragglers, both of which grow with the groups.")
    return "\n".join(lines) + "\n" if lines else ""

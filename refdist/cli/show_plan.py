"""What a plan costs on paper: who sits where, memory, bytes along each axis, bubble, and an estimate of the time of a step.

    refdist show plan --model llama3-405b --cluster llama3 --tp 8 --cp 16 --cp-method all_gather --pp 16 --fsdp 8 --zero 1 \\
        --seq 131072 --micro-batches 16 --layers-per-stage 7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7
    refdist show plan --run llama3-16k                        Llama 3's published plans: llama3-8k, llama3-16k, llama3-128k
    refdist show plan --run llama3-16k --compute 3 --network 2     on hardware that computes 3 times and sends 2 times as fast

Nothing runs; what is called an estimate is one (`docs/choosing-a-plan.md` says what is in it).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.job import add_plan_and_model
from refdist.cli.on_paper import add_stored, model_and_plan, plan_text, stored_of, the_part
from refdist.cli.options import above_0, given, output_file, positive
from refdist.cli.tables import table
from refdist.paper.cluster import CLUSTERS, Cluster, cluster
from refdist.paper.draw import bars_svg, gigabytes, seconds
from refdist.paper.estimate import EFFICIENCY, Estimate, estimate
from refdist.paper.flops import RUNS
from refdist.paper.hardware import FORMATS
from refdist.paper.memory import of_stages
from refdist.paper.models import PLANS
from refdist.paper.state import Stored


@dataclass
class Job:
    """What is shown; nothing runs on ranks."""

    name: str
    run: str | None
    config: rd.ModelConfig
    planned: rd.Plan
    batch: int
    seq: int
    stored: Stored
    cluster: Cluster
    format: str
    efficiency: float
    svg: str | None
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show plan`."""
    group = parser.add_argument_group("run")
    add_where(group)
    group.add_argument("--run", choices=list(PLANS), help="a published run (model, plan, batch, what is stored) to start from; "
                       "other options take the place of its own")
    group.add_argument("--batch", type=positive, metavar="N", help="sequences in a global batch (default one a micro-batch)")
    group.add_argument("--seq", type=positive, metavar="N", help="tokens in a sequence (default 8192)")
    group.add_argument("--svg", type=output_file, metavar="FILE", help="write a picture of the step's time as SVG")
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    add_plan_and_model(parser, "llama3-405b")


def add_where(group: Any) -> None:
    """Add the options that say on what hardware."""
    group.add_argument("--cluster", default="llama3", metavar="NAME",
                       help=f"{', '.join(CLUSTERS)}, or a .json file (default llama3)")
    group.add_argument("--compute", type=above_0, default=1.0, metavar="X", help="as if it computed X times as fast")
    group.add_argument("--network", type=above_0, default=1.0, metavar="X", help="as if it sent X times as fast")
    group.add_argument("--format", choices=FORMATS, default="bf16", help="number format of matrix products (default bf16)")
    group.add_argument("--efficiency", type=above_0, default=EFFICIENCY, metavar="X",
                       help=f"part of the peak that matrix products reach, an assumption (default {EFFICIENCY})")
    add_stored(group, accelerator=False)


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    changed = bool(given(rd.Plan, args) or given(rd.ModelConfig, args) or args.batch or args.seq)
    if args.run is not None:
        published = PLANS[args.run]
        if args.model not in (published["model"], "llama3-405b"):
            raise rd.ConfigError(f"--run {args.run} is a run of {published['model']}: --model {args.model} is another one")
        args.model, args.batch, args.seq = published["model"], args.batch or published["batch"], args.seq or published["seq"]
        args.stored = args.stored or "mixed-fp32-gradients"
        for name, value in published["plan"].items():
            if not hasattr(args, name):
                setattr(args, name, value)
    config, plan, batch, seq = model_and_plan(args)
    if args.efficiency > 1:
        raise rd.ConfigError(f"--efficiency {args.efficiency:g}: expected at most 1")
    where = cluster(args.cluster).scaled(args.compute, args.network)
    where.accelerator.flops(args.format)
    where.check_size(plan.world_size)
    run = None if changed or (args.compute, args.network, args.cluster) != (1, 1, "llama3") else args.run
    return Job(args.model, run, config, plan, batch, seq, stored_of(args).under(plan), where, args.format, args.efficiency,
               args.svg, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print the tables."""
    part = the_part(job.config, job.planned, job.batch, job.seq)
    found = estimate(part, job.stored, job.cluster, job.format, job.efficiency)
    most = max(stage["total"] for stage in of_stages(part, job.stored))
    if job.svg:
        write_aside(job.svg, _svg(job, found))
    if job.json:
        print(json.dumps({"model": job.name, "ranks": job.planned.world_size, "batch": job.batch, "seq": job.seq,
                          "memory": most, "fits": most <= job.cluster.accelerator.memory, "estimate": dataclasses.asdict(found)}),
              flush=True)
        return 0
    memory = job.cluster.accelerator.memory
    print(f"{job.name} on {job.cluster.name}: {plan_text(job.planned)}\n"
          f"batch {job.batch:,} × {job.seq:,} tokens; {job.stored.text}\n")
    print(_axes(job, found) + "\n")
    print(f"memory of the fullest rank {gigabytes(most)}: {'fits' if most <= memory else 'does NOT fit'} {gigabytes(memory)}\n")
    print(_time(job, found))
    return 0


def _axes(job: Job, found: Estimate) -> str:
    """Which axis crosses what, what goes along it, and what of its time is hidden."""
    rows = []
    for line in found.lines:
        level = job.cluster.levels[line.crossing.level or 0].name
        together = " × ".join(f"{factor:g}" if factor == int(factor) else f"{factor:.1f}" for factor in line.crossing.factors)
        hidden = line.seconds - line.exposed
        rows.append([line.axis, str(line.size), f"{line.crossing.stride:,}", level, together, gigabytes(line.sent),
                     seconds(line.seconds), seconds(max(0.0, hidden)), seconds(line.exposed)])
    names = " × ".join(level.name for level in job.cluster.levels)
    return (table(["axis", "ranks", "stride", "crosses", "lies in", "sent a rank", "time", "hidden", "exposed"], rows,
                  [1, 2, 5, 6, 7, 8])
            + f"\n(lies in: members on each level of {names})")


def _parts(found: Estimate) -> dict[str, float]:
    """The step as a sum: kernels, what tp and cp expose, what the pipeline waits, the rest."""
    in_stages = {name: found.exposed.get(name, 0.0) for name in ("tp", "cp")}
    after = {name: time for name, time in found.exposed.items() if name not in in_stages}
    return {**found.parts, **{f"{name}, exposed": time for name, time in in_stages.items()}, "bubble": found.bubble,
            **{f"{name}, exposed": time for name, time in after.items()}, "optimizer": found.optimizer}


def _time(job: Job, found: Estimate) -> str:
    parts = {name: time for name, time in _parts(found).items() if time}
    rows = [[name, seconds(time), f"{100 * time / found.seconds:.1f} %"] for name, time in parts.items()]
    rows.append(["a step, estimated", seconds(found.seconds), "100 %"])
    text = table(["slowest stage", "", ""], rows, [1, 2])
    text += (f"\n\nestimate: {found.tokens_per_second:,.0f} tokens/s, {found.flops_per_second / 1e12:,.0f} model TFLOP/s each, "
             f"MFU {100 * found.mfu:.1f} %\n(roofline with matrix products at {100 * job.efficiency:g} % of the peak; no "
             "stragglers, launches or failures)")
    if job.run is not None:
        text += f"\npublished: {RUNS[job.run].published:g} %"
    return text


def _svg(job: Job, found: Estimate) -> str:
    parts = {name: time for name, time in _parts(found).items() if time}
    sent = [(f"{line.axis} × {line.size}", {"hidden": max(0.0, line.seconds - line.exposed), "exposed": line.exposed})
            for line in found.lines]
    return bars_svg(f"{job.name}: a step of {seconds(found.seconds)}, estimated", [("the step", parts), *sent], seconds,
                    facts=[plan_text(job.planned), f"MFU {100 * found.mfu:.1f} % on {job.cluster.name}"])

"""`refdist show memory` on paper: what a model and a plan need on accelerators that nobody here has. Nothing runs.

    training state of the whole model, how many accelerators hold it, how far data parallelism and ZeRO go
    under the plan, for each pipeline stage the bytes of one rank by category, and those of all ranks
    what one block keeps of its activations, array by array
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.on_paper import add_stored, model_and_plan, plan_text, stored_of, the_part
from refdist.cli.tables import table
from refdist.paper.activations import Activations, korthikanti
from refdist.paper.draw import bars_svg, gigabytes
from refdist.paper.hardware import Accelerator, accelerator
from refdist.paper.memory import CATEGORIES, of_stages, wall
from refdist.paper.models import MODELS, ROUNDED
from refdist.paper.state import Stored, smallest_number

SHOWN = 4  # stages in the table: the first ones, and the last


@dataclass
class Job:
    """What is shown; nothing runs on ranks."""

    name: str
    config: rd.ModelConfig
    planned: rd.Plan
    batch: int
    seq: int
    stored: Stored
    accelerator: Accelerator
    svg: str | None
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options on paper to those of `refdist show memory`."""
    group = parser.add_argument_group("on paper", "for models that are too big to be run, or with --on-paper: nothing runs; "
                                      "batch and seq are then one sequence a micro-batch of 8192 tokens unless given")
    group.add_argument("--on-paper", action="store_true", help="by formulas, without running, for a small model too")
    add_stored(group)
    parser.set_defaults(batch=None, seq=None)


def wanted(args: argparse.Namespace) -> bool:
    """Whether it is to be shown on paper."""
    return args.on_paper or args.model in MODELS


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    for name, instead in (("rank", "stages are shown side by side"), ("device_memory", "--accelerator has its own"),
                          ("precision", "--stored says what is kept")):
        if getattr(args, name) is not None:
            raise rd.ConfigError(f"--{name.replace('_', '-')} is for what is run, not for paper: {instead}")
    config, plan, batch, seq = model_and_plan(args)
    return Job(args.model, config, plan, batch, seq, stored_of(args).under(plan), accelerator(args.accelerator), args.svg,
               args.json)


def program(job: Job) -> int:
    """Print the tables."""
    found = figures(job)
    if job.svg:
        write_aside(job.svg, _svg(job, found))
    if job.json:
        print(json.dumps(found), flush=True)
        return 0
    print(_head(job, found) + "\n")
    print(_wall(job) + "\n")
    print(f"{plan_text(job.planned)}\nbatch {job.batch:,} × {job.seq:,} tokens\n")
    print(_stages(job, found) + "\n")
    print(_block(job))
    return 0


def figures(job: Job) -> dict[str, Any]:
    """All figures, for machines."""
    parameters = job.config.num_parameters()
    part = the_part(job.config, job.planned, job.batch, job.seq)
    stages = of_stages(part, job.stored)
    most = max(stage["total"] for stage in stages)
    per_stage = job.planned.world_size // job.planned.pp
    return {"model": job.name, "parameters": parameters, "bytes_per_parameter": job.stored.per_parameter,
            "state": parameters * job.stored.per_parameter, "accelerator": job.accelerator.name, "memory": job.accelerator.memory,
            "smallest_number": smallest_number(parameters, job.stored, job.accelerator.memory),
            "ranks": job.planned.world_size, "batch": job.batch, "seq": job.seq, "stages": stages, "most": most,
            "fits": most <= job.accelerator.memory, "all_ranks": sum(stage["total"] for stage in stages) * per_stage,
            "block": Activations(part, job.stored).terms(max(part.sequences))}


def _head(job: Job, found: dict[str, Any]) -> str:
    state, memory = found["state"], job.accelerator.memory
    lines = [f"{job.name}: {found['parameters']:,} parameters × {job.stored.per_parameter} bytes = "
             f"{gigabytes(state)} of training state", f"  {job.stored.text}",
             f"  at least {found['smallest_number']:,} × {job.accelerator.name} of {gigabytes(memory)}, nothing else in it"]
    if job.name in ROUNDED:
        rounded = ROUNDED[job.name]
        lines.append(f"  (counted as {rounded / 1e9:.0f} × 10⁹: {gigabytes(rounded * job.stored.per_parameter)}, "
                     f"{smallest_number(int(rounded), job.stored, memory):,})")
    return "\n".join(lines)


def _wall(job: Job) -> str:
    rows = []
    for way in wall(job.config.num_parameters(), job.stored, job.accelerator.memory):
        fits = "on one rank" if way.ranks == 1 else "never" if way.ranks is None else f"on {way.ranks:,} ranks or more"
        rows.append([way.name, gigabytes(way.floor) if way.floor else "0", fits])
    return table(["data parallel alone", "on each rank, always", "its state fits"], rows, [1])


def _stages(job: Job, found: dict[str, Any]) -> str:
    """Bytes of one rank of each stage by category, and whether that fits."""
    stages = found["stages"]
    shown = list(range(len(stages))) if len(stages) <= SHOWN + 1 else [*range(SHOWN - 1), len(stages) - 1]
    names = [name for name in CATEGORIES if any(stage[name] for stage in stages)] + ["total"]
    rows = [[name, *(gigabytes(stages[stage][name]) for stage in shown)] for name in names]
    head = ["one rank of", *(f"stage {stage}" for stage in shown)]
    verdict = "fits" if found["fits"] else "does NOT fit"
    return (table(head, rows, range(1, len(head))) + f"\n\nthe fullest rank has {gigabytes(found['most'])}: {verdict} "
            f"{gigabytes(job.accelerator.memory)}; all {found['ranks']:,} ranks together {gigabytes(found['all_ranks'])}\n"
            "(categories at most, each at its own moment; buffers inside collectives are not counted)")


def _block(job: Job) -> str:
    """What one block keeps, array by array, and what a GPT of the same sizes would."""
    part = the_part(job.config, job.planned, job.batch, job.seq)
    b = max(part.sequences)
    activations = Activations(part, job.stored)
    rows = [[name, gigabytes(size)] for name, size in activations.terms(b).items() if size]
    kept = activations.kept(b, 0)
    plan = job.planned
    gpt = korthikanti(part.positions, b, job.config.hidden_size, job.config.num_attention_heads, plan.tp,
                      plan.tp > 1 and plan.sequence_parallel, plan.recompute)
    return (table([f"a block keeps, {b} × {part.positions:,} tokens", "recompute=none"], rows, [1])
            + f"\nwith recompute={plan.recompute}: {gigabytes(kept)}; a GPT layer of these sizes, which keeps its scores "
            f"(Korthikanti et al. 2022): {gigabytes(gpt)}")


def _svg(job: Job, found: dict[str, Any]) -> str:
    bars = [(f"stage {place}", {name: stage[name] for name in CATEGORIES}) for place, stage in enumerate(found["stages"])]
    memory = job.accelerator.memory
    facts = [f"{plan_text(job.planned)}", f"batch {job.batch:,} × {job.seq:,} tokens; {job.stored.text}"]
    return bars_svg(f"{job.name}: memory of one rank of each stage", bars, gigabytes,
                    (f"{job.accelerator.name}: {gigabytes(memory)}", memory), facts)

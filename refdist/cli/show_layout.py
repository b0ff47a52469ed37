"""Print the layout table: each parameter's shape, what cuts it, where its gradient is a partial sum, who holds which rows.

    refdist show layout --fsdp 2 --dp 2
    refdist show layout --fsdp 2 --tp 2 --model small --json
    refdist show layout --preset llama3

Nothing runs: the table is data, and it is what initialisation, reduction and checkpoints go by.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.table import Table

import refdist as rd
from refdist.cli.display import make_console
from refdist.cli.job import add_plan_and_model, make_config, make_plan
from refdist.comm.mesh import AXES
from refdist.comm.reduction import bounds
from refdist.model.layout import ParameterLayout, layout
from refdist.parallel import check_plan
from refdist.parallel.pipeline import make_schedule
from refdist.parallel.pipeline.stages import pieces_of_places
from refdist.parallel.sharding import box

PLACES = 3  # parts of a parameter that are all shown


@dataclass
class Job:
    """What is shown; nothing runs on ranks of its own."""

    layout_of: rd.Plan
    config: rd.ModelConfig
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show layout`."""
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    add_plan_and_model(parser, "tiny")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options, and refuse a plan that the model cannot be cut by."""
    job = Job(make_plan(args), make_config(args), args.json)
    check_plan(job.config, job.layout_of)
    return job


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print the table."""
    plan = job.layout_of
    stages = stages_of_pieces(job.config, plan)
    rows = [describe(row, plan, stages) for row in layout(job.config, plan.sequence_parallel, plan.tp).values()]
    if job.json:
        print(json.dumps(rows), flush=True)
        return 0
    staged = ["stage"] if plan.pp > 1 else []
    table = Table("parameter", "shape", *staged, "cut by", "partial over", "held by", box=None, pad_edge=False)
    for row in rows:
        cut = ", ".join(f"{axis} along {dimension}" for axis, dimension in row["cut_by"].items()) or "nothing"
        places = [f"{place['who']}: {place['rows']} {place['shape']}" for place in row["held_by"]]
        if len(places) > PLACES:
            places = [places[0], f"and {len(places) - 1} others"]
        table.add_row(row["name"], str(row["shape"]), *([row["stage"]] if staged else []), cut,
                      ", ".join(row["partial_over"]) or "nothing", "; ".join(places))
    console = make_console()
    if not console.is_terminal:
        console = make_console(width=200)
    console.print(table)
    held: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for place in row["held_by"]:
            held[row["stage"].split(".")[0], place["who"]] += math.prod(place["shape"])
    total = sum(math.prod(row["shape"]) for row in rows)
    console.print(f"{total:,} parameters; the rank that holds most of them holds {max(held.values()):,}")
    if plan.world_size > 1:
        console.print(f"{plan.world_size} ranks, innermost first: "
                      + ", ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1))
    return 0


def stages_of_pieces(config: rd.ModelConfig, plan: rd.Plan) -> dict[int | str, str]:
    """For each layer, "embed" and "head": its stage, as in "1", or stage and chunk, as in "1.0"."""
    schedule = make_schedule(plan.schedule, plan.pp, plan.micro_batches, plan.virtual_stages, plan.interleave_group)
    pieces = pieces_of_places(config, schedule, plan.layers_per_stage)
    named = [f"{place.stage}.{place.chunk}" if schedule.chunks > 1 else str(place.stage) for place in schedule.paths[0]]
    return {piece: name for name, found in zip(named, pieces, strict=True) for piece in found}


def describe(row: ParameterLayout, plan: rd.Plan, stages: dict[int | str, str]) -> dict[str, Any]:
    """One row of the table under a plan: only axes that have more than one rank are named.

    Without parameters cut over fsdp (``zero`` 1 and 2) the rows are those that a rank's optimizer updates.
    """
    sizes = plan.sizes
    held = []
    for tp in range(plan.tp):
        part = box(row, plan.tp, tp)
        offsets = bounds(part[0].stop - part[0].start, plan.fsdp)
        for fsdp in range(plan.fsdp):
            first, last = part[0].start + offsets[fsdp], part[0].start + offsets[fsdp + 1]
            who = " ".join(f"{axis} {place}" for axis, place in (("tp", tp), ("fsdp", fsdp)) if sizes[axis] > 1) or "all"
            held.append({"who": who, "rows": f"{first}:{last}", "shape": [last - first, *(p.stop - p.start for p in part[1:])]})
    return {"name": row.name, "shape": list(row.shape), "layer": row.layer, "stage": stages[row.layer],
            "cut_by": {axis: row.shards[axis] for axis in AXES if axis in row.shards and sizes[axis] > 1},
            "partial_over": [axis for axis in AXES if axis in row.partial and sizes[axis] > 1], "held_by": held}

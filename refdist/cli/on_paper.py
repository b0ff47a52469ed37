"""What the commands on paper have in common: which model and plan, what is stored, on which accelerators."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import refdist as rd
from refdist.cli.job import make_config, make_plan
from refdist.paper.hardware import ACCELERATORS
from refdist.paper.part import Part, check_batch, coordinates
from refdist.paper.state import STORED, Stored
from refdist.parallel import check_plan

__all__ = ["SEQ", "add_stored", "model_and_plan", "plan_text", "stored_of", "the_part"]

SEQ = 8192  # tokens in a sequence, unless the model was made for fewer


def add_stored(group: Any, accelerator: bool = True) -> None:
    """Add the options of what is stored, and where."""
    said = "; ".join(f"{name}: {stored.text}" for name, stored in STORED.items())
    group.add_argument("--stored", choices=list(STORED), metavar="NAME", help=f"{said} (default mixed)")
    if accelerator:
        group.add_argument("--accelerator", default="h100", metavar="NAME",
                           help=f"whose memory it is: {', '.join(ACCELERATORS)}, or a .json file (default h100)")


def stored_of(args: argparse.Namespace) -> Stored:
    """What is stored, as the options say."""
    return STORED[args.stored or "mixed"]


def model_and_plan(args: argparse.Namespace) -> tuple[rd.ModelConfig, rd.Plan, int, int]:
    """The model, the plan that fits it, and the global batch: sequences and tokens in each.

    Without ``--batch`` each micro-batch has one sequence.
    """
    config, plan = make_config(args, on_paper=True), make_plan(args)
    check_plan(config, plan)
    batch = args.batch or plan.batch_parts * plan.micro_batches
    seq = args.seq or min(SEQ, config.max_position_embeddings)
    check_batch(plan, batch, seq, config)
    return config, plan, batch, seq


def the_part(config: rd.ModelConfig, plan: rd.Plan, batch: int, seq: int, rank: int = 0) -> Part:
    """The part of one rank; that of rank 0 has the largest shares of its stage."""
    return Part(config, plan, batch, seq, coordinates(plan, rank))


def plan_text(plan: rd.Plan) -> str:
    """The plan in a line: its axes, and what differs from the defaults."""
    plain = rd.Plan()
    axes = " × ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1)
    rest = [f"{name}={_shortened(getattr(plan, name))}" for name in vars(plan)
            if name not in plan.sizes and getattr(plan, name) != getattr(plain, name)]
    return (f"{axes} = {plan.world_size:,} ranks" if axes else "one rank") + (f"; {', '.join(rest)}" if rest else "")


def _shortened(value: Any) -> str:
    """A value; equal numbers in a row of them once: ``7,14×8,7``."""
    if not isinstance(value, tuple):
        return str(value)
    runs = [(number, len(list(same))) for number, same in itertools.groupby(value)]
    return ",".join(f"{count}×{number}" if count > 1 else str(number) for number, count in runs)

"""What the commands have in common: the options of plan, model and batch, and how a plan and a model come from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import refdist as rd
from refdist.cli.options import PRESETS, SEARCHED_FOR, add_fields, given, positive
from refdist.numerics.precision import PRECISIONS, precision_named
from refdist.paper.models import MODELS
from refdist.paper.state import STORED
from refdist.parallel import check_plan

PLANS: dict[str, dict[str, Any]] = {
    "llama3": {
        "tp": 2, "cp": 2, "cp_method": "all_gather", "pp": 2, "schedule": "interleaved", "virtual_stages": 2,
        "layers_per_stage": (1, 2, 2, 1), "fsdp": 2, "micro_batches": 4, "reshard_after_forward": False,
    },
}
"""Name -> fields of a plan.

``llama3``: the shape of Llama 3's training (Grattafiori et al. 2024, section 3.3) on 16 ranks: tp, cp, pp and fsdp together, keys
and values gathered over zigzag chunks, interleaved stages with a layer fewer at both ends, parameters kept after forward.
"""


@dataclass
class RankJob:
    """What a command runs on ranks: a model, a global batch and a precision under a plan. Each command adds its own."""

    plan: rd.Plan
    config: rd.ModelConfig
    batch: int
    seq: int
    seed: int
    precision: str


def add_common(parser: argparse.ArgumentParser, *, model: str, batch: int, seq: int, precision: str) -> None:
    """Add the options that every command has, with this command's defaults."""
    run = parser.add_argument_group("run")
    run.add_argument("--batch", type=positive, default=batch, metavar="N", help=f"sequences in a global batch (default {batch})")
    run.add_argument("--seq", type=positive, default=seq, metavar="N", help=f"tokens in a sequence (default {seq})")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data order (default 0)")
    run.add_argument("--precision", choices=list(PRECISIONS), default=precision,
                     help=f"number format; fp16 and bf16 with master weights in fp32 (default {precision})")
    run.add_argument("--in-process", action="store_true", help="ranks in this one process, also where MPI is installed")
    run.add_argument("--json", action="store_true", help="results as JSON on standard output")
    add_plan_and_model(parser, model)


def add_plan_and_model(parser: argparse.ArgumentParser, model: str, searched: Sequence[str] = ()) -> None:
    """Add the options of plan and model, with this model's sizes as defaults.

    A plan that is `searched` for, as to some of its fields, starts from no preset.
    """
    group = parser.add_argument_group("plan", "which ranks do what: the fields of rd.Plan")
    if searched:
        parser.set_defaults(preset=None)
    else:
        group.add_argument("--preset", choices=list(PLANS), help="a plan to start from: llama3 has 2 tp × 2 cp × 2 pp × 2 fsdp")
    add_fields(group, rd.Plan, dict.fromkeys(searched, SEARCHED_FOR))
    group = parser.add_argument_group("model", "the fields of rd.ModelConfig")
    group.add_argument("--model", choices=[*PRESETS, *MODELS], default=model, metavar="NAME",
                       help=f"sizes to start from (default {model}): {', '.join(PRESETS)}; on paper only: {', '.join(MODELS)}")
    add_fields(group, rd.ModelConfig, {**PRESETS, **MODELS}[model])


def make_plan(args: argparse.Namespace) -> rd.Plan:
    """The plan that the options ask for: a preset, if any, with the fields that were given in place of its own."""
    plan = rd.Plan(**{**PLANS.get(args.preset, {}), **given(rd.Plan, args)})
    if hasattr(args, "zero") and plan.fsdp == 1:
        raise rd.PlanError(f"--zero {plan.zero} shares out what --fsdp ranks hold in common: expected --fsdp 2 or more")
    if hasattr(args, "cp_ulysses"):
        refuse_groups("--cp-ulysses", plan.cp_ulysses, "--cp-method", plan.cp_method, plan.cp)
    return plan


def refuse_groups(option: str, ulysses: int, method_option: str, method: str, cp: int) -> None:
    """PlanError for groups that exchange heads where all context-parallel ranks do so."""
    if method == "ulysses" and ulysses not in (1, cp):
        raise rd.PlanError(f"{option} {ulysses} is for other methods: with {method_option} ulysses all {cp} ranks exchange heads")


def make_config(args: argparse.Namespace, on_paper: bool = False) -> rd.ModelConfig:
    """The model that the options ask for: a preset, with the sizes that were given in place of its own.

    A preset of the plan that says how many layers lie where brings as many layers. Models that are too big to be run are refused
    unless nothing runs.
    """
    if args.model in MODELS:
        config = rd.ModelConfig(**{**MODELS[args.model], **given(rd.ModelConfig, args)})
        if not on_paper:
            needs = config.num_parameters() * STORED["fp32"].per_parameter
            raise rd.ConfigError(f"--model {args.model} is on paper only: its parameters, gradients and moments alone are "
                                 f"{needs:,} bytes in FP32; see refdist show memory, show flops, show plan")
        return config
    sizes, layers = dict(PRESETS[args.model]), PLANS.get(args.preset, {}).get("layers_per_stage")
    if layers is not None and not hasattr(args, "layers_per_stage"):
        sizes["num_hidden_layers"] = sum(layers)
    return rd.ModelConfig(**{**sizes, **given(rd.ModelConfig, args)})


def check_fit(job: Any) -> None:
    """Refuse what can be seen before any rank runs: a model, a batch or a sequence that does not fit the plan."""
    check_plan(job.config, job.plan)
    precision_named(job.precision).product(job.plan.tensor_core)
    job.plan.check_batch(job.batch)
    if job.seq > job.config.max_position_embeddings:
        limit = job.config.max_position_embeddings
        raise rd.ConfigError(f"--seq {job.seq} is longer than max_position_embeddings={limit}")

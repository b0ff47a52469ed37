"""Count a model's FLOPs on paper, and find the MFU and HFU of a run from its tokens per second, by a named convention.

    refdist show flops --model llama3-405b --seq 8192
    refdist show flops --model llama3-405b --seq 8192 --gpus 16384 --tflops 400          a published rate of one GPU
    refdist show flops --model llama3-8b --gpus 64 --tokens-per-s 400000 --recompute full
    refdist show flops --published                                                       Llama 3's and PaLM's runs
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import refdist as rd
from refdist.cli.job import add_plan_and_model
from refdist.cli.on_paper import model_and_plan
from refdist.cli.options import above_0, counted, positive
from refdist.cli.tables import table
from refdist.paper.draw import seconds
from refdist.paper.flops import RUNS, megatron, of_model, palm, per_token
from refdist.paper.hardware import ACCELERATORS, FORMATS, Accelerator, accelerator


@dataclass
class Job:
    """What is shown; nothing runs on ranks."""

    name: str
    config: rd.ModelConfig
    planned: rd.Plan
    batch: int
    seq: int
    accelerator: Accelerator
    format: str
    gpus: int
    rate: tuple[str, float] | None
    published: bool
    json: bool
    plan: None = None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show flops`."""
    group = parser.add_argument_group("run")
    group.add_argument("--batch", type=positive, metavar="N", help="sequences in a global batch (default one a micro-batch)")
    group.add_argument("--seq", type=positive, metavar="N", help="tokens in a sequence (default 8192)")
    group.add_argument("--gpus", type=positive, metavar="N", help="accelerators of the run (default the plan's ranks)")
    group.add_argument("--tokens-per-s", type=above_0, metavar="X", help="tokens that all of them train on in a second")
    group.add_argument("--tflops", type=above_0, metavar="X", help="or the model TFLOP/s that one of them reaches")
    group.add_argument("--accelerator", default="h100", metavar="NAME",
                       help=f"whose peak counts: {', '.join(ACCELERATORS)}, or a .json file (default h100)")
    group.add_argument("--format", choices=FORMATS, default="bf16", help="number format of that peak, dense (default bf16)")
    group.add_argument("--published", action="store_true", help="the published runs instead")
    group.add_argument("--json", action="store_true", help="the figures as JSON")
    add_plan_and_model(parser, "llama3-405b")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options."""
    rates = [(name, value) for name, value in (("tokens", args.tokens_per_s), ("tflops", args.tflops)) if value is not None]
    if len(rates) > 1:
        raise rd.ConfigError("--tokens-per-s and --tflops say the same in two ways: expected one of them")
    config, plan, batch, seq = model_and_plan(args)
    chip = accelerator(args.accelerator)
    chip.flops(args.format)
    return Job(args.model, config, plan, batch, seq, chip, args.format, args.gpus or plan.world_size, rates[0] if rates else None,
               args.published, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Print the tables."""
    if job.published:
        return _published(job)
    found = figures(job)
    if job.json:
        print(json.dumps(found), flush=True)
        return 0
    token = found["per_token"]
    print(f"{job.name}: {found['parameters']:,} parameters, sequences of {job.seq:,} tokens\n")
    total = sum(token.values())
    rows = [[f"forward: {name}", f"{value / 1e9:,.1f}", f"{100 * value / total:.1f} %"] for name, value in token.items()]
    rows += [["forward, causal attention at half", f"{total / 1e9:,.1f}", ""], ["training, × 3", f"{3 * total / 1e9:,.1f}", ""]]
    print(table(["GFLOP a token", "", ""], rows, [1, 2]) + "\n")
    rows = [[name, f"{value / 1e15:,.1f}", says] for name, value, says in found["conventions"]]
    print(table([f"PFLOP a step of {counted(job.batch, 'sequence')}", "", ""], rows, [1]) + "\n")
    if "mfu" in found:
        peak = f"{job.accelerator.flops(job.format) / 1e12:,.1f} TFLOP/s dense {job.format}"
        print(f"{job.gpus:,} × {job.accelerator.name}, {peak}: "
              f"{found['tokens_per_second']:,.0f} tokens/s, {seconds(found['step_seconds'])} a step, "
              f"{found['flops_per_second'] / 1e12:,.1f} model TFLOP/s each")
        print(f"MFU {100 * found['mfu']:.1f} %, HFU {100 * found['hfu']:.1f} % with recompute={job.planned.recompute}")
    return 0


def figures(job: Job) -> dict[str, Any]:
    """All figures, for machines."""
    config, recompute = job.config, job.planned.recompute
    ours = of_model(config, job.batch, job.seq, recompute)
    full = of_model(config, job.batch, job.seq, recompute, causal=False)
    tokens = job.batch * job.seq
    like_palm = palm(config.num_parameters(), config.num_hidden_layers, config.num_attention_heads, config.head_dim, job.seq)
    like_megatron = megatron(job.batch, job.seq, config.num_hidden_layers, config.hidden_size, config.vocab_size,
                             recompute == "full")
    found: dict[str, Any] = {
        "model": job.name, "parameters": config.num_parameters(), "batch": job.batch, "seq": job.seq,
        "per_token": per_token(config, job.seq),
        "conventions": [("ours, model", ours["model"], "matrices and head; causal attention at half: what MFU counts here"),
                        ("ours, executed", ours["executed"], f"with recompute={recompute}: what HFU counts"),
                        ("ours, full attention", full["model"], "all [s, s] scores"),
                        ("PaLM", tokens * like_palm, "6N + 12LHQT a token, full attention, the embedding in N"),
                        ("Megatron", like_megatron, f"{96 if recompute == 'full' else 72}Bslh²(1 + s/6h) + 6BshV: what a "
                         "GPT with these h, l, V and an MLP of 4h would have")]}
    if job.rate is not None:
        kind, value = job.rate
        rate = value * 1e12 if kind == "tflops" else value * ours["model"] / tokens / job.gpus
        found.update(gpus=job.gpus, flops_per_second=rate, tokens_per_second=rate * job.gpus * tokens / ours["model"],
                     step_seconds=ours["model"] / (rate * job.gpus), mfu=rate / job.accelerator.flops(job.format),
                     hfu=rate * ours["executed"] / ours["model"] / job.accelerator.flops(job.format))
    return found


def _published(job: Job) -> int:
    found = {name: {**vars(run), **run.figures()} for name, run in RUNS.items()}
    if job.json:
        print(json.dumps(found), flush=True)
        return 0
    rows = [[run.name, f"{run.accelerators:,}", run.convention, f"{run.flops_per_token / 1e12:.2f}",
             f"{run.figures()['tokens_per_second']:,.0f}", f"{run.figures()['flops_per_second'] / 1e12:,.1f}",
             f"{100 * run.figures()['mfu']:.1f} %", f"{run.published:g} %"] for run in RUNS.values()]
    print(table(["run", "chips", "counted as", "TFLOP/token", "tokens/s", "TFLOP/s each", "MFU", "published"], rows, range(3, 8)))
    print("\nLlama 3 publishes TFLOP/s and not how it counts: tokens/s are what our count would give. PaLM publishes tokens/s.")
    print("\n".join(f"  {source}" for source in dict.fromkeys(run.source for run in RUNS.values())))
    return 0

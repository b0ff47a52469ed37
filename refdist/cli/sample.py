"""Let a saved model write text.

    refdist train --dp 4 --save out
    refdist sample out --prompt 'def main(' --length 200

The model's tokens are bytes, as `refdist train` makes them. It runs on one device, in this process.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import threadpoolctl

import refdist as rd
from refdist.cli.options import positive
from refdist.cli.train import as_text
from refdist.train.data import BYTES
from refdist.train.generate import generate


@dataclass(frozen=True)
class Job:
    """What is written by which model."""

    config: rd.ModelConfig
    params: dict[str, np.ndarray]
    prompt: str
    length: int
    window: int
    temperature: float
    seed: int
    json: bool
    plan: rd.Plan | None = None  # nothing runs on ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist sample`."""
    parser.add_argument("model", type=Path, metavar="DIR", help="a folder that `refdist train --save` has written")
    parser.add_argument("--prompt", default="import ", metavar="TEXT", help="what the text begins with (default 'import ')")
    parser.add_argument("--length", type=positive, default=200, metavar="N", help="bytes to write (default 200)")
    parser.add_argument("--window", type=positive, default=128, metavar="N", help="bytes that the model sees (default 128)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest byte (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random choices (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def prepare(args: argparse.Namespace) -> Job:
    """Read the model, and refuse what cannot be sampled from."""
    if not 0 <= args.temperature < math.inf:
        raise rd.ConfigError(f"--temperature {args.temperature}: expected a number of at least 0")
    if not args.prompt:
        raise rd.ConfigError("--prompt is empty: expected at least one byte")
    config, params = rd.load_params(args.model)
    if config.vocab_size < BYTES:
        raise rd.ConfigError(f"{args.model}: vocab_size={config.vocab_size}, expected at least {BYTES}: the tokens are bytes")
    window = min(args.window, config.max_position_embeddings)
    return Job(config, params, args.prompt, args.length, window, args.temperature, args.seed, args.json)


def program(comm: rd.Comm | None, job: Job) -> int:
    """Write the prompt and what the model makes of it; on rank 0, where a launcher has started several."""
    if comm is not None and comm.rank != 0:
        return 0
    prompt = np.frombuffer(job.prompt.encode(), np.uint8)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # products of one row: more threads only wait for each other
        written = as_text(generate(lambda input_ids: rd.reference.logits(job.config, job.params, input_ids), prompt, job.length,
                                   window=job.window, temperature=job.temperature, seed=job.seed))
    print(json.dumps({"prompt": job.prompt, "sample": written}) if job.json else job.prompt + written)
    return 0

"""Train a small Llama on text, on the ranks of a plan.

    refdist train --dp 4 --steps 200
    refdist train --fsdp 2 --tp 2 --data texts/ --save out --eval-every 50
    refdist train --preset llama3 --steps 20

Without --data the text is the Python standard library's own source. At the end the validation loss is compared with that
of byte bigrams, and the model writes a few lines. --save keeps the model in Hugging Face's files, with the figures of every step.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import refdist as rd
from refdist.cli import keep, show_memory, utilization
from refdist.cli.display import Display, Record, make_display
from refdist.cli.job import add_common, check_fit, make_config, make_plan
from refdist.cli.options import memory_size, natural, path, positive, say, scale
from refdist.device import Recording, Timeline
from refdist.device.recording import as_json
from refdist.ops import IGNORED
from refdist.optim import warmup_cosine
from refdist.train.bigram import bigram_log_probabilities, bigram_loss
from refdist.train.data import (
    BYTES,
    Corpus,
    DataError,
    evaluation_windows,
    load_corpus,
    split_windows,
    training_windows,
)
from refdist.train.generate import generate

EVALUATED_TOKENS = 65_536  # of the validation split, spread evenly
STEPS = 500
EVALUATION_TOKENS = 4096  # in a batch of the validation, at least
SAMPLE_LENGTH = 160
PROMPT_LENGTH = 16
WARMUP_PART = 10  # one step of so many is warm-up


@dataclass(frozen=True)
class Job:
    """What one training run needs to know."""

    plan: rd.Plan
    config: rd.ModelConfig
    corpus: Corpus
    batch: int
    seq: int
    steps: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float | None
    seed: int
    precision: str
    loss_scale: str | float | None
    eval_every: int
    json: bool
    save: Path | None
    plot: Path | None
    trace: Path | None
    memory: bool
    device_memory: int | None
    peak: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist train`."""
    add_common(parser, model="small", batch=16, seq=128, precision="fp32")
    run = parser.add_argument_group("training")
    run.add_argument("--data", type=path, nargs="+", default=[], metavar="PATH",
                     help="text files and folders (default: the Python library)")
    run.add_argument("--steps", type=positive, metavar="N", help=f"optimizer steps (default {STEPS})")
    run.add_argument("--epochs", type=float, metavar="X", help="instead of --steps: passes over the training text")
    run.add_argument("--lr", type=float, default=4e-3, metavar="X", help="highest learning rate of AdamW (default 0.004)")
    run.add_argument("--warmup", type=natural, metavar="N", help="steps until it is reached (default: a tenth of the steps)")
    run.add_argument("--weight-decay", type=float, default=0.01, metavar="X", help="of AdamW, for matrices (default 0.01)")
    run.add_argument("--clip", type=float, default=1.0, metavar="X", help="largest gradient norm, 0: any (default 1)")
    run.add_argument("--loss-scale", type=scale, metavar="N",
                     help="factor of the loss in backward: dynamic, or a number (default: dynamic with fp16, else none)")
    run.add_argument("--eval-every", type=positive, metavar="N", help="steps between validations (default: only at the end)")
    run.add_argument("--save", type=path, metavar="DIR", help="write the model and metrics.jsonl there at the end")
    run.add_argument("--plot", type=path, metavar="FILE", help="draw the loss curve (needs matplotlib)")
    run.add_argument("--trace", type=path, metavar="FILE",
                     help="write kernels, collectives, messages and memory of the last step of all ranks, for ui.perfetto.dev")
    run.add_argument("--memory", action="store_true", help="show each rank's memory by category at the end, and the last step's")
    run.add_argument("--device-memory", type=memory_size, metavar="SIZE", help="capacity of each device, such as 64MiB")
    run.add_argument("--peak", choices=[utilization.SGEMM, *utilization.GPUS], default=utilization.SGEMM,
                     help="what MFU and HFU are parts of: this machine's float32 product, measured at the end, or so many GPUs "
                     "(default sgemm)")


def prepare(args: argparse.Namespace) -> Job:
    """Read the options and the text, and refuse what cannot run."""
    if not args.lr > 0:
        raise rd.ConfigError(f"--lr {args.lr}: expected a positive number")
    for name in ("weight_decay", "clip"):
        if not 0 <= getattr(args, name) < math.inf:
            raise rd.ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected a number of at least 0")
    plan, config = make_plan(args), make_config(args)
    if config.vocab_size < BYTES:
        raise rd.ConfigError(f"vocab_size={config.vocab_size}: the tokens are bytes, expected at least {BYTES}")
    keep.check(args.save, args.plot, args.trace)
    corpus = load_corpus(args.data, args.seq)
    steps = _steps(args, len(corpus.train))
    warmup = max(1, steps // WARMUP_PART) if args.warmup is None else args.warmup
    job = Job(plan, config, corpus, args.batch, args.seq, steps, args.lr, warmup, args.weight_decay, args.clip or None, args.seed,
              args.precision, args.loss_scale, args.eval_every or steps, args.json, args.save, args.plot, args.trace,
              args.memory, args.device_memory, args.peak)
    check_fit(job)
    return job


def _steps(args: argparse.Namespace, tokens: int) -> int:
    """Optimizer steps, said outright or by the number of passes over the training text."""
    if args.epochs is None:
        return args.steps or STEPS
    if args.steps is not None:
        raise rd.ConfigError("--steps and --epochs: expected one of them")
    if not 0 < args.epochs < math.inf:
        raise rd.ConfigError(f"--epochs {args.epochs}: expected a positive number")
    return math.ceil(args.epochs * tokens / (args.batch * args.seq))


def program(comm: rd.Comm, job: Job) -> int:
    """Run on each rank: train, validate, and let rank 0 show how it goes."""
    check_same_text(comm, job.corpus)
    optimizer = rd.AdamW(lr=warmup_cosine(job.lr, job.warmup, job.steps), weight_decay=job.weight_decay)
    device = rd.Device(capacity=job.device_memory)
    trainer = rd.Trainer(
        job.config, job.plan, comm, optimizer, precision=job.precision, seed=job.seed, clip_norm=job.clip, device=device,
        loss_scale=job.loss_scale,
    )
    records: list[Record] = []
    problem = ""
    windows = evaluation_windows(job.corpus.validation, job.seq, max(1, EVALUATED_TOKENS // job.seq))
    with make_display(job.json, job.steps, rank=comm.rank) as display:
        display.begin(facts(job))
        start = time.perf_counter()
        flops = {"model": 0, "executed": 0}
        with np.errstate(over="ignore", invalid="ignore"):  # the loss says so, in every step
            validation, last_step, recording = train(trainer, job, windows, display, records, flops)
        diverged = _diverged(records[-1]) or not math.isfinite(validation)
        seconds, bytes_sent = time.perf_counter() - start, device.bytes_sent
        used = utilization.of_run(comm, flops, sum(record["seconds"] for record in records), job.peak)
        memory = show_memory.all_figures(comm, device) if job.memory else []
        params = trainer.full_params()
        traced = gathered_trace(comm, recording) if job.trace else ""
        if comm.rank == 0:
            summary = {
                "validation_loss": validation,
                "bigram_loss": bigram_loss(bigram_log_probabilities(job.corpus.train), windows),
                "steps": len(records),
                "world_size": comm.size,
                "transport": comm.transport.name,
                "seconds": seconds,
                "tokens": len(records) * job.batch * job.seq,
                "bytes_sent": bytes_sent,
                **vars(used),
                **({"memory": show_memory.as_json(memory)} if job.memory else {}),
                **facts(job),
                **({} if diverged else sample(job, params)),
            }
            problem = keep.results(job.save, job.plot, job.config, params, [*records, summary], job.trace, traced)
            display.end(summary)
    if last_step is not None and comm.rank == 0 and not job.json:
        print(f"{show_memory.memory_tables(memory)}\n\nlive memory of rank 0 over the last step\n{last_step.text()}", flush=True)
    if diverged and comm.rank == 0:
        what = f"loss is {records[-1]['loss']}" if _diverged(records[-1]) else f"validation loss is {validation}"
        say(f"refdist train: the {what} in step {len(records)}: training has diverged and ends there "
            f"(is --lr {job.lr:g} too high?)")
    if problem:
        say(f"refdist train: {problem}")
    return 2 if problem else int(diverged)


def _diverged(record: Record) -> bool:
    """Whether a step's loss is no number any more; what loss scaling has skipped does not count."""
    return not (math.isfinite(record["loss"]) or record.get("skipped"))


def train(trainer: rd.Trainer, job: Job, windows: np.ndarray, display: Display,
          records: list[Record], flops: dict[str, int]) -> tuple[float, Timeline | None, Recording | None]:
    """All steps, with a validation now and then and after the last, each into ``records``; this rank's FLOPs into ``flops``.

    A loss that is no number is the last.

    Returns the last validation loss, and, if asked for, the memory over the last step, and its events.
    """
    validation, timeline, recording = math.nan, None, None
    for step in range(1, job.steps + 1):
        start, sent, before = time.perf_counter(), trainer.device.bytes_sent, dict(trainer.device.flops)
        batch = training_windows(job.corpus.train, job.batch, job.seq, seed=job.seed, step=step)
        if job.memory and step == job.steps:
            timeline = Timeline(trainer.device)
        if job.trace and step == job.steps:
            recording = Recording(trainer.device, trainer.replica.mesh.comm.rank)
        result = trainer.step(*split_windows(batch))
        if timeline is not None:
            timeline.stop()
        if recording is not None:
            recording.stop()
        for kind in flops:
            flops[kind] += trainer.device.flops[kind] - before[kind]
        seconds = time.perf_counter() - start
        record: Record = {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": trainer.optimizer.learning_rate(max(1, trainer.steps)),
            "tokens": result.tokens,
            "seconds": seconds,
            "tokens_per_s": result.tokens / seconds,
            "bytes_sent": trainer.device.bytes_sent - sent,
        }
        if trainer.loss_scale is not None:
            record |= {"loss_scale": result.loss_scale, "skipped": result.skipped}
        if step % job.eval_every == 0 or step == job.steps:
            validation = evaluate(trainer.evaluate, windows, max(job.batch, EVALUATION_TOKENS // job.seq))
            record["validation_loss"] = validation
        records.append(record)
        display.step(record)
        if _diverged(record):
            break
    return validation, timeline, recording


def gathered_trace(comm: rd.Comm, recording: Recording | None) -> str:
    """On rank 0 the events of all ranks, as a file's contents; of a run that has ended early there are none. Collective."""
    mine = json.dumps([] if recording is None else recording.events).encode()
    everybody = comm.gather(np.frombuffer(mine, np.uint8), root=0)
    return as_json(json.loads(each.tobytes()) for each in everybody) if everybody is not None else ""


def evaluate(mean_loss: Callable[[np.ndarray, np.ndarray], float], windows: np.ndarray, batch: int) -> float:
    """Mean loss over all windows [count, seq + 1], a batch at a time; the last batch is filled with ignored labels."""
    total = tokens = 0.0
    for start in range(0, len(windows), batch):
        input_ids, labels = split_windows(windows[np.arange(start, start + batch) % len(windows)])
        labels[len(windows) - start :] = IGNORED
        count = np.count_nonzero(labels != IGNORED)
        total += mean_loss(input_ids, labels) * count
        tokens += count
    return total / tokens


def check_same_text(comm: rd.Comm, corpus: Corpus) -> None:
    """Refuse ranks that have read different texts, as on hosts with different files."""
    sums = comm.all_gather(np.array([corpus.checksum()], dtype=np.uint32))  # [size]
    if len(set(sums.tolist())) > 1:
        other = int(np.flatnonzero(sums != sums[0])[0])
        raise DataError(f"rank {other} has read another text than rank 0 from {corpus.origin}")


def facts(job: Job) -> Record:
    """What is trained on what."""
    return {
        "layers": job.config.num_hidden_layers,
        "hidden_size": job.config.hidden_size,
        "parameters": job.config.num_parameters(),
        "origin": job.corpus.origin,
        "train_bytes": len(job.corpus.train),
        "validation_bytes": len(job.corpus.validation),
    }


def sample(job: Job, params: dict[str, np.ndarray]) -> Record:
    """A few lines of text by the model, after the first bytes of the validation split."""
    prompt = job.corpus.validation[:PROMPT_LENGTH]
    written = generate(
        lambda input_ids: rd.reference.logits(job.config, params, input_ids),
        prompt,
        SAMPLE_LENGTH,
        window=job.seq,
        seed=job.seed,
    )
    return {"prompt": as_text(prompt), "sample": as_text(written)}


def as_text(tokens: np.ndarray) -> str:
    """Byte tokens as text that is safe to print: what is no byte or no character shows as a replacement mark."""
    text = bytes(int(token) if token < BYTES else 0 for token in tokens).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)

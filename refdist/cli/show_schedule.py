"""Draw a pipeline schedule, with its bubble, its micro-batches in flight, and the formulas of its paper; or check one.

    refdist show schedule 1f1b --stages 4 --micro-batches 8
    refdist show schedule zb_v --stages 4 --micro-batches 8 --times 2,3,1 --svg zb_v.svg
    refdist show schedule own.json --check
    refdist show schedule zb_h1 --stages 2 --micro-batches 8 --from-run

`--json` prints the schedule in its plain form, `[[["F", micro_batch, chunk], …], …]`, one list a stage; with `--check` an object
with the faults and all figures. Exit status 1: the schedule is wrong.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

import refdist as rd
from refdist.aside import write_aside
from refdist.cli.display import make_console
from refdist.cli.options import PRESETS, output_file, positive
from refdist.parallel.pipeline import SCHEDULES, Schedule, Times, check, make_schedule, promise, simulate
from refdist.parallel.pipeline.action import KINDS, PLACEMENTS, Action, load_schedule
from refdist.parallel.pipeline.draw import svg_chart, terminal_chart
from refdist.parallel.pipeline.stages import check as check_plan
from refdist.parallel.pipeline.timing import Recorder, Span, bubble, idle, makespan, peak_in_flight

Lanes = list[list[Span]]


@dataclass
class Job:
    """What is shown.

    Attributes:
        plan: None: nothing runs; otherwise the schedule is run under it and drawn as measured.
        times: of F, B and W, for the drawing.
    """

    schedule: Schedule
    plan: rd.Plan | None
    times: Times
    latency: Fraction
    batch: int
    seq: int
    check: bool
    json: bool
    svg: str | None
    topic: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `refdist show schedule`."""
    parser.add_argument("schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or a .json file")
    parser.add_argument("--stages", type=positive, metavar="N", help="pipeline stages (default 4)")
    parser.add_argument("--micro-batches", type=positive, metavar="N", help="micro-batches (default 8)")
    parser.add_argument("--virtual-stages", "--chunks", type=positive, metavar="N", help="chunks a stage")
    parser.add_argument("--interleave-group", type=positive, metavar="N", help="contiguous micro-batches, interleaved")
    parser.add_argument("--placement", choices=PLACEMENTS, help="of the chunks, for a .json file (default loop)")
    parser.add_argument("--times", type=_times, default=Times(Fraction(1), Fraction(1), Fraction(1)), metavar="F,B,W[,F&B]",
                        help="of a micro-batch's forward, input and weight gradient on a stage (default 1,1,1); with a fourth, "
                        "that of a forward and a backward that overlap")
    parser.add_argument("--latency", type=_latency, default=Fraction(0), metavar="T", help="of a message (default 0)")
    parser.add_argument("--check", action="store_true", help="say whether the schedule is right, and if not, where it is wrong")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the chart as SVG")
    parser.add_argument("--json", action="store_true", help="the schedule, or with --check all figures, as JSON")
    run = parser.add_argument_group("a measured run")
    run.add_argument("--from-run", action="store_true", help="train a small model by the schedule, and draw what really happened")
    run.add_argument("--batch", type=positive, default=0, metavar="N", help="sequences (default: two a micro-batch)")
    run.add_argument("--seq", type=positive, metavar="N", help="tokens in a sequence (default 128)")
    run.add_argument("--in-process", action="store_true", help="ranks in this one process, also where MPI is installed")


def _times(text: str) -> Times:
    try:
        values = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        values = []
    if not 3 <= len(values) <= 4 or min(values) < 0 or min(values[0], values[1] + values[2]) == 0:
        raise argparse.ArgumentTypeError(f"expected three or four times, such as 1,1,1 or 2,3,1.5, not {text!r}")
    return Times(*values)


def _latency(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a time of at least 0, such as 0.5 or 1/2, not {text!r}")
    return value


def prepare(args: argparse.Namespace) -> Job:
    """Make or read the schedule."""
    if args.schedule.endswith(".json"):
        schedule = _read(args)
    else:
        if args.placement is not None:
            raise rd.PlanError(f"--placement is for a .json file: where the chunks of {args.schedule} lie is known")
        chunks = args.virtual_stages or (2 if args.schedule == "interleaved" else 1)
        schedule = make_schedule(args.schedule, args.stages or 4, args.micro_batches or 8, chunks, args.interleave_group)
    plan = None
    if args.from_run:
        plan = rd.Plan(pp=schedule.stages, micro_batches=schedule.micro_batches, schedule=schedule)
        check_plan(_config(schedule), plan)
    for name in ("batch", "seq", "in_process"):
        if getattr(args, name) and not args.from_run:
            raise rd.PlanError(f"--{name.replace('_', '-')} is for a measured run: it needs --from-run")
    batch = args.batch or 2 * schedule.micro_batches
    return Job(schedule, plan, args.times, args.latency, batch, args.seq or 128, args.check, args.json, args.svg)


def _read(args: argparse.Namespace) -> Schedule:
    schedule = load_schedule(args.schedule, args.placement)
    for name, found in (("stages", schedule.stages), ("micro_batches", schedule.micro_batches),
                        ("virtual_stages", schedule.chunks)):
        wanted = getattr(args, name)
        if wanted is not None and wanted != found:
            raise rd.PlanError(f"{args.schedule} has {found} {name.replace('_', '-')}, not {wanted}")
    return schedule


def program(comm: rd.Comm | None, job: Job) -> int:
    """Draw, check, or run and draw; 1 if the schedule is wrong."""
    faults = check(job.schedule)
    if comm is not None and job.plan is not None:
        lanes: Lanes | None = measured(comm, job)
    else:
        lanes = None if faults else simulate(job.schedule, job.times, job.latency)
    if comm is not None and comm.rank > 0:
        return int(bool(faults))
    if job.json:
        found = figures(job, lanes, [str(fault) for fault in faults]) if job.check or job.plan else job.schedule.to_lists()
        print(json.dumps(found), flush=True)
    elif lanes is not None:
        draw(job, lanes)
    if job.svg and lanes is not None:
        title, facts, notes = texts(job, lanes)
        unit = "ms" if job.plan is not None else ""
        write_aside(job.svg, svg_chart(lanes, title, facts, notes, unit))
    if (job.check or faults) and not job.json:
        print("\n".join(map(str, faults)) or "the schedule is right", flush=True)
    return int(bool(faults))


def draw(job: Job, lanes: Lanes) -> None:
    """Print the chart."""
    console = make_console()
    title, facts, notes = texts(job, lanes)
    console.print(title, style="bold", markup=False)
    console.print(terminal_chart(lanes, console.width, console.color_system is not None, notes), soft_wrap=True, end="")
    for fact in facts:
        console.print(fact, markup=False, soft_wrap=True)


def texts(job: Job, lanes: Lanes) -> tuple[str, list[str], list[str]]:
    """The chart's title, the lines below it, and the note beside each stage."""
    schedule = job.schedule
    name = SCHEDULES[schedule.name].title if schedule.name in SCHEDULES else schedule.name
    title = f"{name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches"
    if schedule.chunks > 1:
        title += f", {schedule.chunks} chunks a stage"
    unit = " ms" if job.plan is not None else ""
    notes = [f"in flight {_short(Fraction(peak, schedule.visits))}, idle {_short(wait)}{unit}"
             for peak, wait in zip(peak_in_flight(schedule), idle(lanes), strict=True)]
    total, largest = makespan(lanes), bubble(lanes)
    facts = [f"bubble {_short(largest)}{unit} of {_short(total)}{unit} ({float(largest) / float(total):.1%})"]
    if job.plan is not None:
        return title + ", measured", facts, notes
    promised = promise(schedule, job.times)
    if promised is not None:
        holds = ", not promised for these sizes and times" if promised.bubble is None else f" = {_short(promised.bubble)}"
        facts[0] += f"; formula {promised.bubble_formula}{holds}"
        facts.append(f"in flight at most {_short(Fraction(max(peak_in_flight(schedule)), schedule.visits))}; "
                     f"formula {promised.peak_formula}" + ("" if promised.peaks is None else f" = {_short(max(promised.peaks))}"))
    forward, backward, weights, _ = job.times
    facts.append(f"F = {_short(forward)}, B = {_short(backward)}, W = {_short(weights)} for a micro-batch on a stage")
    return title, facts, notes


def figures(job: Job, lanes: Lanes | None, faults: list[str]) -> dict[str, Any]:
    """Everything about the schedule, for machines; it can be read back as a schedule."""
    schedule = job.schedule
    values: dict[str, Any] = {
        "ok": not faults, "faults": faults, "schedule": schedule.name, "stages": schedule.stages,
        "micro_batches": schedule.micro_batches, "chunks": schedule.chunks, "placement": schedule.placement,
        "peak_in_flight": [float(Fraction(peak, schedule.visits)) for peak in peak_in_flight(schedule)],
        "actions": schedule.to_lists()}
    if lanes is not None:
        values |= {"measured": job.plan is not None, "bubble": float(bubble(lanes)), "makespan": float(makespan(lanes)),
                   "idle": [float(wait) for wait in idle(lanes)],
                   "spans": [[[*span.action, float(span.start), float(span.end)] for span in lane] for lane in lanes]}
    promised = promise(schedule, job.times)
    if promised is not None and job.plan is None:
        values |= {"bubble_formula": promised.bubble_formula,
                   "bubble_promised": None if promised.bubble is None else float(promised.bubble),
                   "peak_formula": promised.peak_formula,
                   "peak_promised": None if promised.peaks is None else [float(peak) for peak in promised.peaks]}
    return values


def _short(number: Any) -> str:
    return f"{float(number):.4g}"


# ------------------------------------------------------------------------------------------------------ a real run


def _config(schedule: Schedule) -> rd.ModelConfig:
    """A model with two layers a chunk."""
    return rd.ModelConfig(**{**PRESETS["small"], "num_hidden_layers": 2 * schedule.stages * schedule.visits})


def measured(comm: rd.Comm, job: Job) -> Lanes | None:
    """Train three steps and return the last one's spans, in milliseconds, on rank 0; collective."""
    recorder = Recorder()
    assert job.plan is not None
    trainer = rd.Trainer(_config(job.schedule), job.plan, comm, device=rd.Device(listeners=[recorder]))
    drawn = np.random.default_rng(0).integers(0, trainer.replica.config.vocab_size, (job.batch, job.seq + 1))
    for _ in range(3):
        recorder.spans.clear()
        trainer.step(drawn[:, :-1], drawn[:, 1:])
    kinds = list(KINDS)
    rows = np.array([[kinds.index(kind), micro_batch, chunk, start, end]
                     for (kind, micro_batch, chunk), start, end in recorder.spans], np.float64)
    parts = comm.gather(rows)  # [actions, 5] a stage
    if parts is None:
        return None
    begin = min(part[0, 3] for part in parts)
    return [[Span(Action(kinds[int(row[0])], int(row[1]), int(row[2])), 1e3 * (row[3] - begin), 1e3 * (row[4] - begin))
             for row in part] for part in parts]

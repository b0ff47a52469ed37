"""The search for a plan: every way to share accelerators out over the axes, those that fit, the fastest estimate first.

    accelerators = tp × cp × pp × data            tp up to two servers, cp where sequences are long, pp up to one layer a chunk
    data         = DP, ZeRO 1, ZeRO 3 (FSDP)      whole sequences for each rank
                   or HSDP: FSDP inside of each server or rack, DP across
    recompute    = the least that fits: none, then selective, then full
    micro-batch  = 1, 2 or 4 sequences;           chunks a stage: 1, or as many as there are layers for (interleaved)

What fits is decided by ``memory.of_rank`` on the first and the last stage, what is fast by ``estimate``, both by formulas
alone: no schedule is made. :func:`reasons` says in words why the best plan is as it is: each axis against the best plan that does
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from refdist.errors import PlanError
from refdist.model.config import ModelConfig
from refdist.paper.cluster import Cluster
from refdist.paper.draw import gigabytes, seconds
from refdist.paper.estimate import EFFICIENCY, estimate
from refdist.paper.flops import of_model
from refdist.paper.memory import of_rank, wall
from refdist.paper.part import Part, coordinates
from refdist.paper.state import Stored, smallest_number
from refdist.parallel import context, tensor
from refdist.parallel.plan import Plan

__all__ = ["SEARCHED", "Found", "Problem", "of_plan", "reasons", "search"]

LONG = 16384  # tokens of a sequence from which on context parallelism is tried, if whole sequences are not too few
SHORTEST = 1024  # tokens of a sequence that a cp rank has at least
CHUNKS = 4  # a stage, at most
SEARCHED = ("dp", "fsdp", "zero", "tp", "cp", "cp_method", "pp", "micro_batches", "schedule", "virtual_stages", "recompute")
"""Fields of a plan that are searched for, unless they are given."""


class Problem(NamedTuple):
    """What a plan is searched for; ``fixed``: fields that it must have, all those that are looked at or others."""

    config: ModelConfig
    gpus: int
    batch: int
    seq: int
    stored: Stored
    cluster: Cluster
    format: str = "bf16"
    efficiency: float = EFFICIENCY
    fixed: Mapping[str, Any] = MappingProxyType({})


class Found(NamedTuple):
    """A plan that fits: its estimated seconds a step, its MFU, and the bytes of its fullest rank."""

    plan: Plan
    seconds: float
    mfu: float
    memory: int


def search(problem: Problem) -> list[Found]:
    """All plans that fit, the fastest first.

    Raises:
        PlanError: none does, or there are more accelerators than the cluster has; says what would be needed.
    """
    problem.cluster.check_size(problem.gpus)
    found, looked_at = [], 0
    fixed = problem.fixed
    for shape in _shapes(problem):
        if any(fixed[name] != value for name, value in shape.items() if name in fixed):
            continue
        for recompute in (fixed["recompute"],) if "recompute" in fixed else ("none", "selective", "full"):
            plan = Plan(**{**shape, **fixed, "recompute": recompute})
            if plan.world_size != problem.gpus or plan.cp % plan.cp_ulysses:
                break
            looked_at += 1
            memory = _memory(problem, plan)
            if memory <= problem.cluster.accelerator.memory:
                time = _seconds(problem, plan)
                found.append(Found(plan, time, _mfu(problem, time), memory))
                break
    if not found:
        asked = f" with {', '.join(f'{name}={value}' for name, value in fixed.items())}" if fixed else ""
        if not looked_at:
            raise PlanError(_why_none(problem, asked))
        chip = problem.cluster.accelerator
        needed = smallest_number(problem.config.num_parameters(), problem.stored, chip.memory)
        asked += f"; the training state alone needs {needed:,}" if needed > problem.gpus else ""
        raise PlanError(f"no plan for {problem.gpus:,} × {chip.name} was found that fits {gigabytes(chip.memory)} each with a "
                        f"batch of {problem.batch:,} × {problem.seq:,} tokens{asked}")
    return sorted(found, key=lambda one: one.seconds)


def _why_none(problem: Problem, asked: str) -> str:
    """Why there is no plan to look at."""
    given = {name: problem.fixed[name] for name in ("tp", "cp", "cp_method") if name in problem.fixed}
    plan = Plan(**{"cp_method": "all_gather", **given})
    try:
        tensor.check(problem.config, plan)
        context.check(problem.config, plan)
    except PlanError as error:
        return str(error)
    servers = 2 * problem.cluster.levels[0].children
    return (f"no plan{asked} shares {problem.gpus:,} GPUs out: tp × cp × pp × dp × fsdp must be {problem.gpus:,}, with tp up to "
            f"{servers} (two servers), cp from {LONG:,} tokens a sequence on, pp up to {problem.config.num_hidden_layers} layers"
            f" and equally many of {problem.batch:,} sequences for each of dp × fsdp; both of them only as HSDP")


def of_plan(problem: Problem, plan: Plan) -> Found:
    """The figures of one plan, whether or not it fits."""
    time = _seconds(problem, plan)
    return Found(plan, time, _mfu(problem, time), _memory(problem, plan))


def _shapes(problem: Problem) -> Iterator[dict[str, Any]]:
    """The fields of all plans to look at, but for recomputation."""
    config, gpus, batch, seq = problem.config, problem.gpus, problem.batch, problem.seq
    server = problem.cluster.levels[0].children
    for tp in _divisors(gpus, 2 * server):
        for cp in _divisors(gpus // tp, seq // SHORTEST if seq >= LONG or gpus > batch else 1):
            for pp in _divisors(gpus // tp // cp, config.num_hidden_layers):
                data = gpus // tp // cp // pp
                if batch % data or not _cuttable(config, tp, cp):
                    continue
                for together in (1, 2, 4):
                    if (batch // data) % together == 0 and (together == 1 or seq * together // cp <= LONG):
                        yield from _variants(problem, tp, cp, pp, data, batch // data // together)


def _variants(problem: Problem, tp: int, cp: int, pp: int, data: int, micro_batches: int) -> Iterator[dict[str, Any]]:
    """Ways to share state over the data ranks, and chunks of a stage."""
    config, held = problem.config, 1
    shape: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "micro_batches": micro_batches}
    if cp > 1:
        shape["cp_method"] = "all_gather"
    chunks = min(CHUNKS, config.num_hidden_layers // pp)
    pipelines: list[dict[str, Any]] = [{}]
    if pp > 1 and chunks > 1 and micro_batches % pp == 0:
        pipelines.append({"schedule": "interleaved", "virtual_stages": chunks})
    sharings = [{"fsdp": data, "zero": 1}, {"fsdp": data, "zero": 3}] if data > 1 else []
    for level in problem.cluster.levels[:2]:
        held *= level.children
        within = held // (tp * cp * pp)
        if held % (tp * cp * pp) == 0 and 1 < within < data and data % within == 0:
            sharings.append({"dp": data // within, "fsdp": within, "zero": 3})
    for pipeline in pipelines:
        for sharing in [{"dp": data}, *sharings]:
            yield {**shape, **pipeline, **sharing}


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, min(number, max(1, largest)) + 1) if number % size == 0]


def _cuttable(config: ModelConfig, tp: int, cp: int) -> bool:
    plan = Plan(tp=tp, cp=cp, cp_method="all_gather")
    try:
        tensor.check(config, plan)
        context.check(config, plan)
    except PlanError:
        return False
    return config.intermediate_size % tp == 0


def _part(problem: Problem, plan: Plan) -> Part:
    return Part(problem.config, plan, problem.batch, problem.seq, coordinates(plan, 0))


def _memory(problem: Problem, plan: Plan) -> int:
    """Bytes of the fullest stage's ranks: the first's or the last's, unless layers are cut unevenly."""
    part = _part(problem, plan)
    stages = {0, plan.pp - 1} if plan.layers_per_stage is None else set(range(plan.pp))
    parts = [part, *(Part(part.config, plan, part.batch, part.seq, {**part.at, "pp": stage}) for stage in stages - {0})]
    return max(of_rank(one, problem.stored, quick=True)["total"] for one in parts)


def _seconds(problem: Problem, plan: Plan) -> float:
    """A step's estimated time."""
    part = _part(problem, plan)
    return estimate(part, problem.stored, problem.cluster, problem.format, problem.efficiency, simulated=False).seconds


def _mfu(problem: Problem, time: float) -> float:
    model = of_model(problem.config, problem.batch, problem.seq)["model"]
    return model / time / problem.gpus / problem.cluster.accelerator.flops(problem.format)


# -------------------------------------------------------------------------------------------------------- in words


def reasons(problem: Problem, found: Sequence[Found]) -> list[str]:
    """Why the best plan is as it is, by the usual recipe: state, activations, then one axis after the other."""
    best = found[0]
    return [*_state_reasons(problem), *_batch_reasons(problem, best), *_axis_reasons(found, best)]


def _state_reasons(problem: Problem) -> list[str]:
    """How far sharding the state goes."""
    parameters, chip = problem.config.num_parameters(), problem.cluster.accelerator
    ways = {way.name: way for way in wall(parameters, problem.stored, chip.memory)}
    state = f"{parameters / 1e9:,.3g} billion parameters × {problem.stored.per_parameter} bytes are {gigabytes(ways['DP'].alone)}"
    if ways["DP"].ranks == 1:
        return [f"{state}: each rank can hold all of it, plain data parallelism (DP) is possible."]
    needed = ways["ZeRO 3, FSDP"].ranks
    return [f"{state}: plain data parallelism (DP) does not fit {gigabytes(chip.memory)}; shared out it needs {needed:,} ranks "
            "or more: ZeRO or FSDP, or layers that are cut (TP, PP)."]


def _batch_reasons(problem: Problem, best: Found) -> list[str]:
    """What the number of sequences asks for, and what activations do."""
    lines = []
    if problem.gpus > problem.batch:
        lines.append(f"a batch of {problem.batch:,} sequences goes to {problem.batch:,} data-parallel ranks at most: "
                     f"{problem.gpus:,} GPUs must share each sequence's work among {problem.gpus // problem.batch:,} or more "
                     "(TP, CP, PP).")
    alone = Plan(fsdp=min(problem.gpus, problem.batch))
    part = Part(problem.config, alone, alone.fsdp, problem.seq, coordinates(alone, 0))
    figures = of_rank(part, problem.stored)
    lines.append(f"FSDP alone, one sequence a rank: {gigabytes(figures['activation: kept'] + figures['activation: working'])} of "
                 f"activations and {gigabytes(figures['gathered'])} of gathered parameters.")
    if best.plan.recompute != "none":
        lines.append(f"recompute={best.plan.recompute}: with less, the best shape's activations do not fit.")
    return lines


def _axis_reasons(found: Sequence[Found], best: Found) -> list[str]:
    """Each axis that the best plan uses, against the best plan that does without it."""
    without: dict[str, tuple[str, Callable[[Plan], bool]]] = {
        "tp": ("TP", lambda plan: plan.tp == 1), "cp": ("CP", lambda plan: plan.cp == 1), "pp": ("PP", lambda plan: plan.pp == 1)}
    lines = []
    for axis, (name, does) in without.items():
        size = getattr(best.plan, axis)
        others = [one for one in found if does(one.plan)] if size > 1 else [one for one in found if getattr(one.plan, axis) > 1]
        if not others:
            if size > 1:
                lines.append(f"{name}: nothing that was tried fits without it.")
            continue
        other = min(others, key=lambda one: one.seconds)
        more = 100 * (other.seconds / best.seconds - 1)
        if size > 1:
            lines.append(f"{name} {size}: the best plan without it takes {seconds(other.seconds)}, {more:.0f} % more "
                         f"({_axes(other.plan)}).")
        else:
            lines.append(f"no {name}: the best plan with it takes {seconds(other.seconds)}, {more:.0f} % more "
                         f"({_axes(other.plan)}).")
    return lines


def _axes(plan: Plan) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1) or "one rank"

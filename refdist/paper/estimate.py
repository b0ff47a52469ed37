"""An estimate of a step's time on paper: a roofline for what is computed, an α–β model a level for what is sent.

    stage    ▇ F ▇ B, W ▇ F ▇ B, W …       pipeline: the slowest stage's times, in the order of the schedule, with its bubble
    tp       ▒ exposed between kernels; in backward hidden behind weight gradients, as far as these last
    cp       ring: hidden behind attention, as far as it lasts; gathered keys and exchanged heads: exposed
    fsdp     hidden behind kernels, but for the first gather and the last reduce-scatter, as far as they last
    dp       hidden behind the last micro-batch's backward, as far as it lasts
    pp       hidden, but for the hops of the first micro-batch and of the last

It is an estimate: what is stated here and no more. A matrix product takes the longer of FLOPs / (peak · ``efficiency``) and its
bytes over memory bandwidth (Williams, Waterman & Patterson 2009, "Roofline"), other kernels their bytes over memory bandwidth;
``efficiency``, 0.7 unless said otherwise, and the clusters' latencies are assumptions. Stragglers, launches, failures, data and
checkpoints are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from refdist.paper.activations import Activations
from refdist.paper.cluster import Cluster, Crossing
from refdist.paper.flops import of_model
from refdist.paper.part import Part
from refdist.paper.state import Stored, gathers
from refdist.paper.traffic import by_axis, replicas
from refdist.parallel.context.sequence import exchanging
from refdist.parallel.pipeline.catalog import SCHEDULES
from refdist.parallel.pipeline.timing import Times, makespan, simulate

__all__ = ["EFFICIENCY", "Estimate", "Line", "estimate"]

EFFICIENCY = 0.7  # of the peak that big matrix products reach: assumed
SIMULATED = 50_000  # actions up to which a schedule is simulated; longer ones go by their paper's formula
BACKWARD_OF_ATTENTION = 2.5  # times forward: five products for two, as the scores are made again (Dao 2023)


@dataclass(frozen=True)
class Line:
    """What goes along one axis in a step, on one rank.

    Attributes:
        axis: its name.
        size: ranks of a group.
        crossing: how far apart they are.
        sent: bytes.
        seconds: as if nothing were hidden.
        exposed: seconds of these that nothing hides.
    """

    axis: str
    size: int
    crossing: Crossing
    sent: float
    seconds: float
    exposed: float


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step.

    Attributes:
        seconds: the whole step.
        compute: kernels of the slowest stage, without waiting.
        parts: the same by what they are.
        bubble: what the pipeline waits, with the exposed part of tp and cp in it.
        exposed: communication that nothing hides, by axis.
        optimizer: the update.
        lines: axis by axis.
        mfu: model FLOPs over peak.
        flops_per_second: model FLOPs of one accelerator.
        tokens_per_second: of all.
    """

    seconds: float
    compute: float
    parts: dict[str, float]
    bubble: float
    exposed: dict[str, float]
    optimizer: float
    lines: list[Line] = field(default_factory=list)
    mfu: float = 0.0
    flops_per_second: float = 0.0
    tokens_per_second: float = 0.0


class _Kernels:
    """Times of kernels on one rank."""

    def __init__(self, part: Part, stored: Stored, cluster: Cluster, format_: str, efficiency: float) -> None:
        self.part, self.n = part, stored.activation
        self.rate = cluster.accelerator.flops(format_) * efficiency
        self.memory = cluster.accelerator.memory_bandwidth

    def product(self, rows: float, inner: float, columns: float) -> float:
        """[rows, inner] times [inner, columns]."""
        moved = self.n * (rows * inner + inner * columns + rows * columns)
        return max(2 * rows * inner * columns / self.rate, moved / self.memory)

    def matrices(self, b: float) -> float:
        """The products of one block's forward; its input gradients and its weight gradients take as long each."""
        part, config = self.part, self.part.config
        tokens, hidden, ffn = b * part.positions, config.hidden_size, part.ffn
        q, kv = part.q_heads * config.head_dim, part.kv_heads * config.head_dim
        shapes = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden)]
        return sum(self.product(tokens, inner, columns) for inner, columns in shapes)

    def attention(self, b: float) -> float:
        """Core attention's forward: each rank of a zigzag has the same."""
        part = self.part
        positions, q_heads, kv_heads = part.exchange
        pairs = part.seq * positions / 2
        moved = self.n * b * part.config.head_dim * (2 * positions * q_heads + 2 * part.seq * kv_heads)
        return max(4 * b * q_heads * part.config.head_dim * pairs / self.rate, moved / self.memory)

    def others(self, b: float) -> float:
        """Norms, residual additions, rotary, SwiGLU of a block's forward: what they read and write."""
        part = self.part
        residual = 2 * (2 + 3) * part.residual * part.config.hidden_size
        heads = 2 * part.positions * (part.q_heads + part.kv_heads) * part.config.head_dim
        return self.n * b * (residual + heads + 3 * part.positions * part.ffn) / self.memory

    def head(self, b: float) -> float:
        """Head and loss, forward and both gradients."""
        tokens = b * self.part.positions
        product = self.product(tokens, self.part.config.hidden_size, self.part.columns)
        return 3 * product + 4 * self.n * tokens * self.part.columns / self.memory


def estimate(part: Part, stored: Stored, cluster: Cluster, format_: str = "bf16", efficiency: float = EFFICIENCY,
             simulated: bool = True) -> Estimate:
    """The estimate of a plan.

    Args:
        part: of any rank of the plan.
        stored: bytes a number.
        cluster: where it runs.
        format_: of matrix products.
        efficiency: of the peak that they reach.
        simulated: whether the schedule may be simulated; else its paper's formula counts.

    Raises:
        PlanError: more ranks than the cluster has.
    """
    plan = part.plan
    cluster.check_size(plan.world_size)
    stages = [Part(part.config, plan, part.batch, part.seq, {**part.at, "pp": stage}) for stage in _stages(plan.pp)]
    slowest = max(stages, key=lambda stage: sum(_times(stage, stored, cluster, format_, efficiency)[0].values()))
    parts, forward, backward, weights, tensor, context = _stage(slowest, stored, cluster, format_, efficiency)
    m = plan.micro_batches
    times = Times(forward, backward, weights)
    busy = m * (forward + backward + weights)
    whole = _makespan(slowest, times, simulated)
    lines, exposed = _lines(slowest, stored, cluster, times, tensor, context)
    optimizer = _optimizer(slowest, stored) / cluster.accelerator.memory_bandwidth
    # tp and cp are in the stages' times; what else is exposed comes on top
    seconds = whole + sum(time for axis, time in exposed.items() if axis not in ("tp", "cp")) + optimizer
    model = of_model(part.config, part.batch, part.seq)["model"]
    rate = model / seconds / plan.world_size
    return Estimate(seconds, m * sum(parts.values()), {name: m * time for name, time in parts.items()}, whole - busy, exposed,
                    optimizer, lines, rate / cluster.accelerator.flops(format_), rate, part.batch * part.seq / seconds)


def _stages(count: int) -> list[int]:
    """The stages that can be the slowest: the ends, and one between."""
    return sorted({0, count // 2, count - 1})


def _times(part: Part, stored: Stored, cluster: Cluster, format_: str,
           efficiency: float) -> tuple[dict[str, float], float, float]:
    """Seconds of one micro-batch's kernels on a stage by what they are; of forward and of weight gradients."""
    kernels = _Kernels(part, stored, cluster, format_, efficiency)
    b = max(part.sequences)
    layers = part.layers
    matrices, attention, others = (layers * time for time in (kernels.matrices(b), kernels.attention(b), kernels.others(b)))
    again = {"none": 0.0, "selective": attention, "full": matrices + attention + others}[part.plan.recompute]
    head = kernels.head(b) if part.has("head") else 0.0
    parts = {"matrix products": 3 * matrices, "attention": (1 + BACKWARD_OF_ATTENTION) * attention, "other kernels": 3 * others,
             "head and loss": head, "recomputation": again}
    return parts, matrices + attention + others + head, matrices


def _stage(part: Part, stored: Stored, cluster: Cluster, format_: str,
           efficiency: float) -> tuple[dict[str, float], float, float, float, tuple[float, float], tuple[float, float]]:
    """One micro-batch on a stage: kernels by what they are, F, B and W with what tp and cp expose; (all, exposed) of these."""
    parts, forward, weights = _times(part, stored, cluster, format_, efficiency)
    b = max(part.sequences)
    crossings = cluster.crossings(part.plan.sizes)
    tp_forward, tp_backward, tp_all = _tensor(part, stored, cluster, crossings["tp"], b, weights)
    cp_forward, cp_backward, cp_all = _context(part, stored, cluster, crossings["cp"], b, parts["attention"])
    backward = sum(parts.values()) - forward - weights
    return (parts, forward + tp_forward + cp_forward, backward + tp_backward + cp_backward, weights,
            (tp_all, tp_forward + tp_backward), (cp_all, cp_forward + cp_backward))


def _tensor(part: Part, stored: Stored, cluster: Cluster, crossing: Crossing, b: int,
            weights: float) -> tuple[float, float, float]:
    """Seconds of tp that are exposed in forward and in backward, and all, for one micro-batch on a stage."""
    plan = part.plan
    if plan.tp == 1:
        return 0.0, 0.0, 0.0
    once = cluster.gather_seconds(crossing, Activations(part, stored).whole(b))  # a gather, or half of an all-reduce
    ends = part.has("embed") + part.has("head")
    forward = once * (4 * part.layers + ends)
    again = once * 4 * part.layers if plan.recompute == "full" else 0.0
    fetched = 2 if plan.sequence_parallel and not plan.save_gathered else 0
    behind = once * (2 + fetched) * part.layers  # sums of input gradients, gathers for weight gradients
    backward = once * (2 * part.layers + ends) + again + max(0.0, behind - weights)
    return forward, backward, forward + once * (2 * part.layers + ends) + again + behind


def _context(part: Part, stored: Stored, cluster: Cluster, crossing: Crossing, b: int,
             attention: float) -> tuple[float, float, float]:
    """The same of cp; ``attention`` is what core attention takes, forward and backward."""
    plan = part.plan
    if plan.cp == 1:
        return 0.0, 0.0, 0.0
    together = exchanging(plan)
    positions, q_heads, kv_heads = part.exchange
    width = b * part.config.head_dim * stored.activation
    forward = backward = hidden = 0.0
    if together > 1:
        exchanged = width * positions * (2 * q_heads + 2 * kv_heads)
        forward += part.layers * cluster.gather_seconds(crossing, exchanged)
        backward += part.layers * cluster.gather_seconds(crossing, exchanged)
    if plan.cp > together and plan.cp_method == "all_gather":
        kv = width * part.seq * 2 * kv_heads
        forward += part.layers * cluster.gather_seconds(crossing, kv)
        backward += part.layers * 2 * cluster.gather_seconds(crossing, kv)
    elif plan.cp > together:
        hops = (plan.cp // together - 1) * cluster.send_seconds(crossing, width * positions * 2 * kv_heads)
        hidden = 3 * part.layers * hops
    if plan.recompute != "none":
        forward, backward = forward, backward + forward
    return forward, backward + max(0.0, hidden - attention), forward + backward + hidden


def _makespan(part: Part, times: Times, simulated: bool) -> float:
    """From the first micro-batch's forward on the first stage to the last one's backward there."""
    plan, schedule = part.plan, part.plan.schedule
    m, p = plan.micro_batches, plan.pp
    if p == 1:
        return m * (times.F + times.B + times.W)
    actions = 3 * m * p * plan.virtual_stages
    named = isinstance(schedule, str) and schedule in SCHEDULES
    if simulated and (actions <= SIMULATED or not named):
        return float(makespan(simulate(part.schedule, times)))
    entry = SCHEDULES[schedule]
    bubble = entry.bubble[1](p, m, plan.virtual_stages, times)
    return float(m * (times.F + times.B + times.W) + max(0.0, bubble))


def _lines(part: Part, stored: Stored, cluster: Cluster, times: Times, tensor: tuple[float, float],
           context: tuple[float, float]) -> tuple[list[Line], dict[str, float]]:
    """What goes along each axis, and what of it nothing hides."""
    plan, m = part.plan, part.plan.micro_batches
    crossings = cluster.crossings(plan.sizes)
    sent: dict[str, float] = {}
    for axis, nbytes in by_axis(part, stored).items():
        for name in axis.split("×"):  # gradients over cp and dp: counted where they go furthest
            sent[name] = sent.get(name, 0.0) + (nbytes if name == axis.split("×")[-1] else 0.0)
    whole = m * (times.F + times.B + times.W)
    found = {"tp": (m * tensor[0], m * tensor[1]), "cp": (m * context[0], m * context[1])}
    if plan.pp > 1:
        hop = cluster.send_seconds(crossings["pp"], Activations(part, stored).residual(max(part.sequences)))
        hops = 2 * m * plan.virtual_stages
        found["pp"] = hops * hop, min(hops, 2 * (plan.pp * plan.virtual_stages - 1)) * hop
    if plan.fsdp > 1:
        found["fsdp"] = _sharded(part, stored, cluster, crossings["fsdp"], times, whole)
    _, copies = replicas(part)
    if copies > 1:
        axis = "dp" if plan.dp > 1 else "cp"
        crossing = crossings[axis] if axis == "dp" or plan.dp == 1 else crossings["dp"]
        time = 2 * cluster.gather_seconds(crossing, stored.reduced * sum(part.own.values()))
        exposed = max(time / max(1, part.layers), time - (times.B + times.W))
        before = found.get("cp", (0.0, 0.0)) if axis == "cp" else (0.0, 0.0)
        if axis == "dp":
            found["dp"] = time, exposed
        else:
            found["cp"] = before[0] + time, before[1]
            found["gradients over cp"] = time, exposed
    lines = [Line(axis, plan.sizes[axis], crossings[axis], sent.get(axis, 0.0), *found.get(axis, (0.0, 0.0)))
             for axis in plan.sizes if plan.sizes[axis] > 1]
    return lines, {axis: exposed for axis, (_, exposed) in found.items()}


def _sharded(part: Part, stored: Stored, cluster: Cluster, crossing: Crossing, times: Times, whole: float) -> tuple[float, float]:
    """Seconds of fsdp's gathers and reduce-scatters in a step, and what of them nothing hides."""
    plan = part.plan
    numbers = sum(part.sizes.values())
    gathered = gathers(part)[1] if plan.zero == 3 else numbers
    scatters = plan.micro_batches if plan.zero >= 2 else 1
    piece = max(part.numbers(piece) for chunk in part.chunks for piece in chunk)
    count = len([piece for chunk in part.chunks for piece in chunk])
    rounds = gathered / numbers
    gather = rounds * cluster.gather_seconds(crossing, stored.parameter * numbers / count) * count
    scatter = scatters * cluster.gather_seconds(crossing, stored.reduced * numbers / count) * count
    first = cluster.gather_seconds(crossing, stored.parameter * piece)
    last = cluster.gather_seconds(crossing, stored.reduced * piece)
    behind = whole if plan.zero == 3 else times.B + times.W  # ZeRO 1's and 2's gather of new parameters hides behind nothing
    if plan.zero < 3:
        reduced = scatters * (times.B + times.W)
        return gather + scatter, gather + max(last, scatter - reduced)
    return gather + scatter, max(first + last, gather + scatter - behind)


def _optimizer(part: Part, stored: Stored) -> float:
    """Bytes that the update of a rank's own rows reads and writes."""
    return float(sum(part.own.values()) * (stored.gradient + stored.parameter + 2 * stored.master + 4 * stored.moment))

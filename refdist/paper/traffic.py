"""Traffic on paper: bytes that a step sends along each axis, by operation.

N ranks of a group share an array of n bytes; one gather or one reduce-scatter of it moves (N − 1) · n bytes in all, whatever the
algorithm and however uneven the shards, an all-reduce by the ring 2 (N − 1) · n (Patarasuk & Yuan 2009). So (:func:`of_part`)

    dp, cp     all-reduce of gradients                 2 Ψ                     a step; with fsdp of the rows that a rank owns
    fsdp       ZeRO 1: reduce-scatter, gather          Ψ + Ψ                   a step
               ZeRO 2: reduce-scatter, gather          m Ψ + Ψ                 m micro-batches
               ZeRO 3: reduce-scatter, gathers         m Ψ + 2 m Ψ             as ``state.gathers`` counts them
    tp         4 gathers + 4 reduce-scatters           8 sbh (+ 2 gathers)     a block and micro-batch (Korthikanti et al. 2022)
    cp         ring: K, V forward, K, V and dK, dV     3 · 2 sb·kv             a block and micro-batch (Liu et al. 2023)
               Ulysses: q, k, v there, out back        2 · (2 q + 2 kv) / N    (Jacobs et al. 2023)
    pp         activation, gradient                    2 sbh                   a boundary between stages and micro-batch

each but pp's times (N − 1)/N a rank. Scalars (token counts, losses, norms) are not counted.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TypeAlias

from refdist.paper.activations import Activations
from refdist.paper.part import Part
from refdist.paper.state import Stored, gathers
from refdist.parallel.context.sequence import exchanging

__all__ = ["Traffic", "by_axis", "of_part", "replicas"]

Traffic: TypeAlias = dict[tuple[str, str], int]  # (axis, operation) -> bytes


def of_part(part: Part, stored: Stored) -> Traffic:
    """Bytes that all ranks of this rank's group send in a step, for each (axis, operation), under the emulator's names."""
    found: Counter[tuple[str, str]] = Counter()
    _parameters(part, stored, found)
    if part.config.tie_word_embeddings and part.first_stage != part.last_stage:  # a tied matrix there, its gradient back
        found["pp", "send"] += part.columns * part.config.hidden_size * (stored.parameter + stored.reduced)
    for b, times in Counter(part.sequences).items():
        one: Counter[tuple[str, str]] = Counter()  # micro-batch
        if part.plan.tp > 1:
            _tensor(part, stored, b, one)
        if part.plan.cp > 1:
            _context(part, stored, b, one)
        if part.plan.pp > 1:
            _pipeline(part, stored, b, one)
        for key, nbytes in one.items():
            found[key] += times * nbytes
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def by_axis(part: Part, stored: Stored) -> dict[str, float]:
    """Bytes that one rank sends in a step along each axis, on average over its groups."""
    found: dict[str, float] = {}
    for (axis, _), nbytes in of_part(part, stored).items():
        size = 1
        for name in axis.split("×"):
            size *= part.plan.sizes[name]
        found[axis] = found.get(axis, 0.0) + nbytes / size
    return found


def replicas(part: Part) -> tuple[str, int]:
    """The axes of the ranks that hold the same rows, by the mesh's name, and how many those are."""
    axes = [axis for axis in ("cp", "dp") if part.plan.sizes[axis] > 1]
    size = part.plan.cp * part.plan.dp
    return "×".join(axes) or "dp", size


def _parameters(part: Part, stored: Stored, found: Counter[tuple[str, str]]) -> None:
    """Gradients and parameters, once a step or once a micro-batch."""
    plan, (axes, copies) = part.plan, replicas(part)
    numbers = sum(part.sizes.values())
    others = plan.fsdp - 1
    found[axes, "all_reduce"] += 2 * (copies - 1) * stored.reduced * sum(part.own.values())
    if others:
        scattered = plan.micro_batches if plan.zero >= 2 else 1
        apart = plan.zero >= 2 and plan.order == "rank" and plan.micro_batches > 1  # each rank's sum stays apart
        total = scattered * numbers
        if apart and part.config.tie_word_embeddings and part.has("embed"):  # and so do the two uses of a tied matrix
            total += (scattered if part.has("head") else 1) * part.columns * part.config.hidden_size
        found["fsdp", "all_to_all" if apart else "reduce_scatter"] += others * stored.reduced * total
        gathered = gathers(part)[1] if plan.zero == 3 else sum(part.sizes.values())
        found["fsdp", "all_gather"] += others * stored.parameter * gathered
    if plan.tp > 1:  # what is partial over tp
        for name, size in part.own.items():
            row = part.rows[name]
            if "tp" in row.partial:  # over the copies of a KV head, or over all
                together = row.copies if "tp" in row.shards else plan.tp
                found["tp", "all_reduce"] += plan.tp // together * 2 * (together - 1) * stored.gradient * size


def _tensor(part: Part, stored: Stored, b: int, found: Counter[tuple[str, str]]) -> None:
    """f and g of each block, of the embedding and of the head, for one micro-batch."""
    plan, others = part.plan, part.plan.tp - 1
    moved = others * Activations(part, stored).whole(b)
    again = 2 if plan.recompute == "full" else 0
    blocks, embed, head = part.layers, int(part.has("embed")), int(part.has("head"))
    if plan.sequence_parallel:
        entered = 4 if plan.save_gathered else 6  # forward, backward of g, and once more for the weight gradients
        found["tp", "all_gather"] += moved * (blocks * (entered + again) + embed + head)
        found["tp", "reduce_scatter"] += moved * (blocks * (4 + again) + embed + head)
    else:
        found["tp", "all_reduce"] += 2 * moved * (blocks * (4 + again) + embed + head)
    found["tp", "all_gather"] += head * others * plan.tp * 2 * b * part.positions * stored.statistic  # log-sum-exps


def _context(part: Part, stored: Stored, b: int, found: Counter[tuple[str, str]]) -> None:
    """Keys and values, or heads, of each block, for one micro-batch."""
    plan, n, head_dim = part.plan, stored.activation, part.config.head_dim
    passes = {"none": (1, 1, 1), "selective": (1, 2, 1), "full": (2, 2, 2)}[plan.recompute]  # q k v there, attend, out back
    together = exchanging(plan)
    _, q_heads, kv_heads = part.exchange
    if together > 1:
        seq = part.seq * b * head_dim * n * (together - 1)  # of all groups that exchange heads
        there, back = (q_heads + 2 * kv_heads) * seq, q_heads * seq
        forward = passes[0] * there + (passes[1] if plan.recompute == "selective" else passes[2]) * back
        found["cp", "all_to_all"] += part.layers * (forward + there + back)  # backward: dout there, dq, dk, dv back
    between = plan.cp // together
    if between > 1:
        kv = 2 * b * part.seq * kv_heads * head_dim * (between - 1) * together
        if plan.cp_method == "ring":
            found["cp", "ring kv"] += part.layers * (passes[1] + 1) * kv * n
            found["cp", "ring dkv"] += part.layers * kv * stored.statistic
        else:
            found["cp", "all_gather"] += part.layers * (passes[1] + 1) * kv * n
            found["cp", "reduce_scatter"] += part.layers * kv * stored.statistic


def _pipeline(part: Part, stored: Stored, b: int, found: Counter[tuple[str, str]]) -> None:
    """Activations and their gradients at each boundary between two stages, for one micro-batch."""
    boundaries = sum(one.stage != other.stage for one, other in pairwise(part.path))
    size = Activations(part, stored).residual(b)
    found["pp", "activation"] += boundaries * size
    found["pp", "gradient"] += boundaries * size

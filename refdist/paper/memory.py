"""Memory on paper: everything that one rank holds at most, by category; and how far each way of sharding goes.

    parameter, gradient, master, optimizer      between steps            state.py      exactly the emulator's
    gathered                                    ZeRO 3's parameters      state.py      exactly
    activation: kept                            for backward, at most    activations.py    exactly
    activation: working                         while one piece runs     activations.py    exactly, or an upper bound (see there)
    gradient buffers, communication             on their way             here          upper bounds

The total adds up what each category has at most. A device's own peak is no larger: not all of it is there at the same moment.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from refdist.model.layout import EMBEDDING
from refdist.ops.cross_entropy import LOGITS
from refdist.paper.activations import Activations
from refdist.paper.part import Part
from refdist.paper.state import Stored, gathers, state
from refdist.parallel.context.sequence import exchanging
from refdist.parallel.stage import Piece

__all__ = ["CATEGORIES", "Wall", "of_rank", "of_stages", "wall"]

CATEGORIES = ("parameter", "gradient", "master", "optimizer", "gathered", "activation: kept", "activation: working",
              "gradient buffers", "communication")


def of_rank(part: Part, stored: Stored, quick: bool = False) -> dict[str, int]:
    """Bytes on one rank by :data:`CATEGORIES`, each at most, and their ``"total"``.

    ``quick`` goes by the formula of a named schedule instead of its actions, and may give a little more.
    """
    activations = Activations(part, stored)
    kept, peak = activations.quick() if quick else activations.walk()
    found = {**state(part, stored), "gathered": stored.parameter * gathers(part)[0], "activation: kept": kept,
             "activation: working": peak - kept, "gradient buffers": _gradient_buffers(part, stored),
             "communication": _communication(part, stored)}
    return {**found, "total": sum(found.values())}


def of_stages(part: Part, stored: Stored) -> list[dict[str, int]]:
    """:func:`of_rank` of one rank of each pipeline stage, at the other coordinates of ``part``."""
    return [of_rank(Part(part.config, part.plan, part.batch, part.seq, {**part.at, "pp": stage}), stored)
            for stage in range(part.plan.pp)]


def _gradient_buffers(part: Part, stored: Stored) -> int:
    """Weight gradients of a micro-batch that have not been added to their sums yet, in the activations' format."""
    plan, n = part.plan, stored.activation
    head = part.columns * part.config.hidden_size if part.has("head") else 0
    tied = head if part.config.tie_word_embeddings else 0  # the head's use, until the embedding's is complete
    largest = max(part.sizes.values())
    if head and max(part.sequences) * part.positions > max(1, LOGITS // -(-part.config.vocab_size // plan.tp)):
        largest = max(largest, 2 * head)  # one chunk of tokens' and the sum of those before
    norm = part.config.hidden_size * (n + (stored.statistic if stored.statistic > n else 0))  # while it is summed
    buffers = max(n * largest, n * head + norm if head else norm)  # the head's is still there when its norm's comes
    if plan.fsdp > 1 and plan.zero >= 2:
        numbers = sorted(part.numbers(piece) for chunk in part.chunks for piece in chunk)
        buffers = max(buffers, n * sum(numbers[-2:]) + norm)  # while one is computed, the reduce-scatter of another goes on
        if part.plan.order == "rank" and plan.micro_batches > 1:
            sums = plan.fsdp * (sum(part.own.values()) + (part.own.get(EMBEDDING, 0) if tied else 0))  # one for each rank
            return buffers + n * tied + stored.gradient * sums
        buffers += n * _waiting(part)
    return buffers + n * tied


def _waiting(part: Part) -> int:
    """Numbers in gradients that are made with the input gradient and reduced with the weight gradients of their piece: of norms,
    biases and the embedding, of all micro-batches between their I and their W."""
    if part.plan.schedule in ("1f1b", "interleaved", "gpipe"):
        return 0
    at_once = [sum(size for name, size in part.sizes.items() if part.rows[name].layer in chunk and part.rows[name].layer != "head"
                   and (len(part.rows[name].shape) == 1 or name == EMBEDDING)) for chunk in part.chunks]
    now = most = 0
    for action in part.schedule.actions[part.at["pp"]]:
        now += {"I": 1, "W": -1}.get(action.kind, 0) * at_once[action.chunk]
        most = max(most, now)
    return most


def _communication(part: Part, stored: Stored) -> int:
    """Arrays that come or go: shards of gradients, new rows of parameters, keys and values of other ranks."""
    plan = part.plan
    found = 0
    if plan.fsdp > 1 and plan.zero == 1:
        found = stored.parameter * sum(part.own.values())
    elif plan.fsdp > 1:
        pieces: Counter[Piece] = Counter()
        for name, size in part.own.items():
            pieces[part.rows[name].layer] += size
        found = 2 * stored.gradient * max(pieces.values())
    if plan.cp > 1:
        b, head_dim, n = max(part.sequences), part.config.head_dim, stored.activation
        positions, q_heads, kv_heads = part.exchange
        if exchanging(plan) > 1:
            found = max(found, b * head_dim * n * max(positions * q_heads, part.positions * part.q_heads))
        if plan.cp > exchanging(plan) and plan.cp_method == "all_gather":
            found = max(found, b * head_dim * n * 2 * part.seq * kv_heads)
        elif plan.cp > exchanging(plan):
            found = max(found, b * head_dim * 2 * max(part.lengths) * exchanging(plan) * kv_heads * 2 * (n + stored.statistic))
    return found


class Wall(NamedTuple):
    """How far a way of sharding goes.

    Attributes:
        alone: bytes on one rank alone.
        floor: what remains on each of infinitely many.
        ranks: the fewest that fit; None: none do.
    """

    name: str
    alone: int
    floor: int
    ranks: int | None


def wall(parameters: int, stored: Stored, memory: float) -> list[Wall]:
    """Training state under data parallelism and ZeRO 1 to 3: the fewest ranks whose memory holds it, None where none do."""
    optimizer = stored.master + 2 * stored.moment
    alone = parameters * stored.per_parameter
    found = []
    for name, kept in (("DP", stored.per_parameter), ("ZeRO 1", stored.parameter + stored.gradient), ("ZeRO 2", stored.parameter),
                       ("ZeRO 3, FSDP", 0)):
        shared = (stored.parameter + stored.gradient + optimizer - kept) * parameters
        room = memory - kept * parameters
        ranks = 1 if alone <= memory else None if room <= 0 or not shared else -int(-shared // room)
        found.append(Wall(name, alone, kept * parameters, ranks))
    return found

"""Training state on paper: bytes of parameters, gradients, master copy, moments and gathered parameters on one rank.

                     parameters    gradients     master copy, moments        N ranks share (Rajbhandari et al. 2020, figure 1)
    replicated       Ψ             Ψ             Ψ
    ZeRO 1           Ψ             Ψ             Ψ/N
    ZeRO 2           Ψ             Ψ/N           Ψ/N
    ZeRO 3           Ψ/N           Ψ/N           Ψ/N, and what is gathered just now

7.5 billion parameters at 16 bytes on 64 ranks: 120, 31.4, 16.6, 1.9 GB. Ψ is what tp and pp leave of the model, row by row of the
layout table, so that uneven and empty shards come out as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from refdist.numerics.precision import DTYPES
from refdist.paper.part import Part
from refdist.parallel.pipeline.action import Action
from refdist.parallel.plan import Plan
from refdist.parallel.stage import Piece

__all__ = ["STORED", "Stored", "gathers", "published_zero", "smallest_number", "state"]


@dataclass(frozen=True)
class Stored:
    """Bytes a number.

    Attributes:
        parameter, gradient, master, moment: of training state; there are two moments (Adam).
        reduced: of gradients as they travel between ranks.
        activation: of activations.
        statistic: of norm statistics, log-sum-exps and losses.
        text: for people.
    """

    parameter: int
    gradient: int
    master: int
    moment: int
    reduced: int
    activation: int
    statistic: int
    text: str

    def under(self, plan: Plan) -> Stored:
        """With the formats that a plan asks for: of sums of gradients, of what travels, and whether there are masters."""
        reduced = _itemsize(plan.reduce_dtype, self.reduced)
        gradient = _itemsize(plan.accumulate_dtype or plan.reduce_dtype, self.gradient)
        said = [f"{name.replace('_', '-')} {value}" for name in ("accumulate_dtype", "reduce_dtype")
                if (value := getattr(plan, name)) is not None]
        master = self.master if plan.master_weights else 0
        said += ["no master weights"] * (master != self.master)
        return replace(self, reduced=reduced, gradient=gradient, master=master, text="; ".join([self.text, *said]))

    @property
    def per_parameter(self) -> int:
        """Bytes of training state for each parameter, with nothing sharded."""
        return self.parameter + self.gradient + self.master + 2 * self.moment


def _itemsize(name: str | None, otherwise: int) -> int:
    """Bytes of a number in a format, by its name; None: as it is otherwise."""
    return otherwise if name is None else DTYPES[name].itemsize


STORED: dict[str, Stored] = {
    "mixed": Stored(2, 2, 4, 4, 2, 2, 4, "16-bit weights and gradients, FP32 master copy and moments: 2+2+4+4+4"),
    "lecture": Stored(2, 2, 0, 2, 2, 2, 4, "everything in 16 bits, no master copy: 2+2+2+2"),
    "mixed-fp32-gradients": Stored(2, 4, 4, 4, 4, 2, 4, "gradients accumulated in FP32 (Llama 3): 2+4+4+4+4"),
    "mixed-both-gradients": Stored(2, 6, 4, 4, 4, 2, 4, "16-bit gradients and their FP32 sums: 2+2+4+4+4+4"),
    "fp32": Stored(4, 4, 0, 4, 4, 4, 4, "everything in FP32, as the emulator's fp32: 4+4+4+4"),
    "fp64": Stored(8, 8, 0, 8, 8, 8, 8, "everything in FP64, as the emulator's fp64: 8+8+8+8"),
}
"""What is stored, by name."""


def state(part: Part, stored: Stored) -> dict[str, int]:
    """Bytes of a rank's training state by the device's categories: what is alive between two steps."""
    plan = part.plan
    whole, own = sum(part.sizes.values()), sum(part.own.values())
    zero = plan.zero if plan.fsdp > 1 else 0
    return {
        "parameter": stored.parameter * (own if zero == 3 else whole),
        "gradient": stored.gradient * (own if zero >= 2 else whole),
        "master": stored.master * own,
        "optimizer": 2 * stored.moment * own,
    }


def smallest_number(parameters: int, stored: Stored, memory: float) -> int:
    """Accelerators that hold the training state if nothing is there twice and nothing else is there at all."""
    return -int(-parameters * stored.per_parameter // memory)


def published_zero(parameters: float, ranks: int, stored: Stored) -> list[float]:
    """Bytes a rank of data parallelism and of ZeRO 1 to 3, by the paper's formulas."""
    optimizer = stored.master + 2 * stored.moment
    return [parameters * (stored.parameter + stored.gradient + optimizer),
            parameters * (stored.parameter + stored.gradient + optimizer / ranks),
            parameters * (stored.parameter + (stored.gradient + optimizer) / ranks),
            parameters * stored.per_parameter / ranks]


# ------------------------------------------------------------------------------------------------ gathered parameters


_BACKWARD_FOLLOWS = ("1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")
"""Schedules in which the head's forward is always followed by that micro-batch's backward, for which a block is fetched then; in
others it waits for it, gathered, while more forwards pass by."""


def gathers(part: Part) -> tuple[int, int]:
    """ZeRO 3's gathered parameters over a step: the most numbers that are there at once, and the numbers gathered in all.

    It follows the pieces in the order in which the stage's schedule uses them. With prefetch the next piece is fetched while one
    is used; what is dropped when is a choice (``reshard_after_forward``, ``reshard_after_backward``).
    """
    copy = part.tied_elsewhere
    if part.plan.fsdp == 1 or part.plan.zero < 3:
        return copy, 0
    plan = part.plan
    plain = (plan.reshard_after_forward and plan.prefetch and plan.recompute_blocks == 1
             and (plan.micro_batches == 1 or plan.schedule in _BACKWARD_FOLLOWS))
    return _plain_gathers(part) if plain else _walked_gathers(part)


def _plain_gathers(part: Part) -> tuple[int, int]:
    """Two neighbours at a time; blocks twice a micro-batch, the embedding and the head once."""
    def needed(piece: Piece) -> int:
        return part.numbers(piece) + (part.numbers("embed") if piece == "head" and part.head_needs_embedding else 0)

    most = total = 0
    for pieces in part.chunks:
        both = [needed(one) + needed(other) for one, other in pairwise(pieces)]
        most = max([most, *both, *map(needed, pieces)])
        total += sum(needed(piece) * (2 if isinstance(piece, int) else 1) for piece in pieces)
    total *= part.plan.micro_batches
    if part.config.tie_word_embeddings and part.first_stage != part.last_stage and part.at["pp"] == part.first_stage:
        total += part.numbers("embed")  # to be sent to the last stage
    return most + part.tied_elsewhere, total


def _walked_gathers(part: Part) -> tuple[int, int]:
    """Piece by piece, as the schedule's actions use them."""
    copy = part.tied_elsewhere
    here = _Gathered(part)
    if part.config.tie_word_embeddings and part.first_stage != part.last_stage and part.at["pp"] == part.first_stage:
        here.use("embed")  # to be sent to the last stage
        here.drop("embed")
    for action in part.schedule.actions[part.at["pp"]]:
        for step in _steps(part, action):
            getattr(here, step[0])(step[1])
    return here.most + copy, here.total


class _Gathered:
    """Which pieces are gathered, as ``refdist.parallel.fsdp.zero3`` does it."""

    def __init__(self, part: Part) -> None:
        self.part, self.plan = part, part.plan
        self.here: set[Piece] = set()
        self.most = self.total = 0
        self.fetched_only: set[Piece] = set()

    def use(self, piece: Piece) -> None:
        self._fetch(piece)
        self.fetched_only.difference_update(self._needs(piece))

    def expect(self, piece: Piece) -> None:
        if self.plan.prefetch:
            self.fetched_only.update(set(self._needs(piece)) - self.here)
            self._fetch(piece)

    def drop(self, piece: Piece) -> None:
        if self.plan.reshard_after_forward:
            self.here.difference_update(set(self._needs(piece)) - self.fetched_only)

    def done(self, piece: Piece) -> None:
        if self.plan.reshard_after_backward and not self.plan.reshard_after_forward:
            self.here.discard(piece)

    def _needs(self, piece: Piece) -> list[Piece]:
        return ["head", "embed"] if piece == "head" and self.part.head_needs_embedding else [piece]

    def _fetch(self, piece: Piece) -> None:
        for needed in self._needs(piece):
            if needed not in self.here:
                self.here.add(needed)
                self.total += self.part.numbers(needed)
        self.most = max(self.most, sum(map(self.part.numbers, self.here)))


def _steps(part: Part, action: Action) -> Iterator[tuple[str, Piece]]:
    """What an action asks of the storage of parameters, in order (``refdist.parallel.stage``)."""
    pieces = part.chunks[action.chunk]
    back = {pieces[i]: pieces[i - 1] for i in range(1, len(pieces)) if isinstance(pieces[i - 1], int)}
    if action.kind == "F":
        following = dict(pairwise(pieces))
        for piece in pieces:
            yield "use", piece
            expected = (back if piece == "head" else following).get(piece)
            if expected is not None:
                yield "expect", expected
            if piece == "head":
                yield "done", piece
            yield "drop", piece
    elif action.kind == "W":
        yield from (("done", piece) for piece in reversed(pieces) if piece != "head")
    else:
        blocks = [piece for piece in pieces if isinstance(piece, int)]
        whole: set[Piece] = set()
        for place in reversed(range(len(blocks))):
            piece = blocks[place]
            yield "use", piece
            if piece in back:
                yield "expect", back[piece]
            if part.plan.recompute == "full" and piece not in whole:
                for again in blocks[place - place % part.plan.recompute_blocks:place + 1]:
                    whole.add(again)
                    yield "use", again
                    if again != piece:
                        yield "drop", again
            yield "drop", piece
            if action.kind == "B":
                yield "done", piece
        if "embed" in pieces and action.kind == "B":
            yield "done", "embed"

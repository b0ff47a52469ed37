"""``Part``: what one rank holds of a model and a batch under a plan, in sizes. The other closed forms are made of these.

    plan, coordinates ──▶ rows of the layout table as cut by tp, pp and fsdp     (what the emulator's storages hold)
                      ──▶ sequences in each micro-batch, positions, heads        (what the emulator's micro-batches are)

Nothing here is counted twice: which rows, pieces and positions a rank has is asked of the same functions that the emulator asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from refdist.comm.mesh import AXES
from refdist.comm.reduction import bounds
from refdist.errors import PlanError
from refdist.model.config import ModelConfig
from refdist.model.layout import EMBEDDING, ParameterLayout, layout
from refdist.parallel.context.chunks import lengths
from refdist.parallel.context.sequence import exchanging, local_heads
from refdist.parallel.pipeline.action import Schedule
from refdist.parallel.pipeline.catalog import SCHEDULES, make_schedule
from refdist.parallel.pipeline.communication import Program, add_communication
from refdist.parallel.pipeline.stages import pieces_of_places
from refdist.parallel.plan import Plan
from refdist.parallel.sharding import local_rows
from refdist.parallel.stage import Piece

__all__ = ["Part", "check_batch", "coordinates", "every_part", "schedule_of"]


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """Where a rank sits on each axis of the mesh."""
    found = {}
    for axis in AXES:
        rank, found[axis] = divmod(rank, plan.sizes[axis])
    return found


@lru_cache(maxsize=64)
def _named(name: str, stages: int, micro_batches: int, chunks: int, group: int | None) -> tuple[Schedule, list[Program]]:
    schedule = make_schedule(name, stages, micro_batches, chunks, group)
    return schedule, add_communication(schedule)


def schedule_of(plan: Plan) -> tuple[Schedule, list[Program]]:
    """The plan's pipeline schedule, and what each stage does, sends and receives."""
    arguments = plan.pp, plan.micro_batches, plan.virtual_stages, plan.interleave_group
    if isinstance(plan.schedule, str) and not plan.schedule.endswith(".json"):
        return _named(plan.schedule, *arguments)
    schedule = make_schedule(plan.schedule, *arguments)
    return schedule, add_communication(schedule)


@lru_cache(maxsize=64)
def _rows(config_key: tuple, sequence_parallel: bool, tp: int, rank: int) -> dict[str, ParameterLayout]:
    return local_rows(layout(ModelConfig(**dict(config_key)), sequence_parallel, tp), tp, rank)


def _key(config: ModelConfig) -> tuple:
    """What the layout table depends on, to be looked up by."""
    return tuple((name, value) for name, value in vars(config).items() if name != "rope_scaling")


class _Held(NamedTuple):
    """What is on one rank's stage; the same for all plans that cut the model there and to this width."""

    rows: Mapping[str, ParameterLayout]
    sizes: Mapping[str, int]  # name -> numbers
    numbers: Mapping[Piece, int]  # in each piece


@lru_cache(maxsize=64)
def _held(config_key: tuple, sequence_parallel: bool, tp: int, rank: int, pieces: frozenset[Piece]) -> _Held:
    rows = {name: row for name, row in _rows(config_key, sequence_parallel, tp, rank).items() if row.layer in pieces}
    sizes = {name: math.prod(row.shape) for name, row in rows.items()}
    numbers = dict.fromkeys(pieces, 0)
    for name, row in rows.items():
        numbers[row.layer] += sizes[name]
    return _Held(MappingProxyType(rows), MappingProxyType(sizes), MappingProxyType(numbers))


class Part:
    """One rank's part.

    Args:
        config, plan: that fit each other (``refdist.parallel.check_plan``).
        batch, seq: of the global batch: sequences, and tokens in each.
        at: this rank's coordinates along the mesh axes.

    Attributes:
        path: the places of a micro-batch's way through the pipeline.
        rows: the layout table of what this rank's stage holds, with shapes as tp has cut them.
        sizes: name -> numbers in this rank's part of a parameter, as tp and pp have cut it.
        chunks: the pieces of the model in each of this stage's chunks.
        sequences: in each of this rank's micro-batches; the last ones may have none.
        positions: of every sequence, that this rank's tp group holds.
        residual: positions of the residual stream that this rank holds itself.
        q_heads, kv_heads, ffn, columns: of this tp rank: heads, width of the MLP, columns of the logits.
    """

    def __init__(self, config: ModelConfig, plan: Plan, batch: int, seq: int, at: Mapping[str, int]) -> None:
        self.config, self.plan, self.batch, self.seq, self.at = config, plan, batch, seq, dict(at)
        if isinstance(plan.schedule, str) and plan.schedule in SCHEDULES:  # where chunks lie is the same for one micro-batch
            placed = _named(plan.schedule, plan.pp, 1, plan.virtual_stages, plan.interleave_group)[0]
        else:
            placed = schedule_of(plan)[0]
        self.path = path = placed.paths[0]
        places = dict(zip(path, pieces_of_places(config, placed, plan.layers_per_stage), strict=True))
        self.chunks: list[list[Piece]] = [places[place] for place in sorted(places) if place.stage == at["pp"]]
        self.first_stage, self.last_stage = path[0].stage, path[-1].stage
        pieces = frozenset(piece for chunk in self.chunks for piece in chunk)
        self.rows, self.sizes, self._numbers = _held(_key(config), plan.sequence_parallel, plan.tp, at["tp"], pieces)
        offsets = bounds(batch, plan.batch_parts)
        part = at["dp"] * plan.fsdp + at["fsdp"]
        self.sequences = [end - start for start, end in pairwise(bounds(offsets[part + 1] - offsets[part], plan.micro_batches))]
        self.lengths = lengths(seq, plan.cp, exchanging(plan))
        self.positions = self.lengths[at["cp"]]
        cuts = bounds(self.positions, plan.tp)
        cut = plan.tp > 1 and plan.sequence_parallel
        self.residual = cuts[at["tp"] + 1] - cuts[at["tp"]] if cut else self.positions
        self.q_heads, self.kv_heads = local_heads(config, plan)
        self.ffn, self.columns = (_share(size, plan.tp, at["tp"]) for size in (config.intermediate_size, config.vocab_size))

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline's schedule."""
        return schedule_of(self.plan)[0]

    @cached_property
    def program(self) -> Program:
        """What this rank's stage does, sends and receives."""
        return schedule_of(self.plan)[1][self.at["pp"]]

    # --------------------------------------------------------------------------------------------- parameters

    @cached_property
    def own(self) -> Mapping[str, int]:
        """The same of what this rank owns: its rows among the fsdp ranks."""
        fsdp, rank = self.plan.fsdp, self.at["fsdp"]
        if fsdp == 1:
            return self.sizes
        return {name: math.prod(row.shape[1:]) * _share(row.shape[0], fsdp, rank) for name, row in self.rows.items()}

    def numbers(self, piece: Piece) -> int:
        """In the parameters of one piece, as tp has cut them."""
        return self._numbers.get(piece, 0)

    @cached_property
    def tied_elsewhere(self) -> int:
        """Numbers in the copy of a tied matrix that a last stage keeps during a step; 0 where there is none."""
        apart = self.config.tie_word_embeddings and self.first_stage != self.last_stage
        return self.columns * self.config.hidden_size if apart and self.at["pp"] == self.last_stage else 0

    @property
    def head_needs_embedding(self) -> bool:
        """Whether the head multiplies with this very stage's embedding."""
        return self.config.tie_word_embeddings and EMBEDDING in self.rows and any("head" in chunk for chunk in self.chunks)

    # --------------------------------------------------------------------------------------------- activations

    @property
    def layers(self) -> int:
        """Blocks on this stage."""
        return sum(isinstance(piece, int) for chunk in self.chunks for piece in chunk)

    def has(self, piece: Piece) -> bool:
        """Whether a piece of the model is on this stage."""
        return any(piece in chunk for chunk in self.chunks)

    @cached_property
    def exchange(self) -> tuple[int, int, int]:
        """What attention works on: (positions of the group that exchanges heads, query heads, KV heads) of this rank there."""
        ranks = exchanging(self.plan)
        if ranks == 1:
            return self.positions, self.q_heads, self.kv_heads
        first = self.at["cp"] // ranks * ranks
        share = self.q_heads // ranks
        group = self.q_heads // self.kv_heads
        start, stop = self.at["cp"] % ranks * share, (self.at["cp"] % ranks + 1) * share
        return sum(self.lengths[first:first + ranks]), share, -(-stop // group) - start // group


def every_part(config: ModelConfig, plan: Plan, batch: int, seq: int) -> Iterator[Part]:
    """The part of each rank, in rank order; for plans that run in small."""
    for rank in range(plan.world_size):
        yield Part(config, plan, batch, seq, coordinates(plan, rank))


def _share(length: int, parts: int, part: int) -> int:
    """How many of ``length`` one of ``parts`` gets, as ``np.array_split`` deals them out."""
    return length // parts + (part < length % parts)


def check_batch(plan: Plan, batch: int, seq: int, config: ModelConfig) -> None:
    """Raise PlanError for a batch that leaves a rank without sequences, or a sequence that the model was not made for."""
    plan.check_batch(batch)
    if seq > config.max_position_embeddings:
        raise PlanError(f"seq={seq:,}: the model was made for at most {config.max_position_embeddings:,} positions")

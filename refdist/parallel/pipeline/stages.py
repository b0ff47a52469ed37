"""``Pipeline``: which pieces of the model lie on which stage, and what the stages of a pipeline have to settle with each other.

    stage 0   embed, layers 0 … 2   ─activation─▶   stage 1   layers 3 … 5   ─▶   stage 2   layers 6, 7, final norm, head
                                    ◀─gradient──                            ◀─

A tied matrix belongs to the first stage; the last one multiplies with a copy (``tied.py``). Where first and last stage are one
rank, as in a V, there is one array and nothing to exchange (Qi et al. 2023, section 6).

This module is the room ``"pipeline"`` of ``implementations``: it is replaced by one with the same ``check`` and ``Pipeline``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from refdist.comm import Mesh
from refdist.comm.reduction import bounds
from refdist.device import Device
from refdist.errors import PlanError
from refdist.model.config import ModelConfig
from refdist.model.layout import ParameterLayout
from refdist.model.recompute import Recompute
from refdist.parallel.pipeline.action import Schedule
from refdist.parallel.pipeline.catalog import make_schedule
from refdist.parallel.pipeline.check import require_valid
from refdist.parallel.pipeline.executor import Executor, Sink
from refdist.parallel.pipeline.tied import TiedFirst, TiedLast
from refdist.parallel.plan import Plan
from refdist.parallel.stage import MicroBatch, ParameterStorage, Piece, all_pieces

__all__ = ["Pipeline", "check", "pieces_of_places"]

Rows = Mapping[str, ParameterLayout]


def check(config: ModelConfig, plan: Plan) -> None:
    """Raise PlanError for a schedule or a split of layers that this model and plan cannot have."""
    schedule = _schedule(plan)
    require_valid(schedule)
    pieces_of_places(config, schedule, plan.layers_per_stage)


def _schedule(plan: Plan) -> Schedule:
    schedule = make_schedule(plan.schedule, plan.pp, plan.micro_batches, plan.virtual_stages, plan.interleave_group)
    if len(schedule.paths) > 1:
        raise PlanError(f"schedule={schedule.name!r} needs every stage of the model on two ranks: it is drawn and checked, "
                        "not run; its fold dualpipe_v is run")
    return schedule


def pieces_of_places(config: ModelConfig, schedule: Schedule, layers_per_stage: Sequence[int] | None) -> list[list[Piece]]:
    """The pieces of the model at each place of a micro-batch's path: the embedding first, head and loss last.

    Args:
        layers_per_stage: layers on each stage, cut evenly over its chunks; or on each chunk, in the order of the path; None: the
            layers are cut evenly over all chunks.

    Raises:
        PlanError: not these layers, or a chunk without any.
    """
    path, layers = schedule.paths[0], config.num_hidden_layers
    if layers_per_stage is None:
        counts = [end - start for start, end in pairwise(bounds(layers, len(path)))]
    elif len(layers_per_stage) == len(path):
        counts = list(layers_per_stage)
    elif len(layers_per_stage) == schedule.stages:
        cuts = [[end - start for start, end in pairwise(bounds(count, schedule.chunks))] for count in layers_per_stage]
        counts = [cuts[place.stage][place.chunk] for place in path]
    else:
        raise PlanError(f"layers_per_stage has {len(layers_per_stage)} entries: expected one for each of {schedule.stages} stages"
                        + (f", or for each of {len(path)} chunks" if schedule.chunks > 1 else ""))
    if sum(counts) != layers:
        raise PlanError(f"layers_per_stage={tuple(layers_per_stage or counts)} are {sum(counts)} layers, the model has {layers}")
    if min(counts) < 1:
        raise PlanError(f"{len(path)} chunks (pp={schedule.stages} × {schedule.chunks}) need a layer each: the model has "
                        f"{layers} layers, cut into {tuple(counts)}")
    pieces: list[list[Piece]] = []
    layer = 0
    for count in counts:
        pieces.append(list(range(layer, layer + count)))
        layer += count
    whole = all_pieces(config)
    pieces[0].insert(0, whole[0])
    pieces[-1].append(whole[-1])
    return pieces


class Pipeline:
    """This rank's stage.

    Args:
        config, plan: the model and how it is spread; :func:`check` has accepted them.
        mesh: its pp axis is the pipeline; coordinate s is stage s.
        device: of this rank.

    Attributes:
        comm: the pp group.
        schedule: what is executed.
    """

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh, device: Device) -> None:
        self.config = config
        self.plan = plan
        self.device = device
        self.comm = mesh.axis("pp")
        self.schedule = _schedule(plan)
        self.recompute = Recompute(plan.recompute, plan.recompute_blocks)
        path = self.schedule.paths[0]
        places = dict(zip(path, pieces_of_places(config, self.schedule, plan.layers_per_stage), strict=True))
        own = sorted(place for place in places if place.stage == self.comm.rank)  # by chunk
        self.chunks = [places[place] for place in own]
        self.owner: dict[Piece, int] = {piece: place.stage for place, pieces in places.items() for piece in pieces}
        self.first, self.last = path[0].stage, path[-1].stage

    def rows(self, table: Rows) -> dict[str, ParameterLayout]:
        """The rows of the table that this stage holds."""
        return {name: row for name, row in table.items() if self.owner[row.layer] == self.comm.rank}

    def attach(self, storage: ParameterStorage) -> None:
        """The storage of the parameters in :meth:`rows`, before anything runs."""
        self._tied: TiedFirst | TiedLast | None = None
        if self.config.tie_word_embeddings and self.first != self.last:
            if self.comm.rank == self.first:
                self._tied = TiedFirst(storage, self.comm, self.last)
            elif self.comm.rank == self.last:
                self._tied = TiedLast(storage, self.comm, self.first, self.device, self.plan)
        sink = Sink(self._tied or storage)
        self.executor = Executor(self.schedule, self.config, self.chunks, sink, self.comm, self.device, self.recompute)

    def run(self, batches: Sequence[MicroBatch]) -> float:
        """Forward and backward of all micro-batches by the schedule. Returns the sum of their token losses; collective."""
        return self._executed(self.executor.run, batches)

    def losses(self, batches: Sequence[MicroBatch]) -> float:
        """The sum of the token losses of all micro-batches, forward only; collective."""
        return self._executed(self.executor.losses, batches)

    def _executed(self, execute: Callable[..., float], batches: Sequence[MicroBatch]) -> float:
        """What the stage with the head has summed up, on every stage."""
        if self._tied is not None:
            self._tied.begin(len(batches))
        loss_sum = execute(batches, self._shape(batches))
        if self._tied is not None:
            self._tied.end()
        if self.comm.size == 1:
            return loss_sum
        return float(self.comm.broadcast(np.array([loss_sum], np.float64), root=self.last)[0])

    def _shape(self, batches: Sequence[MicroBatch]) -> tuple[int, int]:
        """Of an activation between stages, without its rows; tensor parallelism may keep it in shards of the sequence."""
        positions = range(batches[0].ids.shape[1])
        return len(positions[batches[0].context.tensor.part]), self.config.hidden_size

    def collect(self, mine: Mapping[str, np.ndarray], table: Rows) -> dict[str, np.ndarray]:
        """Whole arrays of all stages, in canonical order, from those of this stage's rows; collective.

        Args:
            mine: name -> array of the whole parameter's shape.
            table: the rows of all stages.
        """
        if self.comm.size == 1:
            return dict(mine)
        like = next(iter(mine.values()))
        found: dict[str, np.ndarray] = {}
        for stage in range(self.comm.size):
            names = [name for name, row in table.items() if self.owner[row.layer] == stage]
            flat: Any = np.concatenate([mine[name].reshape(-1) for name in names]) if stage == self.comm.rank else None
            flat = self.comm.broadcast(flat, root=stage)
            ends = np.cumsum([np.prod(table[name].shape, dtype=np.int64) for name in names])
            parts = np.split(flat.astype(like.dtype, copy=False), ends[:-1])
            found.update({name: part.reshape(table[name].shape) for name, part in zip(names, parts, strict=True)})
        return {name: found[name] for name in table}

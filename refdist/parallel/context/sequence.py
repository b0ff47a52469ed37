"""``Sequence``: what a plan's context parallelism means for one rank: its positions, and the attention that joins the ranks.

    cp = 8, cp_ulysses = 2          ring or all-gather between groups  ───────────────▶
                                    ranks 0 1 │ ranks 2 3 │ ranks 4 5 │ ranks 6 7
                                    all-to-all of heads within each

The rooms ``ring`` and ``all_gather`` are modules with a class ``Attention(comm, device, chunks)``; ``ulysses`` is one with
``Attention(comm, device, lengths, heads, kv_heads, inner)``; each makes a :class:`refdist.model.seams.SequenceAttention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from refdist.comm import Mesh
from refdist.device import Device
from refdist.errors import PlanError
from refdist.model.config import ModelConfig
from refdist.model.seams import LocalAttention, SequenceAttention
from refdist.parallel.context.chunks import Chunks, positions
from refdist.parallel.groups import part_of_axis
from refdist.parallel.plan import Plan

__all__ = ["Sequence", "check"]


def check(config: ModelConfig, plan: Plan) -> None:
    """Raise PlanError if the cp ranks cannot be arranged as the plan says, or heads cannot be dealt out to them."""
    if plan.cp % plan.cp_ulysses:
        raise PlanError(f"cp_ulysses={plan.cp_ulysses} does not divide cp={plan.cp}")
    ranks = exchanging(plan)
    if ranks == 1:
        return
    heads, kv_heads = local_heads(config, plan)
    here = f" on each of tp={plan.tp} ranks" if plan.tp > 1 else ""
    if heads % ranks:
        raise PlanError(f"{heads} attention heads{here} cannot be exchanged among {ranks} ranks (cp_method={plan.cp_method!r}, "
                        f"cp={plan.cp}, cp_ulysses={plan.cp_ulysses}): {ranks} does not divide {heads}")
    if kv_heads % ranks and ranks % kv_heads:
        raise PlanError(f"{kv_heads} KV heads{here} cannot be exchanged among {ranks} ranks: neither number divides the other, "
                        "and some rank's query heads would need parts of two groups")


def exchanging(plan: Plan) -> int:
    """Ranks that exchange heads."""
    return plan.cp if plan.cp_method == "ulysses" else plan.cp_ulysses


def local_heads(config: ModelConfig, plan: Plan) -> tuple[int, int]:
    """Query heads and KV heads of one tp rank."""
    return config.num_attention_heads // plan.tp, max(1, config.num_key_value_heads // plan.tp)


class Sequence:
    """The context-parallel group of one rank.

    Args:
        config, plan: of the run.
        mesh: its cp axis is the group.
        device: runs the kernels.
        rooms: the modules by name.
    """

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh, device: Device, rooms: Mapping[str, Any]) -> None:
        self.comm = mesh.axis("cp")
        self.device = device
        self.layout = plan.cp_layout
        self.method, self.ulysses = (rooms[name] for name in (plan.cp_method, "ulysses"))
        self.exchanging = exchanging(plan)
        self.heads = local_heads(config, plan)
        rank = self.comm.rank
        self.within = part_of_axis(mesh, "cp", rank // self.exchanging, self.exchanging)
        self.between = part_of_axis(mesh, "cp", rank % self.exchanging, self.comm.size // self.exchanging)

    def positions(self, length: int) -> np.ndarray:
        """This rank's positions of sequences of this length."""
        return self._all_positions(length)[self.comm.rank]

    def attention(self, length: int, segment_ids: np.ndarray | None = None) -> SequenceAttention:
        """Attention over whole sequences of this length, with their segments [rows, length] or None."""
        chunks = Chunks.of(self._all_positions(length), segment_ids)
        groups = chunks.grouped(self.exchanging)
        if self.between.size > 1:
            inner: SequenceAttention = self.method.Attention(self.between, self.device, groups)
        else:
            inner = LocalAttention(self.device, groups.mask(0))
        if self.within.size == 1:
            return inner
        first = self.between.rank * self.exchanging
        lengths = chunks.lengths[first:first + self.exchanging]
        return self.ulysses.Attention(self.within, self.device, lengths, *self.heads, inner)

    def _all_positions(self, length: int) -> tuple[np.ndarray, ...]:
        return positions(length, self.comm.size, self.layout, self.exchanging)

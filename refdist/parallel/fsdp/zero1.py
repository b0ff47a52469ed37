"""ZeRO 1: parameters and gradients are whole on every rank; each rank updates the rows that it owns.

    rank 0   G₀ ─┐                  ┌─▶ rows of rank 0 of ΣG ─▶ optimizer ─▶ new rows ─┐              ┌─▶ all new rows
    rank 1   G₁ ─┼─ reduce-scatter ─┼─▶ rows of rank 1 of ΣG ─▶ optimizer ─▶ new rows ─┼─ all-gather ─┼─▶ all new rows
    rank 2   G₂ ─┘                  └─▶ rows of rank 2 of ΣG ─▶ optimizer ─▶ new rows ─┘              └─▶ all new rows

An all-reduce is a reduce-scatter and an all-gather, so this sends as much as data parallelism, and the optimizer's state is a
part of it only (Rajbhandari et al. 2020, section 5.1). In the last micro-batch a layer's reduce-scatter starts when its backward
is done, and travels while the layers before it compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from refdist.comm import Mesh
from refdist.comm.reduction import bounds
from refdist.comm.work import Work
from refdist.device import Device
from refdist.model.layout import EMBEDDING, ParameterLayout
from refdist.numerics.rounding import store
from refdist.ops import add
from refdist.parallel.fsdp.units import gather_rows, reduce_scatter_rows
from refdist.parallel.plan import Plan
from refdist.parallel.stage import Piece
from refdist.parallel.storage import BaseStorage, pieces_of

__all__ = ["Scattering", "Storage"]


class Scattering(NamedTuple):
    """A piece's reduce-scatter that is under way: of which parameters, where this rank's rows come, by which Works."""

    names: list[str]
    rows: list[np.ndarray]
    works: list[Work]


class Storage(BaseStorage):
    """Parameters and gradients of one rank; the interface is that of :class:`refdist.parallel.data.Storage`.

    Attributes:
        parameters: name -> the whole array that kernels read.
        gradients: name -> this rank's rows of the gradient; complete after :meth:`reduce`.
        group: the ranks that share parameters; rank r owns rows ``offsets[name][r]`` to ``offsets[name][r + 1]``.
        replicas: the ranks of the other groups that own the same rows.
    """

    def __init__(self, rows: Mapping[str, ParameterLayout], params: Mapping[str, np.ndarray], dtype: np.dtype, mesh: Mesh,
                 device: Device, plan: Plan) -> None:
        self.group = mesh.axis("fsdp")
        self.offsets = {name: bounds(row.shape[0], self.group.size) for name, row in rows.items()}
        self._scattering: deque[Scattering] = deque()
        self._earlier = 0  # of these, how many were started up to the piece before
        self._reducing: list[tuple[str, Work]] = []
        super().__init__(rows, params, dtype, mesh, device, plan)

    def own(self, name: str) -> slice:
        """The rows of a parameter that this rank owns."""
        rank = self.group.rank
        return slice(self.offsets[name][rank], self.offsets[name][rank + 1])

    def done(self, piece: Piece) -> None:
        """After a piece's last micro-batch the reduce-scatter of its gradients starts, and that of the piece before it ends."""
        self._remaining[piece] -= 1
        if self._remaining[piece]:
            return
        if self._head is not None and piece == "embed":
            add(self._sums[EMBEDDING], self._head)
            self._head = None
        names = self.names(piece)
        self._start_scatter(piece, {name: self._sums[name] for name in names}, [self.gradients[name] for name in names])
        self._collect_earlier()

    def _start_scatter(self, piece: Piece, gradients: Mapping[str, np.ndarray], sums: Iterable[np.ndarray]) -> None:
        """Sums of a piece's gradients over the group begin; this rank's rows come in ``sums``, if these have the right format."""
        wholes = [self._travelling(gradient) for gradient in gradients.values()]
        rows = [out if out.dtype == self.reduction else self.device.empty(out, None, "communication", self.reduction)
                for out in sums]
        if self.plan.order is None:
            steps = reduce_scatter_rows(self.group, wholes, rows, [self.offsets[name] for name in gradients])
            works = [self.group.start_steps(steps, f"reduce-scatter of {piece}")]
        else:
            works = [self.group.start("reduce_scatter", whole, out=out, label=f"reduce-scatter of {name}", **self._sum)
                     for name, whole, out in zip(gradients, wholes, rows, strict=True)]
        self._scattering.append(Scattering(list(gradients), rows, works))

    def _collect_earlier(self) -> None:
        """Wait for what was started up to the piece before this one, and has had the time of this one's backward."""
        for _ in range(self._earlier):  # never when it happens to end: all ranks keep one order
            self._collect()
        self._earlier = len(self._scattering)

    def _collect(self) -> None:
        """The oldest reduce-scatter ends."""
        names, rows, works = self._scattering.popleft()
        for work in works:
            work.wait()
        for name, summed in zip(names, rows, strict=True):
            self._take(name, summed)

    def _take(self, name: str, summed: np.ndarray) -> None:
        """Rows that have been summed over the group; their sum over the replicas begins."""
        if summed.dtype != self.accumulation:
            store(summed, self.gradients[name])
        self._reduce_over_replicas(name)

    def _reduce_over_replicas(self, name: str) -> None:
        if self.replicas.size == 1:
            return
        shard = self._travelling(self.gradients[name])
        work = self.replicas.start("all_reduce", shard, out=shard, label=f"all-reduce of {name}", **self._sum)
        self._reducing.append((name, work))

    def reduce(self) -> None:
        """Wait until this rank's rows have been summed over all ranks: called once, after the last micro-batch."""
        self.require_complete()
        while self._scattering:
            self._collect()
        self._earlier = 0
        for name, work in self._reducing:
            total = work.wait()
            if total.dtype != self.accumulation:
                store(total, self.gradients[name])
        self._reducing.clear()

    def updated(self) -> None:
        """Every rank has updated its rows: gather all of them."""
        super().updated()
        works = []
        for piece in pieces_of(self.rows):
            wholes = {name: self.parameters[name] for name in self.names(piece)}
            works.append(self._start_gather(f"gather of {piece}", wholes, {name: self.shard(name) for name in wholes}))
        for work in works:
            work.wait()

    def gather(self, shards: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Whole arrays from arrays that are laid out like those of :meth:`owned`, such as optimizer state; collective."""
        wholes = {name: np.empty_like(shard, shape=self.rows[name].shape) for name, shard in shards.items()}
        for piece in pieces_of(self.rows):
            of_piece = {name: wholes[name] for name in self.names(piece)}
            self._start_gather(f"gather of {piece}", of_piece, shards).wait()
        return wholes

    def names(self, piece: Piece) -> list[str]:
        """The parameters of a piece."""
        return [name for name, row in self.rows.items() if row.layer == piece]

    def _start_gather(self, label: str, wholes: Mapping[str, np.ndarray], shards: Mapping[str, np.ndarray]) -> Work:
        """Fill whole arrays with all ranks' rows; ``shards`` has this rank's."""
        steps = gather_rows(self.group, [shards[name] for name in wholes], list(wholes.values()),
                            [self.offsets[name] for name in wholes])
        return self.group.start_steps(steps, label)

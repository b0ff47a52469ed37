"""ZeRO 3, or FSDP: as ZeRO 2, but a rank keeps its own rows of the parameters only.

A layer's parameters are gathered just before use and dropped after it, in forward and again in backward. With prefetch the next
layer's gather is under way while this one computes, so that two layers are gathered at once, otherwise one:

    forward      ▇ embed ▇ layer 0 ▇ layer 1 ▇ …                     ▇ head ▇ layer 1 ▇ layer 0 ▇ embed    backward
    network    ░░ embed ░░ layer 0 ░░ layer 1 ░░ …               ░░ head ░░ layer 1 ░░ layer 0             gathers
                                                                        ░░ head ░░ layer 1 ░░ layer 0 …    reduce-scatters

(Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, sections 3.3 and 4.1.) The embedding's backward needs no parameters, and
the head's backward follows its forward at once, so each of the two is gathered once a micro-batch. Llama 3 keeps parameters
after forward (Llama team 2024, section 3.3.2): ``reshard_after_forward=False``; then they are dropped after the micro-batch's
backward, or, with ``reshard_after_backward=False`` too, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from refdist.comm.work import Work
from refdist.model.layout import EMBEDDING
from refdist.parallel.fsdp import zero2
from refdist.parallel.stage import Piece
from refdist.parallel.storage import BaseStorage

__all__ = ["Storage"]


class Storage(zero2.Storage):
    """Everything by rows. ``parameters`` has the own rows; ``gathered`` the whole arrays that are here just now."""

    def _make_parameters(self, params: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
        self.parameters = self._copies({name: params[name][self.own(name)] for name in self.rows}, "parameter", dtype)
        self.gathered: dict[str, np.ndarray] = {}
        self._gathering: dict[str, Work] = {}
        tied = EMBEDDING in self.rows and self.names("head") and len(self.names("head")) == 1
        self._head_needs = [EMBEDDING] if tied else []

    def weights(self, piece: Piece) -> Mapping[str, np.ndarray]:
        """The piece's parameters, gathered. What is dropped disappears from this mapping."""
        self._fetch(piece)
        for name in self._needs(piece):
            work = self._gathering.pop(name, None)
            if work is not None:
                work.wait()
        return self.gathered

    def expect(self, piece: Piece) -> None:
        """Start to gather the piece that will be used next."""
        if self.plan.prefetch:
            self._fetch(piece)

    def _fetch(self, piece: Piece) -> None:
        missing = [name for name in self._needs(piece) if name not in self.gathered]
        if missing:
            wholes = {name: self.device.empty(self.parameters[name], self.rows[name].shape, "gathered") for name in missing}
            work = self._start_gather(f"gather of {piece}", wholes, self.parameters)
            self.gathered.update(wholes)
            self._gathering.update(dict.fromkeys(missing, work))

    def _needs(self, piece: Piece) -> list[str]:
        names = self.names(piece)
        return names + self._head_needs if piece == "head" else names

    def drop(self, piece: Piece) -> None:
        """After forward or backward of the piece."""
        if self.plan.reshard_after_forward:
            self._forget(self._needs(piece))

    def done(self, piece: Piece) -> None:
        """After its backward."""
        super().done(piece)
        if self.plan.reshard_after_backward and not self.plan.reshard_after_forward:
            self._forget(self.names(piece))

    def _forget(self, names: list[str]) -> None:
        for name in names:
            if name not in self._gathering:  # one that is under way is for whoever asked for it meanwhile
                self.gathered.pop(name, None)

    def shard(self, name: str) -> np.ndarray:
        """All that is here."""
        return self.parameters[name]

    def updated(self) -> None:
        """What was gathered is out of date."""
        BaseStorage.updated(self)
        self._forget(list(self.gathered))

    def full_parameters(self) -> dict[str, np.ndarray]:
        """Copies of all parameters, whole; the master weights where there are some; collective."""
        return self.gather(self.masters or self.parameters)

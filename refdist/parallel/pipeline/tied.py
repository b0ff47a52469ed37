"""A tied matrix on two stages: the first embeds with it and owns it, the last multiplies with a copy.

    begin of a step   first ── the matrix ──▶ last         (updated by the first stage's optimizer only)
    micro-batches     first: E = Σ embedding gradients     last: H = Σ gradients of the copy's use
    before reduction  first ◀── H ── last                  E + H is one gradient, reduced once over data-parallel ranks

The first stage's storage gets H as it would get the head's gradient on a single rank: before the embedding's last one, and so
before any reduction that it starts. The last stage's storage knows nothing of the matrix: nothing there reduces it, counts it in
the norm, updates it or saves it. Megatron-LM keeps the matrix on both stages instead and all-reduces its gradient between them:
each of the two sends as much at the end of a step. Here the one sends at its beginning and the other one at its end.

Both classes stand around a storage of parameters and have its methods (``parallel/stage.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refdist.comm import Comm
from refdist.comm.work import Work
from refdist.device import Device
from refdist.model.layout import EMBEDDING, HEAD
from refdist.ops import add
from refdist.parallel.plan import Plan
from refdist.parallel.stage import ParameterStorage, Piece
from refdist.parallel.storage import in_sum_dtype

__all__ = ["TiedFirst", "TiedLast"]

_MATRIX, _GRADIENT = 0, 1  # tags; those of the executor's messages come after them


class TiedFirst:
    """The storage of the first stage.

    Args:
        storage: of this stage's parameters, the matrix among them.
        comm: the pipeline's ranks.
        last: the rank that has the head.
    """

    def __init__(self, storage: ParameterStorage, comm: Comm, last: int) -> None:
        self.storage = storage
        self.comm = comm
        self.last = last
        self.weights, self.expect, self.drop, self.done = storage.weights, storage.expect, storage.drop, storage.done
        self._sending: Work | None = None

    def begin(self, micro_batches: int) -> None:
        """Send the matrix; so many of its gradients will follow."""
        self._coming = micro_batches
        self._sending = self.comm.isend(self.storage.weights("embed")[EMBEDDING], self.last, _MATRIX)
        self.storage.drop("embed")

    def add(self, name: str, kernel: Callable[..., Any], *args: Any) -> None:
        """As the storage's; the head's gradient comes before the last one of the embedding."""
        if name == EMBEDDING:
            self._coming -= 1
            if self._coming == 0:
                self.storage.add(HEAD, _received, self.comm, self.last)
        self.storage.add(name, kernel, *args)

    def end(self) -> None:
        """Wait until the matrix has been sent: the optimizer may change it now."""
        assert self._sending is not None
        self._sending.wait()


class TiedLast:
    """The storage of the last stage.

    Args:
        storage: of this stage's own parameters.
        comm: the pipeline's ranks.
        first: the rank that owns the matrix.
        device: holds the copy and the gradient.
        plan: ``accumulate_dtype`` and ``reduce_dtype`` are looked at.
    """

    def __init__(self, storage: ParameterStorage, comm: Comm, first: int, device: Device, plan: Plan) -> None:
        self.storage = storage
        self.comm = comm
        self.first = first
        self.device = device
        self.plan = plan
        self.expect, self.drop = storage.expect, storage.drop
        self._copy: np.ndarray | None = None
        self._gradient: np.ndarray | None = None
        self._sending: Work | None = None

    def begin(self, micro_batches: int) -> None:
        """Receive the matrix; it is used by so many micro-batches."""
        self._copy = self.device.copy(self.comm.recv(self.first, _MATRIX), "gathered")
        self._coming = micro_batches

    def weights(self, piece: Piece) -> Mapping[str, np.ndarray]:
        """As the storage's; with the copy for the head."""
        weights = self.storage.weights(piece)
        if piece != "head":
            return weights
        assert self._copy is not None
        return {**weights, EMBEDDING: self._copy}

    def add(self, name: str, kernel: Callable[..., Any], *args: Any) -> None:
        """As the storage's; the gradient of the copy's use is summed here."""
        if name != HEAD:
            self.storage.add(name, kernel, *args)
            return
        gradient = self.device.call(kernel, *args, category="gradient")
        if self._gradient is None:
            self._gradient = in_sum_dtype(gradient, self.plan, self.device)
        else:
            add(self._gradient, gradient)

    def done(self, piece: Piece) -> None:
        """As the storage's; after the last micro-batch the gradient of the copy's use is sent."""
        if piece == "head":
            self._coming -= 1
            if self._coming == 0:
                assert self._gradient is not None
                self._sending = self.comm.isend(self._gradient, self.first, _GRADIENT)
                self._gradient = None
        self.storage.done(piece)

    def end(self) -> None:
        """The copy is given up: the next step's matrix is another one."""
        self._copy = None
        if self._sending is not None:
            self._sending.wait()
            self._sending = None


def _received(comm: Comm, source: int) -> np.ndarray:
    """The sum of the head's gradients of all micro-batches."""
    return comm.recv(source, _GRADIENT)

"""Data parallelism: every rank holds all parameters and trains on its part of the batch; gradients are summed.

    rank 0   batch rows 0…   ─▶ forward, backward of each micro-batch ─▶ G₀ ─┐
    rank 1   next rows …     ─▶              …                        ─▶ G₁ ─┼─▶ all-reduce (sum) ─▶ G₀ + G₁ + …  on every rank
    rank 2   …                                                        ─▶ G₂ ─┘

The loss of each rank is divided by the number of valid tokens in the *global* batch before backward starts, so that the sum is
the gradient of the global mean, and nothing is divided by a number of ranks or of micro-batches.

Gradients of all parameters lie in one flat array, cut into buckets of whole layers. Backward goes from the last layer to the
first; in the last micro-batch a bucket's all-reduce starts when its layers are done, and travels while earlier layers still
compute (Li et al. 2020, "PyTorch Distributed", sections 3.2.2 and 3.2.3):

    compute   ▇ head ▇ layer 3 ▇ layer 2 ▇ layer 1 ▇ layer 0 ▇ embed
    network                    ░░ 3, head ░░       ░░ 1, 2 ░░      ░░ embed, 0 ░░

A room of parameter storage is a module with a class (or a function) ``Storage`` of this interface, most of which is in
``storage.py``; ``implementations={"data": module}`` puts another one in this one's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from refdist.comm.work import Work
from refdist.model.layout import EMBEDDING, ParameterLayout
from refdist.numerics.rounding import store
from refdist.ops import add
from refdist.parallel.stage import Piece
from refdist.parallel.storage import BaseStorage, pieces_of

__all__ = ["Storage"]


class Storage(BaseStorage):
    """Parameters and gradients of one rank under replicated data parallelism.

    Args:
        rows: the layout table of what this rank holds, in canonical order, with shapes as this rank has them.
        params: name -> array; copied onto the device in ``dtype``.
        dtype: of parameters.
        mesh: gradients are summed over its dp and cp axes.
        device: whose memory holds them.
        plan: ``bucket_bytes``, ``order``, ``accumulate_dtype``, ``reduce_dtype`` and ``master_weights`` are looked at.

    Attributes:
        parameters: name -> the array that the model's kernels read.
        gradients: name -> a view of the flat gradient array; complete after :meth:`reduce`.
        replicas: the ranks that hold the same parameters as this one.
    """

    def _make_gradients(self) -> None:
        flat, self.gradients = self._lay_out(self.parameters, "gradient", self.accumulation)
        self._sums = self.gradients
        self._buckets = _cut_into_buckets(self.rows, flat, self.plan.bucket_bytes)

    def done(self, piece: Piece) -> None:
        """After a bucket's last piece of the last micro-batch its all-reduce starts; it is progressed after each kernel."""
        self._remaining[piece] -= 1
        bucket = next(bucket for bucket in self._buckets if piece in bucket.pieces)
        if any(self._remaining[other] for other in bucket.pieces):
            return
        if self._head is not None and "embed" in bucket.pieces:
            add(self.gradients[EMBEDDING], self._head)
            self._head = None
        if self.replicas.size == 1:
            return
        label = f"all-reduce of {', '.join(map(str, bucket.pieces))}"
        sent = self._travelling(bucket.flat)
        bucket.work = self.replicas.start("all_reduce", sent, out=sent, label=label, **self._sum)

    def reduce(self) -> None:
        """Wait until the gradients have been summed over the ranks: called once, after the last micro-batch."""
        self.require_complete()
        for bucket in self._buckets:
            if bucket.work is None:  # there are no other ranks
                continue
            total = bucket.work.wait()
            if total.dtype != bucket.flat.dtype:
                store(total, bucket.flat)
            bucket.work = None


@dataclass
class _Bucket:
    """Consecutive pieces whose gradients are reduced together."""

    pieces: list[Piece]
    flat: np.ndarray
    work: Work | None = None


def _cut_into_buckets(rows: Mapping[str, ParameterLayout], flat: np.ndarray, least: int) -> list[_Bucket]:
    """Buckets in backward order: pieces are joined until they have ``least`` bytes."""
    sizes = {piece: sum(int(np.prod(row.shape)) for row in rows.values() if row.layer == piece) for piece in pieces_of(rows)}
    buckets: list[_Bucket] = []
    start = end = flat.size
    pieces: list[Piece] = []
    for piece in reversed(sizes):
        pieces.append(piece)
        start -= sizes[piece]
        if (end - start) * flat.itemsize >= least or start == 0:
            buckets.append(_Bucket(pieces, flat[start:end]))
            pieces, end = [], start
    return buckets

"""``Stage``: a run of consecutive pieces of the model on one rank, forward and backward of one micro-batch at a time.

    pieces      "embed"   0   1   …   L-1   "head"        (a pipeline stage holds some of them, a rank without a pipeline all)
    forward        ─▶     ─▶  ─▶      ─▶      ─▶ Σ loss
    backward       ◀─     ◀─  ◀─      ◀─      ◀─

Around each piece stands the storage of parameters: ``storage.weights(piece)`` just before use, ``storage.expect(next piece)``,
``storage.drop(piece)`` after use, ``storage.done(piece)`` when the piece's weight gradients of this micro-batch have all been
added. Replicated storage starts reductions there; sharded storage gathers, prefetches, frees and reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from refdist.model.config import ModelConfig
from refdist.model.recompute import Recompute, restore
from refdist.model.transformer import (
    Context,
    GradientSink,
    Weights,
    block_backward,
    block_forward,
    embed_backward,
    embed_forward,
    head_forward_backward,
    head_losses,
)

__all__ = ["MicroBatch", "ParameterStorage", "Piece", "Stage", "all_pieces"]

Piece: TypeAlias = int | str  # the number of a layer, "embed" or "head": the ``layer`` column of the layout table


def all_pieces(config: ModelConfig) -> list[Piece]:
    """The pieces of a whole model, in forward order."""
    return ["embed", *range(config.num_hidden_layers), "head"]


class ParameterStorage(GradientSink, Protocol):
    """What a stage needs of the room that keeps parameters and gradients."""

    def weights(self, piece: Piece) -> Weights:
        """The piece's parameters by name, ready to be multiplied with; called before each use in forward or backward."""

    def expect(self, piece: Piece) -> None:
        """This piece's :meth:`weights` will be asked for next: its parameters may be fetched meanwhile."""

    def drop(self, piece: Piece) -> None:
        """The piece's parameters are not needed until the next :meth:`weights`."""

    def done(self, piece: Piece) -> None:
        """All weight gradients of the piece for one micro-batch have been added."""


@dataclass
class MicroBatch:
    """One micro-batch on one rank.

    Attributes:
        ids, labels: integers [rows, seq], this rank's part.
        context: rotary tables and masks for this rank's positions.
        scale: the gradient is that of ``scale`` times the sum of token losses.
        loss_sum: the sum of token losses, once the head has run here.
        saved: what backward needs, piece by piece; a stack.
    """

    ids: np.ndarray
    labels: np.ndarray
    context: Context
    scale: float
    loss_sum: float = 0.0
    saved: list[Any] = field(default_factory=list)


class Stage:
    """Some consecutive pieces of the model.

    Args:
        config: of the whole model.
        pieces: in forward order.
        storage: of their parameters and gradients.
        recompute: what of a block's activations is kept until backward; everything if None.
    """

    def __init__(self, config: ModelConfig, pieces: Sequence[Piece], storage: ParameterStorage,
                 recompute: Recompute | None = None) -> None:
        self.config = config
        self.pieces = pieces
        self.storage = storage
        self.recompute = Recompute() if recompute is None else recompute
        self._first_layer = next((piece for piece in pieces if isinstance(piece, int)), 0)
        self._next = dict(pairwise(pieces))  # piece -> whose parameters are needed after its forward …
        self._next_back = {piece: before for before, piece in self._next.items() if isinstance(before, int)}  # … and backward

    def forward(self, batch: MicroBatch, x: np.ndarray | None = None) -> np.ndarray | None:
        """Forward of one micro-batch.

        Args:
            batch: what backward needs is pushed onto its ``saved``.
            x: what the stage before returned, [rows, seq, hidden]; None if this one begins with the embedding.

        Returns:
            [rows, seq, hidden] for the next stage; None if this one ends with the head, whose backward has then been done
            as well, so that logits never outlive their chunk.
        """
        for piece in self.pieces:
            weights = self._weights(piece, self._next if piece != "head" else self._next_back)
            if piece == "embed":
                x = embed_forward(weights, batch.ids, batch.context)
            elif isinstance(piece, int):
                assert x is not None
                x, saved = block_forward(self.config, weights, piece, x, batch.context)
                batch.saved.append(self.recompute.kept(saved, piece - self._first_layer))
                del saved
            else:
                assert x is not None
                batch.loss_sum, dx = head_forward_backward(self.config, weights, x, batch.labels, batch.scale, self.storage,
                                                           batch.context)
                batch.saved.append(dx)
                x = None
                self.storage.done(piece)
            self.storage.drop(piece)
        return x

    def backward(self, batch: MicroBatch, dy: np.ndarray | None = None) -> np.ndarray | None:
        """Backward of one micro-batch; its weight gradients go to the storage.

        Args:
            dy: the gradient of what :meth:`forward` returned, [rows, seq, hidden]; None if it returned None.

        Returns:
            The gradient of ``x``, or None if the stage begins with the embedding.
        """
        for piece in reversed(self.pieces):
            if piece == "head":
                dy = batch.saved.pop()
                continue
            assert dy is not None
            if piece == "embed":
                embed_backward(self.config, dy, batch.ids, self.storage, batch.context)
                dy = None
            else:
                assert isinstance(piece, int)
                weights = self._weights(piece, self._next_back)
                restore(batch.saved, self.config, piece, self.storage.weights, self.storage.drop, batch.context)
                dy = block_backward(self.config, weights, piece, dy, batch.saved.pop(), self.storage, batch.context)
                self.storage.drop(piece)
            self.storage.done(piece)
        return dy

    def losses(self, batch: MicroBatch, x: np.ndarray | None = None) -> np.ndarray | None:
        """Forward only: as :meth:`forward`, but nothing is saved, and a stage that ends with the head returns token losses."""
        for piece in self.pieces:
            weights = self._weights(piece, self._next)
            if piece == "embed":
                x = embed_forward(weights, batch.ids, batch.context)
            elif isinstance(piece, int):
                assert x is not None
                x, _ = block_forward(self.config, weights, piece, x, batch.context)
            else:
                assert x is not None
                x = head_losses(self.config, weights, x, batch.labels, batch.context)
            self.storage.drop(piece)
        return x

    def _weights(self, piece: Piece, following: Mapping[Piece, Piece]) -> Weights:
        """The piece's parameters; those of the piece that follows it are fetched while it computes."""
        weights = self.storage.weights(piece)
        if piece in following:
            self.storage.expect(following[piece])
        return weights

"""A rank that holds the whole model, without a strategy: the pieces of ``refdist.model.transformer`` in their plain order."""

from __future__ import annotations

from typing import Any

import numpy as np

from refdist import ops
from refdist.device import Device
from refdist.model import ModelConfig
from refdist.model.layout import EMBEDDING, HEAD
from refdist.model.transformer import (
    Context,
    GradientSink,
    Weights,
    block_backward,
    block_forward,
    embed_backward,
    embed_forward,
    head_forward_backward,
)


class GradientSum:
    """The plain sink: runs each kernel at once and adds micro-batches up, in the order in which they come.

    Attributes:
        sums: name -> gradient, in the device's category "gradient".
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.sums: dict[str, np.ndarray] = {}

    def add(self, name: str, kernel: Any, *args: Any) -> None:
        grad = self.device.call(kernel, *args, category="gradient")
        if name in self.sums:
            self.device.call(ops.add, self.sums[name], grad)
        else:
            self.sums[name] = grad


def combine_tied(config: ModelConfig, sums: dict[str, np.ndarray]) -> None:
    """Add the head's use of a tied matrix to the embedding's, once all micro-batches of a rank are in each."""
    if config.tie_word_embeddings:
        ops.add(sums[EMBEDDING], sums.pop(HEAD))


def micro_batch(
    config: ModelConfig,
    weights: Weights,
    ids: np.ndarray,
    labels: np.ndarray,
    scale: float,
    gradients: GradientSink,
    context: Context,
) -> float:
    """All pieces in order, forward and backward, for a rank that holds the whole model.

    Args:
        ids, labels: integers [rows, seq], checked by the caller.
        scale: the gradient is that of scale · Σ token losses: 1 / global count of labels, times a loss scale if any.

    Returns:
        Σ token losses of these rows.
    """
    x = embed_forward(weights, ids, context)
    saved = []
    for layer in range(config.num_hidden_layers):
        x, kept = block_forward(config, weights, layer, x, context)
        saved.append(kept)
    loss_sum, dx = head_forward_backward(config, weights, x, labels, scale, gradients, context)
    del x
    for layer in reversed(range(config.num_hidden_layers)):
        dx = block_backward(config, weights, layer, dx, saved.pop(), gradients, context)
    embed_backward(config, dx, ids, gradients, context)
    return loss_sum

"""Activation recomputation: what of a block's saved activations is kept until backward, and how the rest is made again.

    none        all of it
    selective   all but the output and log-sum-exp of the attention, which backward computes again from q, k, v
                (Korthikanti et al. 2022, section 5: much memory, few FLOPs)
    full        only the input of each group of `blocks` blocks; backward runs the group forward once more
                (Chen et al. 2016)

One seam serves every strategy. A stage pushes what `Recompute.kept` leaves of each block's saved activations onto its stack,

    y, saved = block_forward(…);  stack.append(recompute.kept(saved, number of the block in its chunk))

and before each block's backward has the top of the stack made whole:

    restore(stack, config, layer, weights, drop, context);  dx = block_backward(…, stack.pop(), …)

What is computed again runs the same kernels on the same numbers, dropout included, so that gradients are the same bits. Its
FLOPs count as executed, not as the model's: for `full` one more forward, 4/3 of the matmul work of forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from .config import ModelConfig
from .transformer import BlockSaved, Context, Weights, attention_again, block_forward

__all__ = ["MODES", "Checkpoint", "Recompute", "restore"]

MODES = ("none", "selective", "full")


class Checkpoint(NamedTuple):
    """What `full` keeps of a block."""

    x: np.ndarray | None  # the block's input [rows, seq, hidden]; None if the block is not the first of its group


class Recompute:
    """How much is kept.

    Args:
        mode: "none", "selective" or "full".
        blocks: for "full", how many consecutive blocks of a chunk share one kept input.
    """

    def __init__(self, mode: str = "none", blocks: int = 1) -> None:
        if mode not in MODES:
            raise ConfigError(f"recompute={mode!r}: expected one of {', '.join(MODES)}")
        if blocks < 1:
            raise ConfigError(f"recompute has blocks={blocks}: expected at least 1")
        self.mode, self.blocks = mode, blocks

    def kept(self, saved: BlockSaved, number: int) -> BlockSaved | Checkpoint:
        """What stays of the saved activations of block `number` of a stage's chunk (from 0) until backward."""
        if self.mode == "selective":
            return saved._replace(attention=saved.attention._replace(out=None, lse=None), attended=None)
        if self.mode == "full":
            return Checkpoint(saved.x if number % self.blocks == 0 else None)
        return saved


def restore(
    stack: list[Any],
    config: ModelConfig,
    layer: int,
    weights: Callable[[int], Weights],
    drop: Callable[[int], None],
    context: Context,
) -> None:
    """Make the top of a stage's stack whole again: what block_forward saved for `layer`.

    Args:
        stack: its entries are those of `Recompute.kept`, one a block, that of `layer` on top.
        weights: gives the parameters of a layer, just before they are used.
        drop: told when the parameters of a layer other than `layer` are not needed for now.
    """
    top = stack[-1]
    if isinstance(top, Checkpoint):
        first = len(stack) - 1
        while stack[first].x is None:
            first -= 1
        x = stack[first].x
        with context.device.recomputing():
            for place in range(first, len(stack)):
                number = layer - (len(stack) - 1 - place)
                x, stack[place] = block_forward(config, weights(number), number, x, context)
                if number != layer:
                    drop(number)
    elif top.attended is None:
        with context.device.recomputing():
            attended, attention = attention_again(layer, top.attention, context)
        stack[-1] = top._replace(attended=attended, attention=attention)

"""Which elements dropout keeps: functions of (seed, layer, what, index of the element in the whole array).

    attention weights    [batch, heads, queries, keys]    after the softmax                  attention_dropout
    branch outputs       [batch, seq, hidden]             of attention and MLP, before they
                                                          join the residual stream           hidden_dropout

Any rank draws the masks of the elements that it holds, whatever rows, positions and heads these are; nothing is saved, the
backward pass and recomputation draw the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..numerics.random import keep_mask, stream
from .config import ModelConfig

__all__ = ["Dropout"]


@dataclass(frozen=True)
class Dropout:
    """The masks of one micro-batch on one rank.

    Attributes:
        config: its attention_dropout and hidden_dropout; either may be 0.
        seed: a new one for each step.
        rows: the rows of the global batch that the micro-batch holds, integers [rows].
        seq: length of the whole sequence.
        positions: those of the residual stream on this rank, integers [seq on this rank].
        first_head: the number of the first of this rank's query heads among all.
    """

    config: ModelConfig
    seed: int
    rows: np.ndarray
    seq: int
    positions: np.ndarray
    first_head: int = 0

    def branch(self, layer: int, name: str) -> np.ndarray:
        """bool [rows, seq on this rank, hidden] for the output of the branch "attention" or "mlp"."""
        hidden = self.config.hidden_size
        box = (self.rows, self.positions, slice(0, hidden))
        shape = (int(self.rows.max(initial=0)) + 1, self.seq, hidden)
        return keep_mask(stream(self.seed, "dropout", layer, name), shape, box, self.config.hidden_dropout)

    def attention(
        self, layer: int
    ) -> Callable[[np.ndarray, np.ndarray, int], Callable[[slice, slice, slice, slice], np.ndarray]] | None:
        """For `ops.attention`: from the positions of its queries and keys, and the number of the first head that it is given
        among this rank's, to the function that gives the factors of a tile. None where nothing is dropped.
        """
        probability = self.config.attention_dropout
        if not probability:
            return None
        shape = (int(self.rows.max(initial=0)) + 1, self.config.num_attention_heads, self.seq, self.seq)
        identity = stream(self.seed, "dropout", layer, "weights")

        def of_chunks(q_positions: np.ndarray, k_positions: np.ndarray, head: int) -> Callable[..., np.ndarray]:
            heads_here = np.arange(self.first_head + head, self.config.num_attention_heads)

            def factors(rows: slice, heads: slice, queries: slice, keys: slice) -> np.ndarray:
                box = (self.rows[rows], heads_here[heads], q_positions[queries], k_positions[keys])
                return keep_mask(identity, shape, box, probability) / (1 - probability)

            return factors

        return of_chunks

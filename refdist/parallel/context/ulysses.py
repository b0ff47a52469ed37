"""Ulysses: from a part of the sequence with all heads to all of the sequence with a part of the heads, and back (Jacobs et al.
2023, "DeepSpeed Ulysses", section 3.1).

                        all-to-all                                       all-to-all
    rank 0   q₀ h₀ h₁ h₂ h₃  ─╲╱─▶  h₀ of all positions ─▶ attention ─╲╱─▶  out₀ of all heads
    rank 1   q₁ h₀ h₁ h₂ h₃  ─╱╲─▶  h₁ of all positions ─▶ attention ─╱╲─▶  out₁ of all heads

Heads do not meet in attention, so each rank attends as on a single device. q, k, v go there, out comes back: four all-to-alls,
and as many in backward, each its own transpose. A query head needs its group's KV head: where there are fewer KV heads than
ranks, the same KV head goes to several ranks, once to each, and the gradients that come back from them are summed.

The attention in the middle may itself be spread over ranks: a ring of groups, each of which exchanges heads within (Fang & Zhao
2024, "USP", section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from refdist import ops
from refdist.comm import Comm
from refdist.device import Device
from refdist.model.seams import AttentionSaved, DropoutFor, SequenceAttention
from refdist.parallel.context.exchange import exchange

__all__ = ["Attention"]


class Attention:
    """Attention over a sequence of which a group of ranks holds some positions together.

    Args:
        comm: the group.
        device: counts the memory of what is exchanged.
        lengths: positions of each rank of the group.
        heads, kv_heads: of q, and of k and v, on each rank.
        inner: attention for all of the group's positions, rank after rank, and a part of the heads.
    """

    def __init__(self, comm: Comm, device: Device, lengths: Sequence[int], heads: int, kv_heads: int,
                 inner: SequenceAttention) -> None:
        self.comm = comm
        self.device = device
        self.lengths = lengths
        self.inner = inner
        share, group = heads // comm.size, heads // kv_heads
        self.heads = [slice(rank * share, (rank + 1) * share) for rank in range(comm.size)]  # of each rank
        self.kv_heads = [slice(part.start // group, -(-part.stop // group)) for part in self.heads]
        self.all_kv_heads = kv_heads

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """See :class:`refdist.model.seams.SequenceAttention`; what is saved has all positions and a part of the heads."""
        parts = self._to_heads(q, self.heads), self._to_heads(k, self.kv_heads), self._to_heads(v, self.kv_heads)
        out, saved = self.inner.forward(*parts, self._shifted(dropout))
        return self._to_positions(out), saved

    def again(self, saved: AttentionSaved, dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        out, saved = self.inner.again(saved, self._shifted(dropout))
        return self._to_positions(out), saved

    def backward(self, dout: np.ndarray, saved: AttentionSaved,
                 dropout: DropoutFor | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        dq, dk, dv = self.inner.backward(self._to_heads(dout, self.heads), saved, self._shifted(dropout))
        return self._to_positions(dq), self._sum_at_positions(dk), self._sum_at_positions(dv)

    def _to_heads(self, x: np.ndarray, heads: Sequence[slice]) -> np.ndarray:
        """x [rows, seq of this rank, all heads, head_dim] -> [rows, seq of the group, heads of this rank, head_dim]."""
        blocks = [x[:, :, part] for part in heads]
        return self._joined(exchange(self.comm, self.device, "all_to_all", blocks, self.lengths), axis=1)

    def _to_positions(self, x: np.ndarray) -> np.ndarray:
        """x [rows, seq of the group, heads of this rank, head_dim] -> [rows, seq of this rank, all heads, head_dim]."""
        return self._joined(self._back(x), axis=2)

    def _sum_at_positions(self, dx: np.ndarray) -> np.ndarray:
        """The adjoint of ``_to_heads`` for KV heads: one that went to several ranks gets the sum, in float32 or wider, of what
        they send."""
        blocks = self._back(dx)
        shape = dx.shape[0], self.lengths[self.comm.rank], self.all_kv_heads, dx.shape[3]
        whole = self.device.zeros(dx, shape, dtype=ops.accumulation_dtype(dx))
        for heads, block in zip(self.kv_heads, blocks, strict=True):
            whole[:, :, heads] += block
        return self.device.in_dtype(whole, dx.dtype)

    def _back(self, x: np.ndarray) -> list[np.ndarray]:
        """Each rank's heads at this rank's positions."""
        blocks = [x[:, start:end] for start, end in pairwise([0, *accumulate(self.lengths)])]
        return exchange(self.comm, self.device, "all_to_all", blocks, [self.lengths[self.comm.rank]] * self.comm.size)

    def _joined(self, blocks: Sequence[np.ndarray], axis: int) -> np.ndarray:
        shape = list(blocks[0].shape)
        shape[axis] = sum(block.shape[axis] for block in blocks)
        return np.concatenate(blocks, axis, out=self.device.empty(blocks[0], tuple(shape)))

    def _shifted(self, dropout: DropoutFor | None) -> DropoutFor | None:
        """Dropout for the inner attention, whose first head is not this rank's first one."""
        if dropout is None:
            return None
        first = self.heads[self.comm.rank].start
        return lambda queries, keys, head: dropout(queries, keys, head + first)

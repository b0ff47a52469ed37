"""All-gather attention: every rank gathers all keys and values, and attends with its own queries (Grattafiori et al. 2024, the
Llama 3 herd of models, section 3.3.2).

    rank 0      q₀ against K₀ K₁ K₂ K₃          K and V are gathered in rank order; the mask knows whose position is where
    rank 1      q₁ against K₀ K₁ K₂ K₃
    …                                            backward: gathered again; dK, dV of all positions are reduce-scattered home

One collective instead of N − 1 hops, and any mask without further thought; but each rank holds the whole K and V for a moment.
With grouped KV heads that is little. Gradients are summed in float32 or wider, whatever the format of q, k and v.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refdist import ops
from refdist.comm import Comm
from refdist.comm.work import Work
from refdist.device import Device
from refdist.model.seams import AttentionSaved, DropoutFor
from refdist.parallel.context.chunks import Chunks

__all__ = ["Attention"]


class Attention:
    """Attention over a sequence that the ranks of a group share, with all keys and values gathered.

    Args:
        comm: the group.
        device: runs the kernels.
        chunks: what each rank holds.
    """

    def __init__(self, comm: Comm, device: Device, chunks: Chunks) -> None:
        self.comm = comm
        self.device = device
        self.chunks = chunks
        self.mask = chunks.mask(comm.rank)

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        k_all, v_all = self._gather(k), self._gather(v)
        out, lse = self.device.call(ops.attention, q, k_all.wait(), v_all.wait(), self.mask, self._factors(dropout))
        return out, AttentionSaved(q, k, v, out, lse)

    def again(self, saved: AttentionSaved, dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        return self.forward(saved.q, saved.k, saved.v, dropout)

    def backward(self, dout: np.ndarray, saved: AttentionSaved,
                 dropout: DropoutFor | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        k_all, v_all = self._gather(saved.k), self._gather(saved.v)
        whole = saved._replace(k=k_all.wait(), v=v_all.wait())
        terms = self.device.call(ops.attention_backward, dout, *whole, self.mask, self._factors(dropout),
                                 dtype=ops.accumulation_dtype(dout))
        works = [self._scatter(x) for x in terms[1:]]
        dq, dk, dv = (self.device.in_dtype(x, dout.dtype) for x in (terms[0], *(work.wait() for work in works)))
        return dq, dk, dv

    def _gather(self, x: np.ndarray) -> Work:
        """x [rows, seq of this rank, …] of all ranks, rank after rank: [rows, seq, …]."""
        out = self.device.empty(x, (x.shape[0], sum(self.chunks.lengths), *x.shape[2:]), "communication")
        return self.comm.start("all_gather", x, axis=1, out=out, lengths=self.chunks.lengths)

    def _scatter(self, x: np.ndarray) -> Work:
        """The adjoint of gathering: the ranks' x [rows, seq, …] are summed, and each gets its own positions."""
        return self.comm.start("reduce_scatter", x, axis=1)

    def _factors(self, dropout: DropoutFor | None) -> Any:
        return dropout and dropout(self.mask.q_positions, self.mask.k_positions, 0)

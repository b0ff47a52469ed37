"""Ring attention: keys and values travel round, queries stay at home (Liu, Zaharia & Abbeel 2023, section 3).

    step          0          1          2          3
    rank 0      K₀ V₀      K₃ V₃      K₂ V₂      K₁ V₁          each sends what it has to the right while it attends to it
    rank 1      K₁ V₁      K₀ V₀      K₃ V₃      K₂ V₂
    rank 2      K₂ V₂      K₁ V₁      K₀ V₀      K₃ V₃          out, lse ◀─ merge(out, lse, this step's out and lse)
    rank 3      K₃ V₃      K₂ V₂      K₁ V₁      K₀ V₀

Forward: N − 1 hops of K and V. Backward: they travel again, and behind each chunk travels the sum of its dK and dV: who has
attended to a chunk adds its term and passes the sum on, and the last one sends it home. The owner's own term stays at home, so
that is N − 1 hops too. A step in which no query sees a key computes nothing; what is sent does not depend on that.

Partial results are merged, and gradients summed, in float32 or wider, whatever the format of q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from refdist import ops
from refdist.comm import Comm
from refdist.comm.work import Work
from refdist.device import Device
from refdist.model.seams import AttentionSaved, DropoutFor
from refdist.parallel.context.chunks import Chunks
from refdist.parallel.context.exchange import start_hop

__all__ = ["Attention"]


class Attention:
    """Attention over a sequence that the ranks of a group share, by the ring.

    Args:
        comm: the group.
        device: runs the kernels.
        chunks: what each rank holds.
    """

    def __init__(self, comm: Comm, device: Device, chunks: Chunks) -> None:
        self.comm = comm
        self.device = device
        self.chunks = chunks
        self.masks: dict[int, ops.AttentionMask] = {}  # of this rank's queries against the keys from a rank

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        size, rank = self.comm.size, self.comm.rank
        k_here, v_here = k, v
        for step in range(size):
            source = (rank - step) % size
            if step + 1 < size:
                travelling = self._hop("ring kv", (k_here, v_here), source)
            if step == 0:
                out, lse = self._attend(q, k_here, v_here, source, dropout)
            elif self._sees(source):
                self.device.call(ops.merge_attention, out, lse, *self._attend(q, k_here, v_here, source, dropout))
            if step + 1 < size:
                k_here, v_here = travelling.wait()
        out = self.device.in_dtype(out, q.dtype)
        return out, AttentionSaved(q, k, v, out, lse)

    def again(self, saved: AttentionSaved, dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        return self.forward(saved.q, saved.k, saved.v, dropout)

    def backward(self, dout: np.ndarray, saved: AttentionSaved,
                 dropout: DropoutFor | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See :class:`refdist.model.seams.SequenceAttention`."""
        size, rank = self.comm.size, self.comm.rank
        k_here, v_here = saved.k, saved.v
        if size > 1:
            travelling = self._hop("ring kv", (k_here, v_here), rank)
        dq, *home = self._terms(dout, saved, rank, dropout)
        sums: Work | None = None  # of dK and dV of the chunk that was here a step ago, on their way behind it
        for step in range(1, size):
            source = (rank - step) % size
            k_here, v_here = travelling.wait()
            if step + 1 < size:
                travelling = self._hop("ring kv", (k_here, v_here), source)
            dq_term, *terms = self._terms(dout, saved._replace(k=k_here, v=v_here), source, dropout)
            self._add([dq], [dq_term])
            if sums is not None:
                self._add(terms, sums.wait())
            sums = self._hop("ring dkv", terms, source)
        if sums is not None:
            self._add(home, sums.wait())
        dq, dk, dv = (self.device.in_dtype(x, dout.dtype) for x in (dq, *home))
        return dq, dk, dv

    def _attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, source: int,
                dropout: DropoutFor | None) -> tuple[np.ndarray, np.ndarray]:
        """This rank's queries and the keys and values from ``source``."""
        mask, factors = self._mask(source, dropout)
        return self.device.call(ops.attention, q, k, v, mask, factors, dtype=ops.accumulation_dtype(q))

    def _terms(self, dout: np.ndarray, saved: AttentionSaved, source: int, dropout: DropoutFor | None) -> list[np.ndarray]:
        """What this rank's queries and the keys and values from ``source`` add to dq, dk and dv."""
        wide = ops.accumulation_dtype(dout)
        if source != self.comm.rank and not self._sees(source):
            return [self.device.zeros(x, dtype=wide) for x in (saved.q, saved.k, saved.v)]
        mask, factors = self._mask(source, dropout)
        return list(self.device.call(ops.attention_backward, dout, *saved, mask, factors, dtype=wide))

    def _add(self, sums: Sequence[np.ndarray], terms: Sequence[np.ndarray]) -> None:
        for total, term in zip(sums, terms, strict=True):
            self.device.call(ops.add, total, term)

    def _hop(self, name: str, arrays: Sequence[np.ndarray], source: int) -> Work:
        """Send the arrays of the chunk from ``source`` to the right; what comes is that of the rank before it."""
        return start_hop(self.comm, self.device, name, arrays, self.chunks.lengths[(source - 1) % self.comm.size])

    def _sees(self, source: int) -> bool:
        """Whether any query of this rank may see a key from ``source``; what ranks hold together is in no order."""
        queries, keys = self.chunks.positions[self.comm.rank], self.chunks.positions[source]
        return bool(len(queries) and len(keys) and keys.min() <= queries.max())

    def _mask(self, source: int, dropout: DropoutFor | None) -> tuple[ops.AttentionMask, Any]:
        """Who sees whom in the chunk from ``source``, and what dropout does there."""
        if source not in self.masks:
            self.masks[source] = self.chunks.mask(self.comm.rank, source)
        mask = self.masks[source]
        return mask, dropout and dropout(mask.q_positions, mask.k_positions, 0)

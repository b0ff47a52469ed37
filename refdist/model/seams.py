"""The two seams through which tensor and context parallelism reach the model, and what stands there on a single rank.

    x ─ norm ─▶ f ─▶ q k v ─▶ attention over the sequence ─▶ o ─▶ g ─▶ + bias ─▶ + x
    x ─ norm ─▶ f ─▶ gate up ─▶ swiglu ─▶ down ─────────────────▶ g ─▶ + bias ─▶ + x

f and g are those of Shoeybi et al. 2019 (figure 3) and, with sequence parallelism, of Korthikanti et al. 2022 (figure 5): f is
where activations enter linear layers that are cut by columns, g is where the terms of layers that are cut by rows are summed.
`TensorAxis` has both, and what happens along a vocabulary that is cut. `SequenceAttention` is attention over a sequence of which
this rank holds a part. Here are the plain objects of a rank that holds everything: they communicate nothing and copy nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from refdist import ops
from refdist.device import Device

__all__ = ["AttentionSaved", "DropoutFor", "LocalAttention", "Pending", "Ready", "SequenceAttention", "TensorAxis", "WholeTensor"]

DropoutFor = Callable[[np.ndarray, np.ndarray, int], "Callable[[slice, slice, slice, slice], np.ndarray]"]
"""From global positions of the queries and of the keys, and the number of the first of this rank's query heads among those that
the attention was given, to the `dropout` of `ops.attention`."""


class Pending(Protocol):
    """An array that is being made, perhaps while other kernels run."""

    def wait(self) -> np.ndarray:
        """The array."""


class Ready(NamedTuple):
    """An array that is there already."""

    value: np.ndarray

    def wait(self) -> np.ndarray:
        return self.value


class TensorAxis(Protocol):
    """Tensor parallelism, as one rank's model meets it.

    Attributes:
        size, rank: of the tensor-parallel group.
        columns: the most columns of logits that any of its ranks computes.
        part: where the residual stream of this rank lies within the positions that the group holds.
    """

    size: int
    rank: int
    columns: int
    part: slice

    def enter(self, x: np.ndarray) -> Pending:
        """f: what column-parallel layers multiply with, [rows, seq, hidden], from the residual stream's x."""

    def enter_backward(self, dx: np.ndarray) -> Pending:
        """The adjoint of f: the sum over the ranks of dx [rows, seq, hidden], as the residual stream has it. The caller must not
        use dx afterwards."""

    def keep(self, x: np.ndarray) -> np.ndarray | None:
        """What f gave, if it shall be saved for backward; None if backward makes it again."""

    def leave(self, y: np.ndarray) -> np.ndarray:
        """g: the sum over the ranks of what row-parallel layers gave, as the residual stream has it. The caller must not
        use y afterwards."""

    def leave_backward(self, dy: np.ndarray) -> np.ndarray:
        """The adjoint of g: dy [rows, seq, hidden], whole, from the residual stream's."""

    def embedding(self, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Rows ids [rows, seq] of the whole matrix of which w is this rank's part, as the residual stream has them."""

    def embedding_weight_grad(self, dx: np.ndarray, ids: np.ndarray) -> tuple[Callable[..., np.ndarray], tuple]:
        """A kernel and its arguments, which give the gradient of this rank's part; dx as the residual stream has it."""

    def cross_entropy(self, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `ops.cross_entropy`, for this rank's columns of the logits; losses and lse are those over all columns."""

    def cross_entropy_backward(self, scale: float, logits: np.ndarray, labels: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """As `ops.cross_entropy_backward`, in place, for this rank's columns of the logits."""


class WholeTensor:
    """A rank that holds whole layers: f and g are the identity."""

    size, rank, part = 1, 0, slice(None)

    def __init__(self, device: Device, vocab_size: int) -> None:
        self.device = device
        self.columns = vocab_size

    def enter(self, x: np.ndarray) -> Pending:
        return Ready(x)

    def enter_backward(self, dx: np.ndarray) -> Pending:
        return Ready(dx)

    def keep(self, x: np.ndarray) -> np.ndarray | None:
        return None

    def leave(self, y: np.ndarray) -> np.ndarray:
        return y

    def leave_backward(self, dy: np.ndarray) -> np.ndarray:
        return dy

    def embedding(self, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return self.device.call(ops.embedding, w, ids)

    def embedding_weight_grad(self, dx: np.ndarray, ids: np.ndarray) -> tuple[Callable[..., np.ndarray], tuple]:
        return ops.embedding_weight_grad, (dx, ids, self.columns)

    def cross_entropy(self, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.device.call(ops.cross_entropy, logits, labels)

    def cross_entropy_backward(self, scale: float, logits: np.ndarray, labels: np.ndarray, lse: np.ndarray) -> np.ndarray:
        return self.device.call(ops.cross_entropy_backward, scale, logits, labels, lse, out=logits)


class AttentionSaved(NamedTuple):
    """What attention keeps for its backward: the arguments and results of `ops.attention`, in the layout in which it ran.

    Without `out` and `lse`, which `SequenceAttention.again` computes again, it is what selective recomputation keeps.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray | None
    lse: np.ndarray | None


class SequenceAttention(Protocol):
    """Causal attention over a sequence of which this rank holds some positions."""

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """q [rows, seq, heads, head_dim], k and v [rows, seq, kv_heads, head_dim] of this rank's positions; q and k after
        the rotary embedding.

        Returns:
            What its queries attend to over all positions, like q; what backward needs.
        """

    def again(self, saved: AttentionSaved, dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        """What forward returned, from what it saved without `out` and `lse`."""

    def backward(self, dout: np.ndarray, saved: AttentionSaved,
                 dropout: DropoutFor | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The gradients of q, k, v at this rank's positions; each layer calls it once for each forward."""


class LocalAttention:
    """All positions are here."""

    def __init__(self, device: Device, mask: ops.AttentionMask) -> None:
        self.device = device
        self.mask = mask

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray,
                dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        out, lse = self.device.call(ops.attention, q, k, v, self.mask, self._factors(dropout))
        return out, AttentionSaved(q, k, v, out, lse)

    def again(self, saved: AttentionSaved, dropout: DropoutFor | None = None) -> tuple[np.ndarray, AttentionSaved]:
        return self.forward(saved.q, saved.k, saved.v, dropout)

    def backward(self, dout: np.ndarray, saved: AttentionSaved,
                 dropout: DropoutFor | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.device.call(ops.attention_backward, dout, *saved, self.mask, self._factors(dropout))

    def _factors(self, dropout: DropoutFor | None) -> Callable[[slice, slice, slice, slice], np.ndarray] | None:
        return dropout and dropout(self.mask.q_positions, self.mask.k_positions, 0)

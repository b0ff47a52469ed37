"""Tensor parallelism: the MLP and the attention of each layer are cut across ranks, first by columns, then by rows.

              ┌─ columns 0 of W₁ ─▶ swiglu ─▶ rows 0 of W₂ ─┐
    x ─ f ────┤                                             ├─── g ─▶ y = Σ of the ranks' terms, + bias once
              └─ columns 1 of W₁ ─▶ swiglu ─▶ rows 1 of W₂ ─┘

Columns first: each rank gets whole columns of the hidden layer and can apply the nonlinearity to them alone. Then rows: a rank's
hidden columns meet exactly its rows of W₂, and the products are terms of a sum. So a layer communicates at two places, f and g
(Shoeybi et al. 2019, figure 3); in attention the columns are whole heads. With sequence parallelism (Korthikanti et al. 2022,
figure 5) norms, residuals and dropout between g and f work on a part of the sequence, and an all-reduce becomes its two halves:

                     forward                          backward
    f                nothing                          all-reduce dx
    g                all-reduce y                     nothing
    f, sequence      all-gather x                     reduce-scatter dx
    g, sequence      reduce-scatter y                 all-gather dy

A norm's gain then meets only a part of the tokens on each rank: its gradient is one term of a sum over tp, as are those of the
biases that are added after g. The layout table says so, and ``sharding.sum_partial`` adds them up.

The room's interface: ``check(config, plan)`` and ``Tensor(config, plan, mesh, device)`` with ``comm``, ``copies`` and
``axis(length)``, a ``refdist.model.seams.TensorAxis``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from refdist.comm import Comm, Mesh
from refdist.comm.reduction import bounds
from refdist.device import Device
from refdist.errors import PlanError
from refdist.model.config import ModelConfig
from refdist.model.seams import Pending, Ready, TensorAxis, WholeTensor
from refdist.parallel.groups import part_of_axis
from refdist.parallel.plan import Plan
from refdist.parallel.tensor.vocabulary import (
    embedding_part,
    embedding_part_weight_grad,
    part_cross_entropy,
    part_cross_entropy_backward,
    whole_cross_entropy,
)

__all__ = ["Tensor", "TensorParallel", "check"]


def check(config: ModelConfig, plan: Plan) -> None:
    """Raise PlanError if the model's heads cannot be dealt out to the plan's tp ranks."""
    tp, heads, kv_heads = plan.tp, config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        raise PlanError(f"tp={tp} does not divide num_attention_heads={heads}: heads are cut whole, the same number on each rank")
    if kv_heads % tp and tp % kv_heads:
        raise PlanError(f"tp={tp} neither divides num_key_value_heads={kv_heads} nor is a multiple of it: some rank's query "
                        "heads would need parts of two groups")


class Tensor:
    """The tensor-parallel group of one rank.

    Attributes:
        comm: the tp group.
        copies: its neighbours that hold the same KV heads, when there are fewer KV heads than ranks.
    """

    def __init__(self, config: ModelConfig, plan: Plan, mesh: Mesh, device: Device) -> None:
        self.comm = mesh.axis("tp")
        self.device = device
        self.vocab_size = config.vocab_size
        self.sequence_parallel = plan.sequence_parallel
        self.save_gathered = plan.save_gathered
        copies = max(1, plan.tp // config.num_key_value_heads)
        self.copies = part_of_axis(mesh, "tp", self.comm.rank // copies, copies)

    def axis(self, length: int) -> TensorAxis:
        """For sequences of which this rank's tp group holds ``length`` positions."""
        if self.comm.size == 1:
            return WholeTensor(self.device, self.vocab_size)
        return TensorParallel(self.comm, self.device, self.vocab_size, length, self.sequence_parallel, self.save_gathered)


class TensorParallel:
    """f and g among several ranks, as a model's ``context.tensor``.

    Args:
        comm: the tp group.
        device: runs the kernels.
        vocab_size: rows of the embedding and of the output matrix, over all ranks.
        length: of the sequence that the group holds.
        sequence_parallel: whether the residual stream is cut along the sequence, [rows, seq / tp, hidden].
        save_gathered: whether what f gathered is kept for backward, and not gathered again.
    """

    def __init__(self, comm: Comm, device: Device, vocab_size: int, length: int, sequence_parallel: bool = True,
                 save_gathered: bool = False) -> None:
        self.comm = comm
        self.device = device
        self.size, self.rank = comm.size, comm.rank
        self.sequence_parallel = sequence_parallel
        self.save_gathered = save_gathered and sequence_parallel
        self.lengths = [end - start for start, end in pairwise(bounds(length, comm.size))]
        first = sum(self.lengths[:comm.rank])
        self.part = slice(first, first + self.lengths[comm.rank]) if sequence_parallel else slice(None)
        self.cuts = bounds(vocab_size, comm.size)
        self.columns = self.cuts[1]  # the first part is the largest

    # ------------------------------------------------------------------------------------------------ f and g

    def enter(self, x: np.ndarray) -> Pending:
        """f: all-gather along the sequence, or nothing."""
        return self._gather(x) if self.sequence_parallel else Ready(x)

    def enter_backward(self, dx: np.ndarray) -> Pending:
        """The adjoint of f: reduce-scatter along the sequence, or all-reduce; it goes on while kernels run."""
        return self._scatter(dx) if self.sequence_parallel else self.comm.start("all_reduce", dx, out=dx)

    def keep(self, x: np.ndarray) -> np.ndarray | None:
        """What f gathered, if it shall be kept."""
        return x if self.save_gathered else None

    def leave(self, y: np.ndarray) -> np.ndarray:
        """g: reduce-scatter along the sequence, or all-reduce."""
        return self._scatter(y).wait() if self.sequence_parallel else self.comm.all_reduce(y, out=y)

    def leave_backward(self, dy: np.ndarray) -> np.ndarray:
        """The adjoint of g: all-gather along the sequence, or nothing."""
        return self._gather(dy).wait() if self.sequence_parallel else dy

    def _gather(self, x: np.ndarray) -> Pending:
        out = self.device.empty(x, (x.shape[0], sum(self.lengths), x.shape[2]))
        return self.comm.start("all_gather", x, axis=1, out=out, lengths=self.lengths)

    def _scatter(self, x: np.ndarray) -> Pending:
        out = self.device.empty(x, (x.shape[0], self.lengths[self.rank], x.shape[2]))
        return self.comm.start("reduce_scatter", x, axis=1, out=out)

    # --------------------------------------------------------------------------------------------- vocabulary

    def embedding(self, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Each rank looks up the ids of its rows, with zeros for the others; g adds that up."""
        return self.leave(self.device.call(embedding_part, w, ids, self.cuts[self.rank]))

    def embedding_weight_grad(self, dx: np.ndarray, ids: np.ndarray) -> tuple[Callable[..., np.ndarray], tuple]:
        """The rows of dx that belong to this rank's ids."""
        return embedding_part_weight_grad, (self.leave_backward(dx), ids, self.cuts[self.rank], self.cuts[self.rank + 1])

    def cross_entropy(self, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each rank's log-sum-exp over its own columns, gathered: 2 numbers a token and rank travel, never the logits."""
        part = self.device.call(part_cross_entropy, logits, labels, self.cuts[self.rank])  # [1, 2, tokens]
        parts = self.comm.all_gather(part, lengths=[1] * self.size)  # [tp, 2, tokens]
        return self.device.call(whole_cross_entropy, parts, labels, self.cuts)

    def cross_entropy_backward(self, scale: float, logits: np.ndarray, labels: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """This rank's columns need nothing but the lse over all of them."""
        return self.device.call(part_cross_entropy_backward, scale, logits, labels, lse, self.cuts[self.rank])

"""Sharded data parallelism: as data parallelism, but what every rank would hold in the same way is cut over the group.

Rajbhandari et al. 2020, "ZeRO", figure 1; Zhao et al. 2023, "PyTorch FSDP". For each parameter, with N ranks:

                     parameter    gradient     optimizer state    a step sends, × (N - 1)/N, with m micro-batches
    data parallel    whole        whole        whole              2 Ψ          all-reduce
    zero1.py         whole        whole        rows of one rank   2 Ψ          reduce-scatter, gather of the new parameters
    zero2.py         whole        own rows     own rows           (m + 1) Ψ    reduce-scatter each micro-batch, gather
    zero3.py         own rows     own rows     own rows           ≤ 3 m Ψ      gather forward and backward, reduce-scatter

Each parameter is cut along its first dimension as ``np.array_split`` does; where tensor parallelism cuts it too, within that.
With ``dp`` outside (HSDP) each group of fsdp ranks has all of it; gradients are reduce-scattered within the groups, and then the
shards all-reduced across them.

    dp 0:  fsdp 0 ─ fsdp 1 ─ fsdp 2        reduce-scatter along a row
             │        │        │
    dp 1:  fsdp 0 ─ fsdp 1 ─ fsdp 2        all-reduce of a shard along a column
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from refdist.comm import Mesh
from refdist.device import Device
from refdist.model.layout import ParameterLayout
from refdist.parallel.fsdp import zero1, zero2, zero3
from refdist.parallel.plan import Plan

__all__ = ["STAGES", "Storage"]

STAGES: Mapping[int, type[zero1.Storage]] = {1: zero1.Storage, 2: zero2.Storage, 3: zero3.Storage}


def Storage(rows: Mapping[str, ParameterLayout], params: Mapping[str, np.ndarray], dtype: np.dtype, mesh: Mesh, device: Device,
            plan: Plan) -> zero1.Storage:
    """The storage of the plan's ZeRO stage; arguments and interface are those of :class:`refdist.parallel.data.Storage`."""
    return STAGES[plan.zero](rows, params, dtype, mesh, device, plan)

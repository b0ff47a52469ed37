"""Cutting the global batch: contiguous ``array_split`` over dp × fsdp (dp outermost), then into micro-batches the same way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from refdist.comm import Mesh
from refdist.comm.reduction import bounds
from refdist.ops import IGNORED
from refdist.parallel.plan import Plan

__all__ = ["micro_batches", "valid_tokens"]


def micro_batches(plan: Plan, mesh: Mesh, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """This rank's micro-batches of arrays [batch, …], in order; more of them than sequences leave the last ones empty."""
    part = mesh.coordinate("dp") * plan.fsdp + mesh.coordinate("fsdp")
    offsets = bounds(arrays[0].shape[0], plan.batch_parts)
    first, last = offsets[part], offsets[part + 1]
    cuts = bounds(last - first, plan.micro_batches)
    for start, end in pairwise(cuts):
        yield tuple(array[first + start:first + end] for array in arrays)


def valid_tokens(labels: np.ndarray) -> int:
    """How many labels count (are not -100)."""
    return int(np.count_nonzero(labels != IGNORED))

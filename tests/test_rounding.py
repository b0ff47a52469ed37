"""Tensor and context parallelism in 32 and 16 bits: their rounding errors are at most twice those of a single device."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from models import batch, model

import refdist as rd
from refdist.testing.compare import differences

LOSS_SCALE = {"fp32": 1.0, "fp16": 1024.0, "bf16": 1.0}
PLANS = [
    {"tp": 2}, {"tp": 4}, {"tp": 8}, {"tp": 4, "sequence_parallel": False}, {"tp": 4, "save_gathered": True},
    {"cp": 2}, {"cp": 3}, {"cp": 5}, {"cp": 4, "cp_layout": "contiguous"}, {"cp": 3, "cp_method": "all_gather"},
    {"cp": 4, "cp_method": "ulysses"}, {"cp": 4, "cp_ulysses": 2}, {"cp": 4, "cp_method": "all_gather", "cp_ulysses": 2},
    {"tp": 2, "cp": 2}, {"tp": 2, "cp": 4, "cp_method": "ulysses"},
    {"tp": 2, "cp": 3, "cp_method": "all_gather", "sequence_parallel": False},
]


@functools.lru_cache
def errors(plan: str, precision: str) -> tuple[float, float]:
    """Against float64, each parameter's largest error over its scale: the largest of them, and their root mean square."""
    config, params = model(vocab_size=53, num_attention_heads=8, num_key_value_heads=2, attention_bias=True)
    ids, labels = batch(config, rows=3, seq=31)
    _, exact = rd.reference.loss_and_grads(config, params, ids, labels)
    spread: Any = rd.Plan(**json.loads(plan))
    _, grads = rd.run(lambda comm: rd.loss_and_grads(config, spread, params, ids, labels, comm=comm, precision=precision,
                                                     loss_scale=LOSS_SCALE[precision]), spread.world_size)[-1]
    found = [row.relative for row in differences(grads, exact, 0.0)]
    assert len(found) == len(exact), "no gradient in few bits equals that in float64"
    return max(found), float(np.sqrt(np.mean(np.square(found))))


@pytest.mark.parametrize("precision", LOSS_SCALE)
@pytest.mark.parametrize("plan", PLANS, ids=json.dumps)
def test_rounding_errors_are_at_most_twice_a_single_devices(plan: dict[str, Any], precision: str) -> None:
    for got, own in zip(errors(json.dumps(plan), precision), errors("{}", precision), strict=True):
        assert got <= 2 * own

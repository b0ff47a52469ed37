"""The trainer's dropout: a new mask each step, the same for every plan, the one that the reference draws from the same seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import refdist as rd

CONFIG = rd.ModelConfig(vocab_size=29, hidden_size=16, intermediate_size=22, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2, attention_dropout=0.2, hidden_dropout=0.1)
SEED = 5
PLANS: list[dict[str, Any]] = [
    {}, {"dp": 2, "micro_batches": 2}, {"fsdp": 3, "recompute": "full", "recompute_blocks": 2},
    {"tp": 2, "sequence_parallel": True, "recompute": "full"}, {"cp": 2, "recompute": "selective"},
    {"pp": 3, "micro_batches": 2, "recompute": "full"},
]


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 29, (5, 9)), np.where(rng.random((5, 9)) < 0.3, -100, rng.integers(0, 29, (5, 9))))
            for _ in range(count)]


def trained(plan: Mapping[str, Any], steps: int) -> tuple[dict[str, np.ndarray], list[float]]:
    def program(comm: rd.Comm) -> tuple[dict[str, np.ndarray], list[float]]:
        trainer = rd.Trainer(CONFIG, rd.Plan(**plan), comm, rd.SGD(lr=0.5), precision="fp64", seed=SEED)
        losses = [trainer.step(*batch).loss for batch in batches(steps)]
        return trainer.full_params(), losses

    return rd.run(program, ranks=rd.Plan(**plan).world_size, scheduler=3, sends="rendezvous")[-1]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(f"{key}={value}" for key, value in plan.items()) or "one rank")
def test_masks_are_those_of_the_reference(plan: dict[str, Any]) -> None:
    params = {name: array.astype(np.float64) for name, array in rd.init_params(CONFIG, SEED).items()}
    seeds = [(SEED << 32) + step for step in (1, 2)]
    want = rd.reference.train(CONFIG, params, batches(2), rd.reference.sgd(0.5), dropout_seeds=seeds)
    got, losses = trained(plan, 2)
    np.testing.assert_allclose(losses, want.losses, rtol=1e-12)
    for name, array in want.params.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-12, err_msg=name)


def test_each_step_has_a_mask_of_its_own() -> None:
    batch = batches(1)[0]

    def losses(comm: rd.Comm) -> list[float]:
        trainer = rd.Trainer(CONFIG, rd.Plan(), comm, rd.SGD(lr=0.0), precision="fp64", seed=SEED)
        return [trainer.step(*batch).loss for _ in range(3)]

    first, second, third = rd.run(losses, ranks=1)[0]
    assert len({first, second, third}) == 3

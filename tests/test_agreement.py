"""Ranks that are given different arguments hear of it; before, they trained on, each for itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models import batch, model
from mpirun import run_ranks

import refdist as rd
from refdist.errors import ConfigError

CONFIG, PARAMS = model(num_attention_heads=2, num_key_value_heads=2)
IDS, LABELS = batch(CONFIG, 4, 6)


def train(comm: rd.Comm, **of_rank_1: object) -> float:
    """One step in which the last rank's arguments are changed."""
    other = of_rank_1 if comm.rank == comm.size - 1 else {}
    arguments = {"config": CONFIG, "plan": rd.Plan(tp=2), "params": PARAMS, "optimizer": rd.AdamW(0.1), "precision": "fp64",
                 "clip_norm": 1.0, "loss_scale": 4.0, "input_ids": IDS, "labels": LABELS, "segment_ids": None, **other}
    given = {name: arguments.pop(name) for name in ("input_ids", "labels", "segment_ids")}
    trainer = rd.Trainer(comm=comm, **arguments)
    trainer.step(**given)
    return trainer.step(IDS, LABELS).loss


OTHERS = {
    "configuration": {"config": dataclasses.replace(CONFIG, rms_norm_eps=1e-4)},
    "plan": {"plan": rd.Plan(dp=2)},
    "precision": {"precision": "fp32"},
    "parameters": {"params": {**PARAMS, "lm_head.weight": PARAMS["lm_head.weight"][::-1]}},
    "optimizer": {"optimizer": rd.AdamW(0.2)},
    "clip_norm": {"clip_norm": 2.0},
    "loss_scale": {"loss_scale": 8.0},
    "input_ids": {"input_ids": IDS[::-1]},
    "labels": {"labels": np.where(np.arange(6) == 2, -100, LABELS)},
    "segment_ids": {"segment_ids": np.zeros((4, 6), int)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_named(name):
    with pytest.raises(ConfigError, match=f"ranks 0 and 1 have been given different {name}: expected the same on every rank"):
        rd.run(lambda comm: train(comm, **OTHERS[name]), 2)


def test_a_learning_rate_that_is_a_function_is_looked_at_too():
    def program(comm):
        return rd.Trainer(CONFIG, rd.Plan(dp=2), comm, rd.AdamW(lambda step: 0.1 * (comm.rank + 1) / step), params=PARAMS)

    with pytest.raises(ConfigError, match="different optimizer"):
        rd.run(program, 2)


def test_what_is_equal_may_be_other_objects():
    """Integers of another size, a new plan, a function of its own: no difference."""
    def program(comm):
        params = {name: value.copy() for name, value in PARAMS.items()}
        ids = IDS.astype([np.int32, np.int64][comm.rank])
        trainer = rd.Trainer(CONFIG, rd.Plan(dp=2), comm, rd.AdamW(lambda step: 0.1), params=params)
        return trainer.step(ids, LABELS).loss

    losses = rd.run(program, 2)
    assert losses[0] == losses[1]


def test_evaluation_looks_at_its_batch():
    def program(comm):
        return rd.Trainer(CONFIG, rd.Plan(dp=2), comm, params=PARAMS).evaluate(IDS[:, :: (1, -1)[comm.rank]], LABELS)

    with pytest.raises(ConfigError, match="different input_ids"):
        rd.run(program, 2)


def test_nothing_of_it_is_counted():
    def program(comm):
        device = rd.Device()
        rd.Trainer(CONFIG, rd.Plan(dp=2), comm.bind(device), params=PARAMS, device=device)
        return device.bytes_sent

    assert rd.run(program, 2) == [0, 0]


def test_under_mpi():
    program = """
import numpy as np, refdist as rd
comm = rd.mpi_world()
config = rd.ModelConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
trainer = rd.Trainer(config, rd.Plan(dp=3), comm)
trainer.step(np.full((3, 2), comm.rank // 2), np.zeros((3, 2), int))
"""
    done = run_ranks(3, ["-c", program])
    assert done.returncode != 0
    assert "ranks 0 and 2 have been given different input_ids: expected the same on every rank" in done.stderr

"""Replicated data parallelism against one device: gradients, parameters and moments, in process and under mpirun."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from models import batch, model
from mpirun import run_ranks
from training import Case, check_training

import refdist as rd

CASES = {
    "sgd": Case({"micro_batches": 2}, optimizer="sgd"),
    "sgd clipped": Case({"micro_batches": 3}, {"tie_word_embeddings": True}, "momentum", clip=0.3),
    "sgd below the threshold": Case({}, {"attention_bias": True, "mlp_bias": True}, "nesterov", clip=4.0),
    "adamw": Case({"micro_batches": 4}, {"attention_bias": True}),
    "adamw clipped": Case({"micro_batches": 2}, {"tie_word_embeddings": True}, clip=0.5),
    "adamw below the threshold": Case({"micro_batches": 1}, clip=3.0),
}


def on(ranks: int, case: Case, **plan: object) -> Case:
    return dataclasses.replace(case, plan={"dp": ranks, **case.plan, **plan})


@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in CASES), *(("adamw clipped", n) for n in (1, 2, 4, 5, 8)),
                                             ("sgd clipped", 5)])
def test_training_equals_one_device(name, ranks):
    case = dataclasses.replace(on(ranks, CASES[name]), rows=max(7, ranks + 1), steps=3)
    rd.run(lambda comm: check_training(comm, case), ranks)


@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
@pytest.mark.parametrize("seed", range(2))
def test_in_any_interleaving(seed, sends):
    case = on(3, CASES["adamw clipped"])
    rd.run(lambda comm: check_training(comm, case), 3, scheduler=seed, sends=sends, checks=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_under_mpirun(ranks):
    cases = [dataclasses.asdict(on(ranks, CASES[name])) for name in ("sgd clipped", "adamw clipped", "adamw")]
    done = run_ranks(ranks, [Path(__file__).with_name("training.py"), json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


@pytest.mark.parametrize("plan", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"fsdp": 2}, {"fsdp": 2, "zero": 1}], ids=str)
def test_what_a_trainer_gives_are_copies(plan):
    """Parameters, gradients and optimizer state that were asked for before a step do not change in it."""
    config, params = model(dtype=np.float32)
    tokens = batch(config, 4, 6)

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(**plan), comm, rd.SGD(0.1, momentum=0.9), params=params)
        trainer.step(*tokens)
        given = [trainer.full_params(), trainer.replica.full_gradients(),
                 trainer.replica.gather({name: state[0] for name, state in trainer.state.items()})]
        before = [{name: array.copy() for name, array in arrays.items()} for arrays in given]
        trainer.step(*tokens)
        return [name for arrays, kept in zip(given, before, strict=True) for name in arrays
                if not np.array_equal(arrays[name], kept[name])]

    assert rd.run(program, rd.Plan(**plan).world_size)[0] == []

"""Sharded data parallelism at each ZeRO stage, and with replicas outside, against one device."""

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
from refdist.comm.work import drive
from refdist.device.events import Phase
from refdist.parallel.fsdp.units import gather_rows, reduce_scatter_rows

CASES = {
    "sgd": Case({"micro_batches": 2}, {"attention_bias": True, "mlp_bias": True}, optimizer="sgd"),
    "sgd clipped": Case({"micro_batches": 3}, {"tie_word_embeddings": True}, "momentum", clip=0.3),
    "adamw clipped": Case({"micro_batches": 2}, {"tie_word_embeddings": True}, clip=0.5, steps=3),
    "adamw below the threshold": Case({}, {"attention_bias": True}, clip=3.0, steps=3),
    "adamw": Case({"micro_batches": 4}, steps=3),
}
ZERO = [1, 2, 3]


def on(case: Case, **plan: object) -> Case:
    return dataclasses.replace(case, plan={**case.plan, **plan})


def train(case: Case, **options: object) -> None:
    ranks = rd.Plan(**case.plan).world_size
    rd.run(lambda comm: check_training(comm, case), ranks, **options)


@pytest.mark.parametrize(("name", "fsdp"), [*((name, 3) for name in CASES), ("adamw clipped", 2), ("adamw", 4),
                                            ("adamw clipped", 5)])
@pytest.mark.parametrize("zero", ZERO)
def test_training_equals_one_device(zero, name, fsdp):
    train(on(CASES[name], fsdp=fsdp, zero=zero))


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("dp", "fsdp"), [(2, 3), (3, 2), (2, 4)])
def test_hybrid_sharding(zero, dp, fsdp):
    train(dataclasses.replace(on(CASES["adamw clipped"], dp=dp, fsdp=fsdp, zero=zero), rows=9))


@pytest.mark.parametrize("zero", ZERO)
def test_more_ranks_than_rows_of_a_parameter(zero):
    case = Case({"fsdp": 8, "zero": zero, "micro_batches": 2},
                {"hidden_size": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 3},
                rows=9)
    train(case)


@pytest.mark.parametrize("keep", [{"reshard_after_forward": False}, {"prefetch": False},
                                  {"reshard_after_forward": False, "reshard_after_backward": False}])
@pytest.mark.parametrize("tied", [False, True])
def test_keeping_parameters_and_doing_without_prefetch(keep, tied):
    train(Case({"fsdp": 3, "micro_batches": 2, **keep}, {"tie_word_embeddings": tied}, steps=3))


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("seed", range(2))
def test_in_any_interleaving(seed, zero):
    for sends in ("buffered", "rendezvous"):
        train(on(CASES["adamw clipped"], fsdp=3, zero=zero), scheduler=seed, sends=sends, checks=True)
        train(on(CASES["adamw"], dp=2, fsdp=2, zero=zero, order="rank"), scheduler=seed, sends=sends, checks=True)


@pytest.mark.parametrize("order", [None, "rank"])
@pytest.mark.parametrize("zero", ZERO)
def test_gradients_in_float64_of_a_float32_model(zero, order):
    config, params = model(dtype=np.float32)
    ids, labels = batch(config, 6)

    def program(comm):
        plan = rd.Plan(fsdp=3, zero=zero, reduce_dtype="fp64", order=order, micro_batches=2)
        return rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, precision="fp32")[1]

    groups = [[[2 * rank], [2 * rank + 1]] for rank in range(3)]
    parts = [rd.reference.loss_and_grads(config, params, ids, np.where(np.isin(np.arange(6), part)[:, None], labels, -100))[1]
             for group in groups for part in group]
    count = [np.count_nonzero(labels[part] >= 0) for group in groups for part in group]
    for grads in rd.run(program, 3):
        for name, grad in grads.items():
            assert grad.dtype == np.float64
            want = sum(np.float64(part[name]) * n for part, n in zip(parts, count, strict=True)) / sum(count)
            np.testing.assert_allclose(grad, want, rtol=0, atol=3e-6 * np.abs(want).max())
            assert np.any(grad != np.float32(grad)), "a float64 sum has digits that float32 has not"


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_under_mpirun(ranks):
    plans = [{"fsdp": ranks, "zero": zero, "micro_batches": 2} for zero in ZERO]
    if ranks == 4:
        plans += [{"dp": 2, "fsdp": 2, "zero": zero, "micro_batches": 3, "order": "rank"} for zero in ZERO]
    cases = [dataclasses.asdict(dataclasses.replace(CASES["adamw clipped"], plan=plan)) for plan in plans]
    done = run_ranks(ranks, [Path(__file__).with_name("training.py"), json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


def test_rows_of_one_rank_alone():
    """The collectives for many arrays at once, in a group of one: what it owns is all."""
    x = [np.arange(6.0).reshape(3, 2), np.arange(3.0)]

    def program(comm):
        sums = [np.full_like(each, np.nan) for each in x]
        drive(comm.transport, reduce_scatter_rows(comm, x, sums, [(0, 3), (0, 3)]))
        wholes = [np.full_like(each, np.nan) for each in x]
        drive(comm.transport, gather_rows(comm, x, wholes, [(0, 3), (0, 3)]))
        return sums + wholes

    for got, want in zip(rd.run(program, 1)[0], x + x, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("zero", [1, 2])
def test_new_parameters_are_gathered_all_at_once(zero):
    """After the optimizer the gathers of all layers are under way together."""
    config, params = model(num_hidden_layers=3)
    ids, labels = batch(config, 2, 5)

    def program(comm):
        now, most = 0, 0

        def listen(event):
            nonlocal now, most
            if isinstance(event, Phase) and event.name.startswith("gather of"):
                now += 1 if event.begins else -1
                most = max(most, now)

        device = rd.Device(listeners=[listen])
        trainer = rd.Trainer(config, rd.Plan(fsdp=2, zero=zero), comm, params=params, device=device)
        trainer.step(ids, labels)
        return now, most

    assert rd.run(program, 2) == [(0, 5)] * 2  # embedding, three layers, head

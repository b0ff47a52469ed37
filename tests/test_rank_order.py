"""With ``order="rank"`` every way of sharding gives the bits of one device that adds the same gradients in the same grouping."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import batch, model
from mpirun import run_ranks
from training import SingleDevice, gather_states, gradient_norm, make_optimizer

import refdist as rd

STEPS = 5
ROWS, SEQ = 11, 9


def split(rows: list[int], parts: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.array(rows, int), parts)]


def grouping(plan: rd.Plan) -> list[Any]:
    """Replicas → ranks → micro-batches → rows; without the level of replicas if there is one."""
    ranks = [split(part, plan.micro_batches) for part in split(list(range(ROWS)), plan.dp * plan.fsdp)]
    if plan.dp == 1 or plan.fsdp == 1:
        return ranks
    return [ranks[start:start + plan.fsdp] for start in range(0, len(ranks), plan.fsdp)]


@functools.lru_cache(maxsize=4)
def one_device(groups: str, options: str) -> tuple[Any, ...]:
    """Configuration, parameters, batches, clipping threshold; and loss, norm and the device after each step."""
    config, params = model(dtype=np.float32, **json.loads(options))
    batches = [batch(config, ROWS, SEQ, seed=step, ignored=0.5) for step in range(STEPS)]
    tree = json.loads(groups)
    clip_norm = 0.7 * gradient_norm(rd.reference.loss_and_grads(config, params, *batches[0], groups=tree)[1])
    single = SingleDevice(config, params, "adamw", clip_norm)
    return config, params, batches, clip_norm, [(*single.step(*arrays, tree), copy.deepcopy(single)) for arrays in batches]


def run_case(comm: rd.Comm, fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Five AdamW steps in float32; every bit of every parameter and moment, the loss and the norm too."""
    plan = rd.Plan(order="rank", **fields)
    config, params, batches, clip_norm, steps = one_device(json.dumps(grouping(plan)), json.dumps(options))
    trainer = rd.Trainer(config, plan, comm, make_optimizer("adamw"), "fp32", params=params, clip_norm=clip_norm)
    clipped = 0
    for step, (loss, norm, single) in enumerate(steps, start=1):
        result = trainer.step(*batches[step - 1])
        clipped += norm > clip_norm
        assert (result.loss, result.grad_norm) == (loss, norm), f"step {step}: {result}, expected {loss}, {norm}"
        require_bits(trainer.replica.full_gradients(), single.grads, f"gradient in step {step}")
        require_bits(trainer.full_params(), single.params, f"parameter after step {step}")
    assert clipped > 0
    for i, moment in enumerate(gather_states(trainer)):
        require_bits(moment, {name: state[i] for name, state in single.state.items()}, f"moment {i}")


def require_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray], what: str) -> None:
    for name, value in want.items():
        assert got[name].dtype == value.dtype == np.float32
        assert np.array_equal(got[name], value), f"{what} of {name} differs in {np.count_nonzero(got[name] != value)} elements"


PLANS = {
    "dp3": {"dp": 3},
    "dp4 buckets": {"dp": 4, "micro_batches": 2, "bucket_bytes": 1},
    "dp5": {"dp": 5, "micro_batches": 3},
    "zero1": {"fsdp": 3, "zero": 1},
    "zero1 accumulating": {"fsdp": 4, "zero": 1, "micro_batches": 2},
    "zero2": {"fsdp": 3, "zero": 2},
    "zero2 accumulating": {"fsdp": 4, "zero": 2, "micro_batches": 2},
    "zero3": {"fsdp": 3, "zero": 3},
    "zero3 accumulating": {"fsdp": 4, "zero": 3, "micro_batches": 2},
    "zero3 on more ranks": {"fsdp": 5, "zero": 3, "micro_batches": 3, "reshard_after_forward": False},
    "hybrid zero1": {"dp": 2, "fsdp": 3, "zero": 1, "micro_batches": 2},
    "hybrid zero2": {"dp": 3, "fsdp": 2, "zero": 2},
    "hybrid zero3": {"dp": 2, "fsdp": 3, "zero": 3},
    "hybrid zero3 accumulating": {"dp": 3, "fsdp": 3, "zero": 3, "micro_batches": 2},
    "pipeline": {"pp": 2, "micro_batches": 3},
    "pipelines": {"dp": 2, "pp": 2, "micro_batches": 3, "schedule": "zb_h1"},
    "pipelines zero1": {"fsdp": 2, "zero": 1, "pp": 2, "micro_batches": 2, "schedule": "gpipe"},
    "pipelines zero2": {"fsdp": 2, "zero": 2, "pp": 2, "micro_batches": 2},
    "pipelines zero3": {"fsdp": 2, "zero": 3, "pp": 2, "micro_batches": 2, "schedule": "zb_h2"},
}


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("options", [{"attention_bias": True}, {"tie_word_embeddings": True}], ids=["biases", "tied"])
def test_the_bits_are_those_of_one_device(fields, options):
    ranks = rd.Plan(**fields).world_size
    rd.run(lambda comm: run_case(comm, fields, options), ranks, scheduler=1, sends="rendezvous")


def test_under_mpirun():
    cases = [PLANS[name] for name in ("dp4 buckets", "zero1 accumulating", "zero2 accumulating", "zero3 accumulating")]
    cases.append({"dp": 2, "fsdp": 2, "zero": 3})
    program = "import json, sys, test_rank_order as t, refdist as rd\ncomm = rd.mpi_world()\n" \
              "for case in json.loads(sys.argv[1]): t.run_case(comm, case, {'tie_word_embeddings': True})\nprint('the same')"
    done = run_ranks(4, ["-c", program, json.dumps(cases)], cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same") == 4


def test_the_ring_adds_in_another_order():
    """Without rank order float32 results differ in the last bits, or these tests would hold nothing."""
    config, params = model(dtype=np.float32)
    ids, labels = batch(config, ROWS, SEQ)
    _, want = rd.reference.loss_and_grads(config, params, ids, labels, groups=grouping(rd.Plan(dp=4)))
    got = rd.run(lambda comm: rd.loss_and_grads(config, rd.Plan(dp=4), params, ids, labels, comm=comm, precision="fp32"), 4)[0][1]
    assert any(not np.array_equal(got[name], want[name]) for name in want)

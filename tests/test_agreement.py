"""Ranks that are given different arguments hear of it; before, they trained on, each for itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from models import batch, model
from mpirun import run_ranks

import refdist as rd
from refdist.errors import ConfigError
from refdist.numerics import LossScale
from refdist.parallel.agreement import require_same

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


def test_parameters_differ_wherever_they_do_and_zeros_of_either_sign_are_equal():
    zeros = {name: np.zeros_like(array) for name, array in PARAMS.items()}
    some = {**zeros, "model.norm.weight": np.where(np.arange(len(PARAMS["model.norm.weight"])) == 5, 1.0, 0.0)}
    with pytest.raises(ConfigError, match="ranks 0 and 1 have been given different parameters"):
        rd.run(lambda comm: train(comm, params=some) if comm.rank else train(comm), 2)
    rd.run(lambda comm: rd.Trainer(CONFIG, rd.Plan(tp=2), comm, params={name: -array if comm.rank else array
                                                                        for name, array in zeros.items()}), 2)
    with pytest.raises(ConfigError, match="ranks 0 and 1 have been given different parameters"):
        rd.run(lambda comm: rd.Trainer(CONFIG, rd.Plan(tp=2), comm, params=some if comm.rank else zeros), 2)


class Odd(rd.AdamW):
    """An optimizer with what cannot be compared, and with a memory of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__(lr=[0.1, np.float64(0.1)][rank], betas=[(0.9, 0.99), [0.9, 0.99]][rank], weight_decay=[0, 0.0][rank])
        self.generator, self.hooks, self.rank_free = np.random.default_rng(0), [lambda: rank], {"a": self.update}
        self.names = {"bias", "norm", "embed", "head", "gain"}

    def learning_rate(self, step: int) -> float:
        self.last = super().learning_rate(step)
        return self.last


class Lasting(LossScale):
    """A loss scale with a callable and an object as attributes."""

    def __init__(self) -> None:
        super().__init__(4.0)
        self.hook, self.thing = print, object()


def test_what_is_equal_may_be_other_objects():
    """Numbers of another type, byte order or place, lists and tuples, closures, objects of other classes: no difference."""
    config = dataclasses.replace(CONFIG, rope_theta=500)
    shared = rd.AdamW(lambda step: 0.1 / step)

    def program(comm):
        rank = comm.rank
        params = {name: PARAMS[name].astype([">f8", "<f8"][rank]) for name in list(PARAMS)[:: [1, -1][rank]]}
        segments = np.zeros((4, 6), [np.int32, np.int64][rank])
        plan = rd.Plan(dp=2, layers_per_stage=[(2,), [2]][rank], schedule=lambda *sizes: own(*sizes))
        trainer = rd.Trainer([config, CONFIG][rank], plan, comm, Odd(rank), [np.str_("fp64"), "fp64"][rank], params=params,
                             clip_norm=[1, np.float64(1)][rank], loss_scale=Lasting())
        losses = [trainer.step(np.asfortranarray(IDS).astype([np.uint8, ">i4"][rank]), LABELS, segments).loss]
        trainer.use(shared)
        return [*losses, trainer.step(IDS, LABELS).loss]

    def own(stages, micro_batches, chunks):
        return [[["F", 0, 0], ["B", 0, 0]]]

    first, second = rd.run(program, 2)
    assert first == second


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


def test_the_same_numbers_in_another_shape_are_another_batch():
    def program(comm):
        shape = (4, 6) if comm.rank == 0 else (6, 4)
        rd.Trainer(CONFIG, rd.Plan(tp=2), comm, params=PARAMS).step(IDS.reshape(shape), LABELS.reshape(shape))

    with pytest.raises(ConfigError, match="different input_ids"):
        rd.run(program, 2)


def test_what_has_changed_since_the_last_time_is_compared_anew():
    @dataclasses.dataclass
    class Open:
        x: int = 1

    @dataclasses.dataclass(frozen=True)
    class WithList:
        x: list[int] = dataclasses.field(default_factory=lambda: [1])

    for make, change in ((Open, lambda value: setattr(value, "x", 2)), (WithList, lambda value: value.x.append(2))):
        def program(comm: rd.Comm, make=make, change=change) -> None:
            value = make()
            require_same(comm, value=value)
            if comm.rank == 1:
                change(value)
            require_same(comm, value=value)

        with pytest.raises(ConfigError, match="ranks 0 and 1 have been given different value"):
            rd.run(program, 2)

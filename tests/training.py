"""Training on one device, written out: rd.reference gradients and the update formulas as plain arithmetic on whole arrays.

`check_training(comm, case)` trains under a plan and holds the loss, every gradient, and after each step every parameter and every
optimizer moment against it. Tests call it on in-process ranks; `python tests/training.py CASES` runs it on the ranks that mpirun
started, with cases as JSON.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from models import batch, model

import refdist as rd

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """What is trained how. `clip`: the threshold as a multiple of the first step's gradient norm; None: no clipping."""

    plan: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # of the model
    optimizer: str = "adamw"
    clip: float | None = None
    steps: int = 2
    rows: int = 7
    seq: int = 11
    seed: int = 0


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"lr": 0.05, "momentum": 0.8, "nesterov": True},
    "adamw": {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
}


def make_optimizer(name: str) -> rd.SGD | rd.AdamW:
    return rd.AdamW(**OPTIMIZERS[name]) if name == "adamw" else rd.SGD(**OPTIMIZERS[name])


def update(name: str, p: np.ndarray, g: np.ndarray, state: list[np.ndarray], step: int, lr: float | None = None) -> np.ndarray:
    """One step of an optimizer on a whole parameter, in its own number format; changes `state`, returns the new parameter."""
    settings = OPTIMIZERS[name]
    lr = settings["lr"] if lr is None else lr
    decay = settings.get("weight_decay", 0.0) if p.ndim == 2 else 0.0
    if name == "adamw":
        (b1, b2), eps = settings["betas"], settings["eps"]
        state[0] = b1 * state[0] + (1 - b1) * g
        state[1] = b2 * state[1] + (1 - b2) * (g * g)
        root = np.sqrt(state[1] * (1 / (1 - b2**step))) + eps
        return p * (1 - lr * decay) - state[0] / root * (lr / (1 - b1**step))
    g = g + decay * p
    if not state:
        return p - lr * g
    state[0] = settings["momentum"] * state[0] + g
    return p - lr * (g + settings["momentum"] * state[0] if settings.get("nesterov") else state[0])


class SingleDevice:
    """The model's training on one device."""

    def __init__(self, config: rd.ModelConfig, params: Arrays, optimizer: str, clip_norm: float | None = None) -> None:
        self.config, self.optimizer, self.clip_norm = config, optimizer, clip_norm
        self.params = {name: p.copy() for name, p in params.items()}
        moments = {"adamw": 2, "sgd": 0}.get(optimizer, 1)
        self.state = {name: [np.zeros_like(p) for _ in range(moments)] for name, p in params.items()}
        self.steps = 0

    def step(self, ids: np.ndarray, labels: np.ndarray, groups: Any = None) -> tuple[float, float]:
        """Loss and gradient norm before the update."""
        loss, self.grads = rd.reference.loss_and_grads(self.config, self.params, ids, labels, groups=groups)
        norm = gradient_norm(self.grads)
        self.steps += 1
        for name, g in self.grads.items():
            if self.clip_norm is not None and norm > self.clip_norm:
                g = g * g.dtype.type(self.clip_norm / norm)
            self.params[name] = update(self.optimizer, self.params[name], g, self.state[name], self.steps)
        return loss, norm


def gradient_norm(grads: Arrays) -> float:
    """√ of the sum of all squares: float64 in each row, rows summed exactly."""
    rows = [np.add.reduce(np.square(g, dtype=np.float64), axis=-1) if g.ndim > 1 else np.square(g, dtype=np.float64)
            for g in grads.values()]
    return math.sqrt(math.fsum(value for row in rows for value in row.tolist()))


def assert_close(got: Arrays, want: Arrays, what: str, tolerance: float = 1e-10) -> None:
    """DESIGN's rule for gradients; names the parameter and the ratio of the two."""
    assert got.keys() == want.keys(), f"{what}: {sorted(got.keys() ^ want.keys())}"
    floor = 1e-3 * max(np.abs(value).max() for value in want.values())
    for name, value in want.items():
        assert got[name].shape == value.shape, f"{what} of {name}: {got[name].shape}, expected {value.shape}"
        error = np.abs(got[name] - value).max()
        square = np.vdot(value, value)
        ratio = np.vdot(got[name], value) / square if square else 1.0
        bound = tolerance * max(np.abs(value).max(), floor)
        assert error <= bound, f"{what} of {name}: error {error:.2e}, ratio {ratio:.6g}"


def gather_states(trainer: rd.Trainer) -> list[Arrays]:
    """Each optimizer state array, whole, by parameter name; collective."""
    count = len(trainer.optimizer.state_names)
    return [trainer.replica.gather({name: state[i] for name, state in trainer.state.items()}) for i in range(count)]


@dataclass
class Expected:
    """What one device gives: `steps` has a loss, a norm, and then the SingleDevice as it was after each step."""

    config: rd.ModelConfig
    params: Arrays
    batches: list[tuple[np.ndarray, np.ndarray]]
    clip_norm: float | None
    steps: list[tuple[float, float, SingleDevice]]
    final_loss: float


@functools.lru_cache(maxsize=8)
def _expected(key: str) -> Expected:
    case = Case(**json.loads(key))
    config, params = model(seed=case.seed, **case.options)
    batches = [batch(config, case.rows, case.seq, seed=case.seed + step, ignored=0.6) for step in range(case.steps)]
    norm = gradient_norm(rd.reference.loss_and_grads(config, params, *batches[0])[1])
    clip_norm = None if case.clip is None else case.clip * norm
    single = SingleDevice(config, params, case.optimizer, clip_norm)
    steps = [(*single.step(ids, labels), copy.deepcopy(single)) for ids, labels in batches]
    return Expected(config, params, batches, clip_norm, steps, rd.reference.loss_and_grads(config, single.params, *batches[0])[0])


def expected(case: Case) -> Expected:
    """Computed once for all ranks and all plans."""
    return _expected(json.dumps({**dataclasses.asdict(case), "plan": {}}))


def check_training(comm: rd.Comm, case: Case) -> None:
    want = expected(case)
    config, params, batches = want.config, want.params, want.batches
    plan = rd.Plan(**case.plan)
    loss, grads = rd.loss_and_grads(config, plan, params, *batches[0], comm=comm)
    assert abs(loss - want.steps[0][0]) <= 1e-12 * abs(loss), f"loss {loss}, expected {want.steps[0][0]}"
    assert_close(grads, want.steps[0][2].grads, "gradient")

    trainer = rd.Trainer(config, plan, comm, make_optimizer(case.optimizer), "fp64", params=params, clip_norm=want.clip_norm)
    for (ids, labels), (loss, norm, single) in zip(batches, want.steps, strict=True):
        result = trainer.step(ids, labels)
        assert abs(result.loss - loss) <= 1e-10 * abs(loss)
        assert abs(result.grad_norm - norm) <= 1e-10 * norm, f"norm {result.grad_norm}, expected {norm}"
        assert result.tokens == np.count_nonzero(labels >= 0)
        assert_close(trainer.replica.full_gradients(), single.grads, "gradient")
        assert_close(trainer.full_params(), single.params, "parameter", 1e-9)
        for i, moment in enumerate(gather_states(trainer)):
            assert_close(moment, {name: state[i] for name, state in single.state.items()}, f"state {i}", 1e-9)
    assert abs(trainer.evaluate(*batches[0]) - want.final_loss) <= 1e-9 * want.final_loss


def main() -> None:
    comm = rd.mpi_world()
    for case in json.loads(sys.argv[1]):
        check_training(comm, Case(**case))
    if comm.rank == 0:
        print("trained")


if __name__ == "__main__":
    main()

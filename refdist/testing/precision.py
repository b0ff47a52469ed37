"""A case of training in 16 bits, and what must hold for it on every rank.

:meth:`PrecisionCase.check` asks, of a plan on a world,

1. that loss and gradients are those of the single device in float64, to a multiple of the error that one rank alone makes, and
   that this is an error of rounding, whatever the size of activations: their squares may be beyond fp16;
2. that sums in float32 have digits that 16 bits do not have;
3. that three steps of AdamW, of which one may overflow on one rank only, give what the formula gives in float64 on the gradients
   that the ranks have: norm and clipping without the loss scale, master weights that start unrounded, parameters that are these
   rounded, and of the overflow nothing but a smaller scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import refdist as rd
from refdist.numerics import LossScale
from refdist.numerics.precision import DTYPES
from refdist.parallel import data, fsdp
from refdist.testing.compare import differences
from refdist.testing.training import Arrays, Batch, random_batch, random_params
from refdist.testing.worlds import World

__all__ = ["UNITS", "PrecisionCase", "poisoned"]

UNITS = {"fp16": 2.0**-11, "bf16": 2.0**-8}
LOSS = 64  # units of rounding
MULTIPLE = 8  # of the error that one rank makes, as a part of a parameter's scale (compare.py)
LEAST = 8  # units of rounding, where that error is smaller
WRONG = 0.75  # an error of one rank that no rounding to fp16 explains
OF_LARGEST = 8  # units of the largest gradient of all are always allowed: a sum that cancels has errors of its terms' size
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-6, 0.1


@dataclass(frozen=True)
class PrecisionCase:
    """One training run in 16 bits.

    Attributes:
        world: as many ranks as the plan needs.
        config, plan, batch, seed: of the run.
        precision: "fp16" or "bf16".
        size: what all that is added to the residual stream is multiplied with; the norms take it off again.
        loss_scale: at first; a power of two.
        overflow: in which of the three steps a gradient of the last rank is poisoned; None: in none.
        poison: inf, -inf or NaN.
        clip: the clipping threshold in units of the first step's gradient norm; None: no clipping.
    """

    world: World
    config: rd.ModelConfig
    plan: rd.Plan
    batch: Batch
    seed: int
    precision: str
    size: float
    loss_scale: float
    overflow: int | None
    poison: float
    clip: float | None

    def check(self) -> None:
        """Run it."""
        params = random_params(self.config, self.seed)
        for name, array in params.items():
            larger = any(part in name for part in ("embed_tokens", "o_proj", "down_proj"))
            params[name] = (array * (self.size if larger else 1.0)).astype(np.float32).astype(np.float64)
        batches = [random_batch(self.config, self.batch, step) for step in range(3)]
        self._check_gradients(params, *batches[0])
        self._check_steps(params, batches)

    def _check_gradients(self, params: Arrays, ids: np.ndarray, labels: np.ndarray) -> None:
        loss, want = rd.reference.loss_and_grads(self.config, params, ids, labels)
        unit = UNITS[self.precision]

        def run(plan: rd.Plan, comm: rd.Comm) -> tuple[float, Arrays]:
            return rd.loss_and_grads(self.config, plan, params, ids, labels, comm=comm, precision=self.precision,
                                     loss_scale=self.loss_scale)

        top = unit * max(float(np.abs(grad).max(initial=0)) for grad in want.values())
        alone = rd.run(lambda comm: run(rd.Plan(), comm), 1)[0][1]
        own = max([LEAST * unit, *(row.relative for row in differences(alone, want, 0.0))])
        _require(self.precision != "fp16" or own < WRONG, f"one rank alone is {own / unit:.3g} units off in fp16, {self.config}")

        def program(comm: rd.Comm) -> None:
            where = f"rank {comm.rank} of {comm.size}, {self.precision}, {self.plan}"
            got_loss, got = run(self.plan, comm)
            near = abs(got_loss - loss) <= LOSS * unit * max(1.0, abs(loss))
            _require(near, f"loss on {where}: {got_loss}, expected {loss}")
            wrong = [row for row in differences(got, want, MULTIPLE * own) if not row.largest <= OF_LARGEST * top]
            if wrong:
                lines = "\n  ".join(f"{row}; {row.relative / unit:.3g} units" for row in wrong)
                raise AssertionError(f"gradients on {where}: one rank alone is {own / unit:.3g} units off\n  {lines}")

        self.world.run(program)

    def _check_steps(self, params: Arrays, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        rooms = {"data": data, "fsdp": fsdp}
        if self.overflow is not None:
            rooms = {name: poisoned(room, self.overflow, self.poison) for name, room in rooms.items()}
        first = rd.reference.loss_and_grads(self.config, params, *batches[0])[1]
        clip_norm = None if self.clip is None else self.clip * math.sqrt(sum(float(np.sum(grad**2)) for grad in first.values()))

        def program(comm: rd.Comm) -> None:
            where = f"on rank {comm.rank} of {comm.size}, {self.precision}, {self.plan}"
            trainer = rd.Trainer(self.config, self.plan, comm, rd.AdamW(LR, BETAS, EPS, DECAY), self.precision, params=params,
                                 clip_norm=clip_norm, implementations=rooms, loss_scale=LossScale(self.loss_scale))
            want = _Formula(params)
            scale = self.loss_scale
            for step, (ids, labels) in enumerate(batches, start=1):
                result = trainer.step(ids, labels)
                _require(result.loss_scale == scale, f"loss scale {result.loss_scale} in step {step} {where}, expected {scale}")
                _require(result.skipped == (step == self.overflow), f"skipped={result.skipped} in step {step} {where}")
                if result.skipped:
                    scale /= 2
                else:
                    grads = {name: array.astype(np.float64) / result.loss_scale
                             for name, array in trainer.replica.full_gradients().items()}
                    norm = want.update(grads, clip_norm)
                    _require(abs(result.grad_norm - norm) <= 1e-9 * norm, f"norm {result.grad_norm} {where}, expected {norm}")
                self._require_parameters(trainer, want.params, f"after step {step} {where}")
            _require(trainer.steps == 3 - (self.overflow is not None), f"{trainer.steps} steps {where}")
            self._require_digits(trainer, batches[-1][1], where)

        self.world.run(program)

    def _require_parameters(self, trainer: rd.Trainer, want: Arrays, when: str) -> None:
        storage, dtype = trainer.replica.storage, DTYPES[self.precision]
        for name, master in trainer.full_params().items():
            off = np.abs(master - want[name])
            _require(bool(np.all(off <= 2e-6 * np.abs(want[name]) + 2e-2 * LR)),
                     f"master weights of {name} {when}: off by {off.max():.3g}")
        for name, master in storage.masters.items():
            _require(bool(np.all(storage.shard(name) == master.astype(dtype))), f"{name} is not its master copy, rounded, {when}")

    def _require_digits(self, trainer: rd.Trainer, labels: np.ndarray, where: str) -> None:
        """Sums over ranks in float32 are not on the grid of 16 bits."""
        parts = np.array_split((labels >= 0).any(axis=1), self.plan.batch_parts)
        if self.plan.reduce_dtype != "fp32" or self.plan.accumulate_dtype is not None or sum(part.any() for part in parts) < 2:
            return
        dtype = DTYPES[self.precision]
        finer = [np.any(grad != grad.astype(dtype)) for grad in trainer.replica.full_gradients().values()]
        _require(any(finer), f"gradients of 16 bits in reduce_dtype='fp32' {where}")


class _Formula:
    """AdamW in float64, on whole parameters."""

    def __init__(self, params: Mapping[str, np.ndarray]) -> None:
        self.params = {name: array.copy() for name, array in params.items()}
        self.moments = {name: (np.zeros_like(array), np.zeros_like(array)) for name, array in params.items()}
        self.steps = 0

    def update(self, grads: Arrays, clip_norm: float | None) -> float:
        """One step; returns the norm of the gradients."""
        norm = math.sqrt(math.fsum(float(np.sum(grad**2)) for grad in grads.values()))
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / norm)
        self.steps += 1
        for name, grad in grads.items():
            m, v = self.moments[name]
            m[...] = BETAS[0] * m + (1 - BETAS[0]) * factor * grad
            v[...] = BETAS[1] * v + (1 - BETAS[1]) * (factor * grad) ** 2
            update = (m / (1 - BETAS[0] ** self.steps)) / (np.sqrt(v / (1 - BETAS[1] ** self.steps)) + EPS)
            p = self.params[name]
            self.params[name] = p * (1 - LR * (DECAY if p.ndim == 2 else 0.0)) - LR * update
        return norm


def poisoned(room: Any, step: int, value: float) -> Any:
    """A room of parameter storage in which one element of one gradient of the last rank is ``value`` in that step, from 1."""

    def Storage(rows: Any, params: Any, dtype: Any, mesh: Any, device: Any, plan: Any) -> Any:
        storage = room.Storage(rows, params, dtype, mesh, device, plan)
        begin, add = storage.begin_step, storage.add
        victim = [name for name in rows if name.endswith("norm.weight")][-1]
        begun = [0]

        def begin_step(micro_batches: int) -> None:
            begun[0] += 1
            begin(micro_batches)

        def add_poison(name: str, kernel: Callable[..., Any], *args: Any) -> None:
            def broken(*args: Any, **kwargs: Any) -> Any:
                gradient = kernel(*args, **kwargs)
                if begun[0] == step and mesh.comm.rank == mesh.comm.size - 1 and name == victim:
                    gradient.reshape(-1)[-1] = value
                return gradient

            broken.wants, broken.flops = getattr(kernel, "wants", ()), getattr(kernel, "flops", None)  # type: ignore[attr-defined]
            add(name, broken, *args)

        storage.begin_step, storage.add = begin_step, add_poison
        return storage

    return SimpleNamespace(Storage=Storage)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)

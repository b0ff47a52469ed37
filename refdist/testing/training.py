"""A case of a whole training run, and what must hold for it: that it is the single device's.

:meth:`TrainingCase.check` runs a plan on a world and asks, in float64, that on every rank the loss and each gradient are those of
the single-device reference, and that after two steps of SGD and two of AdamW each parameter and each moment is. The optimizers'
formulas stand here once more, whole and in order, so that the product's are held against something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

import refdist as rd
from refdist.model.layout import parameter_shapes
from refdist.optim import Optimizer
from refdist.testing.compare import BOUND, Wanted, flat
from refdist.testing.tiles import small_tiles
from refdist.testing.worlds import World

__all__ = ["AdamWFields", "Batch", "SGDFields", "SingleDevice", "TrainingCase", "random_batch", "random_params",
           "random_segments"]

Arrays: TypeAlias = dict[str, np.ndarray]


@dataclass(frozen=True)
class SGDFields:
    """Arguments of :class:`refdist.optim.SGD`, as data."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class AdamWFields:
    """Arguments of :class:`refdist.optim.AdamW`, as data."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Batch:
    """A global batch as data: how many labels count in each sequence, of how many tokens, and the seed of which.

    ``later``: of how many tokens the sequences of later steps are; None: of as many.
    """

    valid: tuple[int, ...]
    length: int
    seed: int
    later: int | None = None

    def length_in(self, step: int) -> int:
        """Tokens of a sequence in a step, counted from 0."""
        return self.length if step == 0 or self.later is None else self.later


def random_params(config: rd.ModelConfig, seed: int) -> Arrays:
    """Float64 parameters that hide nothing: gains away from one, biases away from zero, everything distinct."""
    generator = np.random.default_rng(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        array = generator.standard_normal(shape)
        if len(shape) == 2:
            params[name] = array / math.sqrt(shape[1])
        else:
            params[name] = 0.3 * array + (0.0 if name.endswith(".bias") else 1.0)
    return params


def random_batch(config: rd.ModelConfig, batch: Batch, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``input_ids`` and ``labels`` [batch, seq]; in each sequence as many labels count as the batch says, at random places.

    Their integers are of one byte, with a sign only where one is needed, or of more.
    """
    generator = np.random.default_rng([batch.seed, step])
    length = batch.length_in(step)
    shape = len(batch.valid), length
    ids = generator.integers(0, config.vocab_size, shape)
    labels = generator.integers(0, config.vocab_size, shape)
    for row, valid in enumerate(batch.valid):
        labels[row, generator.permutation(length)[valid:]] = -100
    least = np.uint8 if labels.min() >= 0 else np.int8
    of_ids, of_labels = (np.int64, np.uint8)[generator.integers(2)], (np.int64, np.int32, least)[generator.integers(3)]
    return ids.astype(of_ids), labels.astype(of_labels)


def random_segments(batch: Batch, step: int = 0) -> np.ndarray:
    """``segment_ids`` [batch, seq]: up to three documents packed into each sequence, cut at random places."""
    generator = np.random.default_rng([batch.seed, 99])
    return np.sort(generator.integers(0, 3, (len(batch.valid), batch.length_in(step))), axis=1)


class SingleDevice:
    """A model trained on one device, as whole arrays. Inside, all its numbers lie one after the other.

    Attributes:
        history: each step's loss and gradient norm.
    """

    def __init__(self, params: Arrays, fields: SGDFields | AdamWFields, clip_norm: float | None) -> None:
        self.fields = fields
        self.clip_norm = clip_norm
        self.history: list[tuple[float, float]] = []
        self._shapes = {name: array.shape for name, array in params.items()}
        self._numbers = flat(params)
        self._decayed = flat({name: np.full(array.shape, float(array.ndim >= 2)) for name, array in params.items()})
        names = ("exp_avg", "exp_avg_sq") if isinstance(fields, AdamWFields) else ("momentum_buffer",) * (fields.momentum > 0)
        self._moments = {name: np.zeros_like(self._numbers) for name in names}

    @property
    def params(self) -> Arrays:
        """Now."""
        return self._whole(self._numbers)

    @property
    def moments(self) -> dict[str, Arrays]:
        """The optimizer's state by its names."""
        return {name: self._whole(numbers) for name, numbers in self._moments.items()}

    def _whole(self, numbers: np.ndarray) -> Arrays:
        ends = np.cumsum([math.prod(shape) for shape in self._shapes.values()])
        return {name: part.reshape(shape)
                for (name, shape), part in zip(self._shapes.items(), np.split(numbers, ends[:-1]), strict=True)}

    def step(self, loss: float, grads: Arrays) -> None:
        """One step, given the loss and the gradients at :attr:`params`."""
        norm = _norm(grads)
        self.history.append((loss, norm))
        scale = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / norm)
        update = self._sgd if isinstance(self.fields, SGDFields) else self._adamw
        self._numbers = update(self._numbers, scale * flat({name: grads[name] for name in self._shapes}))

    def _sgd(self, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        fields = self.fields
        assert isinstance(fields, SGDFields)
        g = g + fields.weight_decay * self._decayed * p
        if not fields.momentum:
            return p - fields.lr * g
        self._moments["momentum_buffer"] = b = fields.momentum * self._moments["momentum_buffer"] + g
        return p - fields.lr * (g + fields.momentum * b if fields.nesterov else b)

    def _adamw(self, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        fields, step = self.fields, len(self.history)
        assert isinstance(fields, AdamWFields)
        one, two = fields.betas
        self._moments["exp_avg"] = m = one * self._moments["exp_avg"] + (1 - one) * g
        self._moments["exp_avg_sq"] = v = two * self._moments["exp_avg_sq"] + (1 - two) * g * g
        update = (m / (1 - one**step)) / (np.sqrt(v / (1 - two**step)) + fields.eps)
        return p - fields.lr * fields.weight_decay * self._decayed * p - fields.lr * update


def _norm(grads: Arrays) -> float:
    return math.sqrt(math.fsum(float(np.sum(g * g)) for g in grads.values()))


@dataclass(frozen=True)
class Expected:
    """What a case must give, computed once for all ranks.

    Attributes:
        params, batches: what goes in.
        segments: of each batch, or None.
        clip_norm: the clipping threshold.
        loss, grads: of the first batch.
        devices: by optimizer, after all steps.
        after, moments: their arrays, to be compared with.
    """

    params: Arrays
    batches: list[tuple[np.ndarray, np.ndarray]]
    segments: list[np.ndarray | None]
    clip_norm: float | None
    loss: float
    grads: Wanted
    devices: dict[str, SingleDevice]
    after: dict[str, Wanted]
    moments: dict[str, dict[str, Wanted]]


@dataclass(frozen=True)
class TrainingCase:
    """One training run.

    Attributes:
        world: as many ranks as the plan needs.
        config, plan, batch: of the run; the dropout is the model's.
        seed: of the parameters, and of the dropout.
        initialised: whether the trainers make the parameters from the seed themselves, or are given random ones.
        sgd, adamw: the two optimizers.
        clip: the clipping threshold in units of the first step's gradient norm; None: no clipping.
        packed: whether there are several documents in a sequence.
        alone: whether ``rd.loss_and_grads`` is asked for the first batch's gradients as well.
        tiled: whether the kernels cut into small tiles, on the ranks but not in the reference (:mod:`refdist.testing.tiles`).
    """

    world: World
    config: rd.ModelConfig
    plan: rd.Plan
    batch: Batch
    seed: int
    initialised: bool
    sgd: SGDFields
    adamw: AdamWFields
    clip: float | None
    packed: bool = False
    alone: bool = False
    tiled: bool = False

    def check(self, implementations: Mapping[str, Any] | None = None, bound: float = BOUND) -> None:
        """Run it on in-process ranks, and hold every rank's results against the single device's.

        Args:
            implementations: rooms that take the place of refdist's own (``{"data": module}``).
            bound: of the difference, as a part of a parameter's scale (``compare.py``).
        """
        expected = self.expected(bound)
        with small_tiles() if self.tiled else nullcontext():
            self.world.run(lambda comm: self.check_rank(comm, expected, implementations, bound))

    def expected(self, bound: float = BOUND) -> Expected:
        """Train on a single device, with each optimizer."""
        params = random_params(self.config, self.seed)
        if self.initialised:
            params = {name: array.astype(np.float64) for name, array in rd.init_params(self.config, self.seed).items()}
        batches = [random_batch(self.config, self.batch, step) for step in range(2)]
        loss, grads = self._single(params, batches, 1)
        clip_norm = None if self.clip is None else self.clip * _norm(grads)
        devices = {name: SingleDevice(params, fields, clip_norm) for name, fields in (("SGD", self.sgd), ("AdamW", self.adamw))}
        for device in devices.values():
            device.step(loss, grads)
            device.step(*self._single(device.params, batches, 2))
        segments = [self._segments(step) for step in range(2)]
        return Expected(params, batches, segments, clip_norm, loss, Wanted(grads, bound), devices,
                        {name: Wanted(device.params, bound) for name, device in devices.items()},
                        {name: {moment: Wanted(arrays, bound) for moment, arrays in device.moments.items()}
                         for name, device in devices.items()})

    def check_rank(self, comm: rd.Comm, expected: Expected, implementations: Mapping[str, Any] | None = None,
                   bound: float = BOUND) -> None:
        """This rank's part of :meth:`check`: the program that runs on each rank."""
        def on(what: str) -> Callable[[], str]:
            return lambda: f"{what} on rank {comm.rank} of {comm.size}, {self.plan}"

        first, (segments, later_segments) = expected.batches[0], expected.segments
        if self.alone:
            loss, grads = rd.loss_and_grads(self.config, self.plan, expected.params, *first, comm=comm, segment_ids=segments,
                                            dropout_seed=self._dropout_seed(1), implementations=implementations)
            _require_near([loss], [expected.loss], on("loss of loss_and_grads"), bound)
            expected.grads.require(grads, on("gradients of loss_and_grads"))
        optimizers: dict[str, Optimizer] = {"SGD": rd.SGD(**vars(self.sgd)), "AdamW": rd.AdamW(**vars(self.adamw))}
        trainer = rd.Trainer(self.config, self.plan, comm, optimizers["SGD"], "fp64", self.seed,
                             None if self.initialised else expected.params, clip_norm=expected.clip_norm,
                             implementations=implementations)
        step_1 = trainer.forward_backward(*first, segments)
        _require_near([step_1.loss, step_1.grad_norm], expected.devices["SGD"].history[0], on("loss and gradient norm in step 1"),
                      bound)
        expected.grads.require(trainer.replica.full_gradients(), on("gradients"))
        beginning = [array.copy() for array in _owned(trainer)]
        for name, optimizer in optimizers.items():
            if optimizer is not trainer.optimizer:  # as they were after the first backward, which is the same for both
                for array, before in zip(_owned(trainer), beginning, strict=True):
                    array[...] = before
                trainer.replica.storage.updated()
                trainer.use(optimizer)
            trainer.update(step_1)
            step_2 = trainer.step(*expected.batches[1], later_segments)
            _require_near([step_2.loss, step_2.grad_norm], expected.devices[name].history[1],
                          on(f"loss and gradient norm in step 2 of {name}"), bound)
            expected.after[name].require(trainer.full_params(), on(f"parameters after two steps of {name}"))
            assert tuple(expected.moments[name]) == tuple(optimizer.state_names), (name, optimizer.state_names)
            for place, (moment, arrays) in enumerate(expected.moments[name].items()):
                mine = {parameter: state[place] for parameter, state in trainer.state.items()}
                arrays.require(trainer.replica.gather(mine), on(f"{moment} after two steps of {name}"))

    def _single(self, params: Arrays, batches: list[tuple[np.ndarray, np.ndarray]], step: int) -> tuple[float, Arrays]:
        return rd.reference.loss_and_grads(self.config, params, *batches[step - 1], segment_ids=self._segments(step - 1),
                                           dropout_seed=self._dropout_seed(step))

    def _segments(self, step: int) -> np.ndarray | None:
        return random_segments(self.batch, step) if self.packed else None

    def _dropout_seed(self, step: int) -> int | None:
        """The trainer's, as its documentation has it."""
        drops = self.config.attention_dropout or self.config.hidden_dropout
        return (self.seed << 32) + step if drops else None


def _owned(trainer: rd.Trainer) -> list[np.ndarray]:
    """What this rank updates, and the gradients that it does so by."""
    return [array for pair in trainer.replica.storage.owned().values() for array in pair]


def _require_near(got: Sequence[float], wanted: Sequence[float], what: Callable[[], str], bound: float) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        if not abs(mine - theirs) <= bound * abs(theirs):
            raise AssertionError(f"{what()}: {got}, expected {wanted}; parallel/single = "
                                 f"{[a / b if b else math.nan for a, b in zip(got, wanted, strict=True)]}")

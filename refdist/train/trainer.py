"""``Trainer``: a model, a plan and an optimizer on this rank; one call a step.

    step:  cut the batch ─▶ forward, backward of each micro-batch ─▶ reduce gradients ─▶ global norm, clip ─▶ update

With loss scaling the step is skipped where any gradient on any rank is infinite or NaN. All ranks know that at once, since the
global norm is then infinite or NaN too, and it is the same number everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from refdist.comm import Comm
from refdist.device import Device
from refdist.model.config import ModelConfig
from refdist.model.params import init_params
from refdist.numerics.loss_scale import LossScale, loss_scale_of
from refdist.ops import accumulation_dtype
from refdist.optim import AdamW, Optimizer, clip_scale
from refdist.parallel.agreement import require_same
from refdist.parallel.flat import in_memory_order, joined, lay_out, runs, same
from refdist.parallel.plan import Plan
from refdist.parallel.replica import Replica

__all__ = ["StepResult", "Trainer"]


class StepResult(NamedTuple):
    """What one training step gave.

    Attributes:
        loss: mean over the valid tokens of the global batch, before the update.
        grad_norm: global norm of the gradients, before clipping.
        tokens: valid tokens in the global batch.
        skipped: whether gradients have overflowed, so that nothing was updated.
        loss_scale: what the loss was multiplied by for this step's backward; the norm has been divided by it.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool = False
    loss_scale: float = 1.0


class _Update(NamedTuple):
    """One call of the optimizer: of one parameter, or of several of as many dimensions, joined into flat arrays."""

    parameter: np.ndarray
    gradient: np.ndarray
    state: tuple[np.ndarray, ...]
    ndim: int


class _Updates(NamedTuple):
    """Parameter, gradient and state by name, and the calls of the optimizer that update these arrays."""

    arrays: Mapping[str, tuple[np.ndarray, ...]]
    calls: list[_Update]


class Trainer:
    """Trains a model under a plan. Collective: every rank makes the same calls with the same arguments.

    Args:
        config: the model.
        plan: how it is spread over the ranks of ``comm``.
        comm: as many ranks as the plan needs.
        optimizer: an :class:`~refdist.optim.SGD` or :class:`~refdist.optim.AdamW`; AdamW with its defaults if None.
        precision: ``"fp64"``, ``"fp32"``, ``"fp16"`` or ``"bf16"``, of parameters, activations and gradients; with 16 bits the
            optimizer updates float32 master weights and moments (:mod:`refdist.numerics.precision`).
        seed: of the initial parameters and of the dropout masks, which are the same for every plan.
        params: initial parameters by name instead.
        device: where memory, kernels and messages are counted; a new one if None.
        clip_norm: gradients of a larger global norm are scaled down to it; None: never.
        implementations: rooms that take the place of refdist's own, such as ``{"data": module}``.
        loss_scale: ``"dynamic"``, a number that stays, or a :class:`~refdist.numerics.LossScale`, of which a copy is taken; None:
            dynamic with fp16, else no loss scaling, and then no step is skipped.

    Attributes:
        steps: updates so far; steps that were skipped do not count, neither for the learning rate nor for Adam's moments.
        loss_scale: None without loss scaling.
        state: name -> the optimizer's state arrays, laid out like the parameter that this rank updates. They may be replaced.

    Raises:
        PlanError: the plan does not fit the ranks, the model or the batch.
        ConfigError: parameters that do not fit the configuration, or a batch that cannot be used.
    """

    def __init__(self, config: ModelConfig, plan: Plan, comm: Comm, optimizer: Optimizer | None = None, precision: str = "fp32",
                 seed: int = 0, params: Mapping[str, np.ndarray] | None = None, device: Device | None = None,
                 clip_norm: float | None = None, implementations: Mapping[str, Any] | None = None,
                 loss_scale: str | float | LossScale | None = None) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm!r}: expected a number above 0, or None")
        self.clip_norm = clip_norm
        self.loss_scale = loss_scale_of(loss_scale, precision)
        if optimizer is not None and not hasattr(optimizer, "state_names"):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: expected an Optimizer such as AdamW(), or None")
        if params is None:
            params = init_params(config, seed)
        self.replica = Replica(config, plan, comm, params, precision, device, implementations)
        self.device = self.replica.device
        self.seed = seed
        self.use(AdamW() if optimizer is None else optimizer)

    def use(self, optimizer: Optimizer) -> None:
        """Train with this optimizer from now on: its state is new, and steps count from 0. Collective."""
        require_same(self.replica.mesh.comm, optimizer=(type(optimizer).__name__, vars(optimizer)), clip_norm=self.clip_norm,
                     loss_scale=self.loss_scale and vars(self.loss_scale))
        self.optimizer = optimizer
        self.steps = 0
        owned = self.replica.storage.owned()
        placed = {name: owned[name][0] for name in in_memory_order(self.replica.storage.rows) if name in owned}
        moments = [self._moments(placed) for _ in optimizer.state_names]
        self.state = {name: tuple(moment[name] for moment in moments) for name in owned}
        self._updates = _Updates({}, [])

    def _moments(self, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Zeros shaped like these arrays, one after the other in memory, in at least float32."""
        some = next(iter(like.values()))
        flat, parts = lay_out(self.device, some, {name: array.shape for name, array in like.items()}, "optimizer",
                              accumulation_dtype(some))
        flat.fill(0)
        return parts

    def _to_update(self) -> _Updates:
        """What the optimizer updates. It is worked out anew when arrays, of storage or of the state, have been replaced."""
        arrays = {name: (*pair, *self.state[name]) for name, pair in self.replica.storage.owned().items()}
        known = self._updates.arrays
        if arrays.keys() != known.keys() or not all(same(arrays[name], known[name]) for name in arrays):
            self._updates = _Updates(arrays, list(self._joined(arrays)))
        return self._updates

    def _joined(self, arrays: Mapping[str, tuple[np.ndarray, ...]]) -> Iterator[_Update]:
        """Each parameter; or, for an optimizer that looks at elements only, those that lie side by side at once."""
        ndims = {name: len(self.replica.storage.rows[name].shape) for name in arrays}
        elementwise = vars(type(self.optimizer)).get("elementwise", False)
        for run in runs(arrays, lambda name: ndims[name] if elementwise else name):
            parameter, gradient, *state = arrays[run[0]]
            if len(run) > 1:
                parameter, gradient, *state = (joined(parts) for parts in zip(*(arrays[name] for name in run), strict=True))
            yield _Update(parameter, gradient, tuple(state), ndims[run[0]])

    def step(self, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None) -> StepResult:
        """Train on one global batch, which every rank passes whole.

        Args:
            input_ids, labels: integers [batch, seq]; ``labels[b, t]`` is the target of position t, -100 is ignored.
            segment_ids: integers [batch, seq]: attention stays within a segment. None: each row is one.
        """
        result = self.forward_backward(input_ids, labels, segment_ids)
        self.update(result)
        return result

    def forward_backward(self, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None) -> StepResult:
        """The first part of :meth:`step`: gradients, which stay in ``replica.storage``, and what is known of them."""
        config = self.replica.config
        drops = config.attention_dropout > 0 or config.hidden_dropout > 0
        dropout_seed = self.dropout_seed(self.steps + 1) if drops else None
        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        loss, tokens = self.replica.forward_backward(input_ids, labels, segment_ids, dropout_seed, loss_scale)
        norm = math.sqrt(self.replica.squared_norm()) / loss_scale
        skipped = self.loss_scale is not None and not math.isfinite(norm)
        return StepResult(loss, norm, tokens, skipped, loss_scale)

    def update(self, result: StepResult) -> None:
        """The second part of :meth:`step`: clip and update, or skip, by what :meth:`forward_backward` has left and returned."""
        if self.loss_scale is not None:
            self.loss_scale.update(result.skipped)
        if result.skipped:
            return
        scale = clip_scale(result.grad_norm, self.clip_norm) / result.loss_scale
        storage = self.replica.storage
        self.steps += 1
        for parameter, gradient, state, ndim in self._to_update().calls:
            self.optimizer.update(parameter, gradient, state, self.steps, ndim, scale)
        storage.updated()

    def dropout_seed(self, step: int) -> int:
        """The seed of the dropout masks of a step, counted from 1: what the reference is given to draw the same masks."""
        return (self.seed << 32) + step

    def evaluate(self, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None) -> float:
        """The mean loss over the valid tokens of a global batch, without training on it; arguments as in :meth:`step`."""
        return self.replica.forward_only(input_ids, labels, segment_ids)

    def full_params(self) -> dict[str, np.ndarray]:
        """Copies of all parameters, whole, by name; collective."""
        return self.replica.full_parameters()

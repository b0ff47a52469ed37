"""``Replica``: one rank's part of a model under a plan. It cuts a global batch, runs the rank's micro-batches, and has their
gradients reduced. What it does in each of these steps is the business of the rooms that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from refdist.comm import Comm, Mesh
from refdist.device import Device
from refdist.errors import PlanError
from refdist.model.batch import check_batch
from refdist.model.config import ModelConfig
from refdist.model.dropout import Dropout
from refdist.model.layout import layout
from refdist.model.params import check_params
from refdist.model.transformer import Context
from refdist.numerics.precision import precision_named
from refdist.numerics.rounding import widened
from refdist.optim.clip import exact_squares, exact_value
from refdist.parallel import context, data, fsdp, tensor
from refdist.parallel.agreement import require_same, sample
from refdist.parallel.batch import micro_batches, valid_tokens
from refdist.parallel.pipeline import stages
from refdist.parallel.plan import Plan
from refdist.parallel.sharding import counted, local_rows, own_part, shard, sum_partial, unshard
from refdist.parallel.stage import MicroBatch

__all__ = ["ROOMS", "Replica", "check_plan"]

ROOMS: dict[str, ModuleType] = {"data": data, "fsdp": fsdp, "tensor": tensor, "context": context,
                                **context.METHODS, "pipeline": stages}


def check_plan(config: ModelConfig, plan: Plan, rooms: Mapping[str, Any] = ROOMS) -> None:
    """Raise PlanError if the model cannot be cut as the plan says: heads, layers or stages that do not come out."""
    for room in ("tensor", "context", "pipeline"):
        rooms[room].check(config, plan)


class Replica:
    """One rank's part of a model.

    Args:
        config, plan: the model and how it is spread over the ranks of ``comm``.
        params: all parameters, whole, by name.
        precision: ``"fp64"``, ``"fp32"``, ``"fp16"`` or ``"bf16"`` (:mod:`refdist.numerics.precision`).
        device: this rank's device; a new one if None.
        implementations: modules by room name that take the place of refdist's own.

    Raises:
        PlanError, ConfigError: what does not fit, before anything is communicated; or a configuration, plan, precision or
            parameters that are not those of rank 0.
    """

    def __init__(self, config: ModelConfig, plan: Plan, comm: Comm, params: Mapping[str, np.ndarray], precision: str = "fp64",
                 device: Device | None = None, implementations: Mapping[str, Any] | None = None) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is a {type(plan).__name__}: expected a Plan")
        self.precision = precision_named(precision)
        product = self.precision.product(plan.tensor_core)
        rooms: dict[str, Any] = dict(ROOMS)
        for name, room in (implementations or {}).items():
            if name not in rooms:
                raise PlanError(f"implementations has a room {name!r}: expected one of {', '.join(rooms)}")
            rooms[name] = room
        plan.check_ranks(comm.size)
        check_params(config, params)
        check_plan(config, plan, rooms)
        require_same(comm, configuration=config, plan=plan, precision=precision, parameters=sample(params))
        self.config = config
        self.plan = plan
        self.dtype = self.precision.dtype
        self.device = Device() if device is None else device
        if not self.device.matmul_is_given:
            self.device.matmul = product
        self.mesh = Mesh(comm, **plan.sizes, device=self.device)
        self.tensor = rooms["tensor"].Tensor(config, plan, self.mesh, self.device)
        self.sequence = rooms["context"].Sequence(config, plan, self.mesh, self.device, rooms)
        self.pipeline = rooms["pipeline"].Pipeline(config, plan, self.mesh, self.device)
        self.table = layout(config, plan.sequence_parallel, plan.tp)
        self.rows = self.pipeline.rows(self.table)  # of this stage
        part = plan.tp, self.tensor.comm.rank
        room = rooms["fsdp" if plan.fsdp > 1 else "data"]
        self.storage = room.Storage(local_rows(self.rows, *part), shard(self.rows, params, *part), self.dtype, self.mesh,
                                    self.device, plan)
        self.pipeline.attach(self.storage)
        self._shared: tuple[int, np.ndarray, Context] | None = None
        self._agreed = False  # on the first batch

    def forward_backward(self, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None,
                         dropout_seed: int | None = None, loss_scale: float = 1.0) -> tuple[float, int]:
        """One global batch: afterwards the storage holds the reduced gradients of its mean loss.

        Args:
            input_ids, labels: the whole batch, integers [batch, seq], the same on every rank.
            segment_ids: integers [batch, seq]: attention stays within a segment. None: each row is one.
            dropout_seed: of the dropout masks; None: no dropout.
            loss_scale: the gradients are those of the loss times this.

        Returns:
            The mean loss over the valid tokens of the global batch, and their number.

        Raises:
            ConfigError: what is no batch for this model; or, in the first batch, another one than rank 0's.
        """
        with self._overflows(loss_scale):
            batches = self._micro_batches(input_ids, labels, segment_ids, dropout_seed)
            tokens = self._sum(sum(valid_tokens(batch.labels) for batch in batches))
            self.storage.begin_step(len(batches))
            for batch in batches:
                batch.scale = loss_scale / tokens
            loss_sum = self.pipeline.run(batches)
            self.storage.reduce()
            gradients = {name: gradient for name, (_, gradient) in self.storage.owned().items()}
            sum_partial(self.rows, gradients, self.tensor.comm, self.tensor.copies)
            return self._sum(loss_sum) / tokens, int(tokens)

    def forward_only(self, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None) -> float:
        """The mean loss over the valid tokens of a global batch, without dropout; arguments as above."""
        batches = self._micro_batches(input_ids, labels, segment_ids)
        with self._overflows():
            return self._sum(self.pipeline.losses(batches)) / self._sum(sum(valid_tokens(batch.labels) for batch in batches))

    def _overflows(self, loss_scale: float = 1.0) -> AbstractContextManager[Any]:
        """Inside, infinity and NaN arise without a warning where they belong to the method: loss scaling looks for them."""
        return np.errstate(over="ignore", invalid="ignore") if self.precision.mixed or loss_scale != 1 else nullcontext()

    def squared_norm(self) -> float:
        """The sum of squares of the reduced gradients of the whole model, the same on every rank and for every plan; infinite or
        NaN on every rank if any element on any rank is; collective.

        Each element counts once: where several ranks hold the same rows, each takes a part of them. Copies that do not count are
        looked through for what is not finite, all the same.
        """
        rank, replicas = self.tensor.comm.rank, self.storage.replicas
        owned = self.storage.owned()
        counting = {name for name in owned if counted(self.rows[name], rank)}
        mine = exact_squares(own_part(owned[name][1], replicas) for name in owned if name in counting)
        mine[-1] += sum(not np.isfinite(owned[name][1]).all() for name in owned if name not in counting)
        return exact_value(self.mesh.comm.all_reduce(mine) if self.mesh.comm.size > 1 else mine)

    def gather(self, shards: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Whole arrays of the whole model from arrays laid out like those of ``storage.owned()``, such as optimizer state;
        collective."""
        return self.pipeline.collect(unshard(self.rows, self.storage.gather(shards), self.tensor.comm), self.table)

    def full_parameters(self) -> dict[str, np.ndarray]:
        """Copies of all parameters, whole, of 16 bits the master weights, in float32 or wider; collective."""
        whole = self.pipeline.collect(unshard(self.rows, self.storage.full_parameters(), self.tensor.comm), self.table)
        return {name: widened(array) for name, array in whole.items()}

    def full_gradients(self) -> dict[str, np.ndarray]:
        """Copies of all reduced gradients, whole; collective."""
        return self.pipeline.collect(unshard(self.rows, self.storage.full_gradients(), self.tensor.comm), self.table)

    def _micro_batches(self, input_ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray | None = None,
                       dropout_seed: int | None = None) -> list[MicroBatch]:
        """This rank's rows and positions of a batch that has been checked, micro-batch by micro-batch."""
        input_ids, labels = np.asarray(input_ids), np.asarray(labels)
        check_batch(self.config, input_ids, labels, segment_ids)
        self.plan.check_batch(len(input_ids))
        input_ids, labels = (array.astype(np.int64, copy=False) for array in (input_ids, labels))  # small ones wrap
        if not self._agreed:
            segments = None if segment_ids is None else np.asarray(segment_ids).astype(np.int64, copy=False)
            require_same(self.mesh.comm, input_ids=input_ids, labels=labels, segment_ids=segments, dropout_seed=dropout_seed)
            self._agreed = True
        length = input_ids.shape[1]
        positions, shared = self._context(length)
        axis = shared.tensor
        batches = []
        arrays = [input_ids, labels, np.arange(len(input_ids))] + ([] if segment_ids is None else [segment_ids])
        for ids, targets, rows, *own in micro_batches(self.plan, self.mesh, *arrays):
            context = shared
            if own:
                context = replace(context, attention=self.sequence.attention(length, own[0]))
            if dropout_seed is not None:
                first_head = axis.rank * (self.config.num_attention_heads // axis.size)
                masks = Dropout(self.config, dropout_seed, rows, length, positions[axis.part], first_head)
                context = replace(context, dropout=masks)
            batches.append(MicroBatch(ids[:, positions], targets[:, positions], context, 0.0))
        return batches

    def _context(self, length: int) -> tuple[np.ndarray, Context]:
        """This rank's positions of sequences of this length, and what its micro-batches share; kept for the next step."""
        if self._shared is None or self._shared[0] != length:
            positions = self.sequence.positions(length)
            self._shared = length, positions, Context.of(self.config, self.device, positions, self.dtype,
                                                         tensor=self.tensor.axis(len(positions)),
                                                         attention=self.sequence.attention(length))
        return self._shared[1:]

    def _sum(self, value: float) -> float:
        """The sum of one number over the ranks that cut the batch, in float64: within each shard group, then over the groups."""
        group = self.mesh.axis(*(["cp"] if self.plan.cp > 1 else []), "fsdp", "dp")
        if group.size == 1:
            return value
        values = group.all_gather(np.array([value], np.float64), lengths=[1] * group.size)  # [dp · fsdp · cp]
        return sum(sum(part) for part in values.reshape(-1, self.plan.fsdp * self.plan.cp).tolist())

"""``loss_and_grads``: the loss and all gradients of one global batch under a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refdist.comm import Comm
from refdist.device import Device
from refdist.model.config import ModelConfig
from refdist.numerics.rounding import widened
from refdist.parallel.plan import Plan
from refdist.parallel.replica import Replica

__all__ = ["loss_and_grads"]


def loss_and_grads(config: ModelConfig, plan: Plan, params: Mapping[str, np.ndarray], input_ids: np.ndarray, labels: np.ndarray,
                   *, comm: Comm, segment_ids: np.ndarray | None = None, dropout_seed: int | None = None,
                   precision: str = "fp64", loss_scale: float = 1.0, device: Device | None = None,
                   implementations: Mapping[str, Any] | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of one global batch and its gradients, computed in parallel. Collective.

    Args:
        config: the model.
        plan: how it is spread over the ranks of ``comm``.
        params: all parameters, by Hugging Face name, weights [out, in].
        input_ids, labels: integers [batch, seq]; ``labels[b, t]`` is the target of position t, -100 is ignored.
        segment_ids: integers [batch, seq]: attention stays within a segment. None: each row is one.
        dropout_seed: of the dropout masks, which are the same for every plan; None: no dropout.
        comm: as many ranks as the plan needs; every rank passes the same full arguments.
        precision: ``"fp64"``, ``"fp32"``, ``"fp16"`` or ``"bf16"`` (:mod:`refdist.numerics.precision`).
        loss_scale: backward runs on the loss times this; the gradients that are returned are divided by it.
        device: where memory, kernels and messages are counted.
        implementations: rooms that take the place of refdist's own, such as ``{"data": module}``.

    Returns:
        The mean loss over the valid tokens, and on every rank the full gradients in single-device names and shapes, in float32
        where they are computed in 16 bits.

    Raises:
        PlanError: the plan does not fit the ranks or the batch.
        ConfigError: parameters or a batch that do not fit the model.
    """
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"loss_scale={loss_scale!r}: expected a number above 0")
    replica = Replica(config, plan, comm, params, precision, device, implementations)
    loss, _ = replica.forward_backward(input_ids, labels, segment_ids, dropout_seed, loss_scale)
    grads = {name: widened(gradient) for name, gradient in replica.full_gradients().items()}
    return loss, grads if loss_scale == 1 else {name: gradient / loss_scale for name, gradient in grads.items()}

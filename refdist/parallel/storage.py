"""What all rooms of parameter storage have in common: ``data.py`` and ``fsdp/zero1.py`` to ``zero3.py`` say what is kept where.

    kernels read       parameters     in the format of activations
    kernels give       gradients ──▶ sums over micro-batches ──▶ sums over ranks          accumulate_dtype, reduce_dtype
    optimizer updates  masters        in float32, where parameters have 16 bits; rounded into the parameters afterwards

The master weights and the optimizer's state are kept for the rows that this rank updates: ``own(name)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from refdist.comm import Comm, Mesh
from refdist.device import Device
from refdist.model.layout import ParameterLayout
from refdist.numerics.precision import DTYPES
from refdist.numerics.rounding import has_16_bits, store
from refdist.ops import add
from refdist.parallel.flat import in_memory_order, lay_out
from refdist.parallel.plan import Plan
from refdist.parallel.stage import Piece

__all__ = ["BaseStorage", "in_sum_dtype", "pieces_of", "replicating_axes", "sum_options"]


class BaseStorage:
    """Parameters whole, gradients summed whole, on every rank; the rooms change the one or the other.

    Args:
        rows: the layout table of what this rank holds, in canonical order, with shapes as this rank has them.
        params: name -> array; copied onto the device in ``dtype``.
        dtype: of parameters.
        mesh: gradients are summed over its dp, cp and fsdp axes.
        device: whose memory holds them.
        plan: ``order``, ``accumulate_dtype``, ``reduce_dtype`` and ``master_weights`` are looked at.

    Attributes:
        parameters: name -> the array that the model's kernels read.
        gradients: name -> the gradient of the rows that this rank updates; complete after ``reduce``.
        masters: name -> these rows in float32, where parameters have 16 bits.
        replicas: the ranks that hold the same rows as this one.
    """

    def __init__(self, rows: Mapping[str, ParameterLayout], params: Mapping[str, np.ndarray], dtype: np.dtype, mesh: Mesh,
                 device: Device, plan: Plan) -> None:
        self.rows = rows
        self.device = device
        self.plan = plan
        self.replicas = replicating_axes(mesh)
        self.accumulation, self.reduction = sum_dtype(plan, dtype), DTYPES.get(plan.reduce_dtype or "", dtype)
        self.parameters: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.masters: dict[str, np.ndarray] = {}
        self._sums: Mapping[str, np.ndarray] = {}  # where the micro-batches of a step are added up
        self._sum = sum_options(plan)
        self._remaining: dict[Piece, int] = {}
        self._untouched: set[str] = set()
        self._head: np.ndarray | None = None  # the head's use of a tied matrix, until the embedding's is complete
        self._make_parameters(params, dtype)
        if has_16_bits(dtype) and plan.master_weights:
            self.masters = self._copies({name: params[name][self.own(name)] for name in rows}, "master", np.dtype(np.float32))
        self._make_gradients()

    def own(self, name: str) -> slice:
        """The rows of a parameter that this rank updates."""
        return slice(None)

    def _make_parameters(self, params: Mapping[str, np.ndarray], dtype: np.dtype) -> None:
        self.parameters = self._copies({name: params[name] for name in self.rows}, "parameter", dtype)

    def _copies(self, arrays: Mapping[str, np.ndarray], category: str, dtype: np.dtype) -> dict[str, np.ndarray]:
        """Copies on the device, one after the other in memory."""
        copies = self._lay_out(arrays, category, dtype)[1]
        for name, array in arrays.items():
            store(array, copies[name])
        return copies

    def _lay_out(self, like: Mapping[str, np.ndarray], category: str,
                 dtype: np.dtype) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A flat array of the device, and its parts, shaped like these arrays, by name in canonical order."""
        shapes = {name: like[name].shape for name in in_memory_order(self.rows)}
        flat, parts = lay_out(self.device, next(iter(like.values())), shapes, category, dtype)
        return flat, {name: parts[name] for name in self.rows}

    def _make_gradients(self) -> None:
        _, self._sums = self._lay_out(self.parameters, "gradient", self.accumulation)
        self.gradients = {name: whole[self.own(name)] for name, whole in self._sums.items()}

    def begin_step(self, micro_batches: int) -> None:
        """Forget the gradients of the step before; so many micro-batches will follow."""
        self._remaining = dict.fromkeys(pieces_of(self.rows), micro_batches)
        self._untouched = set(self.rows)
        self._head = None

    def weights(self, piece: Piece) -> Mapping[str, np.ndarray]:
        """The parameters, which are all here all the time."""
        return self.parameters

    def expect(self, piece: Piece) -> None:
        """Nothing to fetch."""

    def drop(self, piece: Piece) -> None:
        """Nothing to drop."""

    def add(self, name: str, kernel: Callable[..., Any], *args: Any) -> None:
        """Compute a weight gradient and add it to what earlier micro-batches gave."""
        gradient = self.device.call(kernel, *args, category="gradient")
        if name not in self.rows:  # the head's use of a tied matrix
            self._head = self._first_term(gradient) if self._head is None else add(self._head, gradient)
        elif name in self._untouched:
            self._untouched.discard(name)
            store(gradient, self._sums[name])
        else:
            add(self._sums[name], gradient)

    def _first_term(self, gradient: np.ndarray) -> np.ndarray:
        return in_sum_dtype(gradient, self.plan, self.device)

    def _travelling(self, x: np.ndarray) -> np.ndarray:
        """A sum as it travels between ranks: itself, or a copy in the format of the reduction."""
        return self.device.in_dtype(x, self.reduction, "communication")

    def require_complete(self) -> None:
        """RuntimeError if a gradient has not been given."""
        if self._untouched or any(self._remaining.values()):
            raise RuntimeError(f"gradients are missing: of {', '.join(sorted(self._untouched)) or self._remaining}")

    def shard(self, name: str) -> np.ndarray:
        """The rows of :meth:`own` of what kernels read."""
        mine, whole = self.own(name), self.parameters[name]
        return whole if mine == slice(None) else whole[mine]

    def owned(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> (parameter, gradient): what this rank's optimizer updates, C-contiguous, possibly no rows; with 16 bits the
        parameter is the master copy."""
        return {name: (self.masters.get(name, self.shard(name)), self.gradients[name]) for name in self.rows}

    def updated(self) -> None:
        """The optimizer has changed what :meth:`owned` gave: the kernels' parameters follow."""
        for name, master in self.masters.items():
            store(master, self.shard(name))

    def gather(self, shards: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Whole arrays from arrays that are laid out like those of :meth:`owned`, such as optimizer state; collective."""
        return {name: array.copy() for name, array in shards.items()}

    def full_parameters(self) -> dict[str, np.ndarray]:
        """Copies of all parameters, whole; the master weights where there are some; collective."""
        if self.masters:
            return self.gather(self.masters)
        return {name: array.copy() for name, array in self.parameters.items()}

    def full_gradients(self) -> dict[str, np.ndarray]:
        """Copies of all reduced gradients, whole; collective."""
        return self.gather(self.gradients)


def pieces_of(rows: Mapping[str, ParameterLayout]) -> Iterable[Piece]:
    """The pieces that a table has parameters of, in forward order."""
    return dict.fromkeys(row.layer for row in rows.values())


def replicating_axes(mesh: Mesh) -> Comm:
    """The ranks that hold the same parameters: replicas, and those that share a sequence."""
    return mesh.axis(*[axis for axis in ("cp", "dp") if mesh.sizes[axis] > 1] or ["dp"])


def sum_dtype(plan: Plan, dtype: np.dtype) -> np.dtype:
    """The number format in which gradients of ``dtype`` are accumulated over micro-batches."""
    return DTYPES.get(plan.accumulate_dtype or plan.reduce_dtype or "", dtype)


def in_sum_dtype(gradient: np.ndarray, plan: Plan, device: Device) -> np.ndarray:
    """A micro-batch's gradient as the first term of a sum: itself, or a copy in the format of the sum."""
    return device.in_dtype(gradient, sum_dtype(plan, gradient.dtype), "gradient")


def sum_options(plan: Plan) -> dict[str, str]:
    """How sums of gradients are made: by the ring, which sends the fewest bytes, or in rank order, which sends as many."""
    return {"algorithm": "ring"} if plan.order is None else {"order": plan.order}

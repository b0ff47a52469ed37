"""The audit of a device's matrix products: which formats meet, where a GPU would multiply them, and what that costs.

    fp16 × fp16   tensor cores   989.4 TFLOP/s on an H100
    fp32 × fp16   FP32 cores      66.9 TFLOP/s: one operand has become FP32 by an oversight, and takes the other with it

A cast too many is easy to write and changes no result for the worse: only the time tells. So each product is noted where it is
done, with the formats of what is really multiplied.

    audit = Audit(trainer.device, trainer.replica.storage)
    trainer.step(input_ids, labels)
    audit.stop();  audit.rows
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from refdist.device.device import Device
from refdist.numerics.formats import format_of
from refdist.numerics.rounding import widened

__all__ = ["Audit", "Row", "grouped"]

_LAYER = re.compile(r"\.(\d+)\.")
TENSOR_CORES, FP32_CORES, FP64_CORES = "tensor cores", "FP32 cores", "FP64 cores"


class Row(NamedTuple):
    """Products of one kernel call.

    Attributes:
        kernel: its name; one call of a kernel that multiplies with several parameters is a row for each.
        parameter: whose product it is, or "" where no parameter takes part.
        shape: [..., m, k, n] of one product; attention is one product a head, tiles put together.
        inputs: formats of the two operands.
        accumulate: format of the sums.
        unit: "tensor cores", "FP32 cores" or "FP64 cores".
        flops: 2 m k n, of attention what the mask lets through.
        calls: so many such kernel calls.
    """

    kernel: str
    parameter: str
    shape: tuple[int, ...]
    inputs: tuple[str, str]
    accumulate: str
    unit: str
    flops: int
    calls: int = 1

    @property
    def format(self) -> str:
        """The format in which the unit multiplies: the wider one of the inputs."""
        return self.inputs[0] if self.inputs[0] == self.inputs[1] else self.accumulate


class _Noting:
    """A matmul that tells about each product before it does it."""

    def __init__(self, matmul: Callable[..., np.ndarray], note: Callable[..., None]) -> None:
        self.matmul, self.note = matmul, note
        self.round = getattr(matmul, "round", widened)
        self.inputs = getattr(matmul, "inputs", None)  # None: those of the operands

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        self.note(a, b, ("tf32", "tf32") if self.inputs == "tf32" else (_name(a), _name(b)))
        return self.matmul(a, b, out=out)

    def exact(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        self.note(a, b, (self.inputs,) * 2 if self.inputs else (_name(a), _name(b)))
        return getattr(self.matmul, "exact", self.matmul)(a, b, out=out)


class Audit:
    """Notes every matrix product of a device until :meth:`stop`.

    Args:
        device: whose products.
        storage: of the parameters, for their names.
        tensor_core: the plan's: FP64 products are those of the chip's tensor cores then.

    Attributes:
        rows: one for each kernel call and pair of formats, in the order of the calls.
    """

    def __init__(self, device: Device, storage: Any, tensor_core: str | None = None) -> None:
        self.device, self.storage, self.tensor_core = device, storage, tensor_core
        self.rows: list[Row] = []
        self._before = device.matmul, device.call, storage.add
        self._products: dict[tuple[str, tuple[str, str]], int] = defaultdict(int)  # parameter if known, formats -> m k n
        self._shapes: dict[str, tuple[int, int, int]] = {}  # parameter -> of its last product
        self._parameter = ""
        device.matmul = _Noting(device.matmul, self._note)
        setattr(device, "call", self._call)  # noqa: B010  (a method, of this device only)
        storage.add = self._add

    def stop(self) -> None:
        """Listen no longer."""
        self.device.matmul, call, self.storage.add = self._before
        setattr(self.device, "call", call)  # noqa: B010

    def _note(self, a: np.ndarray, b: np.ndarray, inputs: tuple[str, str]) -> None:
        *batch, m, k = a.shape
        n = b.shape[-1]
        name = self._name_of((b, b.base))
        self._products[name, inputs] += math.prod(np.broadcast_shapes(tuple(batch), b.shape[:-2])) * m * k * n
        self._shapes[name] = (m, k, n)

    def _add(self, name: str, kernel: Callable[..., Any], *args: Any) -> None:
        self._parameter = name
        self._before[2](name, kernel, *args)

    def _call(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._products.clear()
        result = self._before[1](kernel, *args, **kwargs)
        if self._products:
            self._parameter = self._name_of(args) or self._parameter
            flops, total = getattr(kernel, "flops")(*args), sum(self._products.values())  # noqa: B009
            for (name, inputs), part in self._products.items():
                shape: tuple[int, ...] = self._shapes[name]
                parameter = name or self._parameter
                if args[0].ndim == 4:  # attention: q or dout [rows, queries, heads, head_dim]
                    rows, queries, heads, width = args[0].shape
                    shape, parameter = (rows * heads, queries, width, _keys(args)), ""
                unit = _unit(inputs, self.tensor_core)
                self.rows.append(Row(kernel.__name__, parameter, shape, inputs, *unit, round(flops * part / total)))
        return result

    def _name_of(self, args: tuple[Any, ...]) -> str:
        """The parameter among some arrays."""
        known = {**self.storage.parameters, **getattr(self.storage, "gathered", {})}
        return next((name for name, array in known.items() if any(array is arg for arg in args)), "")


def _keys(args: tuple[Any, ...]) -> int:
    """Keys of an attention: those of its mask."""
    return next(len(arg.k_positions) for arg in args if hasattr(arg, "k_positions"))


def _name(x: np.ndarray) -> str:
    found = format_of(x.dtype)
    return "fp64" if found is None else found.name


def _unit(inputs: tuple[str, str], tensor_core: str | None) -> tuple[str, str]:
    """What the sums are kept in, and which unit of a GPU multiplies such operands."""
    if "fp64" in inputs:
        return "fp64", FP64_CORES if tensor_core is None else TENSOR_CORES
    if inputs[0] == inputs[1] != "fp32":
        return "fp32", TENSOR_CORES
    return "fp32", FP32_CORES


def grouped(rows: list[Row], layers: int) -> list[Row]:
    """Rows that differ in the number of their layer only as one, the layers as ``*`` if they are all there."""
    found: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        found[row._replace(parameter=_LAYER.sub(r".#.", row.parameter), calls=1)].append(row)
    merged = []
    for key, members in found.items():
        numbers = sorted({int(match.group(1)) for row in members if (match := _LAYER.search(row.parameter))})
        named = "*" if len(numbers) == layers else ",".join(map(str, numbers))
        merged.append(key._replace(parameter=key.parameter.replace(".#.", f".{named}."), calls=len(members)))
    return merged


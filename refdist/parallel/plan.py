"""``Plan``: how a model and its batch are spread over ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterable
from typing import Any, Literal

from refdist.comm.mesh import AXES
from refdist.errors import PlanError

__all__ = ["Plan"]


_SCHEDULES = "gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v, or a .json file"


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model and its batch are spread over ranks.

    Attributes:
        dp: ranks that each hold all parameters and train on a part of the batch (replicated data parallel).
        fsdp: ranks that train on a part of the batch each, and share what one of them would hold. With ``dp`` as well (HSDP)
            there are ``dp`` groups of ``fsdp`` ranks.
        zero: what the fsdp ranks share (Rajbhandari et al. 2020): 1 optimizer state, 2 gradients too, 3 parameters too.
        tp: ranks among which each layer is cut, by columns, then by rows (tensor parallel); the vocabulary too.
        sequence_parallel: whether tensor parallelism also cuts the sequence where layers are not cut: norms and residuals.
        save_gathered: whether sequence parallelism keeps the gathered inputs of layers for backward, instead of gathering again.
        cp: ranks that each hold a part of every sequence (context parallel).
        cp_method: how they attend to each other's keys: ``"ring"``, ``"all_gather"``, or ``"ulysses"``, which exchanges heads.
        cp_layout: ``"zigzag"``, which gives each rank an early and a late part of the sequence, or ``"contiguous"``.
        cp_ulysses: so many neighbours exchange heads, and ``cp_method`` joins these groups; with ``"ulysses"`` all exchange them.
        micro_batches: parts into which each rank cuts its part of the batch; their gradients are accumulated.
        reshard_after_forward: with ``zero=3``, a layer's parameters are dropped after its forward and gathered again for its
            backward; False keeps them between the two.
        reshard_after_backward: with ``zero=3``, they are dropped after backward; False, together with
            ``reshard_after_forward=False``, keeps them until the step's last micro-batch is done.
        prefetch: with ``zero=3``, the next layer's gather is started before this layer's kernels.
        pp: pipeline stages.
        schedule: what each stage does when: a name of ``refdist.parallel.pipeline.SCHEDULES``, a ``.json`` file, or a function of
            (stages, micro-batches, chunks) that returns a list of actions a stage.
        virtual_stages: chunks of the model on each stage; zb_v and dualpipe_v have two, whatever is said here.
        layers_per_stage: layers on each stage, or on each chunk in the order in which a micro-batch visits them; None: even.
        interleave_group: contiguous micro-batches of the interleaved schedule (Llama 3's N); None: as many as stages.
        bucket_bytes: gradients are all-reduced in buckets of at least so many bytes, each as soon as its layers are done.
        order: ``"rank"`` adds gradients up in rank order, whatever is sharded; None as the algorithm pleases.
        recompute: what backward computes again (``refdist.model.recompute``): ``"none"``; ``"selective"``, the
            attention's output; ``"full"``, everything but the input of each group of ``recompute_blocks`` blocks.
        recompute_blocks: blocks that share one kept input with ``recompute="full"``.
        accumulate_dtype: number format in which the gradients of micro-batches are added up; None: ``reduce_dtype``.
        reduce_dtype: number format in which gradients travel between ranks, rounded after every addition; None: that of the
            parameters.
        master_weights: whether the optimizer updates a float32 copy of parameters that have 16 bits.
        tensor_core: the chip whose arithmetic multiplies matrices, bit for bit (``refdist.numerics.CHIPS``); None: BLAS.

    Raises:
        PlanError: a value that no run could have.
    """

    dp: int = _option(1, "replicated data parallel ranks")
    fsdp: int = _option(1, "sharded data parallel ranks")
    zero: Literal[1, 2, 3] = _option(3, "what fsdp ranks share: 1 optimizer state, 2 gradients too, 3 parameters too")
    tp: int = _option(1, "tensor-parallel ranks")
    sequence_parallel: bool = _option(True, "keep norms and residuals in sequence shards over tp")
    save_gathered: bool = _option(False, "save the gathered inputs of column-parallel layers for backward")
    pp: int = _option(1, "pipeline stages")
    schedule: str | Any = _option("1f1b", f"of the pipeline: {_SCHEDULES}")  # noqa: RUF009
    virtual_stages: int = _option(1, "chunks of the model on each pipeline stage")
    layers_per_stage: tuple[int, ...] | None = _option(None, "layers on each pipeline stage, or on each chunk")
    interleave_group: int | None = _option(None, "contiguous micro-batches of the interleaved schedule")
    cp: int = _option(1, "context-parallel ranks, each with a part of every sequence")
    cp_method: Literal["ring", "all_gather", "ulysses"] = _option("ring", "how they attend to each other's keys")
    cp_layout: Literal["zigzag", "contiguous"] = _option("zigzag", "which parts of the sequence they hold")
    cp_ulysses: int = _option(1, "neighbours among them that exchange heads, between which cp_method works")
    micro_batches: int = _option(1, "micro-batches per rank and step, whose gradients are accumulated")
    reshard_after_forward: bool = _option(True, "drop gathered parameters after forward")
    reshard_after_backward: bool = _option(True, "drop gathered parameters after backward")
    prefetch: bool = _option(True, "gather the next layer's parameters while this one computes")
    bucket_bytes: int = _option(1 << 20, "bytes of gradients that are all-reduced at once, at least")
    order: Literal["rank"] | None = _option(None, "add gradients up in rank order")
    recompute: Literal["none", "selective", "full"] = _option("none", "activations that backward computes again")
    recompute_blocks: int = _option(1, "blocks that share one kept input with recompute=full")
    accumulate_dtype: Literal["fp16", "bf16", "fp32", "fp64"] | None = _option(
        None, "number format in which micro-batches' gradients are added up")
    reduce_dtype: Literal["fp16", "bf16", "fp32", "fp64"] | None = _option(
        None, "number format in which gradients travel between ranks")
    master_weights: bool = _option(True, "with 16 bits: the optimizer updates a float32 copy of the parameters")
    tensor_core: Literal["v100", "t4", "a100", "ada", "h100", "h200", "b200"] | None = _option(
        None, "chip whose tensor cores multiply, bit for bit")

    def __post_init__(self) -> None:
        hints = _hints()
        for field in dataclasses.fields(self):
            value = _checked(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)

    def __str__(self) -> str:
        """The fields that are not what they are by default."""
        said = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)
                if getattr(self, field.name) != field.default]
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in said)})"

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis."""
        return {axis: getattr(self, axis, 1) for axis in AXES}

    @property
    def world_size(self) -> int:
        """The number of ranks that the plan needs."""
        return math.prod(self.sizes.values())

    @property
    def batch_parts(self) -> int:
        """Parts into which the global batch is cut."""
        return self.dp * self.fsdp

    def check_ranks(self, ranks: int) -> None:
        """Raise PlanError unless the plan needs exactly ``ranks`` ranks."""
        if ranks != self.world_size:
            needs = " × ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "dp=1"
            raise PlanError(f"{needs} needs {self.world_size} rank{'s' * (self.world_size > 1)}, there "
                            f"{'are' if ranks > 1 else 'is'} {ranks}")

    def check_batch(self, sequences: int) -> None:
        """Raise PlanError if a global batch of so many sequences leaves a rank without any."""
        parts = self.batch_parts
        if sequences < parts:
            axes = " × ".join(f"{axis}={self.sizes[axis]}" for axis in ("dp", "fsdp") if self.sizes[axis] > 1)
            raise PlanError(f"a batch of {sequences} sequences cannot be cut over {axes} ranks: at least {parts} are needed")


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Plan)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """The value of a field of type ``hint``: a bool, a choice, integers of at least 1, or what cannot be checked here."""
    arguments = typing.get_args(hint)
    if Any in arguments or (value is None and type(None) in arguments):
        return value
    if tuple[int, ...] in arguments:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise PlanError(f"{name}={value!r}: expected integers of at least 1")
        return tuple(_checked(name, part, int) for part in value)
    if int in arguments:
        hint = int
    if hint is bool:
        if not isinstance(value, bool):
            raise PlanError(f"{name}={value!r}: expected True or False")
        return value
    if hint is int or isinstance(value, bool):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise PlanError(f"{name}={value!r}: expected an integer of at least 1")
        if value.__index__() < 1:
            raise PlanError(f"{name}={value}: expected at least 1")
        return value.__index__()
    choices = [choice for part in (hint, *arguments) if typing.get_origin(part) is Literal
               for choice in typing.get_args(part)]
    if value not in choices:
        raise PlanError(f"{name}={value!r}: expected one of {', '.join(map(str, choices))}")
    return choices[choices.index(value)]

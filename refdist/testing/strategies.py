"""Hypothesis strategies with names, for rank counts, interleavings, arrays, groups, meshes, models, batches and plans.

They shrink towards what is easy to read: few ranks, first-in-first-out, buffered sends, small float64 arrays in C order.
Numbers come from a drawn seed and are distinct and uneven on purpose; only their shape is shrunk.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from refdist.comm import Comm
from refdist.comm.mesh import AXES
from refdist.comm.reduction import OPERATIONS
from refdist.errors import PlanError
from refdist.model import ModelConfig
from refdist.parallel import Plan, context, tensor
from refdist.testing.collectives import EXPECTED, CollectiveCase, Layout, laid_out, numbers
from refdist.testing.precision import PrecisionCase
from refdist.testing.schedules import RandomSchedule
from refdist.testing.training import AdamWFields, Batch, SGDFields, TrainingCase
from refdist.testing.worlds import Choices, World

__all__ = ["DTYPES", "PLAN_AXES", "arrays", "batches", "collective_cases", "dtypes", "groups", "layouts", "meshes",
           "model_configs", "partitions", "plan_axis", "plans",
           "precision_cases", "ranks", "schedulers", "seeds", "send_modes", "shapes",
           "training_cases", "worlds"]

DTYPES = tuple(np.dtype(kind) for kind in (
    np.float64, np.float32, np.int64, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.complex128, np.bool_, np.int8,
    np.int16, np.uint16, np.uint32, np.uint64, np.complex64, np.longdouble, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
"""Number formats, the plain ones first."""


T = TypeVar("T")
_LENGTHS = st.sampled_from([1, 2, 3, 5, 8, 0, 17, 300])  # odd, even, empty, and long enough for a message of two parts
_SEEDS = st.integers(0, 999)
_NUMBERS = st.lists(st.integers(0, 8), max_size=40).map(lambda numbers: Choices(tuple(numbers)))
_SCHEDULERS: SearchStrategy[str | int | Choices] = st.one_of(st.just("fifo"), _NUMBERS, _SEEDS)
_SENDS = st.sampled_from(["buffered", "rendezvous"])
_DTYPES = st.sampled_from(DTYPES)
_SELDOM = st.sampled_from([False, False, False, True])
_RARELY = st.sampled_from([False] * 7 + [True])
_LAYERS = (1, 2, 1, 1, 2, 1, 1, 3, 1, 2, 1, 1, 4, 1)  # what costs most time is drawn least often
_PIPELINE_LAYERS = (4, 2, 3, 4, 1, 4, 3, 6)
_MICRO_BATCHES = (1, 2, 1, 2, 1, 3, 1, 1, 2, 1, 4, 1)
_SHARDED_MICRO_BATCHES = (1, 2, 1, 2, 3, 1, 2)
_PIPELINE_MICRO_BATCHES = (2, 1, 3, 2, 1, 4, 6)
_LONG_PIPELINE_MICRO_BATCHES = (1, 2, 3, 1, 4, 2, 6)  # often fewer than warm-up would take
_WORLDS = (2, 4, 2, 1, 2, 4, 2, 3, 8, 3)  # ranks of a plan of one axis that draws no replicas, at most
_WORLDS_OF_TP = (4, 2, 4, 8, 3, 4, 2, 6)  # heads are cut by their divisors only
_WORLDS_OF_MANY = (4, 2, 4, 3, 2, 4, 2, 1, 4, 8, 2, 4, 6, 4, 8, 16)  # of other plans


@functools.lru_cache(maxsize=4096, typed=True)
def _any_of(*choices: Any) -> SearchStrategy[Any]:
    """One of these; a strategy is made, and looked at by Hypothesis, once."""
    return st.sampled_from(choices)


@functools.lru_cache(maxsize=64)
def _orders_of(*items: str) -> SearchStrategy[list[str]]:
    """All of these, in any order."""
    return st.permutations(items)


def ranks(smallest: int = 1, largest: int = 9) -> SearchStrategy[int]:
    """How many ranks: odd, even, one, powers of two and not; shrinks towards two, the fewest that communicate."""
    return _any_of(*sorted(range(smallest, largest + 1), key=lambda size: (size == 1 and largest > 1, size)))


def seeds() -> SearchStrategy[int]:
    """Seeds for numbers; every seed gives distinct ones, so there is little to shrink."""
    return _SEEDS


def send_modes() -> SearchStrategy[str]:
    """Sends that are done at once, or only when they are received."""
    return _SENDS


def schedulers() -> SearchStrategy[str | int | Choices]:
    """Interleavings: first-in-first-out, by a seed, or choice by choice, so that Hypothesis can search and shrink them."""
    return _SCHEDULERS


def worlds(ranks: SearchStrategy[int] | int = ranks()) -> SearchStrategy[World]:  # noqa: B008
    """Ranks, interleaving, kind of sends, and checks on or off."""
    size = st.just(ranks) if isinstance(ranks, int) else ranks
    return st.builds(World, size, schedulers(), send_modes(), st.booleans())


def dtypes() -> SearchStrategy[np.dtype]:
    """Every number format that a message can have."""
    return _DTYPES


def shapes(smallest_ndim: int = 0, largest_ndim: int = 3) -> SearchStrategy[tuple[int, ...]]:
    """Shapes with odd, even, empty and one-element axes; some are long enough for a message of two parts."""
    sizes = st.lists(_LENGTHS, min_size=smallest_ndim, max_size=largest_ndim)
    return sizes.map(lambda shape: tuple(shape) if math.prod(shape) <= 6000 else (*(1,) * (len(shape) - 1), shape[-1]))


@st.composite
def layouts(draw: DrawFn, ndim: int) -> Layout:
    """Memory layouts for arrays of ``ndim`` dimensions: transposed, strided, backwards, read-only."""
    order = draw(st.sampled_from(list(itertools.permutations(range(ndim)))))
    steps = draw(st.sampled_from([(1,) * ndim, (2,) * ndim, (-1,) * ndim, *itertools.product([1, 2, -1], repeat=ndim)]))
    return Layout(order, steps, draw(st.booleans()))


@st.composite
def arrays(draw: DrawFn, dtype: SearchStrategy[np.dtype] = _DTYPES, shape: SearchStrategy[tuple[int, ...]] = shapes(),  # noqa: B008
           ranks: int = 1) -> np.ndarray:
    """Arrays of any dtype, shape and memory layout, with distinct numbers whose sum over ``ranks`` such arrays is exact."""
    drawn = draw(shape)
    array = numbers(draw(dtype), drawn, draw(_SEEDS), ranks)
    return laid_out(array, draw(layouts(len(drawn))))


@st.composite
def partitions(draw: DrawFn, parts: int) -> tuple[int, ...]:
    """Lengths of ``parts`` shards, uneven and some of them empty."""
    some = draw(st.lists(st.sampled_from([1, 2, 3, 0, 5, 8]), min_size=1, max_size=min(parts, 4)))
    return tuple(itertools.islice(itertools.cycle(some), parts))


@st.composite
def groups(draw: DrawFn, size: int) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Colours and keys for ``split``: blocks of neighbours, every n-th rank, all but one rank; in order, backwards, rotated."""
    kind, n = draw(st.sampled_from(["strided", "block", "without"])), draw(st.integers(1, 4))
    colors: list[int | None] = [rank % n if kind == "strided" else rank // n for rank in range(size)]
    if kind == "without":
        colors = [None if rank == n % size else 0 for rank in range(size)]
    keys = draw(st.sampled_from([[0] * size, [-rank for rank in range(size)], [(rank + 2) % size for rank in range(size)]]))
    return tuple(colors), tuple(keys)


@st.composite
def meshes(draw: DrawFn, largest: int = 12) -> dict[str, int]:
    """Sizes of all mesh axes, at most ``largest`` ranks in all: arguments of :class:`refdist.Mesh`."""
    sizes: dict[str, int] = {}
    room = largest
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, min(room, 4)))
        room //= sizes[axis]
    return {axis: sizes[axis] for axis in AXES}


# ------------------------------------------------------------------------------------------------- collectives


def _algorithms(operation: str) -> SearchStrategy[str | None]:
    """The algorithms of an operation, and None, which lets the library choose."""
    found = getattr(importlib.import_module(f"refdist.comm.{operation}"), "ALGORITHMS", {})
    return st.sampled_from([None, *found])


def operations() -> list[str]:
    """The collectives that ``Comm`` has and NumPy's answer is known for."""
    return [name for name in EXPECTED if hasattr(Comm, name)]


@st.composite
def collective_cases(draw: DrawFn, operation: str | Sequence[str] = "", ranks: SearchStrategy[int] = ranks(),  # noqa: B008
                     algorithms: bool = True, split: bool = True, ops: Sequence[str] = OPERATIONS) -> CollectiveCase:
    """Whole calls of collectives.

    Args:
        operation: which one, or several; all by default.
        ranks: of the world.
        algorithms: whether ``algorithm=`` is drawn; off for a collective of your own, which has none.
        ops: the reductions that are drawn.
        split: whether the call may be on groups that ``split`` made; off for a collective that knows the world only.
    """
    names = [operation] if isinstance(operation, str) and operation else list(operation) or operations()
    name = draw(st.sampled_from(names))
    world = draw(worlds(ranks))
    dtype = draw(dtypes())
    arguments: dict[str, Any] = {}
    if algorithms:
        arguments["algorithm"] = draw(_algorithms(name))
    case_shapes, axes = draw(_shapes_for(name, world.ranks))
    arguments.update(axes)
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        arguments["op"] = draw(st.sampled_from([op for op in ops if op != "avg" or dtype.kind in "fc"]))
        if arguments.get("algorithm") == "hierarchical":
            arguments["groups"] = draw(st.sampled_from([2, 1, 3]))
        elif name != "reduce" and arguments.get("algorithm", "") in (None, "direct"):
            arguments["order"] = draw(st.sampled_from([None, "rank"]))
    if name in ("broadcast", "reduce", "gather", "scatter"):
        arguments["root"] = draw(st.integers(0, world.ranks - 1))
    styles = draw(st.lists(layouts(len(case_shapes[0])), min_size=1, max_size=3))
    colors, keys = draw(groups(world.ranks)) if split and draw(st.booleans()) else (None, None)
    started = algorithms and draw(st.booleans())
    out = algorithms and name in ("all_reduce", "all_gather", "reduce_scatter") and draw(st.booleans())
    return CollectiveCase(world, name, dtype, case_shapes, draw(seeds()), tuple(styles), arguments,
                          colors, keys, started, out)


@st.composite
def _shapes_for(draw: DrawFn, operation: str, size: int) -> tuple[tuple[tuple[int, ...], ...], dict[str, int]]:
    """Each rank's shape, and the axes that the operation splits or joins."""
    along_an_axis = operation in ("reduce_scatter", "all_gather", "all_to_all")
    shape = draw(shapes(1 if along_an_axis else 0))
    if operation in ("gather", "scatter"):
        return tuple(draw(st.lists(shapes(len(shape), len(shape)), min_size=1, max_size=size))), {}
    if not along_an_axis:
        return (shape,), {}
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    if operation == "reduce_scatter":
        return (shape,), {"axis": axis}
    if operation == "all_to_all":
        return (shape,), {"split_axis": axis, "concat_axis": draw(st.integers(0, len(shape) - 1))}
    lengths = draw(partitions(size))
    place = axis % len(shape)
    return tuple((*shape[:place], length, *shape[place + 1:]) for length in lengths), {"axis": axis}


# ----------------------------------------------------------------------------------------- models, batches, plans


@st.composite
def model_configs(draw: DrawFn, layers: Sequence[int] = (1, 2, 3)) -> ModelConfig:
    """Small models of every kind: grouped or multi-head attention, tied or separate head, with and without biases, odd sizes."""
    kv_heads = draw(_any_of(2, 1, 4, 3))
    head_dim = draw(_any_of(2, 4, 6))
    return ModelConfig(
        vocab_size=draw(st.integers(5, 17)), hidden_size=draw(st.integers(3, 9)), intermediate_size=draw(st.integers(4, 9)),
        num_hidden_layers=draw(_any_of(*layers)), num_attention_heads=kv_heads * draw(_any_of(1, 2)),
        num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5, tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()), mlp_bias=draw(st.booleans()))


@st.composite
def batches(draw: DrawFn, smallest: int = 1, largest: int = 8) -> Batch:
    """Batches whose sequences have unequal numbers of labels that count, down to none; at least one label counts in all."""
    size = draw(st.integers(smallest, max(smallest, largest)))
    length = draw(_any_of(4, 3, 5, 6, 8, 1))
    valid = draw(st.lists(st.integers(0, length), min_size=size, max_size=size))
    if not any(valid):
        valid[-1] = 1
    return Batch(tuple(valid), length, draw(_SEEDS), draw(_any_of(None, None, None, 3, 7)))


def _mostly(draw: DrawFn, ways: list[T], cutting: list[T]) -> list[T]:
    """The ways that cut something, where there are some; in one draw of four all ways."""
    return cutting if cutting and not draw(_SELDOM) else ways


PlanAxis: TypeAlias = Callable[[DrawFn, ModelConfig, int], dict[str, Any]]
PLAN_AXES: dict[str, PlanAxis] = {}
"""Axis -> function (draw, config, ranks that are left) -> the fields of the plan that this axis sets."""


def plan_axis(axis: str) -> Callable[[PlanAxis], PlanAxis]:
    """Decorator: the strategy of one axis of plans, which :func:`plans` draws from then on."""
    def register(function: PlanAxis) -> PlanAxis:
        PLAN_AXES[axis] = function
        return function
    return register


@plan_axis("dp")
def _dp(draw: DrawFn, config: ModelConfig, room: int) -> dict[str, Any]:
    return {"dp": draw(ranks(1, min(room, 5))), "micro_batches": draw(_any_of(*_MICRO_BATCHES)),
            "bucket_bytes": draw(_any_of(1, 3000, 1 << 20)), "order": draw(_any_of(None, "rank"))}


@plan_axis("fsdp")
def _fsdp(draw: DrawFn, config: ModelConfig, room: int) -> dict[str, Any]:
    fsdp = draw(ranks(1, min(room, 5)))
    return {"fsdp": fsdp, "dp": draw(ranks(1, min(room // fsdp, 3))), "zero": draw(_any_of(3, 2, 1)),
            "micro_batches": draw(_any_of(*_SHARDED_MICRO_BATCHES)), "order": draw(_any_of(None, "rank")),
            "prefetch": draw(st.booleans()), "reshard_after_forward": draw(st.booleans()),
            "reshard_after_backward": draw(st.booleans())}


@plan_axis("tp")
def _tp(draw: DrawFn, config: ModelConfig, room: int) -> dict[str, Any]:
    fitting = [size for size in (2, 4, 3, 2, 4, 6, 8, 1) if size <= room and config.num_attention_heads % size == 0]
    tp = draw(_any_of(*_mostly(draw, fitting, [size for size in fitting if size > 1])))
    return {"tp": tp, "sequence_parallel": draw(st.booleans()), "save_gathered": draw(st.booleans())}


@plan_axis("cp")
def _cp(draw: DrawFn, config: ModelConfig, room: int) -> dict[str, Any]:
    heads, method = config.num_attention_heads, draw(_any_of("ring", "all_gather", "ulysses"))
    ways = {size: [within for within in (2, 1) if size % within == 0 and heads % (size if method == "ulysses" else within) == 0]
            for size in (2, 4, 3, 1, 5, 8) if size <= room}
    sizes = [size for size in ways if ways[size]]
    size = draw(_any_of(*_mostly(draw, sizes, [size for size in sizes if size > 1])))
    within = draw(_any_of(*ways[size]))
    return {"cp": size, "cp_method": method, "cp_ulysses": within, "cp_layout": draw(_any_of("zigzag", "contiguous"))}


@plan_axis("pp")
def _pp(draw: DrawFn, config: ModelConfig, room: int) -> dict[str, Any]:
    schedules = ["1f1b", "interleaved", "gpipe", "zb_v", "zb_h1", "dualpipe_v", "zb_h2", "random"]
    layers = config.num_hidden_layers
    ways = [(schedule, stages, chunks) for schedule in schedules for chunks in (1, 2, 3) for stages in (2, 3, 3, 1, 4, 5, 6)
            if stages <= room and stages * chunks <= layers and (stages > 1 or layers < 4 or room == 1)
            if chunks == 1 or schedule in ("interleaved", "random") or (chunks == 2 and schedule in ("zb_v", "dualpipe_v"))
            if chunks > 1 or schedule not in ("interleaved", "zb_v", "dualpipe_v")]
    ways = _mostly(draw, ways, [way for way in ways if way[1] > 1])
    schedule = draw(_any_of(*[name for name in schedules if any(way[0] == name for way in ways)]))
    stages, chunks = draw(_any_of(*[way[1:] for way in ways if way[0] == schedule]))
    micro_batches = (_MICRO_BATCHES, _PIPELINE_MICRO_BATCHES, _LONG_PIPELINE_MICRO_BATCHES)[min(stages - 1, 2)]
    fields: dict[str, Any] = {"pp": stages, "virtual_stages": chunks, "dp": draw(ranks(1, min(room // stages, 2))),
                              "schedule": schedule, "micro_batches": draw(_any_of(*micro_batches)),
                              "recompute": draw(_any_of("none", "selective", "full")),
                              "recompute_blocks": draw(_any_of(1, 2, 2))}
    if schedule == "random":
        fields["schedule"] = RandomSchedule(draw(_SEEDS), draw(_any_of("loop", "v")))
    if schedule == "interleaved" and draw(st.booleans()):
        fields["interleave_group"] = draw(st.integers(1, 4))
    if draw(st.booleans()):
        cuts = sorted(draw(st.permutations(range(1, layers)))[: stages * chunks - 1])
        fields["layers_per_stage"] = tuple(end - start for start, end in itertools.pairwise([0, *cuts, layers]))
    return fields


@st.composite
def plans(draw: DrawFn, config: ModelConfig, axes: Sequence[str] = (), largest: int = 8) -> Plan:
    """Plans of at most ``largest`` ranks that fit the model; of the given axes only, or of all that there are."""
    chosen = list(axes) or list(PLAN_AXES)
    worlds = _WORLDS if chosen in (["dp"], ["cp"]) else _WORLDS_OF_TP if chosen == ["tp"] else _WORLDS_OF_MANY
    most = room = draw(_any_of(*[size for size in worlds if size <= largest]))
    fields: dict[str, Any] = {}
    for axis in draw(_orders_of(*chosen)):
        share = room if len(chosen) == 1 else min(room, draw(_any_of(2, 4, 2, 3, 2)))
        drawn = PLAN_AXES[axis](draw, config, share)
        if axis != "dp" and "dp" in chosen:
            drawn.pop("dp", None)  # replicas are that axis' own
        fields.update(drawn)
        room = most // math.prod(fields.get(name, 1) for name in AXES)
    plan = Plan(**fields)
    for room_of_heads in (tensor, context):
        try:
            room_of_heads.check(config, plan)
        except PlanError:  # tp has left too few heads to be exchanged along cp
            reject()
    return plan


_SGD = st.builds(SGDFields, lr=st.sampled_from([0.1, 0.5]), momentum=st.sampled_from([0.0, 0.9]), nesterov=st.just(False),
                 weight_decay=st.sampled_from([0.0, 0.1]))
_NESTEROV = st.just(SGDFields(0.1, 0.9, True, 0.1))
_ADAMW = st.builds(  # a smaller eps would enlarge the rounding error of a gradient that is zero but for it
    AdamWFields, lr=st.sampled_from([0.01, 0.1]), betas=st.sampled_from([(0.9, 0.95), (0.8, 0.99)]),
    eps=st.sampled_from([1e-5, 1e-3]), weight_decay=st.sampled_from([0.1, 0.0]))


@st.composite
def training_cases(draw: DrawFn, axes: Sequence[str] = (), largest: int = 8) -> TrainingCase:
    """Whole training runs under plans of the given axes, on at most ``largest`` ranks."""
    config = draw(model_configs(_PIPELINE_LAYERS if list(axes) == ["pp"] else _LAYERS))
    plan = draw(plans(config, axes, largest))
    parts = plan.sizes["dp"] * plan.sizes["fsdp"]
    batch = draw(batches(parts, parts + 4))
    world = World(plan.world_size, draw(schedulers()), draw(send_modes()), draw(_SELDOM))
    attention, hidden = draw(_any_of((0.0, 0.0), (0.3, 0.3), (0.0, 0.0), (0.3, 0.0), (0.0, 0.0), (0.0, 0.3), (0.0, 0.0)))
    config = dataclasses.replace(config, attention_dropout=attention, hidden_dropout=hidden)
    return TrainingCase(world, config, plan, batch, draw(_SEEDS), draw(_SELDOM), draw(st.one_of(_SGD, _NESTEROV)),
                        draw(_ADAMW), draw(_any_of(None, 0.5, 2.0)), draw(st.booleans()), draw(_RARELY), draw(_RARELY))


@st.composite
def precision_cases(draw: DrawFn, axes: Sequence[str] = ()) -> PrecisionCase:
    """Training runs in 16 bits under a plan along one of the axes, on at most four ranks, with any formats of sums."""
    axis = draw(st.sampled_from(list(axes) or list(PLAN_AXES)))
    config = draw(model_configs())
    plan = draw(plans(config, [axis], 4))
    plan = dataclasses.replace(plan, accumulate_dtype=draw(_any_of(None, "fp32")), reduce_dtype=draw(_any_of(None, "fp32")))
    precision = draw(_any_of("fp16", "bf16"))
    batch = draw(batches(plan.batch_parts, plan.batch_parts + 3))
    world = World(plan.world_size, draw(schedulers()), draw(send_modes()), draw(_SELDOM))
    size = draw(_any_of(1.0, 300.0)) if not config.tie_word_embeddings else 1.0  # the head's logits may not grow
    return PrecisionCase(world, config, plan, batch, draw(_SEEDS), precision, size,
                         draw(_any_of(32.0, 4.0, 256.0)), draw(_any_of(None, 2, 1)),
                         draw(_any_of(math.inf, math.nan, -math.inf)), draw(_any_of(None, 0.5)))

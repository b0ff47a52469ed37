"""The one table: every parameter, its shape, what shards it, who owns it, and over which axes its gradient is partial.

Initialisation, gradient reduction, the gradient norm, checkpoints, resharding and the comparison with the reference are
all driven by this table; no strategy keeps a second list.

Tensor parallelism (Shoeybi et al. 2019, figures 3 and 4): q, k, v, gate and up are column-parallel, which cuts dimension 0
of their [out, in] weights and their biases; o and down are row-parallel, which cuts dimension 1 and leaves the bias whole;
embedding and head are cut along the vocabulary. Attention heads are cut whole; where there are fewer KV heads than ranks,
several neighbours hold the same one, and each has a part of its gradient. Fully sharded data parallelism cuts dimension 0 of
everything, within what tp left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from .config import ModelConfig

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "ParameterLayout", "layout", "parameter_shapes"]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ParameterLayout:
    """One row of the table.

    Attributes:
        name: Hugging Face name.
        shape: global shape.
        layer: number of the layer that owns it, from 0, or "embed", or "head" (final norm and output matrix).
        shards: mesh axis -> dimension that it cuts; where two axes cut one dimension, tp cuts first, fsdp within.
        partial: mesh axes over which the gradient that a rank computes is only one term of a sum.
        unit: tp cuts its dimension at multiples of this (the width of a head).
        copies: so many neighbours along tp hold the same shard. If tp is in `partial`, the sum is over them when tp cuts the
            parameter, else over the whole axis.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | str
    shards: Mapping[str, int] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    unit: int = 1
    copies: int = 1


@lru_cache(maxsize=64)
def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Name -> global shape, in canonical order: embedding, layers from 0, final norm, head (absent when tied)."""
    return MappingProxyType({row.name: row.shape for row in layout(config).values()})


@lru_cache(maxsize=64)
def layout(config: ModelConfig, sequence_parallel: bool = True, tp: int = 1) -> Mapping[str, ParameterLayout]:
    """The table of a model in canonical order.

    Args:
        sequence_parallel: whether tensor parallelism keeps norms and residuals in sequence shards. Gains of norms, and the
            biases that are added there, then get a gradient that is partial over tp.
        tp: tensor-parallel ranks.
    """
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    tokens = frozenset({"dp", "fsdp", "cp"})  # these axes cut the batch or the sequence
    on_shards = tokens | {"tp"} if sequence_parallel else tokens
    copies = max(1, tp // config.num_key_value_heads)
    rows: list[ParameterLayout] = []

    def column(name: str, layer: int, out: int, bias: bool, unit: int = 1, copies: int = 1) -> None:
        shards, partial = {"tp": 0, "fsdp": 0}, tokens | {"tp"} if copies > 1 else tokens
        rows.append(ParameterLayout(name + ".weight", (out, hidden), layer, shards, partial, unit, copies))
        if bias:
            rows.append(ParameterLayout(name + ".bias", (out,), layer, shards, partial, unit, copies))

    def row(name: str, layer: int, width: int, bias: bool, unit: int = 1) -> None:
        rows.append(ParameterLayout(name + ".weight", (hidden, width), layer, {"tp": 1, "fsdp": 0}, tokens, unit))
        if bias:
            rows.append(ParameterLayout(name + ".bias", (hidden,), layer, {"fsdp": 0}, on_shards))

    def norm(name: str, layer: int | str) -> None:
        rows.append(ParameterLayout(name, (hidden,), layer, {"fsdp": 0}, on_shards))

    def vocabulary(name: str, layer: str) -> None:
        rows.append(ParameterLayout(name, (config.vocab_size, hidden), layer, {"tp": 0, "fsdp": 0}, tokens))

    vocabulary(EMBEDDING, "embed")
    for i in range(config.num_hidden_layers):
        prefix = f"model.layers.{i}."
        norm(prefix + "input_layernorm.weight", i)
        column(prefix + "self_attn.q_proj", i, q_width, config.attention_bias, config.head_dim)
        column(prefix + "self_attn.k_proj", i, kv_width, config.attention_bias, config.head_dim, copies)
        column(prefix + "self_attn.v_proj", i, kv_width, config.attention_bias, config.head_dim, copies)
        row(prefix + "self_attn.o_proj", i, q_width, config.attention_bias, config.head_dim)
        norm(prefix + "post_attention_layernorm.weight", i)
        column(prefix + "mlp.gate_proj", i, ffn, config.mlp_bias)
        column(prefix + "mlp.up_proj", i, ffn, config.mlp_bias)
        row(prefix + "mlp.down_proj", i, ffn, config.mlp_bias)
    norm(FINAL_NORM, "head")
    if not config.tie_word_embeddings:
        vocabulary(HEAD, "head")
    return MappingProxyType({r.name: r for r in rows})

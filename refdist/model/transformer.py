"""The model for one rank, cut into the pieces that the parallel strategies call: embedding, block, head.

    ids ─ embed ─▶ x ─ block 0 ─▶ x ─ … ─▶ x ─ head ─▶ Σ loss
                 ◀─ dx ─         ◀─ dx ─         ◀─ dx ─

The mathematics is that of `reference.py`, written apart from it, from the same kernels in the same order, so that one rank
gives the same bits. Here every kernel runs through `device.call`; weights are handed in as a mapping from full Hugging
Face names, so that a strategy may have gathered them a moment ago; and weight gradients go out through a sink,

    gradients.add(name, kernel, *args)

which may run `device.call(kernel, *args)` at once, or keep kernel and args for later, as zero-bubble pipelines do. The two
uses of a tied matrix arrive under two names, that of the embedding and that of the head. What tensor and context parallelism
add stands behind `context.tensor` (the papers' f and g) and `context.attention`, see `seams.py`.

What a block saves, for s·b tokens a micro-batch and n bytes a number (`BlockSaved`):

    x, middle          2 · n·sb·hidden          the inputs of the two norms; x is the output of the layer before
    q, attended        2 · n·sb·heads·head_dim
    k, v               2 · n·sb·kv_heads·head_dim
    gate, up           2 · n·sb·ffn
    r, middle_r        2 · 4·sb                 statistics, in float32 or wider
    lse                    4·sb·heads

Norm outputs and silu(gate)·up are made again from these; no mask and no [s, s] matrix is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import ops
from ..device import Device
from .config import ModelConfig
from .dropout import Dropout
from .layout import EMBEDDING, FINAL_NORM, HEAD
from .seams import AttentionSaved, DropoutFor, LocalAttention, Pending, Ready, SequenceAttention, TensorAxis, WholeTensor

__all__ = [
    "BlockSaved",
    "Context",
    "GradientSink",
    "attention_again",
    "block_backward",
    "block_forward",
    "embed_backward",
    "embed_forward",
    "head_forward_backward",
    "head_losses",
]

Weights = Mapping[str, np.ndarray]


class GradientSink(Protocol):
    """Where weight gradients go."""

    def add(self, name: str, kernel: Any, *args: Any) -> None:
        """The gradient of parameter `name` of this micro-batch is kernel(*args)."""


@dataclass(frozen=True)
class Context:
    """What all layers share for one micro-batch.

    Attributes:
        device: runs the kernels.
        rotary: tables of the positions that this rank holds.
        tensor: where activations enter and leave layers that tensor parallelism has cut.
        attention: attention over the sequence, of which this rank may hold a part.
        dropout: the masks of this micro-batch; None: nothing is dropped.
        dtype: of activations; the rotary tables are in float32 or wider.
    """

    device: Device
    rotary: ops.RotaryTables
    tensor: TensorAxis
    attention: SequenceAttention
    dropout: Dropout | None = None
    dtype: Any = np.float32

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        device: Device,
        positions: np.ndarray,
        dtype: Any,
        segment_ids: np.ndarray | None = None,
        tensor: TensorAxis | None = None,
        attention: SequenceAttention | None = None,
        dropout: Dropout | None = None,
    ) -> Context:
        """For global positions [seq] and, if given, segments [rows, seq]; dtype is that of the activations.

        Without `tensor` and `attention` this rank holds whole layers and all positions.
        """
        frequencies = ops.rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        rotary = ops.RotaryTables(frequencies, positions, np.promote_types(dtype, np.float32))
        if attention is None:
            attention = LocalAttention(device, ops.AttentionMask(positions, positions, segment_ids, segment_ids))
        return cls(device, rotary, tensor or WholeTensor(device, config.vocab_size), attention, dropout, dtype)


# ------------------------------------------------------------------------------------------------------------ embedding


def embed_forward(weights: Weights, ids: np.ndarray, context: Context) -> np.ndarray:
    """ids [rows, seq] -> x [rows, seq, hidden]. Backward needs the ids only."""
    return context.tensor.embedding(weights[EMBEDDING], ids)


def embed_backward(
    config: ModelConfig, dx: np.ndarray, ids: np.ndarray, gradients: GradientSink, context: Context
) -> None:
    """dx [rows, seq, hidden] -> the gradient of the embedding."""
    kernel, args = context.tensor.embedding_weight_grad(dx, ids)
    gradients.add(EMBEDDING, kernel, *args)


# ---------------------------------------------------------------------------------------------------------------- block


class BlockSaved(NamedTuple):
    """What a block keeps for its backward."""

    x: np.ndarray  # the block's input [rows, seq, hidden]
    r: np.ndarray  # of input_layernorm [rows, seq, 1]
    n: np.ndarray | None  # its output as q, k and v saw it, if tensor parallelism keeps it
    attention: AttentionSaved  # q and k turned
    attended: np.ndarray | None  # [rows, seq, heads, head_dim]; None if backward computes it again (recompute.py)
    middle: np.ndarray  # x after attention [rows, seq, hidden]
    middle_r: np.ndarray  # of post_attention_layernorm [rows, seq, 1]
    middle_n: np.ndarray | None  # its output as gate and up saw it, if tensor parallelism keeps it
    gate: np.ndarray  # [rows, seq, ffn]
    up: np.ndarray  # [rows, seq, ffn]


def block_forward(
    config: ModelConfig, weights: Weights, layer: int, x: np.ndarray, context: Context
) -> tuple[np.ndarray, BlockSaved]:
    """One layer: x [rows, seq, hidden] -> y like x, and what backward needs."""
    w = _Layer(weights, layer, context)
    call, tensor = context.device.call, context.tensor
    # middle = x + o(attention(rotary(q(n)), rotary(k(n)), v(n)))                            n = input_layernorm(x)
    n, r = w.norm("input_layernorm", x, config.rms_norm_eps)
    n = tensor.enter(n).wait()
    q, k, v = (_heads(w.linear(f"self_attn.{name}_proj", n), config) for name in "qkv")
    kept_n = tensor.keep(n)
    q, k = (call(ops.rotary, x, context.rotary, out=x) for x in (q, k))
    attended, attention = context.attention.forward(q, k, v, w.attention_dropout())
    middle = call(ops.add, w.dropout("attention", w.row_linear("self_attn.o_proj", _merged(attended)), in_place=True), x)
    # y = middle + down(swiglu(gate(n), up(n)))                                              n = post_attention_layernorm
    n, middle_r = w.norm("post_attention_layernorm", middle, config.rms_norm_eps)
    n = tensor.enter(n).wait()
    gate, up = w.linear("mlp.gate_proj", n), w.linear("mlp.up_proj", n)
    y = w.dropout("mlp", w.row_linear("mlp.down_proj", call(ops.swiglu, gate, up)), in_place=True)
    y = call(ops.add, y, middle)
    return y, BlockSaved(x, r, kept_n, attention, attended, middle, middle_r, tensor.keep(n), gate, up)


def block_backward(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    dy: np.ndarray,
    saved: BlockSaved,
    gradients: GradientSink,
    context: Context,
) -> np.ndarray:
    """dy [rows, seq, hidden] -> dx like dy; the layer's weight gradients go to the sink; saved is used up."""
    w = _Layer(weights, layer, context, gradients)
    call, tensor = context.device.call, context.tensor
    x, r, kept_n, attention, attended, middle, middle_r, kept_middle_n, gate, up = saved
    # y = middle + down(swiglu(gate(n), up(n)))
    entering = w.enter_again("post_attention_layernorm", middle, middle_r, kept_middle_n)
    da, dy_whole = w.row_input_grad("mlp.down_proj", w.dropout("mlp", dy))
    dgate, dup, a = call(ops.swiglu_backward, da, gate, up, out=(gate, up, da))
    w.linear_weight_grad("mlp.down_proj", dy_whole, a)
    dn = w.input_grad({"mlp.gate_proj": dgate, "mlp.up_proj": dup})
    summing = tensor.enter_backward(dn)  # while the weight gradients are computed
    n = entering.wait()
    w.column_weight_grad("mlp.gate_proj", dgate, n)
    w.column_weight_grad("mlp.up_proj", dup, n)
    dmiddle = w.norm_backward("post_attention_layernorm", summing.wait(), middle, middle_r, residual=dy)
    # middle = x + o(attention(rotary(q(n)), rotary(k(n)), v(n)))
    entering = w.enter_again("input_layernorm", x, r, kept_n)
    dattended, dmiddle_whole = w.row_input_grad("self_attn.o_proj", w.dropout("attention", dmiddle))
    assert attended is not None
    w.linear_weight_grad("self_attn.o_proj", dmiddle_whole, _merged(attended))
    dq, dk, dv = context.attention.backward(_heads(dattended, config), attention, w.attention_dropout())
    dq, dk = (call(ops.rotary_backward, d, context.rotary, out=d) for d in (dq, dk))
    dq, dk, dv = _merged(dq), _merged(dk), _merged(dv)
    dn = w.input_grad({"self_attn.q_proj": dq, "self_attn.k_proj": dk, "self_attn.v_proj": dv})
    summing = tensor.enter_backward(dn)  # while the weight gradients are computed
    n = entering.wait()
    w.column_weight_grad("self_attn.q_proj", dq, n)
    w.column_weight_grad("self_attn.k_proj", dk, n)
    w.column_weight_grad("self_attn.v_proj", dv, n)
    return w.norm_backward("input_layernorm", summing.wait(), x, r, residual=dmiddle)


def attention_again(layer: int, saved: AttentionSaved, context: Context) -> tuple[np.ndarray, AttentionSaved]:
    """The attention of a layer once more, from q, k, v: its output [rows, seq, heads, head_dim], and all that it saves."""
    return context.attention.again(saved, context.dropout.attention(layer) if context.dropout else None)


class _Layer:
    """The kernels that have weights, called with those of one layer by their short names."""

    def __init__(self, weights: Weights, layer: int, context: Context, gradients: Any = None) -> None:
        self.weights, self.prefix, self.call = weights, f"model.layers.{layer}.", context.device.call
        self.layer, self.tensor, self.masks = layer, context.tensor, context.dropout
        self.gradients = gradients  # a GradientSink in backward

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        name = self.prefix + name
        return self.call(ops.linear, x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def row_linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """A layer that tensor parallelism cuts by rows: its bias is added once, after the terms have been summed."""
        name = self.prefix + name
        y = self.tensor.leave(self.call(ops.linear, x, self.weights[name + ".weight"]))
        return self.call(ops.add_bias, y, self.weights[name + ".bias"]) if name + ".bias" in self.weights else y

    def row_input_grad(self, name: str, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """dx of a `row_linear`, and the dy that its weight gradient takes; that of the bias is given here."""
        if self.prefix + name + ".bias" in self.weights:
            self.gradients.add(self.prefix + name + ".bias", ops.linear_bias_grad, dy)
        dy = self.tensor.leave_backward(dy)
        return self.input_grad({name: dy}), dy

    def input_grad(self, dys: Mapping[str, np.ndarray]) -> np.ndarray:
        """dx of linear layers that have the same input, by their names."""
        terms = [term for name, dy in dys.items() for term in (dy, self.weights[self.prefix + name + ".weight"])]
        return self.call(ops.linear_input_grad, *terms)

    def linear_weight_grad(self, name: str, dy: np.ndarray, x: np.ndarray) -> None:
        self.gradients.add(self.prefix + name + ".weight", ops.linear_weight_grad, dy, x)

    def column_weight_grad(self, name: str, dy: np.ndarray, x: np.ndarray) -> None:
        """Weight and bias gradient of a layer that tensor parallelism cuts by columns."""
        self.linear_weight_grad(name, dy, x)
        if self.prefix + name + ".bias" in self.weights:
            self.gradients.add(self.prefix + name + ".bias", ops.linear_bias_grad, dy)

    def dropout(self, branch: str, y: np.ndarray, in_place: bool = False) -> np.ndarray:
        """What dropout leaves of the output of "attention" or "mlp", or of its gradient: it is its own backward."""
        if self.masks is None or not self.masks.config.hidden_dropout:
            return y
        keep = self.masks.branch(self.layer, branch)
        return self.call(ops.dropout, y, keep, self.masks.config.hidden_dropout, out=y if in_place else None)

    def attention_dropout(self) -> DropoutFor | None:
        return self.masks.attention(self.layer) if self.masks else None

    def norm(self, name: str, x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        return self.call(ops.rms_norm, x, self.weights[self.prefix + name + ".weight"], eps)

    def enter_again(self, name: str, x: np.ndarray, r: np.ndarray, kept: np.ndarray | None) -> Pending:
        """What the columns after a norm multiplied with: as it was kept, or made again."""
        if kept is not None:
            return Ready(kept)
        return self.tensor.enter(self.call(ops.rms_norm_again, x, self.weights[self.prefix + name + ".weight"], r))

    def norm_backward(self, name: str, dy: np.ndarray, x: np.ndarray, r: np.ndarray, residual: np.ndarray) -> np.ndarray:
        name = self.prefix + name + ".weight"
        dx, dgain = self.call(ops.rms_norm_backward, dy, x, self.weights[name], r, residual)
        self.gradients.add(name, norm_weight_grad, dgain)
        return dx


# ----------------------------------------------------------------------------------------------------------------- head


def head_forward_backward(
    config: ModelConfig,
    weights: Weights,
    x: np.ndarray,
    labels: np.ndarray,
    scale: float,
    gradients: GradientSink,
    context: Context,
) -> tuple[float, np.ndarray]:
    """Final norm, output matrix and loss, forward and backward at once.

    The logits of a chunk of tokens become the loss, then their own gradient in place, then dx and dW, and are gone before
    the next chunk's are made. So a last stage keeps dx between its forward and its backward, no more than it would have
    kept of x; it can do so because scale is known beforehand.

    Args:
        x: [rows, seq, hidden], the last block's output.
        labels: integers [rows, seq], -100 where there is no target.
        scale: the gradient is that of scale · Σ token losses: 1 / global count of labels, times a loss scale if any.

    Returns:
        Σ token losses, in float64; dx [rows, seq, hidden] of scale times it. Gradients of head and norm went to the sink.
    """
    call, tensor = context.device.call, context.tensor
    w, gain = weights[head_name(config)], weights[FINAL_NORM]
    normed, r = call(ops.rms_norm, x, gain, config.rms_norm_eps)
    n = tensor.enter(normed).wait()
    dn, dw, loss_sum = context.device.empty(n), None, 0.0
    for tokens in ops.token_chunks(labels.size, tensor.columns):
        n_chunk, label = _flat(n)[tokens], labels.reshape(-1)[tokens]
        logits = call(ops.linear, n_chunk, w)  # [tokens, vocab]
        losses, lse = tensor.cross_entropy(logits, label)
        loss_sum += float(np.add.reduce(losses, dtype=np.float64))
        dlogits = tensor.cross_entropy_backward(scale, logits, label, lse)
        _flat(dn)[tokens] = call(ops.linear_input_grad, dlogits, w)
        dw_chunk = call(ops.linear_weight_grad, dlogits, n_chunk, category="gradient")
        dw = dw_chunk if dw is None else call(ops.add, dw, dw_chunk)
    summing = tensor.enter_backward(dn)
    gradients.add(HEAD, head_weight_grad, dw if dw is not None else context.device.zeros(w, category="gradient"))
    dn = summing.wait()
    dx, dgain = call(ops.rms_norm_backward, dn, x, gain, r)
    gradients.add(FINAL_NORM, norm_weight_grad, dgain)
    return loss_sum, dx


def head_losses(
    config: ModelConfig, weights: Weights, x: np.ndarray, labels: np.ndarray, context: Context
) -> np.ndarray:
    """Token losses only, for evaluation: x [rows, seq, hidden], labels [rows, seq] -> float [rows, seq], 0 where ignored."""
    call, tensor = context.device.call, context.tensor
    w = weights[head_name(config)]
    normed, r = call(ops.rms_norm, x, weights[FINAL_NORM], config.rms_norm_eps)
    n = tensor.enter(normed).wait()
    losses = context.device.empty(r, shape=labels.shape)
    for tokens in ops.token_chunks(labels.size, tensor.columns):
        logits = call(ops.linear, _flat(n)[tokens], w)
        losses.reshape(-1)[tokens], _ = tensor.cross_entropy(logits, labels.reshape(-1)[tokens])
    return losses


def head_name(config: ModelConfig) -> str:
    """The parameter that the head multiplies with."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


@ops.kernel()
def head_weight_grad(grad: np.ndarray) -> np.ndarray:
    """A gradient that is there already."""
    return grad


@ops.kernel()
def norm_weight_grad(grad: np.ndarray, *, empty: Callable[..., np.ndarray] = ops.empty_like) -> np.ndarray:
    """The gradient that `ops.rms_norm_backward` has given [hidden], where gradients are kept."""
    kept = empty(grad)
    kept[...] = grad
    return kept


def _flat(x: np.ndarray) -> np.ndarray:
    """[rows, seq, n] seen as [rows · seq, n]."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _heads(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """[rows, seq, heads · head_dim] seen as [rows, seq, heads, head_dim]."""
    return x.reshape(*x.shape[:2], x.shape[2] // config.head_dim, config.head_dim)


def _merged(x: np.ndarray) -> np.ndarray:
    """[rows, seq, heads, head_dim] seen as [rows, seq, heads · head_dim]."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])

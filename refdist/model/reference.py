"""The oracle: the whole model on a single device, top to bottom, and its gradient. No collective, no device, no tricks.

    x = embedding(ids)
    for each layer:
        x = x + o_proj(attention(rotary(q_proj(n)), rotary(k_proj(n)), v_proj(n)))      n = input_layernorm(x)
        x = x + down_proj(swiglu(gate_proj(n), up_proj(n)))                             n = post_attention_layernorm(x)
    logits = lm_head(norm(x))
    loss = Σ over tokens with a label of cross_entropy(logits, label) / number of those tokens

This is the Llama of Touvron et al. 2023 with the biases and tied embeddings that Hugging Face's `LlamaForCausalLM` knows.
Every parallel strategy is held against it; it is itself held against finite differences and against PyTorch's autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..errors import ConfigError
from .batch import check_batch, check_tokens
from .config import ModelConfig
from .dropout import Dropout
from .layout import EMBEDDING, FINAL_NORM, HEAD, parameter_shapes
from .params import check_params

__all__ = ["adamw", "logits", "loss_and_grads", "sgd", "token_losses", "train", "weighted_loss_and_grads"]

Params = Mapping[str, np.ndarray]
Grads = dict[str, np.ndarray]
Groups = Sequence[Any]  # row indices (a micro-batch), or a list of groups


def loss_and_grads(
    config: ModelConfig,
    params: Params,
    input_ids: np.ndarray,
    labels: np.ndarray,
    *,
    segment_ids: np.ndarray | None = None,
    dropout_seed: int | None = None,
    groups: Groups | None = None,
) -> tuple[float, Grads]:
    """The loss of a batch, a mean over the tokens that have a label, and its gradient with respect to every parameter.

    Args:
        params: Hugging Face names, weights [out, in], all float32 or all float64.
        input_ids, labels: integers [batch, seq]; labels[b, t] is the target of position t, -100 where there is none.
        segment_ids: integers [batch, seq]: attention stays within a segment. None: each row is one.
        dropout_seed: of the dropout masks; None: no dropout.
        groups: the order in which the gradients of the rows are added up, as a tree. A list of row indices is a
            micro-batch, computed at once; a list of groups is their sum, from the first to the last. So
            [[[0, 1], [2]], [[3], [4]]] is two ranks of two micro-batches each: within a rank, then across ranks. Each row
            appears once. None: all rows at once. The result differs in rounding only.

    Returns:
        loss; gradients under the names and shapes of params, in canonical order. The two uses of a tied matrix are added
        up apart over the micro-batches of a group, then together, and the groups' sums after that: a rank has one gradient.

    Raises:
        ConfigError: parameters, tokens, labels or groups that do not fit or are of another format; no label at all.
    """
    _check_params(config, params)
    count = check_batch(config, input_ids, labels, segment_ids)
    if groups is None:
        groups = list(range(len(input_ids)))
    _check_groups(groups, len(input_ids))

    def micro_batch(rows: list[int]) -> tuple[float, Grads]:
        batch = _Batch.of(config, params, input_ids, segment_ids, rows, dropout_seed)
        return _loss_sum_and_grads(config, params, batch, labels[rows], 1 / count)

    loss_sum, grads = _add_up(groups, micro_batch, partial(_tie, config)) or (0.0, {})
    return loss_sum / count, _in_order(config, grads)


def weighted_loss_and_grads(
    config: ModelConfig,
    params: Params,
    input_ids: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    *,
    segment_ids: np.ndarray | None = None,
    dropout_seed: int | None = None,
) -> tuple[float, Grads]:
    """Σ weights[b, t] · loss[b, t] and its gradient, for any weights [batch, seq]; the rest as in `loss_and_grads`.

    What one token, row or rank adds to a gradient: weights that are 0 elsewhere.
    """
    _check_params(config, params)
    check_batch(config, input_ids, labels, segment_ids)
    if np.shape(weights) != np.shape(labels):
        raise ConfigError(f"weights: found shape {np.shape(weights)}, expected that of labels, {np.shape(labels)}")
    batch = _Batch.of(config, params, input_ids, segment_ids, list(range(len(input_ids))), dropout_seed)
    loss, grads = _loss_sum_and_grads(config, params, batch, labels, np.asarray(weights))
    return loss, _in_order(config, grads)


def token_losses(
    config: ModelConfig,
    params: Params,
    input_ids: np.ndarray,
    labels: np.ndarray,
    *,
    segment_ids: np.ndarray | None = None,
) -> np.ndarray:
    """The cross-entropy of each token, float [batch, seq], 0 where the label is -100; arguments as in `loss_and_grads`."""
    _check_params(config, params)
    check_batch(config, input_ids, labels, segment_ids)
    batch = _Batch.of(config, params, input_ids, segment_ids, list(range(len(input_ids))))
    x, _ = _trunk(config, params, batch)
    n, _ = ops.rms_norm(x, params[FINAL_NORM], config.rms_norm_eps)
    losses, _ = ops.cross_entropy(ops.linear(_flat(n), params[_head(config)]), labels.reshape(-1))
    return losses.reshape(labels.shape)


def logits(
    config: ModelConfig, params: Params, input_ids: np.ndarray, *, segment_ids: np.ndarray | None = None
) -> np.ndarray:
    """Scores of the next token [batch, seq, vocab]."""
    _check_params(config, params)
    check_tokens(config, input_ids)
    batch = _Batch.of(config, params, input_ids, segment_ids, list(range(len(input_ids))))
    x, _ = _trunk(config, params, batch)
    n, _ = ops.rms_norm(x, params[FINAL_NORM], config.rms_norm_eps)
    return ops.linear(n, params[_head(config)])


def _check_params(config: ModelConfig, params: Params) -> None:
    check_params(config, params)
    (dtype,) = {array.dtype for array in params.values()}
    if dtype not in (np.float32, np.float64):
        raise ConfigError(f"parameters are {dtype}: the reference computes in float32 or float64")


class Trained(NamedTuple):
    """What `train` returns: parameters and optimizer state by name after the last step, loss and gradient norm of each."""

    params: dict[str, np.ndarray]
    state: dict[str, tuple[np.ndarray, ...]]
    losses: list[float]
    norms: list[float]


Update = Callable[[np.ndarray, np.ndarray, tuple[np.ndarray, ...], int], tuple[np.ndarray, tuple[np.ndarray, ...]]]


def train(
    config: ModelConfig,
    params: Params,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    update: Update,
    *,
    clip_norm: float | None = None,
    groups: Groups | None = None,
    dropout_seeds: Sequence[int] | None = None,
) -> Trained:
    """A few steps of training, one for each (input_ids, labels); nothing that is passed in is changed.

    Args:
        update: `sgd(…)` or `adamw(…)`.
        clip_norm: gradients whose global norm is larger are scaled down to it.
        groups, dropout_seeds: as in `loss_and_grads`; a seed for each step.
    """
    trained, losses, norms = dict(params), [], []
    state: dict[str, tuple[np.ndarray, ...]] = dict.fromkeys(params, ())
    for step, (input_ids, labels) in enumerate(batches, start=1):
        seed = dropout_seeds[step - 1] if dropout_seeds is not None else None
        loss, grads = loss_and_grads(config, trained, input_ids, labels, groups=groups, dropout_seed=seed)
        norm = math.sqrt(math.fsum(float(np.sum(g.astype(np.float64) ** 2)) for g in grads.values()))
        if clip_norm is not None and norm > clip_norm:
            grads = {name: g * g.dtype.type(clip_norm / norm) for name, g in grads.items()}
        for name, grad in grads.items():
            trained[name], state[name] = update(trained[name], grad, state[name], step)
        losses.append(loss)
        norms.append(norm)
    return Trained(trained, state, losses, norms)


def sgd(lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Update:
    """g ← g + λ p;  b ← μ b + g, at first g;  p ← p − η (g + μ b with Nesterov, else b). No decay (λ) of gains and biases."""

    def update(p: np.ndarray, g: np.ndarray, state: tuple[np.ndarray, ...], step: int) -> Any:
        if weight_decay and p.ndim >= 2:
            g = g + weight_decay * p
        if not momentum:
            return p - lr * g, ()
        b = momentum * state[0] + g if state else g
        return p - lr * (g + momentum * b if nesterov else b), (b,)

    return update


def adamw(
    lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> Update:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2); gains and biases are not decayed. State: first and second moment."""

    def update(p: np.ndarray, g: np.ndarray, state: tuple[np.ndarray, ...], step: int) -> Any:
        m, v = state or (np.zeros_like(p), np.zeros_like(p))
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** step), v / (1 - betas[1] ** step)
        decay = weight_decay if p.ndim >= 2 else 0.0
        return p - lr * (m_hat / (np.sqrt(v_hat) + eps) + decay * p), (m, v)

    return update


class _Batch(NamedTuple):
    """What the layers of one micro-batch share."""

    ids: np.ndarray  # [rows, seq]
    rotary: ops.RotaryTables
    mask: ops.AttentionMask
    dropout: Dropout | None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        params: Params,
        ids: np.ndarray,
        segments: np.ndarray | None,
        rows: list[int],
        dropout_seed: int | None = None,
    ) -> _Batch:
        positions = np.arange(ids.shape[1])
        frequencies = ops.rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        rotary = ops.RotaryTables(frequencies, positions, params[EMBEDDING].dtype)
        own = None if segments is None else segments[rows]
        dropout = None
        if dropout_seed is not None:
            dropout = Dropout(config, dropout_seed, np.asarray(rows), ids.shape[1], positions)
        return cls(ids[rows], rotary, ops.AttentionMask(positions, positions, own, own), dropout)

    def attention_dropout(self, layer: int) -> Any:
        """The factors of the attention weights of a layer, tile by tile; None: no dropout."""
        of_chunks = self.dropout and self.dropout.attention(layer)
        return of_chunks and of_chunks(self.mask.q_positions, self.mask.k_positions, 0)

    def drop(self, layer: int, branch: str, y: np.ndarray) -> np.ndarray:
        """What dropout leaves of a branch's output, or of its gradient."""
        if self.dropout is None or not self.dropout.config.hidden_dropout:
            return y
        return ops.dropout(y, self.dropout.branch(layer, branch), self.dropout.config.hidden_dropout)


def _loss_sum_and_grads(
    config: ModelConfig, params: Params, batch: _Batch, labels: np.ndarray, scale: float | np.ndarray
) -> tuple[float, Grads]:
    """The sum of the token losses of one micro-batch, and the gradient of scale times it.

    With a scale for each token [rows, seq] it is the sum of scale times loss, and its gradient.
    """
    grads: Grads = {}
    x, saved = _trunk(config, params, batch)
    loss_sum, dx = _head_and_back(config, params, x, labels, scale, grads)
    for layer in reversed(range(config.num_hidden_layers)):
        dx = _block_backward(config, _Layer(params, grads, layer), dx, saved.pop(), batch)
    grads[EMBEDDING] = ops.embedding_weight_grad(dx, batch.ids, config.vocab_size)
    return loss_sum, grads


def _trunk(config: ModelConfig, params: Params, batch: _Batch) -> tuple[np.ndarray, list[_Saved]]:
    """Embedding and all layers: [rows, seq, hidden], and what each layer saved."""
    x = ops.embedding(params[EMBEDDING], batch.ids)
    saved = []
    for layer in range(config.num_hidden_layers):
        x, kept = _block(config, _Layer(params, {}, layer), x, batch)
        saved.append(kept)
    return x, saved


class _Layer:
    """The parameters of one layer by their short names, and where their gradients go."""

    def __init__(self, params: Params, grads: Grads, layer: int) -> None:
        self.params, self.grads, self.layer, self.prefix = params, grads, layer, f"model.layers.{layer}."

    def norm(self, name: str, x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
        return ops.rms_norm(x, self.params[self.prefix + name + ".weight"], eps)

    def norm_again(self, name: str, x: np.ndarray, r: np.ndarray) -> np.ndarray:
        return ops.rms_norm_again(x, self.params[self.prefix + name + ".weight"], r)

    def norm_backward(self, name: str, dy: np.ndarray, x: np.ndarray, r: np.ndarray, residual: np.ndarray) -> np.ndarray:
        name = self.prefix + name + ".weight"
        dx, self.grads[name] = ops.rms_norm_backward(dy, x, self.params[name], r, residual)
        return dx

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        name = self.prefix + name
        return ops.linear(x, self.params[name + ".weight"], self.params.get(name + ".bias"))

    def linear_backward(self, x: np.ndarray, dys: Mapping[str, np.ndarray]) -> np.ndarray:
        """Of linear layers with the same input x, from their output gradients by name."""
        for name, dy in dys.items():
            self.linear_weight_grad(name, dy, x)
        return self.linear_input_grad(dys)

    def linear_input_grad(self, dys: Mapping[str, np.ndarray]) -> np.ndarray:
        return ops.linear_input_grad(*(x for name, dy in dys.items() for x in (dy, self.params[self.prefix + name + ".weight"])))

    def linear_weight_grad(self, name: str, dy: np.ndarray, x: np.ndarray) -> None:
        name = self.prefix + name
        self.grads[name + ".weight"] = ops.linear_weight_grad(dy, x)
        if name + ".bias" in self.params:
            self.grads[name + ".bias"] = ops.linear_bias_grad(dy)


class _Saved(NamedTuple):
    """What one layer keeps for its backward."""

    x: np.ndarray  # the layer's input [rows, seq, hidden]
    r: np.ndarray  # of input_layernorm [rows, seq, 1]
    q: np.ndarray  # turned [rows, seq, heads, head_dim]
    k: np.ndarray  # turned [rows, seq, kv_heads, head_dim]
    v: np.ndarray
    attended: np.ndarray  # like q
    lse: np.ndarray  # [rows, seq, heads]
    middle: np.ndarray  # x after attention [rows, seq, hidden]
    middle_r: np.ndarray  # of post_attention_layernorm [rows, seq, 1]
    gate: np.ndarray  # [rows, seq, ffn]
    up: np.ndarray


def _block(config: ModelConfig, w: _Layer, x: np.ndarray, batch: _Batch) -> tuple[np.ndarray, _Saved]:
    """One layer: x [rows, seq, hidden] -> y like x."""
    n, r = w.norm("input_layernorm", x, config.rms_norm_eps)
    q, k, v = (_heads(config, w.linear(f"self_attn.{name}_proj", n)) for name in "qkv")
    q, k = ops.rotary(q, batch.rotary), ops.rotary(k, batch.rotary)
    attended, lse = ops.attention(q, k, v, batch.mask, batch.attention_dropout(w.layer))
    middle = ops.add(batch.drop(w.layer, "attention", w.linear("self_attn.o_proj", _merged(attended))), x)

    n, middle_r = w.norm("post_attention_layernorm", middle, config.rms_norm_eps)
    gate, up = w.linear("mlp.gate_proj", n), w.linear("mlp.up_proj", n)
    y = ops.add(batch.drop(w.layer, "mlp", w.linear("mlp.down_proj", ops.swiglu(gate, up))), middle)
    return y, _Saved(x, r, q, k, v, attended, lse, middle, middle_r, gate, up)


def _block_backward(config: ModelConfig, w: _Layer, dy: np.ndarray, saved: _Saved, batch: _Batch) -> np.ndarray:
    """The gradient of a layer's input from that of its output, line by line the reverse of `_block`."""
    x, r, q, k, v, attended, lse, middle, middle_r, gate, up = saved
    # y = middle + down(swiglu(gate(n), up(n)))
    dmlp = batch.drop(w.layer, "mlp", dy)
    dgate, dup, a = ops.swiglu_backward(w.linear_input_grad({"mlp.down_proj": dmlp}), gate, up)
    w.linear_weight_grad("mlp.down_proj", dmlp, a)
    n = w.norm_again("post_attention_layernorm", middle, middle_r)
    dn = w.linear_backward(n, {"mlp.gate_proj": dgate, "mlp.up_proj": dup})
    dmiddle = w.norm_backward("post_attention_layernorm", dn, middle, middle_r, dy)
    # middle = x + o(attention(rotary(q(n)), rotary(k(n)), v(n)))
    doutput = batch.drop(w.layer, "attention", dmiddle)
    dattended = _heads(config, w.linear_backward(_merged(attended), {"self_attn.o_proj": doutput}))
    dropout = batch.attention_dropout(w.layer)
    dq, dk, dv = ops.attention_backward(dattended, q, k, v, attended, lse, batch.mask, dropout)
    dq, dk = ops.rotary_backward(dq, batch.rotary), ops.rotary_backward(dk, batch.rotary)
    n = w.norm_again("input_layernorm", x, r)
    dn = w.linear_backward(n, {f"self_attn.{name}_proj": _merged(d) for name, d in zip("qkv", (dq, dk, dv), strict=True)})
    return w.norm_backward("input_layernorm", dn, x, r, dmiddle)


def _head_and_back(
    config: ModelConfig, params: Params, x: np.ndarray, labels: np.ndarray, scale: float | np.ndarray, grads: Grads
) -> tuple[float, np.ndarray]:
    """Final norm, output matrix and loss, forward and backward at once: a chunk's logits die before the next chunk's live.

    Returns the sum of the token losses as in `_loss_sum_and_grads`, and the gradient with respect to x [rows, seq, hidden].
    """
    w, gain = params[_head(config)], params[FINAL_NORM]
    n, r = ops.rms_norm(x, gain, config.rms_norm_eps)
    dn = ops.empty_like(n)
    loss_sum = 0.0
    for tokens in ops.token_chunks(labels.size, config.vocab_size):
        n_chunk, label = _flat(n)[tokens], labels.reshape(-1)[tokens]
        scores = ops.linear(n_chunk, w)  # [tokens, vocab]
        losses, lse = ops.cross_entropy(scores, label)
        if isinstance(scale, np.ndarray):
            weight: float | np.ndarray = scale.reshape(-1)[tokens]
            losses = losses * weight
        else:
            weight = scale
        loss_sum += float(np.add.reduce(losses, dtype=np.float64))
        dscores = ops.cross_entropy_backward(weight, scores, label, lse)
        _flat(dn)[tokens] = ops.linear_input_grad(dscores, w)
        dw = ops.linear_weight_grad(dscores, n_chunk)
        grads[HEAD] = ops.add(grads[HEAD], dw) if HEAD in grads else dw
    dx, grads[FINAL_NORM] = ops.rms_norm_backward(dn, x, gain, r)
    return loss_sum, dx


def _add_up(groups: Groups, micro_batch: Any, tie: Callable[[Grads], None]) -> tuple[float, Grads] | None:
    """Run the micro-batches of a tree and add their results in its order; a micro-batch without rows adds nothing.

    Each sum of micro-batches is tied before it is added to others.
    """
    if _is_micro_batch(groups):
        return micro_batch(list(groups)) if len(groups) else None
    innermost = all(_is_micro_batch(group) for group in groups)
    total = None
    for group in groups:
        part = _add_up(group, micro_batch, tie)
        if part is not None and not innermost:
            tie(part[1])
        if total is None or part is None:
            total = total or part
            continue
        for name, grad in part[1].items():
            total[1][name] += grad
        total = total[0] + part[0], total[1]
    return total


def _is_micro_batch(groups: Groups) -> bool:
    return not any(isinstance(part, Sequence) for part in groups)


def _tie(config: ModelConfig, grads: Grads) -> None:
    """Add the head's use of a tied matrix to the embedding's, if that has not been done."""
    if config.tie_word_embeddings and HEAD in grads:
        grads[EMBEDDING] += grads.pop(HEAD)


def _check_groups(groups: Groups, batch: int) -> None:
    def rows(group: Groups) -> list[int]:
        return [row for part in group for row in (rows(part) if isinstance(part, Sequence) else [part])]

    if sorted(rows(groups)) != list(range(batch)):
        raise ConfigError(f"groups: found the rows {sorted(rows(groups))}, expected each of 0 to {batch - 1} once")


def _in_order(config: ModelConfig, grads: Grads) -> Grads:
    _tie(config, grads)
    return {name: grads[name] for name in parameter_shapes(config)}


def _head(config: ModelConfig) -> str:
    """The name of the output matrix."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


def _flat(x: np.ndarray) -> np.ndarray:
    """[rows, seq, n] seen as [rows · seq, n]."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _heads(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """[rows, seq, heads · head_dim] seen as [rows, seq, heads, head_dim]."""
    return x.reshape(*x.shape[:2], x.shape[2] // config.head_dim, config.head_dim)


def _merged(x: np.ndarray) -> np.ndarray:
    """[rows, seq, heads, head_dim] seen as [rows, seq, heads · head_dim]."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])

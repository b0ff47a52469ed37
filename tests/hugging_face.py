"""The same model by transformers' LlamaForCausalLM and PyTorch's autograd, in float64 throughout.

transformers computes norms and rotary angles in float32 whatever the model's format; both are replaced here by the same
formulas in float64, so that the comparison can be tight. Everything else is transformers' own.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

from refdist.model import ModelConfig


def llama_config(config: ModelConfig, **more: object) -> transformers.LlamaConfig:
    values = config.to_dict()
    rope = {"rope_theta": values.pop("rope_theta"), **(values.pop("rope_scaling") or {"rope_type": "default"})}
    for ours in ("architectures", "hidden_dropout"):
        values.pop(ours)
    return transformers.LlamaConfig(**values, rope_parameters=rope, bos_token_id=None, eos_token_id=None, **more)


def frequencies(config: ModelConfig, theirs: torch.Tensor) -> torch.Tensor:
    """Rotary frequencies in float64, by the rule as Meta published it; checked against transformers' float32 ones."""
    plain = [config.rope_theta ** (-2 * j / config.head_dim) for j in range(config.head_dim // 2)]
    result, scaling = [], config.rope_scaling
    for f in plain:
        if scaling:
            wavelength, old = 2 * math.pi / f, scaling["original_max_position_embeddings"]
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = (old / wavelength - low) / (high - low)
            if wavelength > old / low:
                f = f / scaling["factor"]
            elif wavelength >= old / high:
                f = (1 - smooth) * f / scaling["factor"] + smooth * f
        result.append(f)
    exact = torch.tensor(result, dtype=torch.float64)
    torch.testing.assert_close(theirs.double(), exact, rtol=1e-5, atol=0)
    return exact


def build(config: ModelConfig, params: dict[str, np.ndarray]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(llama_config(config, attn_implementation="sdpa"))
    exact = frequencies(config, model.model.rotary_emb.inv_freq)
    model = model.double()
    state = {name: torch.from_numpy(np.array(value, np.float64)) for name, value in params.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * exact
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = rotary
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = lambda x, m=module: m.weight * x * torch.rsqrt((x**2).mean(-1, True) + m.variance_epsilon)
    return model


def loss_and_grads(
    config: ModelConfig,
    params: dict[str, np.ndarray],
    input_ids: np.ndarray,
    labels: np.ndarray,
    segment_ids: np.ndarray | None = None,
) -> tuple[float, dict[str, np.ndarray]]:
    """As `refdist.reference.loss_and_grads`."""
    model = build(config, params)
    mask = None
    if segment_ids is not None:
        sees = torch.from_numpy(segment_ids[:, :, None] == segment_ids[:, None, :]).tril()[:, None]
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    logits = model(torch.from_numpy(input_ids), attention_mask=mask).logits
    targets = torch.from_numpy(labels)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    loss = loss / (targets != -100).sum()
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}

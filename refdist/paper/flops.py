"""FLOPs on paper: what a step computes, and which part of the peak a published run reached.

    forward of a token      2 · (numbers in its matrices, the head's too)  +  4 · s · heads·head_dim · layers · ½
    a step                  3 × that: forward, input gradients, weight gradients
    executed                + one more forward of what is recomputed

The ½ is causal attention that skips what nobody sees (the emulator's convention, and ``causal`` here); Megatron and PaLM count
full attention. MFU is model FLOPs over peak, whatever was recomputed, HFU executed FLOPs (Chowdhery et al. 2022, section 4.1). A
run's MFU therefore depends on three choices, and :data:`CONVENTIONS` names them:

    ours        matrices and the head; attention at half                            the emulator's ``device.flops``
    palm        6 N + 12 · L · H · Q · T a token, N all parameters                  Chowdhery et al. 2022, appendix B
    megatron    96 · B·s·l·h² · (1 + s/6h + V/16lh), with full recomputation        Narayanan et al. 2021, section 5.1; 72 without
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refdist.model.config import ModelConfig
from refdist.model.layout import layout
from refdist.paper.models import MODELS
from refdist.paper.part import Part
from refdist.parallel.context.chunks import positions
from refdist.parallel.context.sequence import exchanging

__all__ = ["CONVENTIONS", "RUNS", "Run", "megatron", "of_model", "of_part", "palm", "per_token"]

CONVENTIONS = ("ours", "palm", "megatron")


def per_token(config: ModelConfig, seq: int, causal: bool = True) -> dict[str, float]:
    """Forward FLOPs of one token in a sequence of ``seq``: ``"matrices"``, ``"head"`` and ``"attention"``."""
    one = replace(config, num_hidden_layers=1)
    rows = [row.shape for row in layout(one).values() if len(row.shape) == 2 and row.layer == 0]
    matrices = config.num_hidden_layers * sum(out * width for out, width in rows)
    attention = 4 * seq * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return {"matrices": 2.0 * matrices, "head": 2.0 * config.vocab_size * config.hidden_size,
            "attention": attention * (0.5 if causal else 1.0)}


def of_model(config: ModelConfig, batch: int, seq: int, recompute: str = "none", causal: bool = True) -> dict[str, float]:
    """``"model"`` and ``"executed"`` FLOPs of a step on so many sequences."""
    token = per_token(config, seq, causal)
    again = {"none": 0.0, "selective": token["attention"], "full": token["matrices"] + token["attention"]}[recompute]
    model = 3 * sum(token.values())
    return {"model": batch * seq * model, "executed": batch * seq * (model + again)}


def of_part(part: Part) -> dict[str, int]:
    """The same of one rank, exactly as its device counts: its stage, its heads and columns, and what its queries see."""
    config, plan = part.config, part.plan
    sequences = sum(part.sequences)
    tokens = sequences * part.positions
    hidden, head_dim = config.hidden_size, config.head_dim
    matrices = hidden * head_dim * (2 * part.q_heads + 2 * part.kv_heads) + 3 * hidden * part.ffn
    pairs, q_heads = _seen(part), part.exchange[1]
    attention = int(4 * sequences * q_heads * head_dim * pairs)
    block = 2 * tokens * matrices + attention
    head = 2 * tokens * hidden * part.columns if part.has("head") else 0
    model = 3 * (part.layers * block + head)
    again = {"none": 0, "selective": attention, "full": block}[plan.recompute]
    return {"model": model, "executed": model + part.layers * again}


def _seen(part: Part) -> float:
    """(query, key) pairs that the queries of this rank's attention see in one sequence, its own position half."""
    plan, together = part.plan, exchanging(part.plan)
    if plan.cp == together:
        return part.seq**2 / 2
    held = positions(part.seq, plan.cp, plan.cp_layout, together)
    first = part.at["cp"] // together * together
    return float(sum(int(np.add.reduce(where)) + len(where) / 2 for where in held[first:first + together]))


# -------------------------------------------------------------------------------------------------------- conventions


def megatron(batch: int, seq: int, layers: int, hidden: int, vocab: int, recompute: bool = True) -> float:
    """FLOPs of a step of a GPT by Megatron's formula: full attention, an MLP of 4 hidden, the head three times."""
    forward = 24 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden))
    return (4 if recompute else 3) * forward + 6 * batch * seq * hidden * vocab


def palm(parameters: float, layers: int, heads: int, head_dim: int, seq: int, attention: bool = True) -> float:
    """FLOPs of a token by PaLM's formula; ``attention=False``: 6 N alone."""
    return 6 * parameters + (12 * layers * heads * head_dim * seq if attention else 0)


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: for people.
        accelerators: how many.
        peak: FLOP/s of one, as the paper takes it.
        flops_per_token: by the convention.
        tokens_per_second: as published; None: published are FLOP/s.
        flops_per_second: of one accelerator, as published; None: published are tokens per second.
        published: MFU in per cent, as published.
        convention: of ``flops_per_token``.
        source: where.
    """

    name: str
    accelerators: int
    peak: float
    flops_per_token: float
    tokens_per_second: float | None
    flops_per_second: float | None
    published: float
    convention: str
    source: str

    def figures(self) -> dict[str, Any]:
        """Tokens per second, FLOP/s of one accelerator, and MFU, whichever two follow from the one that is published."""
        rate = self.flops_per_second
        if rate is None:
            assert self.tokens_per_second is not None
            rate = self.tokens_per_second * self.flops_per_token / self.accelerators
        tokens = self.tokens_per_second or rate * self.accelerators / self.flops_per_token
        return {"tokens_per_second": tokens, "flops_per_second": rate, "mfu": rate / self.peak}


_TABLE4 = "Grattafiori et al. 2024, table 4"
_PALM = "Chowdhery et al. 2022, section 4.1 and appendix B: 238.3K tokens/s on 6,144 TPU v4 of 275 TFLOP/s"


def _llama3(gpus: int, seq: int, tflops: float, published: float, plan: str) -> Run:
    token = 3 * sum(per_token(ModelConfig(**MODELS["llama3-405b"]), seq).values())
    return Run(f"Llama 3 405B, {plan}", gpus, 989.4e12, token, None, tflops * 1e12, published, "ours", _TABLE4)


RUNS: Mapping[str, Run] = {
    "llama3-8k": _llama3(8192, 8192, 430, 43, "8,192 GPUs, sequence 8,192"),
    "llama3-16k": _llama3(16384, 8192, 400, 41, "16,384 GPUs, sequence 8,192"),
    "llama3-128k": _llama3(16384, 131072, 380, 38, "16,384 GPUs, sequence 131,072"),
    "palm-540b": Run("PaLM 540B", 6144, 275e12, palm(540.35e9, 118, 48, 256, 2048), 238.3e3, None, 46.2, "palm", _PALM),
    "palm-540b-no-attention": Run("PaLM 540B, without attention", 6144, 275e12, palm(540.35e9, 118, 48, 256, 2048, False),
                                  238.3e3, None, 45.7, "palm", _PALM),
}
"""By short names."""

"""Models on paper: sizes from their papers, too big to be run here.

    llama3-8b, -70b, -405b     Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3

A ``ModelConfig`` is what the emulator runs, so that a model of another shape (GPT, PaLM) is not here; their published FLOPs are
in ``flops.py`` under their own formulas.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MODELS", "PLANS", "ROUNDED"]

_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
           "max_position_embeddings": 131072}

MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {**_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                  "num_attention_heads": 32},
    "llama3-70b": {**_LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                   "num_attention_heads": 64},
    "llama3-405b": {**_LLAMA3, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
                    "num_attention_heads": 128},
}
"""The fields of ModelConfig by name."""

ROUNDED: dict[str, float] = {"llama3-8b": 8e9, "llama3-70b": 70e9, "llama3-405b": 405e9}
"""Parameters as the models' names round them."""

_LLAMA3_PLAN = {"tp": 8, "pp": 16, "zero": 1, "schedule": "interleaved", "virtual_stages": 4, "micro_batches": 16,
                "layers_per_stage": (7, *[8] * 14, 7)}

PLANS: dict[str, dict[str, Any]] = {
    "llama3-8k": {"model": "llama3-405b", "batch": 2048, "seq": 8192, "plan": {**_LLAMA3_PLAN, "fsdp": 64, "micro_batches": 32}},
    "llama3-16k": {"model": "llama3-405b", "batch": 2048, "seq": 8192, "plan": {**_LLAMA3_PLAN, "fsdp": 128}},
    "llama3-128k": {"model": "llama3-405b", "batch": 128, "seq": 131072,
                    "plan": {**_LLAMA3_PLAN, "cp": 16, "cp_method": "all_gather", "fsdp": 8}},
}
"""Llama 3's three published runs (table 4) as plans.

From the paper: tp, cp, pp, dp, batch, sequence, a layer fewer on the first and the last stage. Not from the paper, and chosen
here: 4 chunks a stage, and ZeRO 1, which sends gradients once a step (the paper shards gradients too and does not say how often
they are reduced; in every micro-batch they would not cross its pods in time).
"""

"""Make the golden files in tests/golden: parameters, tokens, loss and gradients by PyTorch autograd in float64.

    python tests/make_golden.py        needs torch and transformers

Each holds one small model of another kind, so that the reference is held against PyTorch on machines without it.
"""

from __future__ import annotations

import json
from pathlib import Path

import hugging_face
import numpy as np
from models import batch, model
from safetensors.numpy import save_file

SIZES = {"vocab_size": 29, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "grouped-biases": {"num_key_value_heads": 2, "head_dim": 4, "attention_bias": True, "mlp_bias": True},
    "tied-single-kv": {"num_key_value_heads": 1, "head_dim": 6, "tie_word_embeddings": True, "rope_theta": 5e5},
    "llama31-segments": {"num_key_value_heads": 4, "head_dim": 8, "rope_scaling": LLAMA3, "rope_theta": 100.0},
}


def main() -> None:
    folder = Path(__file__).parent / "golden"
    folder.mkdir(exist_ok=True)
    for seed, (name, options) in enumerate(MODELS.items()):
        config, params = model(seed, **SIZES, **options)
        ids, labels = batch(config, rows=3, seq=11, seed=seed)
        inputs = {"input_ids": ids, "labels": labels}
        if name.endswith("segments"):
            inputs["segment_ids"] = np.sort(np.random.default_rng(seed).integers(0, 3, ids.shape), axis=1)
        loss, grads = hugging_face.loss_and_grads(config, params, ids, labels, inputs.get("segment_ids"))
        arrays = {**params, **inputs, "loss": np.array([loss]), **{f"grad.{k}": v for k, v in grads.items()}}
        save_file(arrays, folder / f"{name}.safetensors", metadata={"config": json.dumps(config.to_dict())})
        print(f"{name}: loss {loss:.6f}, {(folder / f'{name}.safetensors').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

"""Small models and batches for tests: odd sizes, non-zero biases, gains away from one, unequal label counts."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from refdist import ops
from refdist.model import ModelConfig, init_params

SMALL = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 500.0,
    "initializer_range": 0.3,
}


def model(seed: int = 0, dtype: type = np.float64, **options: object) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """A configuration and parameters in which no gain is one and no bias is zero."""
    config = ModelConfig(**{**SMALL, **options})
    rng = np.random.default_rng(seed)
    params = init_params(config, seed, np.float64)
    for name, value in params.items():
        if value.ndim == 1:
            params[name] = value + 0.3 * rng.normal(size=value.shape)
    return config, {name: value.astype(dtype) for name, value in params.items()}


def batch(config: ModelConfig, rows: int = 5, seq: int = 13, seed: int = 0, ignored: float = 0.3):
    """ids and labels [rows, seq]; a part of the labels is ignored, unevenly over the rows."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (rows, seq))
    labels = rng.integers(0, config.vocab_size, (rows, seq))
    labels[rng.random((rows, seq)) < ignored * np.arange(rows)[:, None] / max(1, rows - 1) * 2] = ops.IGNORED
    return ids, labels


@st.composite
def configurations(draw: st.DrawFn) -> tuple[dict, dict, int, bool]:
    """Options of `model`, arguments of `batch`, a seed, and whether the rows are packed documents."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    options = {
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": kv_heads * group * draw(st.integers(1, 5)),  # transformers wants a multiple
        "intermediate_size": draw(st.integers(1, 30)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 5)),
        "rope_theta": draw(st.sampled_from([10.0, 10000.0, 5e5])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "initializer_range": draw(st.sampled_from([0.02, 0.5])),
    }
    if draw(st.booleans()):
        factors = {"factor": draw(st.sampled_from([2.0, 32.0])), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        original = {"original_max_position_embeddings": draw(st.sampled_from([8, 64]))}
        options["rope_scaling"] = {"rope_type": "llama3", **factors, **original}
    shape = {"rows": draw(st.integers(1, 4)), "seq": draw(st.integers(1, 40)), "ignored": draw(st.sampled_from([0, 0.3]))}
    return options, shape, draw(st.integers(0, 2**16)), draw(st.booleans())


def segments_of(ids: np.ndarray, seed: int) -> np.ndarray:
    """Documents of random lengths packed into each row."""
    return np.sort(np.random.default_rng(seed).integers(0, 4, ids.shape), axis=1)

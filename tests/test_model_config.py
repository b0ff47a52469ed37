import json

import pytest
from models import SMALL

from refdist.errors import ConfigError
from refdist.model import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_defaults():
    config = ModelConfig(64, 32, 88, 2, 4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "heads", "kv_heads", "parameters"),
    [  # Llama 3 8B, 70B and 405B with a vocabulary of 128,256
        (32, 4096, 14336, 32, 8, 8_030_261_248),
        (80, 8192, 28672, 64, 8, 70_553_706_496),
        (126, 16384, 53248, 128, 8, 405_853_388_800),
    ],
)
def test_llama3_sizes(layers, hidden, ffn, heads, kv_heads, parameters):
    assert ModelConfig(128256, hidden, ffn, layers, heads, kv_heads).num_parameters() == parameters


def test_a_tied_matrix_counts_once():
    untied, tied = ModelConfig(**SMALL), ModelConfig(**SMALL, tie_word_embeddings=True)
    assert untied.num_parameters() - tied.num_parameters() == 37 * 24


def test_round_trip_through_json():
    config = ModelConfig(**SMALL, rope_scaling=LLAMA3, mlp_bias=True, attention_dropout=0.1)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["model_type"] == "llama"


def test_hugging_face_keys_that_do_not_matter_are_ignored():
    extra = {"torch_dtype": "bfloat16", "bos_token_id": 1, "use_cache": True, "pretraining_tp": 1, "hidden_act": "silu"}
    assert ModelConfig.from_dict(SMALL | extra) == ModelConfig(**SMALL)


def test_rope_parameters_of_transformers_5():
    old = ModelConfig.from_dict(SMALL | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = ModelConfig.from_dict(SMALL | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    assert new == old
    default = ModelConfig.from_dict(SMALL | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    assert (default.rope_theta, default.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0: expected a positive integer"),
        ({"vocab_size": 2.5}, "vocab_size=2.5: expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: expected a positive integer"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 does not divide num_attention_heads=6"),
        ({"head_dim": None, "num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=24"),
        ({"head_dim": 7}, "head_dim=7: expected a positive even integer"),
        ({"attention_dropout": 1.0}, r"attention_dropout=1.0: expected a number in \[0, 1\)"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: expected a positive number"),
        ({"mlp_bias": "yes"}, "mlp_bias='yes': expected true or false"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor below high_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: expected 'swish'"),
        ({"model_type": "mixtral"}, "model_type='mixtral' is not supported: expected 'llama'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(SMALL | change)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="lacks hidden_size, num_hidden_layers"):
        ModelConfig.from_dict({"vocab_size": 3, "intermediate_size": 4, "num_attention_heads": 2})


def test_what_is_not_finite_is_refused():
    with pytest.raises(ConfigError, match="rope_theta"):
        ModelConfig(**{**SMALL, "rope_theta": float("inf")})

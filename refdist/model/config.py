"""What a model is: the sizes of a Llama-style transformer, under Hugging Face's names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

__all__ = ["ModelConfig"]

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ONLY = {  # keys of a Hugging Face config.json that change the computation, and the values that leave it as it is here
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_sliding_window": (None, False),
}


def _option(text: str, default: Any = dataclasses.MISSING, hashed: bool = True) -> Any:
    return dataclasses.field(default=default, hash=hashed, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the model; what is left out is what Hugging Face's LlamaConfig would take.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: positive integers.
        num_key_value_heads: a divisor of num_attention_heads; None: the same number (multi-head attention).
        head_dim: even width of a head; None: hidden_size / num_attention_heads.
        max_position_embeddings: the longest sequence the model was made for; longer ones are computed all the same.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None, or Llama 3.1's mapping {"rope_type": "llama3", "factor": …, "low_freq_factor": …,
            "high_freq_factor": …, "original_max_position_embeddings": …}.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: the output head uses the embedding's matrix.
        attention_bias, mlp_bias: biases on q, k, v, o and on gate, up, down.
        attention_dropout, hidden_dropout: probabilities in [0, 1): of the attention weights; of what the attention and the
            MLP add to the residual stream (the latter is not in Hugging Face's Llama).
        initializer_range: standard deviation of the initial weights.

    Raises:
        ConfigError: naming the field, its value and what was expected.
    """

    vocab_size: int = _option("tokens")
    hidden_size: int = _option("width of the residual stream")
    intermediate_size: int = _option("width of the MLP")
    num_hidden_layers: int = _option("layers")
    num_attention_heads: int = _option("query heads")
    num_key_value_heads: int = _option("key and value heads, each shared by as many query heads; as many if not said",
                                       None)  # filled in below
    head_dim: int = _option("width of a head; hidden_size / num_attention_heads if not said", None)
    max_position_embeddings: int = _option("longest sequence", 2048)
    rope_theta: float = _option("base of the rotary frequencies", 10000.0)
    rope_scaling: Mapping[str, Any] | None = _option("Llama 3.1's scaling of the rotary frequencies; none if not said", None,
                                                     hashed=False)  # a dict, which has no hash
    rms_norm_eps: float = _option("added to the mean square of a norm", 1e-6)
    tie_word_embeddings: bool = _option("let the head use the embedding's matrix", False)
    attention_bias: bool = _option("biases on q, k, v and o", False)
    mlp_bias: bool = _option("biases on gate, up and down", False)
    attention_dropout: float = _option("probability of dropping an attention weight", 0.0)
    hidden_dropout: float = _option("probability of dropping what a branch adds to the residual stream", 0.0)
    initializer_range: float = _option("standard deviation of the initial weights", 0.02)

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            self._expect(name, "a positive integer", lambda value: _is_integer(value) and value > 0)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"num_attention_heads={self.num_attention_heads} does not divide hidden_size={self.hidden_size}; "
                    "give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        self._expect("head_dim", "a positive even integer", lambda v: _is_integer(v) and v > 0 and v % 2 == 0)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            self._expect(name, "a positive number", lambda v: _is_number(v) and v > 0)
        for name in ("attention_dropout", "hidden_dropout"):
            self._expect(name, "a number in [0, 1)", lambda v: _is_number(v) and 0 <= v < 1)
        for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            self._expect(name, "true or false", lambda v: isinstance(v, bool))
        object.__setattr__(self, "rope_scaling", _checked_scaling(self.rope_scaling))

    def _expect(self, name: str, what: str, fits: Any) -> None:
        value = getattr(self, name)
        if not fits(value):
            raise ConfigError(f"{name}={value!r}: expected {what}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a Hugging Face config.json.

        Keys that do not touch the computation (`torch_dtype`, `bos_token_id`, …) are ignored; what this model cannot
        compute (another activation, quantisation, another `rope_type`, …) is a ConfigError.
        """
        for key, allowed in ONLY.items():
            if key in values and values[key] not in allowed:
                raise ConfigError(f"{key}={values[key]!r} is not supported: expected {allowed[-1]!r}")
        values = dict(values)
        rope = dict(values.get("rope_parameters") or {})  # where transformers 5 keeps θ and the scaling
        if "rope_theta" in rope:
            values["rope_theta"] = rope.pop("rope_theta")
        if rope:
            values["rope_scaling"] = rope
        fields = {f.name: f.default for f in dataclasses.fields(cls)}
        missing = [name for name, default in fields.items() if default is dataclasses.MISSING and name not in values]
        if missing:
            raise ConfigError(f"the model configuration lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in fields if name in values})

    def to_dict(self) -> dict[str, Any]:
        """The contents of a config.json that Hugging Face transformers and `from_dict` read."""
        values = dataclasses.asdict(self)
        values["rope_scaling"] = dict(self.rope_scaling) if self.rope_scaling else None
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **values}

    def num_parameters(self) -> int:
        """Numbers in all the parameters; a tied matrix counts once."""
        from .layout import parameter_shapes

        return sum(math.prod(shape) for shape in parameter_shapes(self).values())


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _checked_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling={scaling!r}: expected a mapping, as in config.json, or None")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rope_scaling: rope_type={kind!r} is not supported: expected 'llama3' or 'default'")
    missing = [key for key in LLAMA3_SCALING if not _is_number(scaling.get(key)) or scaling[key] <= 0]
    if missing:
        raise ConfigError(f"rope_scaling={dict(scaling)!r}: expected positive numbers for {', '.join(missing)}")
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ConfigError(f"rope_scaling={dict(scaling)!r}: expected low_freq_factor below high_freq_factor")
    return {"rope_type": "llama3", **{key: scaling[key] for key in LLAMA3_SCALING}}

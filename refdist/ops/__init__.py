"""Kernels: a forward and a backward for each, plain arrays in, plain arrays out."""

from .attention import AttentionMask, attention, attention_backward, merge_attention
from .cross_entropy import IGNORED, cross_entropy, cross_entropy_backward, token_chunks
from .dropout import dropout
from .embedding import embedding, embedding_weight_grad
from .kernel import accumulation_dtype, empty_like, in_two_steps, kernel, row_blocks, working
from .linear import add, add_bias, linear, linear_bias_grad, linear_input_grad, linear_weight_grad
from .norm import rms_norm, rms_norm_again, rms_norm_backward
from .rotary import RotaryTables, rotary, rotary_backward, rotary_frequencies
from .swiglu import swiglu, swiglu_backward

__all__ = [
    "IGNORED",
    "AttentionMask",
    "RotaryTables",
    "accumulation_dtype",
    "add",
    "add_bias",
    "attention",
    "attention_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "embedding",
    "embedding_weight_grad",
    "empty_like",
    "in_two_steps",
    "kernel",
    "linear",
    "linear_bias_grad",
    "linear_input_grad",
    "linear_weight_grad",
    "merge_attention",
    "rms_norm",
    "rms_norm_again",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "rotary_frequencies",
    "row_blocks",
    "swiglu",
    "swiglu_backward",
    "token_chunks",
    "working",
]

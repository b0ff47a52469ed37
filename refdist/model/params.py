"""Initial parameters: normal weights, gains of one, biases of zero.

Every number is a function of (seed, name of the parameter, index of the element), so that a rank can draw a shard alone and
gets the numbers that the single device has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..numerics.random import Box, normal, stream
from ..numerics.rounding import has_16_bits, store
from .config import ModelConfig
from .layout import parameter_shapes

__all__ = ["check_params", "init_parameter", "init_params"]


def init_params(config: ModelConfig, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """All parameters, under Hugging Face's names, weights [out, in], in canonical order.

    Args:
        dtype: the numbers are drawn in float64 and rounded to it, so that all formats start from the same model.
    """
    return {name: init_parameter(config, name, seed, dtype=dtype) for name in parameter_shapes(config)}


def init_parameter(
    config: ModelConfig, name: str, seed: int = 0, box: Box | None = None, dtype: Any = np.float32
) -> np.ndarray:
    """One parameter, or the part `box` of it (a slice or an integer array a dimension), equal to that part of the whole."""
    shape = parameter_shapes(config)[name]
    if len(shape) == 2:
        narrow = has_16_bits(np.dtype(dtype))  # NumPy would round twice on its way to bfloat16
        drawn = normal(stream(seed, "parameter", name), shape, box, config.initializer_range, np.float64 if narrow else dtype)
        return store(drawn, np.empty_like(drawn, dtype)) if narrow else drawn
    index = np.arange(shape[0])[box[0] if box is not None else slice(None)]
    return np.full_like(index, 0 if name.endswith(".bias") else 1, dtype=dtype)


def check_params(config: ModelConfig, params: Mapping[str, np.ndarray]) -> None:
    """ConfigError unless params has exactly the names and shapes that the configuration asks for, and one number format."""
    shapes = parameter_shapes(config)
    missing, extra = sorted(shapes.keys() - params.keys()), sorted(params.keys() - shapes.keys())
    if missing or extra:
        raise ConfigError(
            f"parameters do not fit the configuration: missing {missing[:5] or 'none'}, not expected {extra[:5] or 'none'}"
        )
    for name, shape in shapes.items():
        if not hasattr(params[name], "dtype"):
            raise ConfigError(f"{name}: found a {type(params[name]).__name__}, expected an array")
        if np.shape(params[name]) != shape:
            raise ConfigError(f"{name}: found shape {np.shape(params[name])}, expected {shape}")
    formats = sorted({str(p.dtype) for p in params.values()})
    if len(formats) > 1:
        raise ConfigError(f"parameters have mixed number formats: {', '.join(formats)}")

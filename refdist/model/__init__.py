"""The model: configuration, parameters and their layout, the block, the single-device reference."""

from . import reference
from .batch import check_batch
from .config import ModelConfig
from .files import load_params, save_params
from .layout import ParameterLayout, layout, parameter_shapes
from .params import init_parameter, init_params

__all__ = [
    "ModelConfig",
    "ParameterLayout",
    "check_batch",
    "init_parameter",
    "init_params",
    "layout",
    "load_params",
    "parameter_shapes",
    "reference",
    "save_params",
]

"""Presets of number formats for training, after Micikevicius et al. 2018, "Mixed precision training" (figure 1).

              weights, activations,      a product reads     and adds up in     master weights,
              gradients                                                         Adam's moments
    fp64      float64                    fp64                fp64               float64, the weights themselves
    fp32      float32                    fp32, or tf32 *     fp32               float32, the weights themselves
    fp16      float16                    fp16                fp32               float32
    bf16      bfloat16                   bf16                fp32               float32

    * in a tensor core, which has no fp32 inputs

Whatever is stored in 16 bits is widened when it is read, and rounded to nearest when it is written; a kernel's arithmetic in
between, softmax, statistics of norms, and losses are in FP32. A parameter costs 2 + 2 bytes for weight and gradient and 4 + 4 + 4
for master weight and moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..errors import ConfigError
from .product import FormatProduct, Product
from .rounding import has_16_bits

__all__ = ["DTYPES", "FP64_TENSOR_CORES", "PRECISIONS", "Precision", "precision_named"]

DTYPES: dict[str, np.dtype] = {"fp64": np.dtype(np.float64), "fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16),
                               "bf16": np.dtype(ml_dtypes.bfloat16)}
FP64_TENSOR_CORES = ("a100", "h100", "h200", "b200")  # they multiply and add as IEEE 754 asks, which BLAS does as well


@dataclass(frozen=True)
class Precision:
    """One preset.

    Attributes:
        name: "fp64", "fp32", "fp16" or "bf16".
        dtype: of weights, activations and gradients.
    """

    name: str
    dtype: np.dtype

    @property
    def mixed(self) -> bool:
        """Whether weights have 16 bits, and so a master copy in FP32."""
        return has_16_bits(self.dtype)

    def product(self, tensor_core: str | None = None) -> Callable[..., np.ndarray]:
        """What matrices are multiplied with: a function matmul(a, b, out=None).

        Args:
            tensor_core: whose arithmetic (`numerics.CHIPS`); None: BLAS, which adds in FP32 (FP64 with fp64).

        Raises:
            ConfigError: the chip's tensor cores do not take this format.
        """
        try:
            if self.mixed:
                return FormatProduct(self.name, "fp32", tensor_core)
            if self.name == "fp32" and tensor_core is not None:
                return Product("tf32", "fp32", tensor_core)
        except ValueError as error:
            raise ConfigError(f"precision={self.name!r}: {error}") from None
        if tensor_core is not None and tensor_core not in FP64_TENSOR_CORES:
            raise ConfigError(f"precision={self.name!r}: the tensor cores of {tensor_core} do not take it; those of "
                              f"{', '.join(FP64_TENSOR_CORES)} do")
        return np.matmul


PRECISIONS: dict[str, Precision] = {name: Precision(name, dtype) for name, dtype in DTYPES.items()}


def precision_named(name: str) -> Precision:
    """The preset of that name; ConfigError lists those that there are."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name!r}: expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]

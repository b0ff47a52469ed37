"""Number formats, rounding, and matrix products in the arithmetic of tensor cores."""

from .chips import CHIPS, Step, step_of
from .formats import FORMATS, Format, format_named, format_of
from .loss_scale import LossScale
from .precision import PRECISIONS, Precision
from .product import FormatProduct, Product, matmul, matmul_for
from .rounding import convert, round_to, store, to_float32, widened

__all__ = [
    "CHIPS",
    "FORMATS",
    "PRECISIONS",
    "Format",
    "FormatProduct",
    "LossScale",
    "Precision",
    "Product",
    "Step",
    "convert",
    "format_named",
    "format_of",
    "matmul",
    "matmul_for",
    "round_to",
    "step_of",
    "store",
    "to_float32",
    "widened",
]

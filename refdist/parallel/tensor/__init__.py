"""Tensor parallelism: layers cut across ranks by columns, then by rows; with sequence and vocabulary parallelism."""

from refdist.parallel.tensor.regions import Tensor, TensorParallel, check

__all__ = ["Tensor", "TensorParallel", "check"]

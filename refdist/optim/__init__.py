"""Optimizers, clipping by the global norm, and learning-rate schedules."""

from refdist.optim.clip import clip_scale, exact_squares, exact_value, squared_norm
from refdist.optim.optimizers import SGD, AdamW, Optimizer
from refdist.optim.schedules import linear, warmup_cosine

__all__ = ["SGD", "AdamW", "Optimizer", "clip_scale", "exact_squares", "exact_value", "linear", "squared_norm", "warmup_cosine"]

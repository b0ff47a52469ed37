"""The trainer, its data, and what it needs to show that it has learned."""

from refdist.train.trainer import StepResult, Trainer

__all__ = ["StepResult", "Trainer"]

"""The plan, and one room a strategy."""

from refdist.parallel.api import loss_and_grads
from refdist.parallel.plan import Plan
from refdist.parallel.replica import check_plan

__all__ = ["Plan", "check_plan", "loss_and_grads"]

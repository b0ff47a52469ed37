"""What happens on an emulated device, as it happens. A listener is a function of one event.

Times are ``time.perf_counter()`` seconds of this process.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

__all__ = ["Allocation", "Event", "Kernel", "Message", "Phase"]


class Kernel(NamedTuple):
    """A kernel has run.

    Attributes:
        name: of the kernel function.
        shapes: of its array arguments.
        flops: matrix-multiply FLOPs (2 m n k).
        start, end: seconds.
        recomputed: whether it repeats a forward pass (then it is no part of the model's FLOPs).
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    flops: int
    start: float
    end: float
    recomputed: bool


class Message(NamedTuple):
    """A message has been sent: ``nbytes`` of payload to world rank ``peer``, in communication step ``step`` of its call."""

    axis: str
    operation: str
    peer: int
    nbytes: int
    step: int
    time: float


class Allocation(NamedTuple):
    """Memory of a category has been handed out (``nbytes`` > 0) or has come back (< 0)."""

    category: str
    nbytes: int
    time: float


class Phase(NamedTuple):
    """Something named begins or ends: a collective under way, a block's backward, an action of a schedule."""

    name: str
    begins: bool
    time: float


Event: TypeAlias = Kernel | Message | Allocation | Phase

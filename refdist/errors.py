"""The errors that refdist raises on purpose. A message names the value, what was expected and, if there is one, the rank."""

from __future__ import annotations

__all__ = ["ConfigError", "DeadlockError", "MismatchError", "OutOfDeviceMemory", "PeerFailed", "PlanError"]


class ConfigError(ValueError):
    """A model configuration, a parameter set or a batch that cannot be used."""


class PlanError(ValueError):
    """A parallel plan that does not fit the ranks, the model or the batch."""


class DeadlockError(RuntimeError):
    """Ranks wait for each other, or for one that has finished; the message lists what each of them waits for."""


class MismatchError(RuntimeError):
    """Two ranks met in different calls: another operation, order, dtype, shape or root; or messages are left over at the
    end, or an array was touched on its way."""


class PeerFailed(RuntimeError):
    """Another rank failed first.

    Attributes:
        rank: the world rank that failed.
        cause: what it raised, as one line of text.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} failed: {cause}")
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[int, str]]:
        return type(self), (self.rank, self.cause)  # so that a copy from another process is whole


class OutOfDeviceMemory(MemoryError):
    """An emulated device ran over its capacity; the message has the table of what was alive."""

"""Small tiles: kernels cut their arrays into blocks for the cache, and small examples would never need a second one.

    with small_tiles():      what runs meanwhile, in this process, cuts everything into blocks of a few numbers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from refdist import ops  # noqa: F401  (its modules are changed)

__all__ = ["SMALL", "small_tiles"]

SMALL = {
    "refdist.ops.kernel": {"BLOCK": 16},
    "refdist.ops.attention": {"QUERY_BLOCK": 2, "KEY_BLOCK": 3, "COLUMNS": 4, "TILE": 20},
    "refdist.ops.cross_entropy": {"LOGITS": 40},
}
"""Module -> its constants, and what takes their place."""


@contextmanager
def small_tiles() -> Iterator[None]:
    """Kernels cut into tiny blocks as long as this lasts."""
    before = {module: {name: getattr(sys.modules[module], name) for name in values} for module, values in SMALL.items()}
    try:
        _set(SMALL)
        yield
    finally:
        _set(before)


def _set(values: dict[str, dict[str, int]]) -> None:
    for module, constants in values.items():
        for name, value in constants.items():
            setattr(sys.modules[module], name, value)

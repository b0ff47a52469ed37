"""Whether ranks that were told to pass the same arguments have done so.

Replicas that start from other weights, or tensor-parallel ranks that look at other batches, raise no error: they train on, and
their gradients are those of no model. So what must be the same is compared once, by checksums, before any work is done.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from refdist.comm import Comm
from refdist.errors import ConfigError

__all__ = ["require_same", "sample"]

_NUMBERS = 64  # of each array that `sample` looks at


def require_same(comm: Comm, **what: Any) -> None:
    """Raise ConfigError on every rank if any rank passes something else than rank 0. Collective; its bytes are not counted.

    Args:
        comm: the ranks that must agree.
        what: name, for the error, -> an array, or anything whose ``repr`` tells it from others.
    """
    if comm.size == 1:
        return
    sums = np.array([[_checksum(value) for value in what.values()]], np.uint32)
    table = comm.bind(None).all_gather(sums, lengths=[1] * comm.size)  # [ranks, things]
    ranks, things = np.nonzero(table != table[0])
    if len(ranks):
        names = list(what)
        raise ConfigError(f"ranks 0 and {ranks[0]} have been given different {names[things[0]]}: expected the same on every rank")


def sample(arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """Names, formats, shapes and some numbers of each of the arrays, which tell one initialisation from another."""
    return [(name, str(x.dtype), x.shape, x.reshape(-1)[:: max(1, x.size // _NUMBERS)].tolist()) for name, x in arrays.items()]


def _checksum(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), zlib.crc32(f"{value.dtype}{value.shape}".encode()))
    return zlib.crc32(repr(value).encode())

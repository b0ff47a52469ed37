"""What travels: a header of 24 bytes, for a self-describing message its dtype and shape, and the raw bytes of an array.

    header   fingerprint  u32   CRC-32 of what the sender does: operation, algorithm, dtype, root, shape without the uneven axis
             sequence     u32   the number of this collective call on its group (0 for point-to-point messages)
             length       u64   bytes of the payload
             epoch        u32   raised when a failed example is given up, so that nothing of it reaches the next one
             description  u32   bytes of dtype and shape that follow the header (0 when the receiver knows them)

A receiver that knows what it expects compares 24 bytes with 24 bytes. Nothing here ever pickles.
"""

from __future__ import annotations

import struct
import zlib
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types by name)
import numpy as np

__all__ = ["HEADER_BYTES", "as_bytes", "describe", "fingerprint", "meaning", "pack_header", "undescribe", "unpack_header"]

_HEADER = struct.Struct("<IIQII")
HEADER_BYTES = _HEADER.size
pack_header = _HEADER.pack
unpack_header = _HEADER.unpack_from


_meanings: dict[int, tuple[Any, ...]] = {}


@lru_cache(maxsize=4096)
def fingerprint(*parts: Any) -> int:
    """A CRC-32 of the parts' text: the same on every rank and in every process, which Python's ``hash`` is not."""
    mark = zlib.crc32(_text(parts).encode())
    if len(_meanings) >= 1 << 16:
        _meanings.clear()
    _meanings[mark] = parts
    return mark


def _text(part: Any) -> str:
    """What is equal has one text: 1, True and ``np.int64(1)``, or ``"sum"`` and ``np.str_("sum")``."""
    if isinstance(part, tuple):
        return f"({', '.join(map(_text, part))})"
    if isinstance(part, np.generic):
        part = part.item()
    return str(int(part)) if isinstance(part, int) else repr(part)


def meaning(mark: int) -> tuple[Any, ...]:
    """The parts of a fingerprint that has been made in this process, for the text of errors; empty if it has not."""
    return _meanings.get(mark, ())


@lru_cache(maxsize=4096)
def describe(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Dtype and shape as text, for messages whose receiver knows neither: ``b"float32:3,4"``."""
    return f"{dtype.name}:{','.join(map(str, shape))}".encode()


@lru_cache(maxsize=4096)
def undescribe(description: bytes) -> tuple[np.dtype, tuple[int, ...]]:
    """The inverse of :func:`describe`."""
    name, _, sizes = description.decode().partition(":")
    return np.dtype(name), tuple(int(size) for size in sizes.split(",") if size)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array's memory as a flat uint8 view; every dtype has one, also those without a buffer format."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)

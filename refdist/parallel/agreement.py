"""Whether ranks that were told to pass the same arguments have done so.

Replicas that start from other weights, or tensor-parallel ranks that look at other batches, raise no error: they train on, and
their gradients are those of no model. So what must be the same is compared once, by checksums, before any work is done.

Only what can be told to be equal in another process is compared: numbers, texts, arrays, and collections and dataclasses of such.
What is equal in Python counts as equal here, 1 and 1.0, and so do a list and a tuple. A function or an object of another class is
passed over.
"""

from __future__ import annotations

import dataclasses
import numbers
import zlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
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
        what: name, for the error, -> value.
    """
    if comm.size == 1:
        return
    sums = np.array([[zlib.crc32(_text(value).encode()) for value in what.values()]], np.uint32)
    table = comm.bind(None).all_gather(sums, lengths=[1] * comm.size)  # [ranks, things]
    ranks, things = np.nonzero(table != table[0])
    if len(ranks):
        names = list(what)
        raise ConfigError(f"ranks 0 and {ranks[0]} have been given different {names[things[0]]}: expected the same on every rank")


def sample(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Of each array the format, the shape and some numbers, which tell one initialisation from another."""
    step = {name: max(1, x.size // _NUMBERS) for name, x in arrays.items()}
    return {name: (x.dtype.name, x.shape, x.reshape(-1)[::step[name]] + x.dtype.type(0)) for name, x in arrays.items()}  # -0 is 0


def _text(value: Any) -> str:
    """The same for what is equal, on every rank and in every process; "" for what cannot be compared."""
    if isinstance(value, np.ndarray):
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return f"{native.dtype}{native.shape}{zlib.crc32(native.tobytes())}"
    if value is None or isinstance(value, str):
        return repr(None if value is None else str(value))
    if isinstance(value, (numbers.Number, np.generic)):
        plain: Any = value.item() if isinstance(value, np.generic) else value
        return str(int(plain)) if isinstance(plain, int) or (isinstance(plain, float) and plain.is_integer()) else repr(plain)
    if isinstance(value, Mapping):
        return f"{{{sorted((_text(key), _text(item)) for key, item in value.items())}}}"
    if isinstance(value, AbstractSet):
        return f"{{{sorted(map(_text, value))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _text({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    return ""

"""Random numbers that do not know the mesh: Philox 4×32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A number is a pure function of (seed, what it is for, index of the element in the whole array). Elements 4c … 4c+3 share
the counter c: they are the four words of one block. So a rank that holds any part of an array draws for it exactly the
numbers that the single device would have drawn, without drawing the others.

    a round:  (x0, x1, x2, x3) -> (hi(x2·M1) ^ x1 ^ k0,  lo(x2·M1),  hi(x0·M0) ^ x3 ^ k1,  lo(x0·M0))
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Box", "Stream", "keep_mask", "normal", "philox", "random_words", "stream"]

CROSSED_MULTIPLIERS = np.array([0xCD9E8D57, 0xD2511F53], np.uint64)  # M1 for x2, M0 for x0
ROUNDS = 10
KEY_STEPS = np.arange(ROUNDS, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)  # its growth
LOW = np.array(0xFFFFFFFF, np.uint64)
HALF = np.array(32, np.uint64)
CHUNK = 32768  # elements drawn at a time, so that the rounds stay in cache
SMALL, REMEMBERED = 2048, 512  # elements of a draw that is remembered, and how many are

Box = Sequence["slice | np.ndarray"]  # a part of an array: one slice (step 1) or integer array a dimension
Words = Sequence[np.ndarray]  # four arrays of one shape: the words, or the numbers, of elements 4c, 4c+1, 4c+2, 4c+3


_remembered: dict[Any, np.ndarray] = {}


class Stream(NamedTuple):
    """The identity of one array of random numbers: four 32-bit words."""

    key: tuple[int, int]
    counter: tuple[int, int]


def stream(seed: int, *what: str | int) -> Stream:
    """The stream of a seed and of what the numbers are for, such as `stream(0, "dropout", layer, "attention")`."""
    digest = hashlib.blake2b(repr((int(seed), *what)).encode(), digest_size=16).digest()
    a, b, c, d = np.frombuffer(digest, dtype="<u4").tolist()
    return Stream((a, b), (c, d))


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox 4×32-10: four uint64 arrays of 32-bit words and two 32-bit key words -> four arrays of random 32-bit words."""
    even, odd = np.array(counter[0::2]), np.array(counter[1::2])  # x0, x2 and x1, x3: both halves of a round at once
    crossed, product = even[::-1], np.empty_like(even)
    single = (1,) * (even.ndim - 1)
    multipliers = CROSSED_MULTIPLIERS.reshape(2, *single)
    for k in ((np.array(key, np.uint64) + KEY_STEPS) & LOW).reshape(ROUNDS, 2, *single):
        np.multiply(crossed, multipliers, out=product)
        np.right_shift(product, HALF, out=even)
        even ^= odd
        even ^= k
        np.bitwise_and(product, LOW, out=odd)
    return even[0], odd[0], even[1], odd[1]


def random_words(identity: Stream, shape: Sequence[int], box: Box | None = None) -> np.ndarray:
    """32-bit words: uint32, of the shape of the part `box` (None: all) of an array of the global shape `shape`."""
    return _draw(identity, shape, box, lambda words: words, np.uint32)


def normal(
    identity: Stream, shape: Sequence[int], box: Box | None = None, std: float = 1.0, dtype: Any = np.float64
) -> np.ndarray:
    """Normal numbers of mean 0 (Box & Muller 1958), computed in float64 and rounded to dtype; shape and box as above."""

    def box_muller(words: Words) -> Words:
        numbers: list[np.ndarray] = []
        for first, second in (words[:2], words[2:]):
            radius = std * np.sqrt(-2 * np.log((first + 1.0) * 2.0**-32))
            angle = second * (2 * math.pi * 2.0**-32)
            numbers += radius * np.cos(angle), radius * np.sin(angle)
        return numbers

    return _draw(identity, shape, box, box_muller, dtype)


def keep_mask(identity: Stream, shape: Sequence[int], box: Box | None, drop: float) -> np.ndarray:
    """bool, false with probability `drop` (to 2⁻³²): which elements dropout keeps; shape and box as above."""
    return _words_again(identity, shape, box) >= np.uint32(min(round(drop * 2**32), 2**32 - 1))


def _words_again(identity: Stream, shape: Sequence[int], box: Box | None) -> np.ndarray:
    """As `random_words`, read-only; a few small draws are remembered, since backward asks for what forward has drawn."""
    parts = [(p.dtype.num, p.tobytes()) if isinstance(p, np.ndarray) else (p.start, p.stop, p.step) for p in box or ()]
    key = identity, *shape, *parts
    words = _remembered.get(key)
    if words is None:
        words = random_words(identity, shape, box)
        words.flags.writeable = False
        if words.size <= SMALL:
            if len(_remembered) >= REMEMBERED:
                _remembered.clear()
            _remembered[key] = words
    return words


def _draw(
    identity: Stream, shape: Sequence[int], box: Box | None, numbers: Callable[[Words], Words], dtype: Any
) -> np.ndarray:
    """Draw the blocks that cover the box, turn their words into numbers, and keep those of the box."""
    starts, length, wanted = _runs(shape, box)
    drawn = np.empty((len(starts), length), dtype=dtype)
    for rows, columns in _pieces(len(starts), length):
        first = starts[rows, None] + columns.start  # [rows, 1]
        width = columns.stop - columns.start
        blocks = first // 4 + np.arange((width + 6) // 4)  # enough for any alignment; [rows, blocks]
        blocks = blocks.astype(np.uint64)
        counter = np.empty_like(blocks, shape=(4, *blocks.shape))
        counter[0], counter[1], counter[2], counter[3] = blocks & LOW, blocks >> HALF, *identity.counter
        covering = np.empty_like(drawn, shape=(*blocks.shape, 4))  # [rows, blocks, 4]
        for word, number in enumerate(numbers(philox(counter, identity.key))):
            covering[..., word] = number
        drawn[rows, columns] = covering.reshape(len(blocks), -1)[np.arange(len(blocks))[:, None], first % 4 + np.arange(width)]
    return drawn.reshape(wanted)


def _runs(shape: Sequence[int], box: Box | None) -> tuple[np.ndarray, int, tuple[int, ...]]:
    """The box as runs of neighbours in the flat array: the index at which each run starts, their length, the box's shape."""
    indices = [np.arange(n)[part] for n, part in zip(shape, box or [slice(None)] * len(shape), strict=True)]
    wanted = tuple(len(i) for i in indices)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    length = 1
    while indices and _consecutive(indices[-1]):
        last = indices.pop()
        length *= len(last)
        if len(last) < shape[len(indices)]:  # a part of a dimension ends the run
            indices.append(last[:1])
            break
    starts = np.zeros(1, dtype=np.int64)
    for index, stride in zip(indices, strides, strict=False):
        starts = (starts[:, None] + index * stride).reshape(-1)  # [runs]
    return starts, length, wanted


def _consecutive(index: np.ndarray) -> bool:
    return len(index) < 2 or bool((index[1:] - index[:-1] == 1).all())


def _pieces(rows: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows × length into pieces of about CHUNK elements."""
    if length == 0:
        return
    width = min(length, CHUNK)
    height = max(1, CHUNK // width)
    for row in range(0, rows, height):
        for column in range(0, length, width):
            yield slice(row, row + height), slice(column, min(length, column + width))

"""Text to train on: bytes are the tokens, and windows of them are drawn by seed and step.

    files ──► stable hash of the path ──► training split, validation split ──► windows [batch, seq + 1]
                                                                              ├─ input_ids = window[:-1]
                                                                              └─ labels    = window[1:]

Every rank reads the same bytes in the same order: nothing depends on how a file system lists a folder. The windows of a
step are a function of (seed, step) through a counter-based generator, so they are the same on every mesh, and step 1000
needs no step before it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from refdist.numerics.random import random_words, stream

__all__ = ["BYTES", "Corpus", "DataError", "evaluation_windows", "load_corpus", "split_windows", "training_windows"]

BYTES = 256  # the vocabulary: one token per byte value
STANDARD_LIBRARY_LIMIT = 4_000_000  # bytes of the default corpus
VALIDATION_PART = 10  # one file or block of so many is for validation
BLOCK = 65_536  # bytes of a block where a text is split by blocks
FILE_END = b"\0"  # stands after each file
PICTURES = {".svg", ".eps"}  # text by its bytes, but nobody wrote it
SNIFFED = 8192  # bytes
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})


class DataError(ValueError):
    """A text that cannot be read, or that is too short to train on."""


@dataclass(frozen=True)
class Corpus:
    """Two texts as byte tokens, uint8 [length]: one to train on, one to validate on; and where they come from."""

    train: np.ndarray
    validation: np.ndarray
    origin: str

    def checksum(self) -> int:
        """CRC-32 of both texts, by which ranks can tell that they read the same."""
        return zlib.crc32(self.validation.tobytes(), zlib.crc32(self.train.tobytes()))


def load_corpus(paths: Sequence[str | Path] = (), seq: int = 1) -> Corpus:
    """Read the files and folders `paths`, or Python's own standard library where there are none, and split the text.

    Of a folder, binary files and pictures are left out; a file that is named is taken as it is.
    Files go to training or validation by a stable hash of their relative path. Where that leaves a split shorter than
    one window of `seq + 1` bytes (one file, few files), the text is split by blocks instead.

    Raises:
        DataError: a path that cannot be read, a text without bytes, or one shorter than two windows.
    """
    origin = ", ".join(str(path) for path in paths) or "Python's standard library"
    files = list(_named_files(paths)) if paths else _standard_library()
    texts = [(is_validation(name), read_bytes(path)) for name, path in files]
    texts = [(validation, text) for validation, text in texts if text]
    if not texts:
        found = f"{len(files)} file{'s' * (len(files) != 1)}, all empty" if files else "no file that may be text"
        raise DataError(f"no text in {origin}: {found}")
    if len(texts) == 1:
        return split_by_blocks(texts[0][1], seq, origin)
    train, validation = (b"".join(text + FILE_END for v, text in texts if v == part) for part in (False, True))
    if min(len(train), len(validation)) < seq + 1:
        return split_by_blocks(b"".join(text + FILE_END for _, text in texts), seq, origin)
    return Corpus(_tokens(train), _tokens(validation), origin)


def is_validation(name: str) -> bool:
    """Whether the file of this relative path, with forward slashes, is held back for validation."""
    return _stable_hash(name) % VALIDATION_PART == 0


def split_by_blocks(text: bytes, seq: int, origin: str) -> Corpus:
    """Split one text in equal blocks of about 64 KiB, of which every tenth is for validation; of fewer, the last."""
    fitting = len(text) // (seq + 1)
    if fitting < 2:
        raise DataError(
            f"{origin} has {len(text)} bytes, too short: --seq {seq} needs {2 * (seq + 1)}, "
            f"one sequence of {seq + 1} to train on and one to validate on"
        )
    blocks = np.array_split(_tokens(text), min(fitting, VALIDATION_PART * -(-len(text) // (VALIDATION_PART * BLOCK))))
    held_back = range(min(VALIDATION_PART, len(blocks)) - 1, len(blocks), VALIDATION_PART)
    train = [block for i, block in enumerate(blocks) if i not in held_back]
    return Corpus(np.concatenate(train), np.concatenate([blocks[i] for i in held_back]), origin)


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, or of what a pipe brings."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise DataError(f"cannot read {path}: a device, expected a file")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _named_files(paths: Iterable[str | Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file of `paths`; of a folder those with text, in the order of their relative paths."""
    for path in map(Path, paths):
        if path.is_dir():
            found = [(file.relative_to(path).as_posix(), file) for file in _walk(path) if _has_text(file)]
            yield from sorted(found)
        else:
            yield path.name, path


def _walk(folder: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """All files under a folder in no order; hidden ones, and what is in folders of the names `skipped`, left out."""
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror or error}") from None
    for entry in seen:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in skipped:
                yield from _walk(folder / entry.name, skipped)
        elif entry.is_file():
            yield folder / entry.name


def _has_text(path: Path) -> bool:
    """Whether a file of a folder is taken: not a picture drawn in letters, and nothing with a zero byte near its beginning."""
    if path.suffix.lower() in PICTURES:
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(SNIFFED)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _standard_library() -> list[tuple[str, Path]]:
    """Source files of the standard library, in the order of a stable hash of their paths, up to some megabytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [(file.relative_to(root).as_posix(), file) for file in _walk(root, SKIPPED_FOLDERS) if file.suffix == ".py"]
    chosen: list[tuple[str, Path]] = []
    left = STANDARD_LIBRARY_LIMIT
    for name, file in sorted(found, key=lambda entry: (_stable_hash(entry[0]), entry[0])):
        left -= file.stat().st_size
        if left < 0:
            break
        chosen.append((name, file))
    if not chosen:
        raise DataError(f"no Python source in {root}; give a text with --data")
    return chosen


def _stable_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=8).digest(), "little")


def _tokens(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)


# ---------------------------------------------------------------- windows


def training_windows(text: np.ndarray, batch: int, seq: int, *, seed: int, step: int) -> np.ndarray:
    """The global batch of a step: windows [batch, seq + 1] of `text` at places that follow from (seed, step) alone."""
    words = random_words(stream(seed, "data order", step), [2 * batch]).astype(np.uint64)
    drawn = words[0::2] << np.uint64(32) | words[1::2]  # [batch], 64 random bits each
    return _cut(text, drawn % np.uint64(len(text) - seq), seq)


def evaluation_windows(text: np.ndarray, seq: int, at_most: int) -> np.ndarray:
    """At most `at_most` windows [count, seq + 1] that share no more than their ends, spread evenly over `text`."""
    fitting = (len(text) - 1) // seq
    count = min(fitting, at_most)
    return _cut(text, np.arange(count) * fitting // count * seq, seq)


def split_windows(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """input_ids and labels, int64 [batch, seq], of windows [batch, seq + 1]: each position's label is the next byte."""
    tokens = windows.astype(np.int64)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def _cut(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    return text[starts.astype(np.int64)[:, None] + np.arange(seq + 1)]  # [batch, seq + 1]

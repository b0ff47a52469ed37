"""The board: what each rank says about itself, where all others can read it without its help.

    one record a rank     status       0 running, 1 waiting, 2 left
                          number       of the wait, counted up with each one that is published
                          confirmed    a suspicion that this rank agrees with (watchdog.py)
                          answered     it has said what it is doing since somebody failed
                          failed       when it failed, in nanoseconds, or 0
                          complete     its account of the failure is complete
                          version      odd while the texts are being written
                          epoch        of this record; a record of another one than the reader's is not heeded
                          2 lengths    of the texts
                          texts        what it is doing; kind and account of its failure

On one host the records lie in one shared file (:class:`SharedBoard`); across hosts each rank keeps a copy of all records, and a
rank that changes its own sends it to the others (:class:`MessageBoard`). Each rank writes its own record only, so there is
nothing to lock. It is written when a wait has lasted some milliseconds, a rank fails or leaves, and never on a short wait.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["LEFT", "RUNNING", "TEXT_BYTES", "WAITING", "Board", "MessageBoard", "SharedBoard"]

RUNNING, WAITING, LEFT = 0, 1, 2
_STATUS, _NUMBER, _CONFIRMED, _ANSWERED, _FAILED, _COMPLETE, _VERSION, _EPOCH, _DOING, _ACCOUNT = range(10)
_WORDS = 16  # int64 words at the start of a record
_TEXT = 8 * _WORDS
TEXT_BYTES = 8192  # for each of the two texts
RECORD_BYTES = _TEXT + 2 * TEXT_BYTES


class Board:
    """One rank's view of the board.

    Args:
        memory: writable, ``ranks`` records long.
        rank: whose view this is.
        settling: seconds in which a change is certain to have reached the others.
    """

    settling = 0.02

    def __init__(self, memory: Any, ranks: int, rank: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._bytes = np.frombuffer(memory, np.uint8, ranks * RECORD_BYTES).reshape(ranks, RECORD_BYTES)
        self._words = self._bytes[:, :_TEXT].view(np.int64)  # [ranks, 16]
        self._mine = self._words[rank]

    # ------------------------------------------------------------------------------------------- one's own record

    def publish(self, doing: bytes) -> None:
        """This rank waits, for something else than before."""
        self._write(doing, None)
        self._mine[_NUMBER] += 1
        self._mine[_CONFIRMED] = 0
        self._mine[_STATUS] = WAITING
        self._changed()

    def resume(self) -> None:
        """This rank does not wait any more."""
        self._mine[_STATUS] = RUNNING
        self._mine[_NUMBER] += 1
        self._changed()

    def leave(self) -> None:
        """This rank sends nothing more."""
        self._mine[_STATUS] = LEFT
        self._changed()

    def confirm(self, suspicion: int) -> None:
        """This rank agrees that the suspicion is true as far as it can see."""
        if self._mine[_CONFIRMED] != suspicion:
            self._mine[_CONFIRMED] = suspicion
            self._changed()

    def answer(self, doing: bytes) -> None:
        """Somebody has failed; this is what this rank was doing."""
        self._write(doing, None)
        self._mine[_ANSWERED] = 1
        self._changed()

    def fail(self, kind: str, account: str, complete: bool) -> None:
        """This rank has failed; ``complete`` says whether the account will be added to."""
        self._write(None, f"{kind}\n{account}".encode())
        if not self._mine[_FAILED]:
            self._mine[_FAILED] = time.time_ns()
        self._mine[_COMPLETE] = complete
        self._changed()

    def reset(self) -> None:
        """Forget everything that this rank has said, but for how often it has waited; all ranks do so at the same time."""
        number, epoch = self._mine[_NUMBER], self._mine[_EPOCH]
        self._mine[:] = 0
        self._mine[_NUMBER], self._mine[_EPOCH] = number + 1, epoch + 1

    def _write(self, doing: bytes | None, account: bytes | None) -> None:
        self._mine[_VERSION] += 1
        for text, start, length in ((doing, _TEXT, _DOING), (account, _TEXT + TEXT_BYTES, _ACCOUNT)):
            if text is not None:
                size = min(len(text), TEXT_BYTES)
                self._bytes[self.rank, start:start + size] = np.frombuffer(text, np.uint8, size)
                self._mine[length] = size
        self._mine[_VERSION] += 1

    def _changed(self) -> None:
        """Let the others know."""

    # ------------------------------------------------------------------------------------------------ all records

    def refresh(self) -> None:
        """Take in what the others have said."""

    def status(self, rank: int) -> int:
        return int(self._words[rank, _STATUS])

    def number(self, rank: int) -> int:
        return int(self._words[rank, _NUMBER])

    def confirmed(self, rank: int) -> int:
        return int(self._words[rank, _CONFIRMED])

    def answered(self, rank: int) -> bool:
        return bool(self._words[rank, _ANSWERED])

    def complete(self, rank: int) -> bool:
        return bool(self._words[rank, _COMPLETE])

    def ranks_with(self, status: int) -> list[int]:
        """The ranks of this status."""
        return np.flatnonzero(self._words[:, _STATUS] == status).tolist()

    def first_failure(self) -> int:
        """The rank that failed first, or -1."""
        failed = self._words[:, _FAILED]
        if not failed.any():
            return -1
        return min(np.flatnonzero(failed).tolist(), key=lambda rank: (failed[rank], rank))

    def doing(self, rank: int) -> bytes:
        """What the rank has last published."""
        return self._read(rank, _TEXT, _DOING)

    def account(self, rank: int) -> tuple[str, str]:
        """Kind and account of the rank's failure."""
        kind, _, account = self._read(rank, _TEXT + TEXT_BYTES, _ACCOUNT).decode(errors="replace").partition("\n")
        return kind, account

    def _read(self, rank: int, start: int, length: int) -> bytes:
        words = self._words[rank]
        for _ in range(1000):
            version = int(words[_VERSION])
            text = self._bytes[rank, start:start + int(words[length])].tobytes()
            if version % 2 == 0 and version == int(words[_VERSION]):
                break
            time.sleep(1e-5)
        return text


class SharedBoard(Board):
    """The records in a file that all ranks of one host have mapped."""

    def __init__(self, path: str, ranks: int, rank: int) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), ranks * RECORD_BYTES)
        super().__init__(self._map, ranks, rank)

    @staticmethod
    def create(ranks: int) -> str:
        """Make the file and return its path; the caller unlinks it when every rank has opened it."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") and os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="refdist-board-", dir=folder)
        os.ftruncate(descriptor, ranks * RECORD_BYTES)
        os.close(descriptor)
        return path


class MessageBoard(Board):
    """A copy of all records on each rank.

    Args:
        send: sends bytes to every other rank.
        receive: gives (rank, bytes) for what has come from the others, in the order of sending.
    """

    settling = 0.5

    def __init__(self, ranks: int, rank: int, send: Callable[[bytes], None],
                 receive: Callable[[], Iterable[tuple[int, bytes | bytearray]]]) -> None:
        super().__init__(bytearray(ranks * RECORD_BYTES), ranks, rank)
        self._send = send
        self._receive = receive

    def _changed(self) -> None:
        doing, account = int(self._mine[_DOING]), int(self._mine[_ACCOUNT])
        record = self._bytes[self.rank]
        self._send(record[:_TEXT + doing].tobytes() + record[_TEXT + TEXT_BYTES:_TEXT + TEXT_BYTES + account].tobytes())

    def reset(self) -> None:
        super().reset()
        for rank in range(self.ranks):
            if rank != self.rank:
                self._words[rank, _STATUS:_VERSION] = 0

    def refresh(self) -> None:
        for rank, record in self._receive():
            words = np.frombuffer(record, np.int64, _WORDS)
            if words[_EPOCH] != self._mine[_EPOCH]:
                continue
            doing, account = int(words[_DOING]), int(words[_ACCOUNT])
            texts = np.frombuffer(record, np.uint8, doing + account, _TEXT)
            self._bytes[rank, _TEXT:_TEXT + doing] = texts[:doing]
            self._bytes[rank, _TEXT + TEXT_BYTES:_TEXT + TEXT_BYTES + account] = texts[doing:]
            self._words[rank] = words

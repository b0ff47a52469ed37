"""Why ranks cannot go on, from what each of them is doing: the same reasoning and the same words for both transports.

A rank that waits is described by a :class:`Doing`: the requests it waits for, and the place in the program. From those of all
ranks follow
- who is *stuck*: the largest set of waiting ranks of which each needs something of a member, or of a rank that has left;
- what to call it: MismatchError when ranks of one group are in different collective calls, else DeadlockError.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from refdist.comm.transport import Request
from refdist.errors import DeadlockError, MismatchError, PeerFailed

__all__ = ["Doing", "Wait", "as_text", "described", "explain", "named_error", "printable", "report", "stuck"]

_SHOWN = 4  # requests of one rank that a report shows
_LINES = 32


@dataclass(frozen=True)
class Wait:
    """One request that has not been done yet, as data.

    Attributes:
        text: operation, group, sequence number, shape, peer.
        group, sequence, mark: of the collective call: its group (context id and first member: groups that were made together have
            one context), its number and its fingerprint; -1 for a message outside of one.
    """

    text: str
    group: int = -1
    sequence: int = -1
    mark: int = -1


@dataclass(frozen=True)
class Doing:
    """What one rank is doing while it waits.

    Attributes:
        peers: world ranks of all requests that it waits for.
        any_of: whether one of them is enough for it to go on.
        waits: some of the requests.
        site: file, line and function of the program that made the call.
    """

    peers: tuple[int, ...]
    any_of: bool
    waits: tuple[Wait, ...]
    site: str

    def encode(self, limit: int) -> bytes:
        """As text of at most so many bytes (1,000 or more) that another rank can read.

        Call sites and requests are cut where they are long; a rank whose peers do not find room is not taken for stuck.
        """
        runs = _runs(self.peers)
        for length, waits, peers in ((500, self.waits, runs), (40, self.waits[:1], runs), (40, self.waits[:1], [])):
            shown = [asdict(replace(wait, text=wait.text[:length])) for wait in waits]
            text = json.dumps([peers, self.any_of, shown, self.site[-length:]], separators=(",", ":")).encode()
            if len(text) <= limit:
                break
        return text

    @staticmethod
    def decode(text: bytes) -> Doing:
        """The inverse of :meth:`encode`."""
        runs, any_of, waits, site = json.loads(text)
        peers = tuple(peer for first, last in runs for peer in range(first, last + 1))
        return Doing(peers, any_of, tuple(Wait(**wait) for wait in waits), site)


def _runs(peers: Collection[int]) -> list[list[int]]:
    """The same ranks, each once, as [first, last] of neighbours."""
    runs: list[list[int]] = []
    for peer in sorted(set(peers)):
        if runs and peer == runs[-1][1] + 1:
            runs[-1][1] = peer
        else:
            runs.append([peer, peer])
    return runs


def described(requests: Sequence[Request], any_of: bool, site: str) -> Doing:
    """What a rank that waits for ``requests`` is doing."""
    pending = [request for request in requests if not request.done] or list(requests)
    waits = []
    for request in pending[:_SHOWN]:
        call: Any = request.what
        if getattr(call, "algorithm", ""):
            group = request.context * call.comm.transport.size + call.comm.members[0]
            waits.append(Wait(str(request), group, call.sequence, call.mark))
        else:
            waits.append(Wait(str(request)))
    return Doing(tuple(request.peer for request in pending), any_of, tuple(waits), site)


def stuck(waiting: Mapping[int, Doing], left: Collection[int]) -> set[int]:
    """The ranks of ``waiting`` that can never go on, if no message is under way between them: each needs something of another
    one of them, or of a rank that has left."""
    found = set(waiting)
    while True:
        silent = found.union(left)
        kept = set()
        for rank in found:
            doing = waiting[rank]
            hopeless = [peer in silent for peer in doing.peers]
            if hopeless and (all(hopeless) if doing.any_of else any(hopeless)):
                kept.add(rank)
        if kept == found:
            return found
        found = kept


def report(cause: str, doings: Mapping[int, Doing | str]) -> str:
    """The cause, and a line or more for each rank."""
    lines = []
    for rank, doing in sorted(doings.items()):
        if isinstance(doing, str):
            lines.append(f"  rank {rank} {doing}")
            continue
        lines += [f"  rank {rank} waits: {wait.text}, at {doing.site}" for wait in doing.waits]
    if len(lines) > _LINES:
        lines[_LINES:] = [f"  … and {len(lines) - _LINES} more"]
    return "\n".join([f"{cause}:", *lines])


def explain(waiting: Mapping[int, Doing], others: Mapping[int, str]) -> DeadlockError | MismatchError:
    """Why the ``waiting`` ranks cannot go on; ``others`` says what the rest of the ranks is doing."""
    calls: dict[tuple[int, int], set[int]] = defaultdict(set)
    for doing in waiting.values():
        for wait in doing.waits:
            if wait.sequence >= 0:
                calls[wait.group, wait.sequence].add(wait.mark)
    doings: dict[int, Doing | str] = {**waiting, **others}
    if any(len(marks) > 1 for marks in calls.values()):
        return MismatchError(report("ranks of one group are in different calls", doings))
    ranks = "the rank that has not finished waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait for each other"
    if others:
        ranks = f"{len(waiting)} of {len(doings)} ranks wait for what never comes"
    return DeadlockError(report(ranks, doings))


def named_error(kind: str, text: str, rank: int) -> RuntimeError:
    """What a rank raises when rank ``rank`` has failed: the same kind of error when that is about the communication of several
    ranks, else PeerFailed."""
    if kind == "DeadlockError":
        return DeadlockError(text)
    if kind == "MismatchError":
        return MismatchError(text)
    return PeerFailed(rank, f"{kind}: {text}")


def as_text(error: BaseException) -> str:
    """What an exception says, also if its ``__str__`` fails or its text cannot be encoded."""
    try:
        return printable(str(error))
    except Exception as failure:
        return f"(its text cannot be had: {type(failure).__name__})"


def printable(text: str) -> str:
    """The text with what cannot be encoded, such as half a surrogate pair, written as an escape."""
    return text.encode(errors="backslashreplace").decode()

"""``trace``: run a collective on a few in-process ranks and keep who sends what to whom in each step.

    picture = trace("all_reduce", algorithm="ring", ranks=4)
    print(picture)                     in a terminal
    picture                            at the end of a notebook cell: draws itself
    Path("ring.svg").write_text(picture.svg())

It is the collective itself that runs, not a drawing of it. Each number it moves says where it comes from: element c of rank r is
2^r + 2^32 c, so that a sum of them tells which ranks' contributions to chunk c it holds.

A message belongs to the first step after everything that its sender and its receiver have waited for (Lamport 1978, "Time,
clocks, and the ordering of events in a distributed system").
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from refdist.comm.broadcast import PIECE
from refdist.comm.communicator import OPERATIONS, Comm
from refdist.comm.inprocess import run
from refdist.comm.transport import Request, Transport

__all__ = ["COLLECTIVES", "MOST_RANKS", "Content", "Message", "Step", "Trace", "trace"]

COLLECTIVES = tuple(OPERATIONS)
MOST_RANKS = 16
_CHUNK = 32  # the number of a chunk is this many bits further up than the set of ranks
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_MOVING = ("all_to_all", "scatter")  # a block that is sent is not held any more


@dataclass(frozen=True)
class Content:
    """Chunk ``chunk`` with the contributions of ``ranks`` in it."""

    chunk: int
    ranks: tuple[int, ...]


@dataclass
class Message:
    """A message of ``contents`` from rank ``source`` to rank ``dest``, in step ``step`` (from 1)."""

    source: int
    dest: int
    contents: tuple[Content, ...] = ()
    step: int = 0
    posted: int = 0  # when the first of the two sides came


@dataclass
class Step:
    """The messages of one step, and what each rank holds after it: for each of its columns a list of contents."""

    messages: list[Message]
    held: list[dict[int, list[Content]]]


@dataclass
class Trace:
    """A collective, step by step; ``steps[0]`` is the start, without messages.

    Attributes:
        operation, algorithm, ranks, root: what ran.
        columns: of each rank's row: chunks, or blocks of an all-to-all.
        reducing: whether contributions are added.
    """

    operation: str
    algorithm: str
    ranks: int
    root: int
    columns: int
    reducing: bool
    steps: list[Step] = field(default_factory=list)

    def __str__(self) -> str:
        from refdist.comm.draw import text
        return text(self)

    def svg(self) -> str:
        """The picture as an SVG document."""
        from refdist.comm.draw import svg
        return svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    @property
    def title(self) -> str:
        """``ring all-reduce on 4 ranks``."""
        how = self.algorithm.replace("_", " ").removeprefix("by ")  # a broadcast is "by size"
        ranks = f"{self.ranks} rank{'s' if self.ranks != 1 else ''}"
        return f"{self.operation.replace('_', '-')}{f' by {how}' if how else ''} on {ranks}"


def trace(operation: str, algorithm: str | None = None, ranks: int = 4, root: int = 0,
          groups: Sequence[Sequence[int]] | None = None) -> Trace:
    """Run a collective on in-process ranks and keep its steps.

    Args:
        operation: its name, as a method of ``Comm``.
        algorithm: None: the one that an array of a few bytes gets.
        ranks: at most 16.
        root: for those that have one.
        groups: the ranks of each node, for a hierarchical all-reduce; by default two halves.

    Raises:
        ValueError: an operation or algorithm that does not exist, too many ranks, a root that is no rank.
    """
    if operation not in COLLECTIVES:
        raise ValueError(f"operation={operation!r}: expected one of {', '.join(COLLECTIVES)}")
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks={ranks}: a picture has 1 to {MOST_RANKS}")
    if not 0 <= root < ranks:
        raise ValueError(f"root={root}: expected a rank of 0 to {ranks - 1}")
    if algorithm == "hierarchical" and groups is None:
        half = (ranks + 1) // 2
        groups = [group for group in (list(range(half)), list(range(half, ranks))) if group]
    recorder = _Recorder(operation, ranks)
    results = run(lambda comm: recorder.call(comm, algorithm, root, groups), ranks, sends="rendezvous")
    picture = Trace(operation, recorder.algorithm, ranks, root, ranks if operation != "barrier" else 1, operation in _REDUCING)
    picture.steps = _replay(operation, ranks, root, recorder.messages)
    _confirm(picture, results)
    return picture


def _numbers(rank: int, chunks: Sequence[int], repeat: int) -> np.ndarray:
    return np.repeat(np.array([(1 << rank) + (chunk << _CHUNK) for chunk in chunks], np.int64), repeat)


def _contents(numbers: np.ndarray) -> tuple[Content, ...]:
    """What the numbers of a message or a result hold, each kind once, in order."""
    found: dict[Content, None] = {}
    flat = numbers.reshape(-1)
    first = np.append(True, flat[1:] != flat[:-1])[:flat.size]  # of each run of equal numbers
    for number in flat[first].tolist():
        mask = number & ((1 << _CHUNK) - 1)
        ranks = tuple(rank for rank in range(MOST_RANKS) if mask >> rank & 1)
        found[Content((number >> _CHUNK) // max(1, len(ranks)), ranks)] = None
    return tuple(found)


class _Recorder:
    """Sees all messages of all ranks, and pairs sends with receives as the transport does."""

    def __init__(self, operation: str, ranks: int) -> None:
        self.operation = operation
        self.ranks = ranks
        self.algorithm = ""
        self.clocks = [0] * ranks
        self.messages: list[Message] = []
        self.waiting: dict[tuple[bool, Any], deque[Message]] = defaultdict(deque)

    def call(self, comm: Comm, algorithm: str | None, root: int, groups: Any) -> Any:
        """Make the call on one rank, through a transport that reports here."""
        watched = Comm(cast(Transport, _Watched(comm.transport, self)), range(comm.size), 1 << 20)
        arguments: dict[str, Any] = {} if self.operation == "barrier" else {"algorithm": algorithm}
        every = range(comm.size)
        repeat = PIECE // 8 if algorithm == "chain" else 1  # so that each chunk is a piece of the pipeline
        x: Any = _numbers(comm.rank, every, repeat)
        if self.operation in ("all_gather", "gather"):
            x = _numbers(comm.rank, [comm.rank], repeat)
        if self.operation == "all_gather":
            arguments["lengths"] = [1] * comm.size
        if self.operation == "scatter":
            x = [_numbers(root, [chunk], repeat) for chunk in every]
        if self.operation in ("broadcast", "scatter", "reduce", "gather"):
            arguments["root"] = root
        if groups is not None:
            arguments["groups"] = groups
        return getattr(watched, self.operation)(*([] if self.operation == "barrier" else [x]), **arguments)

    def post(self, key: Any, sends: bool, rank: int, message: Message) -> Message:
        """One side of a message; the same object is returned for the other side."""
        others = self.waiting[not sends, key]
        if others:
            both = others.popleft()
            both.contents = both.contents or message.contents
        else:
            both = message
            self.waiting[sends, key].append(both)
        both.posted = max(both.posted, self.clocks[rank])
        both.step = both.posted + 1
        return both


class _Watched:
    """A rank's transport that tells the recorder what passes through it."""

    def __init__(self, transport: Transport, recorder: _Recorder) -> None:
        self._transport = transport
        self._recorder = recorder
        self._of_request: dict[int, Message] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    exchange = Transport.exchange

    def isend(self, dest: int, context: int, tag: int, header: bytes, description: bytes, payload: np.ndarray,
              what: Any) -> Request:
        recorder, rank = self._recorder, self._transport.rank
        request = self._transport.isend(dest, context, tag, header, description, payload, what)
        message = Message(rank, dest)
        if what.name == recorder.operation:
            recorder.algorithm = what.algorithm
            message.contents = _contents(payload.view(np.int64)) if payload.size else ()
        message = recorder.post((rank, dest, context, tag), True, rank, message)
        if what.name == recorder.operation:
            recorder.messages.append(message)
            self._of_request[id(request)] = message
        return request

    def irecv(self, source: int, context: int, tag: int, expected: bytes | None, payload: np.ndarray | None, what: Any,
              described: bool = False) -> Request:
        rank = self._transport.rank
        request = self._transport.irecv(source, context, tag, expected, payload, what, described)
        self._of_request[id(request)] = self._recorder.post((source, rank, context, tag), False, rank, Message(source, rank))
        return request

    def wait(self, requests: Sequence[Request]) -> None:
        self._transport.wait(requests)
        clocks, rank = self._recorder.clocks, self._transport.rank
        drawn = [self._of_request[id(request)] for request in requests if id(request) in self._of_request]
        clocks[rank] = max([clocks[rank], *(message.step for message in drawn if message in self._recorder.messages)])


def _replay(operation: str, ranks: int, root: int, messages: list[Message]) -> list[Step]:
    """The steps, with what each rank holds after each."""
    held: list[dict[Any, Content]] = []
    for rank in range(ranks):
        chunks = range(ranks)
        if operation in ("all_gather", "gather"):
            chunks = range(rank, rank + 1)
        elif operation in ("broadcast", "scatter"):
            chunks = range(ranks if rank == root else 0)
        elif operation == "barrier":
            chunks = range(1)
        contents = [Content(chunk, (rank,)) for chunk in chunks]
        held.append({_key(operation, content): content for content in contents})
    steps = [Step([], [_columns(operation, rank, mine) for rank, mine in enumerate(held)])]
    numbers = sorted({message.step for message in messages})  # steps in which only lengths move are not drawn
    for number in numbers:
        of_step = sorted((message for message in messages if message.step == number), key=lambda message: message.source)
        if operation == "barrier":
            for message in of_step:
                message.contents = (held[message.source][0],)
        for message in of_step:
            for content in message.contents if operation in _MOVING else ():
                held[message.source].pop(_key(operation, content), None)
        for message in of_step:
            message.step = numbers.index(number) + 1
            for content in message.contents:
                key = _key(operation, content)
                held[message.dest][key] = _merged(held[message.dest].get(key), content, operation)
        steps.append(Step(of_step, [_columns(operation, rank, mine) for rank, mine in enumerate(held)]))
    return steps


def _key(operation: str, content: Content) -> Any:
    return content if operation == "all_to_all" else content.chunk


def _merged(before: Content | None, new: Content, operation: str) -> Content:
    """What a rank holds when a content comes: contributions that it has not are added, a sum that has all of them takes over."""
    if before is None or set(before.ranks) <= set(new.ranks):
        return new
    if operation == "barrier" or not set(before.ranks) & set(new.ranks):
        return Content(new.chunk, tuple(sorted({*before.ranks, *new.ranks})))
    return before


def _columns(operation: str, rank: int, held: dict[Any, Content]) -> dict[int, list[Content]]:
    """By column: the chunk; in an all-to-all the block's destination, and once it is there its source."""
    columns: dict[int, list[Content]] = defaultdict(list)
    for content in held.values():
        arrived = operation == "all_to_all" and content.chunk == rank
        columns[content.ranks[0] if arrived else content.chunk].append(content)
    return dict(columns)


def _confirm(picture: Trace, results: list[Any]) -> None:
    """What the pictures say that each rank holds in the end must be what the call has returned there."""
    for rank, result in enumerate(results):
        if result is None:
            continue
        returned = set().union(*(_contents(part) for part in (result if isinstance(result, list) else [result])))
        drawn = {content for contents in picture.steps[-1].held[rank].values() for content in contents}
        if not returned <= drawn:
            raise AssertionError(f"rank {rank} has {sorted(returned - drawn, key=str)}, which is not in the picture")
        if picture.operation in ("reduce_scatter", "scatter"):
            held = picture.steps[-1].held[rank]
            picture.steps[-1].held[rank] = {column: contents for column, contents in held.items() if set(contents) & returned}
    for rank, result in enumerate(results):
        if result is None and picture.operation in ("reduce", "gather"):
            picture.steps[-1].held[rank] = {}

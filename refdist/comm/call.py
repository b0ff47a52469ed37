"""``Call``: one collective call on one rank, through which its generator posts messages.

A collective is a generator: it posts sends and receives on its :class:`Call` and yields the requests that its next step
depends on. One ``yield`` is one communication step.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from refdist.comm.message import as_bytes, describe, meaning, pack_header, undescribe
from refdist.comm.transport import Request

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["Call", "Steps"]

Steps = Generator[Sequence[Request], None, Any]
_BYTE = np.dtype(np.uint8)
_SMALL = 4096  # bytes up to which a new array costs less than a look into the arena


class Call:
    """One collective call, or one point-to-point message, on one rank.

    Attributes:
        rank, size: of the group, or of the part of it that :meth:`among` has picked.
        members: the world rank of each.
        name, algorithm: for counters and errors.
        sequence: the number of this collective call on its group.
        step: the communication step that is under way, from 0.
    """

    __slots__ = ("algorithm", "comm", "mark", "members", "name", "rank", "sequence", "size", "step", "tag")

    def __init__(self, comm: Comm, name: str, algorithm: str, sequence: int, tag: int, mark: int) -> None:
        self.comm = comm
        self.name = name
        self.algorithm = algorithm
        self.sequence = sequence
        self.tag = tag
        self.mark = mark
        self.rank = comm.rank
        self.size = comm.size
        self.members = comm.members
        self.step = 0

    def part(self, name: str) -> Call:
        """A part of this call that is counted under a name of its own (lengths, announcements)."""
        call = Call(self.comm, name, self.algorithm, self.sequence, self.tag, self.mark)
        call.rank, call.size, call.members, call.step = self.rank, self.size, self.members, self.step
        return call

    def among(self, ranks: Sequence[int]) -> Call:
        """This call with only the given ranks (of its own), numbered anew in that order; this rank is one of them."""
        if type(ranks) is range and len(ranks) == self.size and ranks.step == 1:
            return self  # all of them
        call = self.part(self.name)
        call.members = [self.members[rank] for rank in ranks]
        call.rank, call.size = ranks.index(self.rank), len(ranks)
        return call

    def channel(self) -> Call:
        """A second stream of messages, for an algorithm that cannot keep one order for all messages between two ranks.

        All ranks ask for it before their first step.
        """
        call = self.comm.call(self.name, self.algorithm)
        call.mark, call.rank, call.size, call.members = self.mark, self.rank, self.size, self.members
        return call

    def buffer(self, like: np.ndarray, size: int | None = None, dtype: Any = None) -> np.ndarray:
        """A flat uninitialised array of ``size`` elements for messages that come in; its memory is used again afterwards."""
        device = self.comm.device
        if device is None and size is None and dtype is None and like.nbytes <= _SMALL:
            return np.empty_like(like)
        shape = (like.size if size is None else size,)
        dtype = like.dtype if dtype is None else np.dtype(dtype)
        if device is not None:
            return device.empty(like, shape, "communication", dtype)
        return self.scratch(like, shape[0], dtype)

    def scratch(self, like: np.ndarray, size: int, dtype: Any = None) -> np.ndarray:
        """As :meth:`buffer`, in memory that no device counts: for copies that put elements in order."""
        dtype = like.dtype if dtype is None else dtype
        nbytes = size * dtype.itemsize
        if nbytes <= _SMALL:
            return np.empty_like(like, dtype, shape=(size,))
        arena = self.comm.transport.arena
        return arena.array((size,), dtype, arena.uncounted(nbytes))

    # ----------------------------------------------------------------------------------------------- messages

    def isend(self, array: np.ndarray, dest: int, describes: np.ndarray | None = None) -> Request:
        """Start to send a C-contiguous array to a rank of the group; it must not change until the request is done.

        For a receiver that knows neither, dtype and shape of the array ``describes`` travel along: of ``array`` itself, or, with
        an empty ``array``, of one that is only announced.
        """
        comm = self.comm
        transport = comm.transport
        description = b"" if describes is None else describe(describes.dtype, describes.shape)
        payload = as_bytes(array)
        header = pack_header(self.mark, self.sequence, payload.size, transport.epoch, len(description))
        peer = self.members[dest]
        if comm.device is not None:
            comm.device.message(comm.axis, self.name, peer, payload.size, self.step)
        request = transport.isend(peer, comm.context, self.tag, header, description, payload, self)
        if transport.checks:
            request.guard(array)
        return request

    def irecv(self, out: np.ndarray, source: int, or_described: bool = False) -> Request:
        """Start to receive from a rank of the group into a C-contiguous array of the very size that was sent.

        With ``or_described`` the sender may also have sent another array, which describes itself; the request then has a
        ``description``, and :meth:`received` gives that array.
        """
        comm = self.comm
        payload = as_bytes(out)
        expected = pack_header(self.mark, self.sequence, payload.size, comm.transport.epoch, 0)
        return comm.transport.irecv(self.members[source], comm.context, self.tag, expected, payload, self, or_described)

    def irecv_described(self, source: int) -> Request:
        """Start to receive a message that was sent with ``describes``; :meth:`received` gives its array."""
        comm = self.comm
        return comm.transport.irecv(self.members[source], comm.context, self.tag, None, None, self, True)

    def exchange(self, mine: np.ndarray, theirs: np.ndarray, peer: int, or_described: bool = False) -> Sequence[Request]:
        """Start to send ``mine`` to a rank and to receive ``theirs`` from the same one; what a step of many algorithms is.

        The receive is the first of the requests; ``or_described`` as for :meth:`irecv`.
        """
        comm = self.comm
        transport = comm.transport
        if mine.size != theirs.size or transport.checks:
            return self.irecv(theirs, peer, or_described), self.isend(mine, peer)
        world_peer = self.members[peer]
        theirs = (theirs if theirs.ndim == 1 else theirs.reshape(-1)).view(_BYTE)
        header = pack_header(self.mark, self.sequence, theirs.size, transport.epoch, 0)
        if comm.device is not None:
            comm.device.message(comm.axis, self.name, world_peer, theirs.size, self.step)
        return transport.exchange(world_peer, comm.context, self.tag, header, mine, theirs, self, or_described)

    def received(self, request: Request) -> np.ndarray:
        """The array of a finished :meth:`irecv_described`, after a look at whether it belongs to this call.

        One that was only announced is new and uninitialised.
        """
        transport = self.comm.transport
        assert request.payload is not None
        length = len(request.description) or 1  # a message without a description is of another call
        request.expected = pack_header(self.mark, self.sequence, request.payload.nbytes, transport.epoch, length)
        request.verify(transport)
        dtype, shape = undescribe(request.description)
        array = request.payload.view(dtype)
        return array.reshape(shape) if array.size == math.prod(shape) else np.empty(shape, dtype)

    def __str__(self) -> str:
        if not self.algorithm:
            return f"{self.name} on {self.comm.axis}"
        what = ", ".join(str(part) for part in meaning(self.mark)[2:] if part is not None)  # dtype, shape, …
        return f"{self.name} ({self.algorithm}{'; ' if what else ''}{what}) number {self.sequence} on {self.comm.axis}"

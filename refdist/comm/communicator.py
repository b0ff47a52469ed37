"""``Comm``: a group of ranks that communicate with each other, as one of them sees it.

    transport (world ranks, bytes)  ◀──  Comm (group ranks, arrays)  ◀──  a collective: a generator on one Call

``comm.all_reduce(x)`` drives the generator of that collective to its end; ``comm.start("all_reduce", x)`` returns a
:class:`~refdist.comm.work.Work` that is driven bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from refdist.comm.all_gather import all_gather
from refdist.comm.all_reduce import all_reduce
from refdist.comm.all_to_all import all_to_all
from refdist.comm.barrier import barrier
from refdist.comm.broadcast import broadcast
from refdist.comm.call import Call, Steps
from refdist.comm.choose import FASTEST, LEAST, Table
from refdist.comm.gather import gather
from refdist.comm.message import fingerprint
from refdist.comm.reduce import reduce
from refdist.comm.reduce_scatter import reduce_scatter
from refdist.comm.scatter import scatter
from refdist.comm.straight import Straight
from refdist.comm.transport import Transport
from refdist.comm.work import Work, drive, progress

if TYPE_CHECKING:
    from refdist.device import Device

__all__ = ["OPERATIONS", "Comm"]

OPERATIONS: dict[str, Callable[..., Steps]] = {
    "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, "broadcast": broadcast,
    "reduce": reduce, "gather": gather, "scatter": scatter, "all_to_all": all_to_all, "barrier": barrier,
}
_COLLECTIVE_TAG = 1 << 15  # the tags of collectives: this bit and 15 bits of their sequence number
_POINT_TO_POINT = fingerprint("point to point")
_KNOWN = 4096  # kinds of calls that are remembered
_NUMBERS = frozenset(np.dtype(name) for name in (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16"))  # what check_array need not look at twice


class Comm:
    """A group of ranks, numbered from 0 to ``size - 1``, as one of them sees it.

    Every member must make the same collective calls in the same order. Ranks in arguments are ranks of this group. Arrays may
    be of any number dtype, any shape (0-d and empty ones too), any memory layout, and read-only; a result is a new array,
    unless ``out`` is given. Where an axis is split, rank r gets shard r of ``np.array_split``.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        members: the world rank of each.
        axis: the group's name in counters and errors (``"world"``, ``"tp"``, …).
        transport, context: what carries the messages, and the id that keeps groups apart.
        device: the emulated device that counts this group's messages, or None.
        table: which algorithm is used when none is asked for.
        chosen: the table that was set, which groups made from this one inherit; None if it is the usual one.
    """

    def __init__(self, transport: Transport, members: Sequence[int], context: int, axis: str = "world",
                 device: Device | None = None, sequence: list[int] | None = None, table: Table | None = None) -> None:
        self.transport = transport
        self.members = members
        self.context = context
        self.axis = axis
        self.device = device
        self.size = len(members)
        try:
            self.rank = members.index(transport.rank)
        except ValueError:
            raise ValueError(f"rank {transport.rank} is not in the group of ranks {list(members)}") from None
        if sequence is None:
            sequence = [0]
            transport.sequences.append(sequence)
        self._sequence = sequence  # shared by all views of one group
        self._use(table)

    @property
    def table(self) -> Table:
        return self._table

    @table.setter
    def table(self, table: Table) -> None:
        self._use(table)

    def _use(self, table: Table | None) -> None:
        self.chosen = table
        self._table = table or (FASTEST if self.device is None else LEAST)
        self._straight = Straight(self) if Straight.fits(self) else None

    def __repr__(self) -> str:
        return f"<Comm {self.axis}: rank {self.rank} of {self.size}, {self.transport.name}>"

    def bind(self, device: Device | None) -> Comm:
        """The same group with its messages counted on ``device``, whose kernels progress this rank's Works.

        All ranks bind a device, or none does: where messages are counted, other algorithms are picked (``choose.py``).
        """
        if device is not None:
            transport = self.transport
            device.progress = lambda: progress(transport)
            device.before_kernel = transport.check_reads if transport.checks else None
        return Comm(self.transport, self.members, self.context, self.axis, device, self._sequence, self.chosen)

    # -------------------------------------------------------------------------------------------- collectives

    def all_reduce(self, x: np.ndarray, op: str = "sum", algorithm: str | None = None, order: str | None = None,
                   out: np.ndarray | None = None, accumulate: Any = None,
                   groups: Sequence[Sequence[int]] | None = None) -> np.ndarray:
        """The elementwise reduction of all ranks' ``x``, on every rank; all get the same bits.

        Args:
            x: the same shape and dtype on every rank.
            op: ``"sum"``, ``"max"``, ``"min"``, ``"prod"`` or ``"avg"``.
            algorithm: one of ``refdist.comm.all_reduce.ALGORITHMS``; None picks by size and number of ranks.
            order: ``"rank"``: contributions are added in rank order, ((x0 + x1) + x2) + …, by a direct exchange.
            out: where to put the result; may be ``x`` itself.
            accumulate: a dtype in which additions are carried out; messages and result are of ``x``'s dtype.
            groups: for ``"hierarchical"``: the ranks of each node; None: those that share a host.

        Raises:
            ValueError: an algorithm, operation or order that does not exist; lists those that do.
        """
        if self._straight is not None and groups is None and type(x) is np.ndarray:
            result = self._straight.all_reduce(x, op, algorithm, order, out, accumulate)
            if result is not None:
                return result
        return drive(self.transport, all_reduce(self, x, op, algorithm, order, out, accumulate, groups))

    def reduce_scatter(self, x: np.ndarray, axis: int = 0, op: str = "sum", algorithm: str | None = None,
                       order: str | None = None, out: np.ndarray | None = None, accumulate: Any = None) -> np.ndarray:
        """Shard ``rank`` along ``axis`` of the reduction of all ranks' ``x`` (the same shape and dtype on every rank).

        The other arguments are those of :meth:`all_reduce`; algorithms: ``refdist.comm.reduce_scatter.ALGORITHMS``.
        """
        if self._straight is not None and type(x) is np.ndarray:
            result = self._straight.reduce_scatter(x, axis, op, algorithm, order, out, accumulate)
            if result is not None:
                return result
        return drive(self.transport, reduce_scatter(self, x, axis, op, algorithm, order, out, accumulate))

    def all_gather(self, x: np.ndarray, axis: int = 0, algorithm: str | None = None, out: np.ndarray | None = None,
                   lengths: Sequence[int] | None = None) -> np.ndarray:
        """The concatenation along ``axis`` of all ranks' ``x``, in rank order.

        Shapes must agree but for ``axis``. With ``lengths``, each rank's length along ``axis``, the same on every rank, they
        need not be exchanged first. ``out`` is given on all ranks or on none.
        """
        if self._straight is not None and type(x) is np.ndarray:
            result = self._straight.all_gather(x, axis, algorithm, out, lengths)
            if result is not None:
                return result
        return drive(self.transport, all_gather(self, x, axis, algorithm, out, lengths))

    def broadcast(self, x: np.ndarray | None, root: int = 0, algorithm: str | None = None) -> np.ndarray:
        """The root's ``x`` on every rank; the others may pass None."""
        return drive(self.transport, broadcast(self, x, root, algorithm))

    def reduce(self, x: np.ndarray, root: int = 0, op: str = "sum", algorithm: str | None = None,
               accumulate: Any = None) -> np.ndarray | None:
        """The elementwise reduction of all ranks' ``x`` (the same shape and dtype) on the root, None elsewhere."""
        return drive(self.transport, reduce(self, x, root, op, algorithm, accumulate))

    def gather(self, x: np.ndarray, root: int = 0, algorithm: str | None = None) -> list[np.ndarray] | None:
        """A list of all ranks' ``x``, in rank order, on the root, None elsewhere; shapes may differ, dtypes not."""
        return drive(self.transport, gather(self, x, root, algorithm))

    def scatter(self, xs: Sequence[np.ndarray] | None, root: int = 0, algorithm: str | None = None) -> np.ndarray:
        """The ``rank``-th of the root's ``xs``; the others may pass None. Shapes may differ, dtypes not."""
        return drive(self.transport, scatter(self, xs, root, algorithm))

    def all_to_all(self, x: np.ndarray, split_axis: int = 0, concat_axis: int = 0, algorithm: str | None = None,
                   lengths: Sequence[int] | None = None) -> np.ndarray:
        """Send shard r of ``x`` along ``split_axis`` to rank r; join what comes along ``concat_axis``, in rank order.

        Shapes must agree but for the two axes. ``lengths``: of the shards of this rank's ``x``, where they are not those of
        ``np.array_split``; each rank passes its own.
        """
        return drive(self.transport, all_to_all(self, x, split_axis, concat_axis, algorithm, lengths))

    def barrier(self) -> None:
        """Return when every rank of the group has come here."""
        drive(self.transport, barrier(self))

    def start(self, operation: str, *args: Any, label: str = "", **kwargs: Any) -> Work:
        """Start a collective by its name, with that method's arguments; the Work's ``wait()`` gives its result.

        Neither the input nor ``out`` may be touched before that. Listeners of the device are told when it begins and ends, under
        ``label`` or the operation's name.
        """
        try:
            steps = OPERATIONS[operation]
        except KeyError:
            raise ValueError(f"operation={operation!r}: expected one of {', '.join(OPERATIONS)}") from None
        return self.start_steps(steps(self, *args, **kwargs), label or f"{operation} on {self.axis}")

    def start_steps(self, steps: Steps, label: str) -> Work:
        """Start the steps of a collective that is none of ours; listeners of the device are told when they begin and end."""
        if self.device is not None and self.device.listeners:
            steps = self.device.during(label, steps)
        return Work(self.transport, steps)

    # ------------------------------------------------------------------------------------------ point to point

    def send(self, x: np.ndarray, dest: int, tag: int = 0) -> None:
        """Send an array; returns when ``x`` may be changed again."""
        drive(self.transport, self._send(x, dest, tag))

    def recv(self, source: int, tag: int = 0) -> np.ndarray:
        """Receive the next array that ``source`` has sent with this tag, in the dtype and shape that it was sent with."""
        return drive(self.transport, self._recv(source, tag))

    def isend(self, x: np.ndarray, dest: int, tag: int = 0) -> Work:
        """Start to send; ``x`` must not change before the Work's ``wait()``."""
        return Work(self.transport, self._send(x, dest, tag))

    def irecv(self, source: int, tag: int = 0) -> Work:
        """Start to receive; the Work's ``wait()`` gives the array."""
        return Work(self.transport, self._recv(source, tag))

    def sendrecv(self, x: np.ndarray, dest: int, source: int, tag: int = 0) -> np.ndarray:
        """Send to one rank and receive from another at the same time, in either order."""
        return drive(self.transport, self._sendrecv(x, dest, source, tag))

    def _send(self, x: np.ndarray, dest: int, tag: int) -> Steps:
        x = np.asarray(self.check_array(x), order="C")
        yield (self._message("send", dest, "dest", tag).isend(x, dest, describes=x),)

    def _recv(self, source: int, tag: int) -> Steps:
        call = self._message("recv", source, "source", tag)
        request = call.irecv_described(source)
        yield (request,)
        return call.received(request)

    def _sendrecv(self, x: np.ndarray, dest: int, source: int, tag: int) -> Steps:
        x = np.asarray(self.check_array(x), order="C")
        call = self._message("recv", source, "source", tag)
        request = call.irecv_described(source)
        yield request, self._message("send", dest, "dest", tag).isend(x, dest, describes=x)
        return call.received(request)

    def _message(self, name: str, peer: int, what: str, tag: int) -> Call:
        self.check_rank(peer, what)
        if not 0 <= tag < self.transport.user_tags:
            raise ValueError(f"tag={tag} (rank {self.rank}): expected 0 to {self.transport.user_tags - 1}")
        return Call(self, name, "", 0, tag, _POINT_TO_POINT)

    # -------------------------------------------------------------------------------------------------- groups

    def split(self, color: int | None, key: int = 0, axis: str | None = None) -> Comm | None:
        """Cut the group into one new group for each colour; collective.

        Args:
            color: ranks that pass the same one become a group; None: this rank is in no group, and gets None.
            key: the order of ranks in the new group; equal keys keep the order of this group.
            axis: a name for counters and errors; the same as this group's by default.
        """
        for name, value in (("color", color), ("key", key)):
            if not hasattr(value, "__index__") and not (name == "color" and value is None):
                raise TypeError(f"{name}={value!r} (rank {self.rank}): expected an integer" + " or None" * (name == "color"))
        member = color is not None
        mine = np.array([[member, color if member else 0, key, self.transport.next_context]], np.int64)
        table = self.all_gather(mine, algorithm="bruck", lengths=[1] * self.size)  # [size, 4]
        context = self.reserve_contexts(int(table[:, 3].max()), 1)
        if not member:
            return None
        group = [rank for rank in range(self.size) if table[rank, 0] and table[rank, 1] == color]
        group.sort(key=lambda rank: (table[rank, 2], rank))
        members = [self.members[rank] for rank in group]
        return Comm(self.transport, members, context, axis or self.axis, self.device, table=self.chosen)

    def reserve_contexts(self, first: int, count: int) -> int:
        """Take ``count`` context ids from ``first`` on, which all members have agreed on; returns ``first``."""
        if first + count > self.transport.contexts:
            raise RuntimeError(f"rank {self.rank} has used up the {self.transport.contexts} context ids of its transport (a "
                               "group takes one, a mesh 32): make groups once and keep them")
        self.transport.next_context = first + count
        return first

    # ----------------------------------------------------------------------------- what collectives are built on

    def call(self, name: str, algorithm: str, *what: Any) -> Call:
        """The next collective call; ``what`` must be the same on every rank, or the ranks' messages will not match."""
        return self._next(name, algorithm, fingerprint(name, algorithm, *what))

    def prepare(self, operation: str, algorithms: Mapping[str, Any], algorithm: str | None, nbytes: int, *what: Any) -> Call:
        """The next collective call, by the algorithm that was asked for, or the table's for so many bytes in the whole array.

        ``what`` must be the same on every rank, or the ranks' messages will not match.
        """
        name = self.choose(operation, algorithm, algorithms, nbytes)
        return self._next(operation, name, fingerprint(operation, name, *what))

    def recall(self, find: Callable[..., tuple[str, str, int, Any]], x: np.ndarray, *options: Any) -> tuple[Call, Any]:
        """The next collective call, and what else was found out about such calls: about all with an array of this dtype and shape
        and these options, which are hashable.

        ``find(comm, x, *options)`` finds it out for the first of them, or raises: the operation, the algorithm, the fingerprint
        of what must be the same on every rank, and anything.
        """
        key = find, x.dtype, x.shape, options, self.size
        found = self.table.known.get(key)
        if found is None:
            if len(self.table.known) >= _KNOWN:
                self.table.known.clear()
            found = self.table.known[key] = find(self, x, *options)
        operation, algorithm, mark, rest = found
        return self._next(operation, algorithm, mark), rest

    def _next(self, operation: str, algorithm: str, mark: int) -> Call:
        call = Call(self, operation, algorithm, 0, 0, mark)
        self.renew(call)
        return call

    def renew(self, call: Call) -> None:
        """Make a call the next one of this group."""
        sequence = self._sequence[0]
        self._sequence[0] = sequence + 1
        call.sequence = sequence
        call.tag = _COLLECTIVE_TAG | (sequence & (_COLLECTIVE_TAG - 1))

    def choose(self, operation: str, algorithm: str | None, algorithms: Mapping[str, Any], nbytes: int) -> str:
        """The algorithm that was asked for, or the table's for this number of ranks and bytes of the whole array."""
        if algorithm is None:
            algorithm = self.table.pick(operation, self.size, nbytes) or next(iter(algorithms))
        if algorithm not in algorithms:
            raise ValueError(f"algorithm={algorithm!r} does not exist for {operation}: expected one of "
                             f"{', '.join(algorithms)}")
        return algorithm

    def nodes(self) -> list[list[int]]:
        """The ranks of this group that share a host, one list a host, by its first rank."""
        hosts = self.transport.nodes
        found: dict[int, list[int]] = {}
        for rank, member in enumerate(self.members):
            found.setdefault(0 if hosts is None else hosts[member], []).append(rank)
        return list(found.values())

    @staticmethod
    def overlaps(out: np.ndarray, x: np.ndarray) -> bool:
        """Whether ``out`` shares some memory with ``x``, but is not ``x`` itself."""
        if out is x or (out.base is None and x.base is None) or not np.may_share_memory(out, x):
            return False
        return not (out.ctypes.data == x.ctypes.data and out.shape == x.shape and out.strides == x.strides)

    def check_array(self, x: Any) -> np.ndarray:
        """``x`` as an array of a number dtype in native byte order."""
        if type(x) is np.ndarray and x.dtype in _NUMBERS and x.dtype.isnative:
            return x
        x = np.asarray(x)
        if x.dtype.kind not in "biufc" and not (x.dtype.kind == "V" and x.dtype.names is None
                                                 and not x.dtype.name.startswith("void")):
            raise TypeError(f"dtype={x.dtype} (rank {self.rank}): expected a number dtype")
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))

    def check_axis(self, axis: int, ndim: int) -> int:
        if not -ndim <= axis < ndim:
            raise ValueError(f"axis={axis} (rank {self.rank}): the array has {ndim} dimensions")
        return axis % ndim

    def check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{what}={rank} (rank {self.rank}): the group has ranks 0 to {self.size - 1}")

    def check_out(self, out: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if out is None:
            return
        self.check_writeable(out)
        if out.shape != shape or out.dtype != dtype:
            raise ValueError(f"out is {out.dtype}{list(out.shape)} (rank {self.rank}): expected {dtype}{list(shape)}")

    def check_writeable(self, out: Any) -> None:
        """Refuse an ``out`` that no result can be written to."""
        if not hasattr(out, "flags") or not hasattr(out, "dtype"):
            raise TypeError(f"out is a {type(out).__name__} (rank {self.rank}): expected an array")
        if isinstance(out, (np.matrix, np.ma.MaskedArray)):
            raise TypeError(f"out is a {type(out).__name__} (rank {self.rank}): expected a plain array")
        if not out.flags.writeable:
            raise ValueError(f"out is read-only (rank {self.rank}): expected an array that can be written to")

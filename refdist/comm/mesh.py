"""``Mesh``: the ranks of a group arranged along named axes.

Rank order, innermost first: tp, cp, pp, fsdp, dp (Llama 3, section 3.3.2: the axes that communicate most sit closest together).

    rank = ((((dp · FSDP + fsdp) · PP + pp) · CP + cp) · TP + tp
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from refdist.comm.communicator import Comm
from refdist.errors import PlanError

if TYPE_CHECKING:
    from refdist.device import Device

__all__ = ["AXES", "Mesh"]

AXES = ("tp", "cp", "pp", "fsdp", "dp")  # innermost first


class Mesh:
    """Named axes over a group. Collective: every rank of ``comm`` makes the same mesh.

    Args:
        comm: the group; its size must be the product of the sizes.
        tp, cp, pp, fsdp, dp: the size of each axis.
        device: counts the messages of this mesh's groups.
    """

    def __init__(self, comm: Comm, tp: int = 1, cp: int = 1, pp: int = 1, fsdp: int = 1, dp: int = 1,
                 device: Device | None = None) -> None:
        self.sizes: dict[str, int] = {"tp": tp, "cp": cp, "pp": pp, "fsdp": fsdp, "dp": dp}
        for axis, size in self.sizes.items():
            if size < 1:
                raise PlanError(f"{axis}={size} (rank {comm.rank}): expected at least 1")
        product = math.prod(self.sizes.values())
        if product != comm.size:
            shape = " × ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one rank"
            raise PlanError(f"{shape} needs {product} ranks, the group has {comm.size} (rank {comm.rank})")
        self.comm = comm.bind(device) if device is not None else comm
        self.device = device
        self._axes: dict[frozenset[str], Comm] = {}
        self._first_context = self._agree_on_contexts()

    def _agree_on_contexts(self) -> int:
        """One context id for each set of axes, the same on all ranks, in ⌈lg N⌉ messages; groups are then made without any."""
        first = np.array([self.comm.transport.next_context])
        first = self.comm.bind(None).all_reduce(first, "max", "recursive_doubling")
        return self.comm.reserve_contexts(int(first[0]), 1 << len(AXES))

    def coordinate(self, axis: str, rank: int | None = None) -> int:
        """Where a rank of ``comm`` (this one by default) is along an axis."""
        coordinates = self.coordinates(rank)
        if axis not in coordinates:
            raise ValueError(f"axis={axis!r}: expected one of {', '.join(AXES)}")
        return coordinates[axis]

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where a rank of ``comm`` (this one by default) is along each axis, innermost first."""
        rest = self.comm.rank if rank is None else rank
        self.comm.check_rank(rest, "rank")
        place = {}
        for axis, size in self.sizes.items():
            rest, place[axis] = divmod(rest, size)
        return place

    def axis(self, *axes: str) -> Comm:
        """The group of ranks that differ from this one along the given axes only, the innermost axis counting fastest.

        ``axis("tp")`` is one axis, ``axis("fsdp", "dp")`` two joined, in whatever order they are named; ``axis()`` is this rank
        alone. The same group is returned each time.
        """
        for axis in axes:
            if axis not in self.sizes:
                raise ValueError(f"axis={axis!r}: expected one of {', '.join(AXES)}")
        wanted = frozenset(axes)
        if wanted not in self._axes:
            self._axes[wanted] = self._make(wanted)
        return self._axes[wanted]

    def _make(self, axes: frozenset[str]) -> Comm:
        ranks, stride = [self.comm.rank], 1
        for axis, size in self.sizes.items():
            if axis in axes:
                start = [rank - self.coordinate(axis) * stride for rank in ranks]
                ranks = [rank + place * stride for place in range(size) for rank in start]
            stride *= size
        context = self._first_context + sum(1 << AXES.index(axis) for axis in axes)
        name = "×".join(axis for axis in AXES if axis in axes) or "self"
        members = [self.comm.members[rank] for rank in ranks]
        return Comm(self.comm.transport, members, context, name, self.device, table=self.comm.chosen)

    def table(self, limit: int = 64) -> str:
        """Who is where: a line a rank, with its coordinates along the axes that are longer than one, outermost first.

        A star marks this rank. Above ``limit`` ranks the lines in the middle are left out.
        """
        axes = [axis for axis, size in reversed(self.sizes.items()) if size > 1]
        widths = [max(len(axis), len(str(self.sizes[axis] - 1))) for axis in axes]
        head = max(4, len(str(self.comm.size - 1)))
        lines = [f"{'rank':>{head}}  " + "  ".join(f"{axis:>{width}}" for axis, width in zip(axes, widths, strict=True))]
        shown = list(range(self.comm.size))
        if len(shown) > limit:
            shown[limit // 2:-(limit // 2)] = [-1]
        for rank in shown:
            if rank < 0:
                lines.append(f"{'…':>{head}}")
                continue
            place = self.coordinates(rank)
            cells = "  ".join(f"{place[axis]:>{width}}" for axis, width in zip(axes, widths, strict=True))
            lines.append(f"{rank:>{head}}{'*' if rank == self.comm.rank else ' '} {cells}")
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        shape = " × ".join(f"{axis} {size}" for axis, size in reversed(self.sizes.items()) if size > 1) or "one rank"
        place = ", ".join(f"{axis} {at}" for axis, at in reversed(self.coordinates().items()) if self.sizes[axis] > 1)
        return f"<Mesh {shape}: rank {self.comm.rank} of {self.comm.size}{' at ' + place if place else ''}>"

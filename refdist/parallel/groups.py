"""Groups within one axis of a mesh."""

from __future__ import annotations

from refdist.comm import Comm, Mesh

__all__ = ["part_of_axis"]


def part_of_axis(mesh: Mesh, axis: str, color: int, size: int) -> Comm:
    """The ``size`` ranks of an axis that pass the same colour, in a group that is made without counting messages. Collective."""
    comm = mesh.axis(axis)
    if size == comm.size:
        return comm
    if size == 1:
        return mesh.axis()
    group = comm.bind(None).split(color)
    assert group is not None
    return group.bind(comm.device)

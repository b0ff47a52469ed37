"""Transports, groups, hand-written collectives and meshes."""

from refdist.comm.choose import Table
from refdist.comm.communicator import Comm
from refdist.comm.inprocess import run
from refdist.comm.mesh import AXES, Mesh
from refdist.comm.tracing import Trace, trace
from refdist.comm.work import Work

__all__ = ["AXES", "Comm", "Mesh", "Table", "Trace", "Work", "run", "trace"]

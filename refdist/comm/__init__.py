"""Transports, groups, hand-written collectives and meshes.

    transport.py                          the one primitive: a message; inprocess.py and mpi.py are the two transports there are
    message.py, call.py                   what a message is; one call, on which a generator posts messages
    communicator.py, work.py              Comm, and how its generators are driven, blocking or bit by bit
    all_reduce.py … barrier.py            a file for each collective; reduction, blocks, folding, double_tree beside them
    choose.py, mesh.py                    which algorithm by default; groups along named axes
    diagnosis, board, watchdog, meeting   why ranks cannot go on, and how that is proven under MPI
    tracing.py, draw.py                   pictures of collectives
    straight.py                           the same messages without generators, for speed: to be read last
"""

from refdist.comm.choose import Table
from refdist.comm.communicator import Comm
from refdist.comm.inprocess import run
from refdist.comm.mesh import AXES, Mesh
from refdist.comm.tracing import Trace, trace
from refdist.comm.work import Work

__all__ = ["AXES", "Comm", "Mesh", "Table", "Trace", "Work", "run", "trace"]

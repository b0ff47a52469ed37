"""Barrier: nobody leaves before everybody has come.

Dissemination (Hensgen, Finkel & Manber 1988): in step k each rank tells the one 2^k further; after ⌈lg N⌉ steps everyone has
heard, directly or not, of everyone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refdist.comm.call import Steps

if TYPE_CHECKING:
    from refdist.comm.communicator import Comm

__all__ = ["barrier"]


def barrier(comm: Comm) -> Steps:
    """The steps of :meth:`Comm.barrier`."""
    call = comm.call("barrier", "dissemination")
    nothing = np.empty(0, np.uint8)
    distance = 1
    while distance < comm.size:
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        yield call.irecv(nothing, source), call.isend(nothing, to)
        distance *= 2
        call.step += 1

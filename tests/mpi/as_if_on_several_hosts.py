"""Run a script of this folder as if the ranks of one host were on several: no shared file, only control messages."""

from __future__ import annotations

import runpy
import sys

from refdist.comm import mpi

mpi._MPI._hosts = lambda self: list(range(self.size))  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

"""A limit on how long ranks wait to meet.

Until each rank has started MPI and called :func:`refdist.mpi_world`, no watchdog can ask the others: a rank waits inside the MPI
library, for one that may have ended already. A process of its own looks at the clock meanwhile. After ``REFDIST_MEETING_SECONDS``
(300 by default) it says what is missing and kills the rank that waits, and the launcher ends the job. It ends with that rank.

This file is that process's program too, and imports nothing of refdist.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 300.0
LONGEST = 10**7  # what time.sleep takes on any system; 115 days
VARIABLE = "REFDIST_MEETING_SECONDS"


@contextmanager
def limited_meeting() -> Iterator[None]:
    """Within this context, all ranks must meet in time.

    Raises:
        ValueError: the environment's limit is no positive number of seconds.
    """
    said = os.environ.get(VARIABLE, str(SECONDS))
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"{VARIABLE}={said}: expected a number of seconds, more than 0 and at most {LONGEST:,}")
    guard = subprocess.Popen([sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{seconds:g}"], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        assert guard.stdin is not None
        guard.stdin.close()


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent has gone
    os._exit(0)


def _guard(parent: int, seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    time.sleep(seconds)
    ranks = [os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID") if name in os.environ]
    who = f"rank {ranks[0]}" if ranks else f"process {parent}"
    sys.stderr.write(f"refdist: {who} has waited {seconds:g} s in mpi_world() for the other ranks: one has ended before it "
                     f"called mpi_world(), or needs longer ({VARIABLE} sets the limit)\n")
    sys.stderr.flush()
    time.sleep(0.5)  # for the launcher to pass it on
    os.kill(parent, getattr(signal, "SIGKILL", signal.SIGTERM))
    os._exit(0)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), float(sys.argv[2]))

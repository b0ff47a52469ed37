"""Groups made by ``split``: ids that all members agree on whatever they have split before, and arguments that cannot be; and
exceptions whose text cannot be had, also under mpirun."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpirun import run_ranks

import refdist as rd


def sums(comm: rd.Comm) -> list[float]:
    pair = comm.split(0 if comm.rank < 2 else None)
    if pair is not None:  # two ranks use up ids that the others have never seen
        pair.split(0)
        pair.split(0)
    whole = comm.split(0)
    assert whole is not None
    parts = [group.all_reduce(np.array(1.0 + comm.rank)) for group in (whole, pair) if group is not None]
    return [float(part) for part in parts]


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_agreed_on_after_uneven_splits(seed: int) -> None:
    results = rd.run(sums, ranks=4, scheduler=seed, sends=("buffered", "rendezvous")[seed % 2])
    assert results == [[10.0, 3.0], [10.0, 3.0], [10.0], [10.0]]


@pytest.mark.parametrize(("color", "key"), [(0.5, 0), ("a", 0), (0, 0.9), (0, None)])
def test_colors_and_keys_that_are_no_integers_are_refused(color: object, key: object) -> None:
    with pytest.raises(TypeError, match=r"(color|key)=.* \(rank \d\): expected an integer"):
        rd.run(lambda comm: comm.split(color, key), ranks=2)


FAILS = """
import sys, refdist as rd
class Silent(Exception):
    def __str__(self): raise ZeroDivisionError
comm = rd.mpi_world()
if comm.rank == 1:
    raise Silent() if sys.argv[1] == "silent" else ValueError("a name \\udcff of a file")
comm.barrier()
"""
BOARD = """
import refdist as rd, refdist.comm.mpi as mpi
from mpi4py import MPI
def broken(self, *_): raise OSError("no space for the board")
if MPI.COMM_WORLD.rank == 1:
    mpi._MPI._make_board = broken
rd.mpi_world().barrier()
"""


@pytest.mark.parametrize(("program", "words", "says"), [(FAILS, ["silent"], "Silent"), (FAILS, ["name"], "a name"),
                                                        (BOARD, [], "no space for the board")])
def test_whatever_an_exception_says_the_job_ends_and_says_it_once(program: str, words: list[str], says: str,
                                                                  tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    done = run_ranks(3, [script, *words])  # type: ignore[list-item]
    assert done.returncode not in (0, None)
    assert says in done.stderr
    assert "Error in sys.excepthook" not in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr

"""All axes at once on MPI ranks: the named preset of 16 ranks gives the single device's gradients."""

from __future__ import annotations

import json

from mpirun import run_ranks


def test_the_preset_runs_on_16_mpi_ranks() -> None:
    done = run_ranks(16, ["-m", "refdist", "check", "--preset", "llama3", "--batch", "8", "--seq", "16", "--json"], timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"]
    assert len(result["parameters"]) == 3 + 6 * 9  # six layers
    assert max(row["max_rel"] for row in result["parameters"].values()) <= 1e-10
    assert all(abs(row["ratio"] - 1) <= 1e-10 for row in result["parameters"].values())

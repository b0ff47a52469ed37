"""The examples of mixed precision say what they show, and their tables are right."""

from __future__ import annotations

import pathlib
import runpy

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


def table(capsys, name, *arguments):
    """The numbers of an example's table, a row a line."""
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))
    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace("2^", "").split() for line in lines[1:] if line.split()[0].isdigit()]
    return np.array(rows, np.float64), lines[-1]


@pytest.mark.once
def test_fp16_without_loss_scaling_stalls_and_with_it_does_not(capsys):
    rows, _ = table(capsys, "loss_scaling", "--steps", "60")
    step, fp32, unscaled, dynamic, scale, skipped = rows.T
    assert step[-1] == 60
    assert fp32[-1] < 0.6
    assert abs(dynamic[-1] - fp32[-1]) < 0.02
    assert unscaled.min() > np.log(16)  # never better than knowing nothing
    assert (scale[0], scale[-1], skipped[-1]) == (16, 16 + 59 // 20, 0)


@pytest.mark.once
def test_bf16_without_master_weights_stalls_and_with_them_does_not(capsys):
    rows, last = table(capsys, "master_weights", "--steps", "120")
    _, fp32, masters, without = rows.T
    assert fp32[-1] < fp32[0] - 2
    assert abs(masters[-1] - fp32[-1]) < 0.05
    assert without[-1] > without[0] - 0.5
    changed = [float(word.rstrip("%")) for word in last.split()[1:]]
    assert changed[0] > 99
    assert changed[1] > 99
    assert changed[2] < 25


@pytest.mark.parametrize("name", ["loss_scaling", "master_weights"])
def test_the_plot_is_written(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    table(capsys, name, "--steps", "12", "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10000

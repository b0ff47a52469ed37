"""The example about accumulators says what it shows, and the table is right."""

import pathlib
import re
import runpy

import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "fp16_accumulate.py"


def test_the_table_shows_what_the_example_says(capsys):
    runpy.run_path(str(EXAMPLE))["main"](["--largest", "1024", "--rows", "20"])
    unit, _, header, *lines = capsys.readouterr().out.splitlines()
    assert "in units of 2^-24" in unit
    assert re.split(r"  +", header.strip()) == ["K", "BLAS fp32", "v100 fp32", "h100 fp32", "BLAS fp16", "h100 fp16"]
    table = np.array([[float(number) for number in line.replace("/", " ").split()] for line in lines])
    np.testing.assert_array_equal(table[:, 0], 2 ** np.arange(4, 11))
    spread, mean = table[-1, 1::2], table[-1, 2::2]
    assert spread[0] < 10 < spread[2] < spread[1] < spread[3]
    assert np.all(np.abs(-mean[1:3] / spread[1:3] - 1) < 0.05)  # truncation has one sign
    growth = table[-1, 1::2] / table[-4, 1::2]  # from K = 128 to 1024
    assert 4 < growth[2] < 16  # in proportion to K
    assert 1.5 < growth[3] < 4  # as its square root


def test_the_plot_is_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    runpy.run_path(str(EXAMPLE))["main"](["--largest", "64", "--rows", "4", "--plot", str(tmp_path / "error.png")])
    assert (tmp_path / "error.png").stat().st_size > 1000
    assert capsys.readouterr().out

import importlib
import math

import numpy as np
import pytest
from kernels import assert_close, numeric_gradient

from refdist import ops

rng = np.random.default_rng(6)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def turned(x, positions, frequencies):
    """Each plane (j, j + d/2) as a complex number, multiplied by exp(i · position · frequency)."""
    half = x.shape[-1] // 2
    plane = x[..., :half] + 1j * x[..., half:]
    plane = plane * np.exp(1j * positions[..., None, None] * frequencies)
    return np.concatenate([plane.real, plane.imag], axis=-1)


@pytest.mark.parametrize("positions", [np.array([0, 1, 7, 3, 500]), rng.integers(0, 99, size=(2, 5))])
def test_forward_turns_planes(positions):
    x, frequencies = rng.normal(size=(2, 5, 3, 8)), ops.rotary_frequencies(8, 10000.0)
    tables = ops.RotaryTables(frequencies, positions, np.float64)
    assert_close(ops.rotary(x, tables), turned(x, positions, frequencies), 1e-13)


def test_gradient_is_that_of_finite_differences():
    x, dy = rng.normal(size=(2, 3, 2, 4)), rng.normal(size=(2, 3, 2, 4))
    tables = ops.RotaryTables(ops.rotary_frequencies(4, 100.0), np.array([1, 5, 2]), np.float64)
    assert_close(ops.rotary_backward(dy, tables), numeric_gradient(lambda x: np.sum(dy * ops.rotary(x, tables)), x))


def test_scores_depend_on_distance_only():
    q, k, frequencies = rng.normal(size=(1, 1, 1, 16)), rng.normal(size=(1, 1, 1, 16)), ops.rotary_frequencies(16, 5e5)

    def score(i, j):
        turn = [ops.RotaryTables(frequencies, np.array([p]), np.float64) for p in (i, j)]
        return np.vdot(ops.rotary(q, turn[0]), ops.rotary(k, turn[1]))

    assert score(11, 4) == pytest.approx(score(1007, 1000), abs=1e-11)


def test_llama3_scaling_is_the_published_rule():
    plain = ops.rotary_frequencies(32, 10000.0)
    for got, f in zip(ops.rotary_frequencies(32, 10000.0, LLAMA3), plain, strict=True):
        wavelength = 2 * math.pi / f
        if wavelength < 64 / 4.0:
            want = f
        elif wavelength > 64 / 1.0:
            want = f / 8.0
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            want = (1 - smooth) * f / 8.0 + smooth * f
        assert got == pytest.approx(want, rel=1e-14)
    assert len({float(r) for r in np.round(ops.rotary_frequencies(32, 10000.0, LLAMA3) / plain, 9)}) > 2


def test_one_table_serves_formats_and_numbers_of_heads_by_turns():
    positions, frequencies = np.array([3, 900, 41]), ops.rotary_frequencies(8, 1e4)
    tables = ops.RotaryTables(frequencies, positions, np.float64)
    for heads, dtype in ((2, np.float32), (2, np.float64), (3, np.float64), (3, np.float32), (2, np.float64)):
        x = rng.normal(size=(2, 3, heads, 8)).astype(dtype)
        got = ops.rotary(x, tables)
        assert got.dtype == dtype
        assert_close(got, turned(x, positions, frequencies), 1e-13 if dtype == np.float64 else 1e-5)
    assert tables.as_wide_as_rows(3, np.dtype(np.float32)) is tables.as_wide_as_rows(3, np.dtype(np.float32))


def test_positions_of_each_row_meet_their_row_in_every_block(monkeypatch):
    monkeypatch.setattr(importlib.import_module("refdist.ops.kernel"), "BLOCK", 40)
    for rows in (2, 5):
        positions, frequencies = rng.integers(0, 99, size=(rows, 3)), ops.rotary_frequencies(8, 1e4)
        x, tables = rng.normal(size=(rows, 3, 2, 8)), ops.RotaryTables(frequencies, positions, np.float64)
        assert_close(ops.rotary(x, tables), turned(x, positions, frequencies), 1e-13)

"""Optimizers, clipping and schedules against written-out arithmetic, exact sums, and PyTorch where it is installed."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from models import model
from training import OPTIMIZERS, make_optimizer, update

import refdist as rd
from refdist.optim import clip_scale, exact_squares, exact_value, linear, squared_norm, warmup_cosine

SHAPES = {"weight": (37, 501), "gain": (29,), "tall": (7000, 3), "none": (0, 5)}


def run(name: str, dtype: type, steps: int = 10, scale: float = 1.0, cuts: int = 1):
    """Parameters and state after some steps, by the product and written out. Rows go to the product in `cuts` pieces."""
    rng = np.random.default_rng(3)
    optimizer = make_optimizer(name)
    got, want = {}, {}
    for key, shape in SHAPES.items():
        mine = rng.normal(size=shape).astype(dtype)
        theirs = mine.copy()
        count = len(optimizer.state_names)
        state = [np.zeros_like(mine) for _ in range(count)]
        expected = [np.zeros_like(mine) for _ in range(count)]
        for step in range(1, steps + 1):
            g = rng.normal(size=shape).astype(dtype)
            pieces = zip(*(np.array_split(array, cuts) for array in (mine, g, *state)), strict=True)
            for p, part, *moments in pieces:
                optimizer.update(p, part, tuple(moments), step, len(shape), scale)
            theirs = update(name, theirs, g if scale == 1 else g * dtype(scale), expected, step)
        got[key], want[key] = [mine, *state], [theirs, *expected]
    return got, want


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_ten_steps_are_the_written_out_ones(name, scale):
    got, want = run(name, np.float64, scale=scale)
    for key, arrays in got.items():
        for mine, theirs in zip(arrays, want[key], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_get_the_bits_of_the_whole(name):
    whole, _ = run(name, np.float32)
    pieces, _ = run(name, np.float32, cuts=7)
    for key, arrays in whole.items():
        assert all(np.array_equal(a, b) for a, b in zip(arrays, pieces[key], strict=True)), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pytorch_agrees(name):
    torch = pytest.importorskip("torch")
    settings = dict(OPTIMIZERS[name])
    rng = np.random.default_rng(0)
    start = {key: rng.normal(size=shape) for key, shape in SHAPES.items()}
    tensors = {key: torch.tensor(value, requires_grad=True) for key, value in start.items()}
    decayed = [t for t in tensors.values() if t.ndim == 2]
    plain = [t for t in tensors.values() if t.ndim < 2]
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
    theirs = kind([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], **settings)
    optimizer = make_optimizer(name)
    mine = {key: value.copy() for key, value in start.items()}
    state = {key: tuple(np.zeros_like(value) for _ in optimizer.state_names) for key, value in start.items()}
    for step in range(1, 11):
        for key, tensor in tensors.items():
            g = rng.normal(size=SHAPES[key])
            tensor.grad = torch.tensor(g)
            optimizer.update(mine[key], g, state[key], step, g.ndim)
        theirs.step()
    for key, tensor in tensors.items():
        np.testing.assert_allclose(mine[key], tensor.detach().numpy(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("falls", ["cosine", "linear"])
@pytest.mark.parametrize("threshold", [0.5, 50.0, 1e6])
def test_pytorch_agrees_on_clipping_and_schedules(threshold, falls):
    """Ten steps of AdamW, the warm-up three of them, at thresholds that clip always, sometimes and never."""
    torch = pytest.importorskip("torch")
    rates = torch.optim.lr_scheduler
    rng = np.random.default_rng(0)
    start = {key: rng.normal(size=shape) for key, shape in SHAPES.items()}
    tensors = {key: torch.tensor(value, requires_grad=True) for key, value in start.items()}
    theirs = torch.optim.AdamW(tensors.values(), lr=0.02, weight_decay=0.0)
    after = rates.CosineAnnealingLR(theirs, 7, 0.002) if falls == "cosine" else rates.PolynomialLR(theirs, 7, 1.0)
    schedule = rates.SequentialLR(theirs, [rates.LinearLR(theirs, 1 / 3, 1.0, 2), after], [2])
    optimizer = rd.AdamW((warmup_cosine if falls == "cosine" else linear)(0.02, 3, 10), weight_decay=0.0)
    mine = {key: value.copy() for key, value in start.items()}
    state = {key: tuple(np.zeros_like(value) for _ in optimizer.state_names) for key, value in start.items()}
    clipped = 0
    for step in range(1, 11):
        size = rng.uniform(0.05, 0.6)
        grads = {key: size * rng.normal(size=shape) for key, shape in SHAPES.items()}
        norm = math.sqrt(squared_norm(list(grads.values())))
        clipped += norm > threshold
        for key, tensor in tensors.items():
            tensor.grad = torch.tensor(grads[key])
            scale = clip_scale(norm + 1e-6, threshold)  # PyTorch adds this to the norm
            optimizer.update(mine[key], grads[key], state[key], step, grads[key].ndim, scale)
        assert float(torch.nn.utils.clip_grad_norm_(tensors.values(), threshold)) == pytest.approx(norm, rel=1e-12)
        theirs.step()
        schedule.step()
    assert {0.5: clipped == 10, 50.0: 0 < clipped < 10, 1e6: clipped == 0}[threshold]
    for key, tensor in tensors.items():
        np.testing.assert_allclose(mine[key], tensor.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_norms_and_biases_decay_only_when_asked():
    for decay_all in (False, True):
        for kind in (rd.SGD, rd.AdamW):
            optimizer = kind(0.1, weight_decay=0.5, decay_all=decay_all)
            p, zero = np.array([2.0]), np.zeros(1)
            optimizer.update(p, zero, tuple(np.zeros(1) for _ in optimizer.state_names), 1, 1)
            assert p[0] == pytest.approx(2 * (1 - 0.05) if decay_all else 2)


@pytest.mark.parametrize("make", [
    lambda: rd.SGD(-1.0), lambda: rd.SGD(math.nan), lambda: rd.SGD(0.1, momentum=1.0), lambda: rd.SGD(0.1, nesterov=True),
    lambda: rd.SGD(0.1, weight_decay=-1), lambda: rd.AdamW(betas=(0.9, 1.0)), lambda: rd.AdamW(eps=0.0),
    lambda: rd.run(lambda comm: rd.Trainer(model()[0], rd.Plan(), comm, clip_norm=0.0), 1)])
def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(ValueError, match=r"expected|needs"):
        make()


def test_schedules():
    for schedule, final in ((warmup_cosine(2.0, 10, 100), 0.2), (linear(2.0, 10, 100), 0.0)):
        rates = [schedule(step) for step in range(1, 121)]
        np.testing.assert_allclose(rates[:10], 0.2 * np.arange(1, 11))
        assert all(a >= b for a, b in itertools.pairwise(rates[9:])), "it falls after the warm-up"
        assert rates[99] == pytest.approx(final) == rates[119]
    assert warmup_cosine(2.0, 10, 100, 0.1)(55) == pytest.approx(0.5 * (2.0 + 0.2))
    assert linear(2.0, 10, 100)(55) == pytest.approx(1.0)
    assert linear(1.0, 0, 1)(1) == 0.0
    step_rates = rd.SGD(lr=lambda step: 1 / step)
    p = np.zeros(1)
    for step in (1, 2, 4):
        step_rates.update(p, np.ones(1), (), step, 1)
    assert p[0] == -1.75


def test_clipping_on_both_sides_of_the_threshold():
    assert clip_scale(2.0, None) == clip_scale(2.0, 2.0) == clip_scale(1.0, 2.0) == 1.0
    assert clip_scale(4.0, 2.0) == 0.5


def test_the_norm_is_that_of_exact_arithmetic():
    rng = np.random.default_rng(0)
    for trial in range(40):
        a = rng.normal(size=(rng.integers(1, 9), rng.integers(1, 40))) * 10.0 ** rng.uniform(-170, 150)
        if trial % 3 == 0:
            a *= 10.0 ** rng.uniform(-150, 0, size=a.shape)
        rows = np.add.reduce(a * a, axis=1)
        assert squared_norm([a]) == float(sum(Fraction(row) for row in rows.tolist()))
    assert squared_norm([]) == squared_norm([np.zeros((0, 3))]) == squared_norm([np.zeros(4)]) == 0
    assert squared_norm([np.full(4, 2e-162)]) == 4 * (2e-162) ** 2, "subnormal squares"
    assert squared_norm([np.full((3, 1), 1.3e154)]) == math.inf, "the sum overflows, no row does"
    assert squared_norm([np.full(3, 1e200)]) == math.inf
    assert math.isnan(squared_norm([np.array([np.nan, np.inf, 1.0])]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_the_norm_does_not_depend_on_cuts_and_order(dtype):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(301, 777)).astype(dtype)
    whole = squared_norm([a])
    assert whole == pytest.approx(float(np.square(a, dtype=np.float64).sum()), rel=1e-13)
    for parts in (2, 7, 50, 301, 400):
        pieces = [np.ascontiguousarray(part) for part in np.array_split(a, parts)]
        rng.shuffle(pieces)
        assert exact_value(sum(exact_squares([piece]) for piece in pieces)) == whole


def test_numbers_that_are_none_are_refused():
    for options in ({"eps": float("nan")}, {"betas": (0.9,)}, {"betas": (0.9, 0.99, 0.999)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            rd.AdamW(**options)
    with pytest.raises(ValueError, match=r"lr\(3\)=nan: expected a number of at least 0"):
        rd.AdamW(lambda step: float("nan")).learning_rate(3)

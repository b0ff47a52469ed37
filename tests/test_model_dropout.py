"""Dropout masks are functions of global indices; gradients under dropout are those of the dropped-out loss."""

import dataclasses

import numpy as np
import pytest
from kernels import assert_close, numeric_gradient
from models import batch, model
from whole import GradientSum, micro_batch

from refdist import ops
from refdist.device import Device
from refdist.model import reference
from refdist.model.dropout import Dropout
from refdist.model.transformer import Context

DROPPING = {"attention_dropout": 0.3, "hidden_dropout": 0.2}


def whole(config, rows=4, seq=10, seed=5):
    return Dropout(config, seed, np.arange(rows), seq, np.arange(seq))


def test_kernel_scales_what_it_keeps_and_is_its_own_backward():
    rng = np.random.default_rng(0)
    x, dy, keep = rng.normal(size=(3, 4)), rng.normal(size=(3, 4)), rng.random((3, 4)) < 0.5
    assert_close(ops.dropout(x, keep, 0.2), np.where(keep, x / 0.8, 0), 1e-15)
    want = numeric_gradient(lambda x: np.sum(dy * ops.dropout(x, keep, 0.2)), x)
    assert_close(ops.dropout(dy, keep, 0.2), want)
    assert ops.dropout(x, keep, 0.2, out=x) is x


def test_a_part_draws_the_masks_of_the_whole():
    config, _ = model(**DROPPING)
    all_of_it = whole(config)
    rows, positions = np.array([1, 3]), np.array([0, 1, 7, 8, 9])
    part = dataclasses.replace(all_of_it, rows=rows, positions=positions, first_head=3)
    for name in ("attention", "mlp"):
        mask = all_of_it.branch(1, name)
        assert mask.shape == (4, 10, 24)
        assert np.array_equal(part.branch(1, name), mask[np.ix_(rows, positions)])
    everything = slice(0, 99)
    weights = all_of_it.attention(1)(np.arange(10), np.arange(10), 0)
    weights = weights(slice(0, 4), slice(0, 6), everything, everything)  # [rows, heads, queries, keys]
    keys = np.array([2, 5, 6])
    tile = part.attention(1)(positions, keys, 1)(slice(1, 2), slice(0, 2), slice(1, 4), slice(0, 3))
    assert np.array_equal(tile, weights[np.ix_([3], [4, 5], positions[1:4], keys)])
    assert set(np.unique(weights)) == {0, 1 / 0.7}


def test_masks_differ_by_seed_layer_and_place_and_drop_as_many_as_they_should():
    config, _ = model(**DROPPING)
    masks = [
        whole(config, rows=40, seq=50, seed=seed).branch(layer, name)
        for seed in (1, 2)
        for layer in (0, 1)
        for name in ("attention", "mlp")
    ]
    for i, mask in enumerate(masks):
        assert mask.mean() == pytest.approx(0.8, abs=0.01)
        for other in masks[:i]:
            assert (mask == other).mean() == pytest.approx(0.8**2 + 0.2**2, abs=0.01)


def test_attention_masks_differ_by_seed_layer_and_row():
    config, _ = model(**DROPPING)
    place = np.arange(50)
    everything = slice(0, 2), slice(0, config.num_attention_heads), slice(0, 50), slice(0, 50)
    masks = [(whole(config, rows=2, seq=50, seed=seed).attention(layer)(place, place, 0)(*everything) > 0)[row]
             for seed in (1, 2) for layer in (0, 1) for row in (0, 1)]
    for i, mask in enumerate(masks):
        assert mask.mean() == pytest.approx(0.7, abs=0.02)
        for other in masks[:i]:
            assert (mask == other).mean() == pytest.approx(0.7**2 + 0.3**2, abs=0.02)


def test_gradients_are_those_of_the_dropped_out_loss():
    config, params = model(**DROPPING, attention_bias=True)
    ids, labels = batch(config, rows=3, seq=7)

    def loss_of(params):
        return reference.loss_and_grads(config, params, ids, labels, dropout_seed=3)[0]

    _, grads = reference.loss_and_grads(config, params, ids, labels, dropout_seed=3)
    rng, step = np.random.default_rng(0), 1e-4
    for name, grad in grads.items():
        direction = rng.normal(size=grad.shape)
        shifted = [loss_of(params | {name: params[name] + k * step * direction}) for k in (-2, -1, 1, 2)]
        slope = (shifted[0] - 8 * shifted[1] + 8 * shifted[2] - shifted[3]) / (12 * step)
        assert np.sum(grad * direction) == pytest.approx(slope, rel=1e-7, abs=1e-9), name


def test_no_seed_no_dropout_and_each_seed_another():
    config, params = model(**DROPPING)
    plain_config, _ = model()
    ids, labels = batch(config)
    plain = reference.loss_and_grads(plain_config, params, ids, labels)[0]
    assert reference.loss_and_grads(config, params, ids, labels)[0] == plain
    losses = [reference.loss_and_grads(config, params, ids, labels, dropout_seed=seed)[0] for seed in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    assert plain not in losses


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", [DROPPING, {"attention_dropout": 0.5}, {"hidden_dropout": 0.5}])
def test_groups_do_not_change_the_masks_and_the_pieces_give_the_same_bits(dtype, options):
    config, params = model(dtype=dtype, **options)
    ids, labels = batch(config)
    groups = [[0, 1], [2], [3, 4]]
    at_once, _ = reference.loss_and_grads(config, params, ids, labels, dropout_seed=9)
    loss, want = reference.loss_and_grads(config, params, ids, labels, dropout_seed=9, groups=groups)
    assert loss == pytest.approx(at_once, rel=1e-5 if dtype == np.float32 else 1e-13)
    device, positions = Device(), np.arange(ids.shape[1])
    sink = GradientSum(device)
    for rows in groups:
        dropout = Dropout(config, 9, np.array(rows), ids.shape[1], positions)
        context = Context.of(config, device, positions, dtype, dropout=dropout)
        micro_batch(config, params, ids[rows], labels[rows], 1 / np.count_nonzero(labels >= 0), sink, context)
    assert all(np.array_equal(sink.sums[name], want[name]) for name in want)
    assert device.live["activation"] == 0

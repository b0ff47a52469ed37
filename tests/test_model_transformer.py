"""The model in pieces gives the reference's bits, keeps what its docstring says, and counts what the formulas say."""

import numpy as np
import pytest
from models import batch, model
from whole import GradientSum, combine_tied, micro_batch

from refdist.device import Device
from refdist.model import reference
from refdist.model import transformer as pieces
from refdist.model.transformer import Context

VARIANTS = [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True, "num_key_value_heads": 1}]


def run_groups(config, params, ids, labels, ranks, segments=None):
    """[ranks → micro-batches → rows] through the pieces, added in that order."""
    count = np.count_nonzero(labels >= 0)
    device, loss, total = Device(), 0.0, {}
    for micro_batches in ranks:
        sink, rank_loss = GradientSum(device), 0.0
        for rows in micro_batches:
            own = None if segments is None else segments[rows]
            context = Context.of(config, device, np.arange(ids.shape[1]), params["model.norm.weight"].dtype, own)
            rank_loss += micro_batch(config, params, ids[rows], labels[rows], 1 / count, sink, context)
        loss += rank_loss
        combine_tied(config, sink.sums)
        total = {name: total[name] + grad if total else grad for name, grad in sink.sums.items()}
    return loss / count, total, device


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [[[[0, 1, 2, 3, 4]]], [[[0, 1], [2]], [[3], [4], []]]])
def test_the_pieces_give_the_bits_of_the_reference(options, dtype, ranks):
    config, params = model(dtype=dtype, **options)
    ids, labels = batch(config)
    segments = np.sort(np.random.default_rng(0).integers(0, 3, ids.shape), axis=1)
    want_loss, want = reference.loss_and_grads(config, params, ids, labels, segment_ids=segments, groups=ranks)
    loss, grads, _ = run_groups(config, params, ids, labels, ranks, segments)
    assert loss == want_loss
    assert grads.keys() == want.keys()
    for name in want:
        assert grads[name].dtype == dtype
        assert np.array_equal(grads[name], want[name]), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_block_saves_what_its_docstring_lists(dtype):
    config, params = model(dtype=dtype)
    device, (rows, seq) = Device(), (3, 13)
    context = Context.of(config, device, np.arange(seq), dtype)
    x = device.copy(np.random.default_rng(0).normal(size=(rows, seq, 24)).astype(dtype), "activation")
    before = device.live["activation"]
    y, saved = pieces.block_forward(config, params, 0, x, context)
    sb, n, statistic = rows * seq, np.dtype(dtype).itemsize, max(4, np.dtype(dtype).itemsize)
    widths = 2 * 24 + 2 * 6 * 6 + 2 * 2 * 6 + 2 * 40  # x and middle, q and attended, k and v, gate and up
    assert device.live["activation"] - before == n * sb * widths + statistic * sb * (2 + 6)  # y is the next block's x
    del x, y, saved
    assert device.live["activation"] == 0


def test_nothing_stays_alive_but_the_gradients():
    config, params = model()
    ids, labels = batch(config)
    _, grads, device = run_groups(config, params, ids, labels, [[[0, 1, 2, 3, 4]]])
    alive = {category: size for category, size in device.live.items() if size}
    total = sum(grad.nbytes for grad in grads.values())
    assert alive == {"gradient": total, "total": total}


def test_flops_are_those_of_the_formula():
    config, params = model(tie_word_embeddings=True)
    ids, labels = batch(config, rows=5, seq=13)
    _, _, device = run_groups(config, params, ids, labels, [[[0, 1, 2, 3, 4]]])
    matrices = 2 * (24 * (36 + 12 + 12) + 36 * 24 + 3 * 24 * 40) + 24 * 37
    forward = 2 * matrices * 65 + 2 * (4 * 5 * 6 * 6 * 13 * 13 // 2)
    assert device.flops == {"model": 3 * forward, "executed": 3 * forward}


def test_weight_gradients_may_be_made_later():
    config, params = model()
    ids, labels = batch(config)
    kept = []

    class Later:
        def add(self, name, kernel, *args):
            kept.append((name, kernel, args))

    device = Device()
    context = Context.of(config, device, np.arange(ids.shape[1]), np.float64)
    micro_batch(config, params, ids, labels, 1 / np.count_nonzero(labels >= 0), Later(), context)
    grads = {name: device.call(kernel, *args) for name, kernel, args in reversed(kept)}
    _, want = reference.loss_and_grads(config, params, ids, labels)
    assert all(np.array_equal(grads[name], want[name]) for name in want)


def test_losses_for_evaluation_are_the_token_losses():
    config, params = model(tie_word_embeddings=True)
    ids, labels = batch(config)
    context = Context.of(config, Device(), np.arange(ids.shape[1]), np.float64)
    x = pieces.embed_forward(params, ids, context)
    for layer in range(config.num_hidden_layers):
        x, _ = pieces.block_forward(config, params, layer, x, context)
    losses = pieces.head_losses(config, params, x, labels, context)
    np.testing.assert_array_equal(losses, reference.token_losses(config, params, ids, labels))

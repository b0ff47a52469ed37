"""Recomputation: the same bits, less memory, and the FLOPs of the formulas."""

import numpy as np
import pytest
from models import batch, model
from whole import GradientSum

from refdist.device import Device
from refdist.errors import ConfigError
from refdist.model.dropout import Dropout
from refdist.model.recompute import Recompute, restore
from refdist.model.transformer import Context, block_backward, block_forward, embed_backward, embed_forward, head_forward_backward

LAYERS = 5
EACH = [("none", 1), ("selective", 1), ("full", 1), ("full", 2), ("full", 5), ("full", 9)]


def run(mode, blocks=1, dtype=np.float32, **options):
    """One micro-batch as a stage runs it; returns the gradients, the device, and bytes of activations kept after forward."""
    config, params = model(dtype=dtype, num_hidden_layers=LAYERS, **options)
    ids, labels = batch(config)
    device, positions, recompute = Device(), np.arange(ids.shape[1]), Recompute(mode, blocks)
    dropout = Dropout(config, 4, np.arange(len(ids)), ids.shape[1], positions)
    context = Context.of(config, device, positions, dtype, dropout=dropout)
    sink, stack, dropped = GradientSum(device), [], []
    x = embed_forward(params, ids, context)
    for layer in range(LAYERS):
        x, saved = block_forward(config, params, layer, x, context)
        stack.append(recompute.kept(saved, layer))
        del saved
    kept = device.live["activation"] - x.nbytes
    _, dx = head_forward_backward(config, params, x, labels, 1 / np.count_nonzero(labels >= 0), sink, context)
    for layer in reversed(range(LAYERS)):
        restore(stack, config, layer, lambda layer: params, dropped.append, context)
        dx = block_backward(config, params, layer, dx, stack.pop(), sink, context)
    embed_backward(config, dx, ids, sink, context)
    return sink.sums, device, kept, dropped


@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.3, "hidden_dropout": 0.2, "attention_bias": True}])
@pytest.mark.parametrize(("mode", "blocks"), EACH)
def test_gradients_are_the_same_bits(mode, blocks, options):
    want, *_ = run("none", **options)
    got, *_ = run(mode, blocks, **options)
    assert all(np.array_equal(got[name], want[name]) for name in want)
    assert got.keys() == want.keys()


def test_what_is_kept_is_what_the_formulas_say():
    sb, n = 5 * 13, 4
    x, heads = sb * 24 * n, sb * 36 * n
    block = sb * n * (2 * 24 + 2 * 36 + 2 * 12 + 2 * 40 + 2 + 6)
    assert run("none")[2] == LAYERS * block
    assert run("selective")[2] == LAYERS * (block - heads - sb * 6 * n)  # without the attention's output and lse
    assert run("full")[2] == LAYERS * x
    assert run("full", 2)[2] == 3 * x
    assert run("full", 5)[2] == x


def test_flops_are_those_of_one_more_forward():
    _, device, *_ = run("none")
    model_flops = device.flops["model"]
    assert device.flops["executed"] == model_flops
    head = 3 * 2 * 65 * 24 * 37
    core_attention = 2 * 2 * 5 * 36 * 13 * 13 // 2
    for mode, blocks, more in [("selective", 1, LAYERS * core_attention), ("full", 1, 0), ("full", 2, 0)]:
        _, device, *_ = run(mode, blocks)
        assert device.flops["model"] == model_flops
        again = device.flops["executed"] - model_flops
        if mode == "full":
            assert 3 * again == model_flops - head  # a third of the blocks' work: 4/3 in all
        else:
            assert again == more


def test_nothing_stays_alive_and_other_layers_are_dropped_again():
    _, device, _, dropped = run("full", 2)
    assert device.live["activation"] == 0
    assert dropped == [2, 0]  # layer 4 is alone in its group


@pytest.mark.parametrize(("mode", "blocks"), [("some", 1), ("full", 0)])
def test_what_does_not_exist_is_refused(mode, blocks):
    with pytest.raises(ConfigError, match="expected"):
        Recompute(mode, blocks)

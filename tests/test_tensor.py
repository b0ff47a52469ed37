"""Tensor parallelism: the single device's gradients from layers that are cut, with the formulas' bytes and memory."""

import json
import re
import sys

import numpy as np
import pytest
from models import batch, model
from whole import GradientSum

import refdist as rd
from refdist import ops
from refdist.device import Device
from refdist.device.events import Kernel, Message
from refdist.model.layout import layout
from refdist.model.transformer import Context, block_backward, block_forward
from refdist.parallel.sharding import box, local_rows, shard, sum_partial, unshard
from refdist.parallel.tensor import TensorParallel
from refdist.testing.compare import require_equal


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"save_gathered": True}], ids=json.dumps)
@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(2, 6, 2), (3, 6, 3), (4, 8, 2), (5, 5, 5), (8, 8, 1)])
def test_gradients_are_those_of_one_device(tp, heads, kv_heads, options):
    """Vocabulary 257, FFN 90, sequence 13: nothing but the heads divides."""
    config, params = model(vocab_size=257, intermediate_size=90, num_hidden_layers=1, num_attention_heads=heads,
                           num_key_value_heads=kv_heads, attention_bias=True, mlp_bias=True, tie_word_embeddings=tp == 4)
    ids, labels = batch(config, rows=2, seq=13)
    loss, grads = rd.reference.loss_and_grads(config, params, ids, labels)
    plan = rd.Plan(tp=tp, **options)
    for got in rd.run(lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm), ranks=tp):
        assert abs(got[0] - loss) < 1e-12
        require_equal(got[1], grads, f"tp={tp}")


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_f_and_g_and_their_adjoints(ranks, sequence_parallel):
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩: what is whole on every rank counts as a copy on each, unless it is a part of the sequence."""
    def program(comm):
        rng, device = np.random.default_rng(comm.rank), Device()
        axis = TensorParallel(comm, device, 257, 13, sequence_parallel)
        shape = (2, axis.lengths[comm.rank] if sequence_parallel else 13, 4)
        same = rng if sequence_parallel else np.random.default_rng(99)  # without it the residual stream is the same everywhere
        copies = 1 if sequence_parallel else comm.size
        x, y = same.standard_normal(shape), rng.standard_normal((2, 13, 4))
        f = np.vdot(axis.enter(x).wait(), y), np.vdot(x, axis.enter_backward(y.copy()).wait()) / copies
        y, x = same.standard_normal(shape), rng.standard_normal((2, 13, 4))
        g = np.vdot(axis.leave(x.copy()), y) / copies, np.vdot(x, axis.leave_backward(y))
        ids, w = np.random.default_rng(5).integers(0, 257, (2, 13)), rng.standard_normal((axis.cuts[comm.rank + 1]
                                                                                         - axis.cuts[comm.rank], 4))
        kernel, args = axis.embedding_weight_grad(y, ids)
        embedding = np.vdot(axis.embedding(w, ids), y) / copies, np.vdot(w, kernel(*args))
        return f, g, embedding

    for pair in zip(*rd.run(program, ranks=ranks), strict=True):
        there, back = np.sum(pair, axis=0)
        assert abs(there - back) < 1e-12 * max(abs(there), 1)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False}, {"save_gathered": True}], ids=json.dumps)
@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(1, 6, 2), (2, 6, 2), (3, 6, 3), (4, 8, 2), (5, 5, 5), (8, 8, 1)])
def test_a_layer_with_any_gradient_from_above(tp, heads, kv_heads, options):
    """One block with random x and dy: y, dx and each weight's gradient; sequence 13 and FFN 39 are cut unevenly."""
    config, params = model(intermediate_size=39, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads,
                           attention_bias=True, mlp_bias=True)
    rows = {name: row for name, row in layout(config, options.get("sequence_parallel", True), tp).items() if row.layer == 0}
    weights = {name: params[name] for name in rows}
    rng = np.random.default_rng(tp)
    x, dy = rng.standard_normal((2, 2, 13, config.hidden_size))

    def through(weights, x, dy, tensor=None):
        context, sink = Context.of(config, Device(), np.arange(13), np.float64, tensor=tensor), GradientSum(Device())
        y, saved = block_forward(config, weights, 0, x, context)
        y = y.copy()
        return y, block_backward(config, weights, 0, dy, saved, sink, context), sink.sums

    y, dx, grads = through(weights, x.copy(), dy.copy())

    def program(comm):
        axis = TensorParallel(comm, Device(), config.vocab_size, 13, **options)
        parts = shard(rows, weights, comm.size, comm.rank)
        mine = through(parts, *(np.ascontiguousarray(array[:, axis.part]) for array in (x, dy)), axis)
        sum_partial(rows, mine[2], comm, comm.split(comm.rank // max(1, tp // kv_heads)))
        return axis.part, *mine[:2], unshard(rows, mine[2], comm)

    for part, y_part, dx_part, got in rd.run(program, ranks=tp):
        assert y_part.shape == x[:, part].shape
        np.testing.assert_allclose(y_part, y[:, part], rtol=0, atol=1e-12)
        np.testing.assert_allclose(dx_part, dx[:, part], rtol=0, atol=1e-12)
        require_equal({name: got[name] for name in rows}, {name: grads[name] for name in rows}, f"tp={tp}")


def test_whole_parameters_are_gathered_in_one_message_a_layer():
    config, params = model(num_hidden_layers=3)

    def program(comm):
        device = Device()
        trainer = rd.Trainer(config, rd.Plan(tp=2), comm, params=params, precision="fp64", device=device)
        trainer.full_params()
        (gather,) = device.traffic
        return gather.messages, gather.bytes

    messages, sizes = zip(*rd.run(program, 2), strict=True)
    assert messages == (5, 5)  # embedding, layers and head
    assert sum(sizes) == sum(array.nbytes for name, array in params.items() if "norm" not in name)


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize(("vocab", "ranks"), [(257, 4), (3, 5), (1, 2)])
def test_the_loss_of_logits_that_nobody_has_whole(vocab, ranks, size):
    rng = np.random.default_rng(0)
    logits = size * rng.uniform(-1, 1, (11, vocab))
    labels = rng.integers(0, vocab, 11)
    labels[3] = ops.IGNORED
    wanted, lse = ops.cross_entropy(logits, labels)
    gradient = ops.cross_entropy_backward(0.3, logits, labels, lse)

    def program(comm):
        axis = TensorParallel(comm, Device(), vocab, 11)
        own = slice(axis.cuts[comm.rank], axis.cuts[comm.rank + 1])
        part = np.ascontiguousarray(logits[:, own])
        losses, lse = axis.cross_entropy(part, labels)
        return own, losses, axis.cross_entropy_backward(0.3, part, labels, lse)

    for own, losses, part in rd.run(program, ranks=ranks):
        np.testing.assert_allclose(losses, wanted, rtol=1e-12, atol=1e-11)
        np.testing.assert_allclose(part, gradient[:, own], rtol=1e-10, atol=1e-13)


def test_parameters_are_cut_and_put_together_again():
    config, params = model(vocab_size=257, num_attention_heads=8, num_key_value_heads=2, attention_bias=True)
    rows = layout(config, tp=4)

    def program(comm):
        parts = shard(rows, params, comm.size, comm.rank)
        assert {name: part.shape for name, part in parts.items()} == {
            name: row.shape for name, row in local_rows(rows, comm.size, comm.rank).items()}
        return unshard(rows, parts, comm)

    for whole in rd.run(program, ranks=4):
        assert list(whole) == list(params)
        assert all(np.array_equal(whole[name], params[name]) for name in params)
    key = rows["model.layers.0.self_attn.k_proj.weight"]
    assert [box(key, 4, rank)[0] for rank in range(4)] == [slice(0, 6), slice(0, 6), slice(6, 12), slice(6, 12)]


def traffic(tp, rows=2, seq=24, layers=2, **options):
    """Bytes by operation on the tp axis of one rank, for one more layer."""
    def sent(layers):
        config, params = model(num_attention_heads=tp, num_key_value_heads=tp, num_hidden_layers=layers)
        ids, labels = batch(config, rows=rows, seq=seq)

        def program(comm):
            device = Device()
            rd.loss_and_grads(config, rd.Plan(tp=tp, **options), params, ids, labels, comm=comm, device=device)
            return {row.operation: row.bytes for row in device.traffic if row.axis == "tp"}
        return rd.run(program, ranks=tp)[0]

    fewer, more = sent(layers - 1), sent(layers)
    return {name: more[name] - fewer.get(name, 0) for name in more}


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_a_layer_are_those_of_the_formula(tp):
    sbh = 2 * 24 * 24 * 8  # sequence × batch × hidden in float64
    plain = traffic(tp, sequence_parallel=False)
    assert plain["all_reduce"] == 8 * sbh * (tp - 1) / tp
    again, kept = traffic(tp), traffic(tp, save_gathered=True)
    assert again["reduce_scatter"] == kept["reduce_scatter"] == 4 * sbh * (tp - 1) / tp
    of_this_test = plain["all_gather"]  # `loss_and_grads` gathers the whole gradients in the end
    assert kept["all_gather"] - of_this_test == 4 * sbh * (tp - 1) / tp
    assert again["all_gather"] - of_this_test == 6 * sbh * (tp - 1) / tp
    assert 0 < again["all_reduce"] <= 2 * 24 * 8 * np.log2(tp)  # the gradients of two norms


@pytest.mark.parametrize(("plan", "whole", "part", "gathered"), [
    ({"tp": 2}, 0, 1 / 2, 0), ({"tp": 4}, 0, 1 / 4, 0), ({"cp": 2}, 0, 1 / 2, 0), ({"tp": 2, "cp": 2}, 0, 1 / 4, 0),
    ({"tp": 2, "sequence_parallel": False}, 1, 1 / 2, 0), ({"tp": 2, "save_gathered": True}, 0, 1 / 2, 1),
    ({"tp": 2, "cp": 2, "save_gathered": True}, 0, 1 / 4, 1 / 2)], ids=str)
def test_what_a_layer_keeps_is_what_the_formula_says(plan, whole, part, gathered):
    """Of Korthikanti et al.'s 34·sbh this model has what `transformer.py` lists; no [s, s] matrix, no masks, no dropout."""
    rows, seq = 2, 24
    peaks = []
    for layers in (2, 3):
        config, params = model(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=layers)
        ids, labels = batch(config, rows=rows, seq=seq)

        def program(comm, config=config, params=params, ids=ids, labels=labels):
            device = Device()
            rd.loss_and_grads(config, rd.Plan(**plan), params, ids, labels, comm=comm, device=device)
            return device.peak["activation"]

        peaks.append(rd.run(program, ranks=rd.Plan(**plan).world_size)[0])
    stream = 8 * rows * seq * 2 * (config.hidden_size + 1)  # inputs and statistics of two norms: cut by SP and CP only
    inside = 8 * rows * seq * (4 * 4 * config.head_dim + 4 + 2 * config.intermediate_size)  # q k v, attended, lse; gate, up
    kept = 8 * rows * seq * 2 * config.hidden_size * gathered  # what f gathered for the columns, of this rank's cp part
    assert peaks[1] - peaks[0] == (stream if whole else stream * part) + inside * part + kept


def test_weight_gradients_are_computed_while_the_input_gradient_travels():
    """Between the kernels of the weight gradients the all-reduce of the input gradient takes its later steps."""
    config, params = model(num_attention_heads=4, num_key_value_heads=4, hidden_size=64)
    ids, labels = batch(config, rows=4, seq=64)

    def program(comm):
        events = []
        rd.loss_and_grads(config, rd.Plan(tp=4, sequence_parallel=False), params, ids, labels, comm=comm,
                          device=Device(listeners=[events.append]))
        return [event.name if isinstance(event, Kernel) else event.operation for event in events
                if isinstance(event, (Kernel, Message))]

    for names in rd.run(program, ranks=4):
        trace = " ".join(names)
        assert len(re.findall("linear_weight_grad( all_reduce)+ linear_weight_grad", trace)) >= 2 * config.num_hidden_layers


@pytest.mark.parametrize(("tp", "options", "reason"), [
    (3, {"num_attention_heads": 4, "num_key_value_heads": 2}, "tp=3 does not divide num_attention_heads=4: heads are cut whole"),
    (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "tp=2 neither divides num_key_value_heads=3 nor is a multiple")])
def test_heads_that_cannot_be_cut_are_refused_with_the_reason(tp, options, reason):
    config, params = model(**options)
    ids, labels = batch(config)
    with pytest.raises(rd.PlanError, match=reason):
        rd.run(lambda comm: rd.loss_and_grads(config, rd.Plan(tp=tp), params, ids, labels, comm=comm), ranks=tp)


@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("vocab", [15, 16])
def test_logits_in_several_chunks(plan, vocab, monkeypatch):
    """As with every real vocabulary; of 15 columns two ranks hold 8 and 7, and cut their tokens alike."""
    config, params = model(vocab_size=vocab, num_attention_heads=2, num_key_value_heads=2)
    ids, labels = batch(config, 4, 6)
    loss, grads = rd.reference.loss_and_grads(config, params, ids, labels)
    monkeypatch.setattr(sys.modules["refdist.ops.cross_entropy"], "LOGITS", 56)

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(**plan), comm, params=params, precision="fp64")
        return rd.loss_and_grads(config, rd.Plan(**plan), params, ids, labels, comm=comm), trainer.evaluate(ids, labels)

    for (got_loss, got), validation in rd.run(program, rd.Plan(**plan).world_size):
        assert got_loss == pytest.approx(loss, rel=1e-13)
        assert validation == pytest.approx(loss, rel=1e-13)
        require_equal(got, grads, str(plan))


def test_save_gathered_keeps_nothing_more_where_nothing_is_gathered():
    config, params = model(num_attention_heads=2, num_key_value_heads=2)
    ids, labels = batch(config, 4, 6)

    def peaks(save_gathered):
        def program(comm):
            device = rd.Device()
            plan = rd.Plan(tp=2, sequence_parallel=False, save_gathered=save_gathered)
            rd.Trainer(config, plan, comm, params=params, device=device).step(ids, labels)
            return device.peak["activation"]

        return rd.run(program, 2)

    assert peaks(True) == peaks(False)

"""Training in 16 bits: gradients, master weights, memory, the formats of sums, loss scaling, and steps that all ranks skip."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from models import batch, model

import refdist as rd
from refdist.comm import Mesh
from refdist.model.layout import layout
from refdist.numerics import LossScale, matmul
from refdist.numerics.loss_scale import loss_scale_of
from refdist.numerics.precision import DTYPES
from refdist.parallel import data, fsdp, storage
from refdist.parallel.fsdp import zero1, zero2, zero3
from refdist.parallel.pipeline import tied
from refdist.testing.compare import differences
from refdist.testing.precision import poisoned

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}
LOSS_SCALE = {"fp16": 1024.0, "bf16": 1.0}
ROOMS = {"data": {"dp": 3}, "zero 1": {"fsdp": 3, "zero": 1}, "zero 2": {"fsdp": 3, "zero": 2}, "zero 3": {"fsdp": 3, "zero": 3},
         "hybrid": {"dp": 2, "fsdp": 2, "zero": 3}}


def on_ranks(plan, program):
    return rd.run(program, plan.world_size)


# ------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize(("precision", "tied"), [("fp16", True), ("bf16", False)])
@pytest.mark.parametrize("plan", [
    {}, {"dp": 3, "micro_batches": 2}, {"dp": 5, "order": "rank"}, {"fsdp": 3, "zero": 1},
    {"fsdp": 3, "zero": 2, "micro_batches": 3}, {"fsdp": 5, "zero": 3, "micro_batches": 2}, {"tp": 2},
    {"tp": 2, "sequence_parallel": False}, {"cp": 3}, {"cp": 2, "cp_method": "ulysses"}, {"cp": 3, "cp_method": "all_gather"},
    {"tensor_core": "h100"}, {"pp": 2, "micro_batches": 3, "recompute": "full"},
    {"dp": 2, "micro_batches": 3, "accumulate_dtype": "fp32"}, {"pp": 2, "dp": 2, "micro_batches": 2, "reduce_dtype": "fp32"},
])
def test_gradients_are_near_those_of_float64(precision, plan, tied):
    """Both within 64 units of rounding, and within 4 times the single device's own error."""
    plan = rd.Plan(**plan)
    config, params = model(tie_word_embeddings=tied, attention_bias=tied, mlp_bias=True)
    ids, labels = batch(config, 7, 11, seed=3, ignored=0.5)
    loss, want = rd.reference.loss_and_grads(config, params, ids, labels)

    def run(plan):
        return on_ranks(plan, lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, precision=precision,
                                                             loss_scale=LOSS_SCALE[precision]))

    own = max((row.relative for row in differences(run(rd.Plan())[0][1], want, 0.0)), default=0.0)
    for got_loss, got in run(plan):
        assert abs(got_loss - loss) <= 4 * UNIT[precision] * loss
        assert {grad.dtype for grad in got.values()} == {np.dtype(np.float32)}
        assert not differences(got, want, 64 * UNIT[precision])
        assert not differences(got, want, 4 * own)


def test_the_chip_of_the_plan_multiplies():
    """Every product of a step is that of numerics.matmul for the chip, to the bit; another chip gives other bits."""
    config, params = model(num_hidden_layers=1)
    ids, labels = batch(config, 3, 9)

    def gradients(precision, chip, device=None):
        plan = rd.Plan(tensor_core=chip)
        return rd.run(lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, precision=precision,
                                                     device=device, loss_scale=256.0), 1)[0][1]

    for precision, inputs in (("fp16", "fp16"), ("fp32", "tf32")):
        def product(a, b, out=None, inputs=inputs):
            return matmul(a, b, inputs=inputs, tensor_core="h100", out=np.empty(
                (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), a.dtype) if out is None else out)

        product.round = lambda x, inputs=inputs: rd.numerics.Product(inputs, "fp32", "h100").round(x)
        got, want = gradients(precision, "h100"), gradients(precision, None, rd.Device(matmul=product))
        assert all(np.array_equal(got[name], want[name]) for name in want)
        blas = gradients(precision, None)
        assert any(not np.array_equal(got[name], blas[name]) for name in want)
    fp64 = gradients("fp64", "h100")
    assert all(np.array_equal(fp64[name], grad) for name, grad in gradients("fp64", None).items())


# --------------------------------------------------------------------------------------- memory and master weights


@pytest.mark.parametrize("precision", UNIT)
@pytest.mark.parametrize("room", ROOMS)
def test_a_parameter_takes_2_2_4_4_4_bytes_over_the_ranks_that_share_it(room, precision):
    plan = rd.Plan(**ROOMS[room])
    config, params = model(tie_word_embeddings=False)
    psi = sum(array.size for array in params.values())

    def program(comm):
        trainer = rd.Trainer(config, plan, comm, rd.AdamW(1e-3), precision, params=params)
        before = dict(trainer.device.live)
        for step in range(2):
            trainer.step(*batch(config, 6, 8, seed=step))
        after = dict(trainer.device.live)
        return before, after

    shared = plan.fsdp
    parts = [0 if plan.fsdp == 1 else plan.zero >= stage for stage in (3, 2, 1, 1)]  # parameters, gradients, masters, moments
    for moment in range(2):
        lives = [states[moment] for states in on_ranks(plan, program)]
        for category, size, part in zip(("parameter", "gradient", "master", "optimizer"), (2, 2, 4, 8), parts, strict=True):
            total = sum(live[category] for live in lives)
            assert total == size * psi * (plan.dp if part else plan.dp * shared), (category, moment)
        assert all(live["activation"] == live["gathered"] == live["communication"] == 0 for live in lives)
    if plan.fsdp == 1:
        assert all(live["total"] == 16 * psi for live in lives)


def test_sums_in_fp32_cost_two_bytes_more_and_no_master_four_less():
    config, params = model()
    psi = sum(array.size for array in params.values())

    def live(**plan):
        trainer = rd.run(lambda comm: rd.Trainer(config, rd.Plan(**plan), comm, precision="bf16", params=params), 1)[0]
        return dict(trainer.device.live)

    assert live(accumulate_dtype="fp32")["gradient"] == live(reduce_dtype="fp32")["gradient"] == 4 * psi
    assert live(master_weights=False)["master"] == 0
    assert live(master_weights=False)["total"] == 12 * psi


def adamw(p, g, m, v, step, lr, decay):
    m[...] = 0.9 * m + 0.1 * g
    v[...] = 0.95 * v + 0.05 * g * g
    return p * (1 - lr * (decay if p.ndim == 2 else 0)) - lr * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("precision", UNIT)
@pytest.mark.parametrize("room", ROOMS)
def test_the_master_weights_follow_the_formula_and_the_parameters_the_master_weights(room, precision, clip):
    """After each of three steps: AdamW in float64 on the gradients that the trainer has, unscaled and clipped."""
    plan = rd.Plan(**ROOMS[room])
    config, params = model(tie_word_embeddings=True)
    norms = []

    def program(comm):
        trainer = rd.Trainer(config, plan, comm, rd.AdamW(1e-3, betas=(0.9, 0.95), weight_decay=0.1), precision, params=params,
                             clip_norm=clip)
        storage = trainer.replica.storage
        want = {name: array.astype(np.float32).astype(np.float64) for name, array in params.items()}
        moments = {name: [np.zeros(array.shape), np.zeros(array.shape)] for name, array in want.items()}
        for step in range(1, 4):
            result = trainer.step(*batch(config, 6, 8, seed=step))
            assert (result.skipped, result.loss_scale) == (False, 2.0**16 if precision == "fp16" else 1.0)
            gradients = {name: array.astype(np.float64) / result.loss_scale
                         for name, array in trainer.replica.full_gradients().items()}
            norm = math.sqrt(sum(float(np.sum(gradient**2)) for gradient in gradients.values()))
            assert abs(result.grad_norm - norm) <= 1e-12 * norm
            norms.append(norm)
            factor = 1.0 if clip is None else min(1.0, clip / norm)
            for name, gradient in gradients.items():
                want[name] = adamw(want[name], factor * gradient, *moments[name], step, 1e-3, 0.1)
            masters = trainer.full_params()
            for name, master in masters.items():
                assert master.dtype == np.float32
                np.testing.assert_allclose(master, want[name], rtol=2e-6 * step, atol=1e-7)
            for name, whole in storage.gather({name: storage.shard(name) for name in storage.rows}).items():
                assert np.array_equal(whole, masters[name].astype(DTYPES[precision]))
            if room.startswith("zero 1"):
                assert all(np.array_equal(storage.parameters[name], masters[name].astype(DTYPES[precision])) for name in masters)
        assert trainer.evaluate(*batch(config, 6, 8)) == pytest.approx(
            rd.reference.loss_and_grads(config, masters, *batch(config, 6, 8))[0], rel=8 * UNIT[precision])

    on_ranks(plan, program)
    assert clip is None or min(norms) > clip


def test_without_a_master_copy_small_updates_are_lost():
    """Updates of 1e-4 of a weight are below half the distance of two numbers of bf16: nothing changes but what is near zero."""
    config, params = model()
    params = {name: np.sign(array) * (1 + np.abs(array)) for name, array in params.items()}

    def moved(**plan):
        def program(comm):
            trainer = rd.Trainer(config, rd.Plan(**plan), comm, rd.AdamW(1e-4, weight_decay=0), "bf16", params=params)
            before = trainer.full_params()
            for step in range(20):
                trainer.step(*batch(config, 4, 8, seed=step))
            after = trainer.full_params()
            assert all(array.dtype == np.float32 for array in after.values())
            return [np.mean(after[name] != before[name]) for name in after], after
        return rd.run(program, 1)[0]

    changed, after = moved(master_weights=False)
    assert max(changed) == 0
    assert all(np.array_equal(array, array.astype(ml_dtypes.bfloat16).astype(np.float32)) for array in after.values())
    assert min(moved()[0][1:]) > 0.9  # all but rows of tokens that do not occur


# ------------------------------------------------------------------------------------------------ formats of sums


def added(terms, dtype):
    """Terms added from the first to the last, rounded to the format after each addition."""
    total = terms[0].astype(dtype)
    for term in terms[1:]:
        total = (total.astype(np.float64) + term.astype(np.float64)).astype(np.float32).astype(dtype)
    return total


@pytest.mark.parametrize(("accumulate", "reduction"), [(None, None), ("fp32", None), (None, "fp32"), ("fp32", "bf16"),
                                                       ("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "bf16")])
@pytest.mark.parametrize("zero", [None, 1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_added_in_the_formats_of_the_plan(zero, micro_batches, accumulate, reduction):
    """Bit for bit in rank order, rounded after each addition: within a rank in accumulate_dtype, then in reduce_dtype."""
    config, params = model(num_hidden_layers=1)
    sums, travels = (DTYPES[name or "fp16"] for name in (accumulate or reduction, reduction))
    plan = rd.Plan(dp=3 if zero is None else 1, fsdp=1 if zero is None else 3, zero=zero or 3, order="rank",
                   accumulate_dtype=accumulate, reduce_dtype=reduction, micro_batches=micro_batches)
    rng = np.random.default_rng(9)
    given = {name: rng.standard_normal((3, micro_batches, *array.shape)).astype(np.float16) for name, array in params.items()}
    want = {}
    for name, terms in given.items():
        ranks = [added(list(of_rank), sums) for of_rank in terms]
        if zero in (2, 3):  # each micro-batch's gradient travels as its kernel gave it
            ranks = [of_rank[0] for of_rank in terms]
        if zero in (2, 3) and micro_batches > 1:  # and is added up by its owner
            want[name] = added([added([term.astype(travels) for term in of_rank], sums) for of_rank in terms], sums)
        else:
            want[name] = added([rank.astype(travels) for rank in ranks], travels).astype(sums)

    def program(comm):
        device = rd.Device()
        mesh = Mesh(comm, **plan.sizes, device=device)
        rows = layout(config)
        room = data if zero is None else fsdp
        storage = room.Storage(rows, params, np.dtype(np.float16), mesh, device, plan)
        storage.begin_step(micro_batches)
        for number in range(micro_batches):
            for piece in ("head", 0, "embed"):
                for name, row in rows.items():
                    if row.layer == piece:
                        storage.add(name, lambda x: x.copy(), given[name][comm.rank, number])
                storage.done(piece)
        storage.reduce()
        return storage.full_gradients()

    for got in rd.run(program, 3, scheduler=4, checks=True):
        for name, total in want.items():
            assert got[name].dtype == sums
            assert np.array_equal(got[name], total), name


# --------------------------------------------------------------------------------------------------- loss scaling


def test_the_dynamic_scale_grows_and_backs_off_as_pytorchs():
    scale = LossScale(8.0, growth_interval=3, smallest=2.0, largest=16.0)
    seen = []
    for overflow in (False, False, True, False, False, False, False, False, False, False, False, False, True, True, True, True):
        seen.append(scale.value)
        scale.update(overflow)
    assert seen == [8, 8, 8, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 8, 4, 2]
    assert scale.value == 2
    static = LossScale(8.0, growth_interval=None)
    static.update(True)
    assert static.value == 8


def test_which_loss_scale_an_option_means():
    dynamic = loss_scale_of(None, "fp16")
    assert (dynamic.value, dynamic.growth_interval) == (65536.0, 2000)
    assert loss_scale_of(None, "bf16") is loss_scale_of(None, "fp32") is None
    assert loss_scale_of("dynamic", "bf16").growth_interval == 2000
    assert (loss_scale_of(128, "fp64").value, loss_scale_of(128, "fp64").growth_interval) == (128.0, None)
    taken = loss_scale_of(dynamic, "fp32")
    assert taken is not dynamic
    assert vars(taken) == vars(dynamic)


@pytest.mark.parametrize(("plan", "value"), list(zip(
    [*ROOMS.values(), {"pp": 2, "micro_batches": 2}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"cp": 2},
     {"dp": 2, "pp": 2, "tp": 2}], itertools.cycle([np.inf, np.nan, -np.inf]), strict=False)))
def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(plan, value):
    """Nothing of it remains: parameters, moments and the step count are those of a run that has never seen that batch."""
    plan = rd.Plan(**plan)
    config, params = model(num_hidden_layers=2)
    batches = [batch(config, 6, 8, seed=seed) for seed in range(3)]

    def train(comm, batches, implementations=None):
        rates = []

        def rate(step):
            rates.append(step)
            return 1e-2 / step

        trainer = rd.Trainer(config, plan, comm, rd.AdamW(rate), "fp16", params=params, clip_norm=1.0,
                             implementations=implementations, loss_scale=LossScale(1024.0))
        results = [trainer.step(*one) for one in batches]
        moments = [trainer.replica.gather({name: state[i] for name, state in trainer.state.items()}) for i in range(2)]
        return results, trainer.full_params(), moments, trainer.steps, sorted(set(rates)), trainer.loss_scale.value

    rooms = {"data": poisoned(data, 2, value), "fsdp": poisoned(fsdp, 2, value)}
    for on_rank in on_ranks(plan, lambda comm: (train(comm, batches, rooms), train(comm, [batches[0], batches[2]]))):
        (results, after, moments, steps, rates, scale), (_, want, want_moments, *_) = on_rank
        assert [result.skipped for result in results] == [False, True, False]
        assert [result.loss_scale for result in results] == [1024, 1024, 512]
        assert (steps, rates, scale) == (2, [1, 2], 512)
        assert not math.isfinite(results[1].grad_norm)
        for name, array in after.items():
            assert np.isfinite(array).all()
            np.testing.assert_allclose(array, want[name], rtol=0, atol=2e-4)
        for got, wanted in zip(moments, want_moments, strict=True):
            assert not differences(got, wanted, 0.02)


def test_ranks_that_are_given_one_loss_scale_take_copies_of_it():
    config, params = model()
    given = LossScale(2.0**24, growth_interval=2)

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(dp=2), comm, rd.SGD(0.1), "fp16", params=params, loss_scale=given)
        return [trainer.step(*batch(config, 4, 8)).loss_scale for _ in range(12)], trainer.full_params()

    (scales, first), (others, second) = rd.run(program, 2)
    assert scales == others
    assert len(set(scales)) > 2
    assert given.value == 2.0**24
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_rotary_tables_are_in_float32(precision):
    config, params = model()

    def program(comm):
        _, context = rd.Trainer(config, rd.Plan(), comm, precision=precision, params=params).replica._context(9)
        return context.rotary.cos.dtype, context.rotary.sin.dtype

    assert rd.run(program, 1) == [(np.float32, np.float32)]


@pytest.mark.parametrize("fields", [{}, {"dp": 2}, {"fsdp": 2, "zero": 1}, {"fsdp": 2, "zero": 2}, {"fsdp": 2}, {"pp": 2}])
def test_the_heads_use_of_a_tied_matrix_is_added_up_in_the_format_of_sums(fields, monkeypatch):
    config, params = model(tie_word_embeddings=True)
    formats = set()

    def adding(module, original):
        def spy(total, term):
            if total.shape[1:] == (config.hidden_size,) and len(total) in (config.vocab_size, -(-config.vocab_size // 2)):
                formats.add(total.dtype)
            return original(total, term)
        monkeypatch.setattr(module, "add", spy)

    for module in (storage, tied, zero1, zero2, zero3):
        if hasattr(module, "add"):
            adding(module, module.add)
    plan = rd.Plan(**fields, micro_batches=3, accumulate_dtype="fp32")

    def program(comm):
        trainer = rd.Trainer(config, plan, comm, precision="bf16", params=params)
        trainer.forward_backward(*batch(config, 8, 6))

    rd.run(program, plan.world_size)
    assert formats == {np.dtype(np.float32)}


def test_a_real_overflow_is_skipped_until_the_scale_fits_and_warns_about_nothing():
    config, params = model()

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(dp=2), comm, rd.AdamW(1e-3), "fp16", params=params, loss_scale=LossScale(2.0**24))
        return [trainer.step(*batch(config, 4, 8)) for _ in range(20)]

    runs = rd.run(program, 2)
    assert [result.skipped for result in runs[0]] == [result.skipped for result in runs[1]]
    skipped = [result.skipped for result in runs[0]]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert runs[0][-1].loss_scale == 2.0 ** (24 - sum(skipped))
    assert runs[0][-1].loss < runs[0][0].loss


def test_without_loss_scaling_nothing_is_skipped():
    config, params = model()

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(), comm, rd.SGD(1e-3), "bf16", params=params,
                             implementations={"data": poisoned(data, 1, np.inf)})
        result = trainer.step(*batch(config, 4, 8))
        return result.skipped, trainer.steps, all(np.isfinite(array).all() for array in trainer.full_params().values())

    assert rd.run(program, 1) == [(False, 1, False)]


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(("options", "words"), [
    ({"precision": "fp8"}, "precision='fp8': expected one of fp64, fp32, fp16, bf16"),
    ({"precision": "bf16", "plan": {"tensor_core": "v100"}}, "the tensor cores of v100 do not take bf16; they take fp16"),
    ({"precision": "fp32", "plan": {"tensor_core": "t4"}}, "the tensor cores of t4 do not take tf32; they take fp16"),
    ({"precision": "fp64", "plan": {"tensor_core": "ada"}}, "tensor cores of ada do not take it; those of a100, h100, h200, b2"),
    ({"loss_scale": 0}, "loss_scale=0: expected a number above 0"),
    ({"loss_scale": math.inf}, "loss_scale=inf: expected a number above 0"),
    ({"loss_scale": "static"}, "loss_scale='static': expected 'dynamic', a number above 0"),
    ({"loss_scale": True}, "loss_scale=True: expected 'dynamic', a number above 0"),
])
def test_bad_input(options, words):
    config, params = model()
    plan = rd.Plan(**options.pop("plan", {}))
    with pytest.raises(ValueError, match=words):
        rd.run(lambda comm: rd.Trainer(config, plan, comm, params=params, **options), 1)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: rd.Plan(tensor_core="p100"), "tensor_core='p100': expected one of v100, t4, a100, ada, h100, h200, b200"),
    (lambda: rd.Plan(reduce_dtype="fp8"), "reduce_dtype='fp8': expected one of fp16, bf16, fp32, fp64"),
    (lambda: rd.Plan(accumulate_dtype=32), "accumulate_dtype=32: expected one of fp16, bf16, fp32, fp64"),
    (lambda: rd.Plan(master_weights="no"), "master_weights='no': expected True or False"),
    (lambda: LossScale(growth_interval=0), "growth_interval=0: expected at least 1"),
    (lambda: LossScale(backoff=1.5), "backoff=1.5: expected one above 1, and one between 0 and 1"),
    (lambda: LossScale(0.5), "loss_scale=0.5: expected a number from 1.0 to 16777216.0"),
])
def test_bad_options(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_validation_losses_are_not_rounded_to_16_bits():
    config, params = model(dtype=np.float32)
    ids, labels = batch(config, 4, 6)

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(), comm, params=params, precision="bf16")
        return trainer.evaluate(ids, labels), trainer.step(ids, labels).loss

    validation, loss = rd.run(program, 1)[0]
    assert validation == loss

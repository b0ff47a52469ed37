"""Parameters that lie one after the other: where they lie, what is joined, and an optimizer that sees them joined."""

from __future__ import annotations

import numpy as np
import pytest
from models import batch, model

import refdist as rd
from refdist.device import Device
from refdist.model.layout import layout
from refdist.parallel import data
from refdist.parallel.flat import in_memory_order, joined, lay_out, runs

SHAPES = {"a": (2, 3), "b": (0, 5), "c": (4,), "d": (1, 2)}


def parts(dtype=np.float32):
    flat, made = lay_out(Device(), np.empty(0), SHAPES, "parameter", np.dtype(dtype))
    flat[...] = np.arange(flat.size)
    return flat, made


def test_parts_cover_the_flat_array_in_order():
    flat, made = parts()
    assert {name: part.shape for name, part in made.items()} == SHAPES
    assert np.array_equal(np.concatenate([part.reshape(-1) for part in made.values()]), np.arange(12))
    made["c"][1] = -1
    assert flat[7] == -1


def test_matrices_of_a_layer_come_before_its_vectors_and_layers_stay_together():
    config = model(num_hidden_layers=2, attention_bias=True)[0]
    rows = layout(config)
    names = in_memory_order(rows)
    assert sorted(names) == sorted(rows)
    layers = [rows[name].layer for name in names]
    assert list(dict.fromkeys(layers)) == ["embed", 0, 1, "head"]
    assert layers == [layer for layer in dict.fromkeys(layers) for _ in range(layers.count(layer))]
    of_layer = [len(rows[name].shape) for name in names if rows[name].layer == 1]
    assert of_layer == sorted(of_layer, reverse=True)
    assert set(of_layer) == {1, 2}


def test_neighbours_are_joined_where_all_of_their_arrays_are_neighbours_and_their_keys_equal():
    _, first = parts()
    _, second = parts(np.float64)
    arrays = {name: (first[name], second[name]) for name in SHAPES}
    assert list(runs(arrays, lambda name: 0)) == [["a", "c", "d"]]  # there is nothing in b
    assert list(runs(arrays, lambda name: name > "b")) == [["a"], ["c", "d"]]
    assert np.array_equal(joined([first["c"], first["d"]]), np.arange(6, 12))
    joined([second["c"], second["d"]])[...] = 7
    assert np.concatenate([second[name].reshape(-1) for name in SHAPES]).tolist() == [0, 1, 2, 3, 4, 5, 7, 7, 7, 7, 7, 7]

    apart = {**arrays, "c": (first["c"], second["c"].copy())}
    assert list(runs(apart, lambda name: 0)) == [["a"], ["c"], ["d"]]
    gap = {name: arrays[name] for name in "ad"}
    assert list(runs(gap, lambda name: 0)) == [["a"], ["d"]]


@pytest.mark.parametrize("plan", [rd.Plan(), rd.Plan(fsdp=3), rd.Plan(fsdp=3, zero=1)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_is_called_once_for_parameters_that_lie_side_by_side(plan, precision):
    config, params = model(num_hidden_layers=3)
    calls = []

    class Counting(rd.AdamW):
        elementwise = True

        def update(self, parameter, *args, **kwargs):
            calls.append(parameter.size)
            super().update(parameter, *args, **kwargs)

    def program(comm):
        trainer = rd.Trainer(config, plan, comm, optimizer=Counting(weight_decay=0.1), params=params, precision=precision)
        trainer.step(*batch(config, 3, 8))
        return len(trainer.state)

    (count, *_) = rd.run(program, plan.fsdp)
    side_by_side = plan.fsdp == 1 or plan.zero > 1  # else gradients are rows of whole ones
    assert len(calls) == plan.fsdp * (8 if side_by_side else count)  # embed, then matrices and vectors by turns
    assert sum(calls) == sum(p.size for p in params.values())


def test_what_only_touches_is_not_joined():
    memory = bytearray(96)
    left, right = (np.ndarray((6,), np.float32, memory, start) for start in (0, 24))  # neither knows of the other

    def joins(*arrays):
        return len(list(runs({str(place): (array,) for place, array in enumerate(arrays)}, lambda name: 0))) == 1

    assert joins(left[:2], left[2:])
    assert joins(left[:4].reshape(2, 2), left[4:])
    assert not joins(left[:6], right[:6]), "parts of two arrays"
    assert not joins(left, right), "no parts"
    assert not joins(left[:4].reshape(2, 2).T, left[4:]), "elements in another order"
    assert not joins(left[:2], left[2:].view(np.int32)), "two formats"
    assert not joins(left[:2].view(np.int32), left[2:].view(np.int32)), "another format than the whole"
    rows = np.empty((2, 12), np.float32)
    assert not joins(rows[0], rows[1]), "the whole has two dimensions"
    back = np.ndarray((6,), np.float32, memory, 20, (-4,))
    assert not joins(back[5:], back[4:5]), "the whole runs backwards"


def trained(config, params, optimizer, change=lambda trainer, step: None, room=None, steps=3):
    """All parameters after some steps; ``change`` is called before each update."""
    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(), comm, optimizer=optimizer(), params=params, precision="fp64",
                             implementations=None if room is None else {"data": room})
        for step in range(steps):
            result = trainer.forward_backward(*batch(config, 2, 8))
            change(trainer, step)
            trainer.update(result)
        return trainer.full_params()

    return rd.run(program, 1)[0]


def require_bits(got, wanted):
    for name, array in wanted.items():
        assert np.array_equal(array, got[name]), name


class Apart(rd.AdamW):
    """AdamW, parameter by parameter: what it does is not said to be elementwise."""


def test_an_optimizer_whose_decay_is_changed_later_follows_it():
    config, params = model(attention_bias=True)

    def change(trainer, step):
        if step == 1:
            trainer.optimizer.weight_decay = 0.3

    require_bits(trained(config, params, lambda: rd.AdamW(weight_decay=0.0), change),
                 trained(config, params, lambda: Apart(weight_decay=0.0), change))

    def only_matrices(trainer, step):
        trainer.optimizer.decay_all = False

    require_bits(trained(config, params, lambda: rd.AdamW(weight_decay=0.3, decay_all=True), only_matrices),
                 trained(config, params, lambda: rd.AdamW(weight_decay=0.3)))


def test_gradients_and_state_that_are_replaced_are_those_that_count():
    config, params = model()

    def in_place(trainer, step):
        for name, gradient in trainer.replica.storage.gradients.items():
            np.sign(gradient, out=gradient)
            if step == 1:
                for moment in trainer.state[name]:
                    moment *= 0.5

    def anew(trainer, step):
        gradients = trainer.replica.storage.gradients
        for name, gradient in gradients.items():
            gradients[name] = np.sign(gradient)
        if step == 1:
            trainer.state = {name: tuple(0.5 * moment for moment in moments) for name, moments in trainer.state.items()}

    require_bits(trained(config, params, rd.AdamW, anew, steps=2), trained(config, params, rd.AdamW, in_place, steps=2))


def test_a_new_optimizer_has_its_own_state():
    config, params = model()

    def program(comm):
        trainer = rd.Trainer(config, rd.Plan(), comm, optimizer=rd.AdamW(), params=params, precision="fp64")
        trainer.step(*batch(config, 2, 8))
        before = {name: [moment.copy() for moment in moments] for name, moments in trainer.state.items()}
        old = trainer.state
        trainer.use(rd.AdamW(lr=0.1))
        assert all((moment == 0).all() for moments in trainer.state.values() for moment in moments)
        trainer.step(*batch(config, 2, 8))
        assert all(moment.any() for moments in trainer.state.values() for moment in moments)
        assert all(np.array_equal(now, then) for name in old for now, then in zip(old[name], before[name], strict=True))

    rd.run(program, 1)


def test_an_optimizer_that_does_not_say_that_it_is_elementwise_sees_one_parameter_at_a_time():
    config, params = model(num_hidden_layers=3)
    seen = []

    class PerParameter:
        """As little as a trainer needs of an optimizer."""

        state_names = ()

        def update(self, parameter, gradient, state, step, ndim, scale):
            seen.append((parameter.shape, ndim))
            parameter -= 0.1 * gradient / (np.linalg.norm(gradient) + 1e-9)

    trained(config, params, PerParameter, steps=1)
    assert sorted(seen) == sorted((array.shape, array.ndim) for array in params.values())


def test_a_room_may_leave_parameters_out_of_what_is_updated():
    config, params = model()

    class Storage(data.Storage):
        def owned(self):
            return {name: pair for name, pair in super().owned().items() if "embed" not in name}

    class Room:
        pass

    Room.Storage = Storage
    got, all_of_them = trained(config, params, rd.AdamW, room=Room), trained(config, params, rd.AdamW)
    for name, array in got.items():
        assert np.array_equal(array, params[name]) == ("embed" in name)
        assert not np.array_equal(all_of_them[name], params[name])


def test_a_room_that_gives_other_arrays_in_each_step_has_them_updated():
    config, params = model()

    class Storage(data.Storage):
        def owned(self):
            for name, gradient in self.gradients.items():
                self.gradients[name] = gradient.copy()
            return super().owned()

    class Room:
        pass

    Room.Storage = Storage
    require_bits(trained(config, params, rd.AdamW, room=Room), trained(config, params, rd.AdamW))


def test_one_rank_rounds_no_sum_to_the_format_of_the_reduction():
    config, params = model(dtype=np.float32)

    def gradients(plan):
        def program(comm):
            trainer = rd.Trainer(config, plan, comm, params=params, precision="fp32")
            trainer.forward_backward(*batch(config, 2, 8))
            return trainer.replica.full_gradients()
        return rd.run(program, 1)[0]

    require_bits(gradients(rd.Plan(accumulate_dtype="fp32", reduce_dtype="bf16")), gradients(rd.Plan()))


def test_weights_of_64_bits_are_rounded_once():
    config, params = model()
    for array in params.values():
        array[...] = 1 + 2.0**-8 + 2.0**-40  # just above the middle of two bfloat16; in float32 it is the middle, and a tie

    def program(comm):
        storage = rd.Trainer(config, rd.Plan(), comm, params=params, precision="bf16").replica.storage
        return {name: array.astype(np.float64) for name, array in storage.parameters.items()}

    for name, array in rd.run(program, 1)[0].items():
        assert (array == 1 + 2.0**-7).all(), name

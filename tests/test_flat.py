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


def test_a_room_that_gives_other_arrays_in_each_step_has_them_updated():
    config, params = model()
    given = batch(config, 2, 8)

    class Storage(data.Storage):
        def owned(self):
            for name, gradient in self.gradients.items():
                self.gradients[name] = gradient.copy()
            self._owned = {}
            return super().owned()

    def program(comm, **rooms):
        trainer = rd.Trainer(config, rd.Plan(), comm, params=params, precision="fp64", **rooms)
        for _ in range(3):
            trainer.step(*given)
        return trainer.full_params()

    class Room:
        pass

    Room.Storage = Storage
    (wanted,) = rd.run(program, 1)
    (got,) = rd.run(lambda comm: program(comm, implementations={"data": Room}), 1)
    for name, array in wanted.items():
        assert np.array_equal(array, got[name]), name

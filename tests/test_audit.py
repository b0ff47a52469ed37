"""The audit of matrix products: complete, in the right formats, and a planted cast is seen with what it costs."""

from __future__ import annotations

import json

import numpy as np
import pytest
from models import batch, model

import refdist as rd
from refdist.cli.main import main
from refdist.device.audit import Audit
from refdist.model import transformer
from refdist.ops import linear

PRESETS = [("fp16", None, "fp16", "tensor cores"), ("bf16", None, "bf16", "tensor cores"),
           ("fp16", "v100", "fp16", "tensor cores"), ("fp32", None, "fp32", "FP32 cores"),
           ("fp32", "h100", "tf32", "tensor cores"), ("fp64", None, "fp64", "FP64 cores"),
           ("fp64", "h100", "fp64", "tensor cores")]


def audited(plan, precision):
    """Each rank's rows, and the FLOPs that its device has counted meanwhile."""
    config, params = model(num_hidden_layers=2)

    def program(comm):
        trainer = rd.Trainer(config, plan, comm, precision=precision, params=params)
        device, before = trainer.device, (trainer.device.matmul, trainer.device.flops["executed"])
        audit = Audit(device, trainer.replica.storage, plan.tensor_core)
        trainer.step(*batch(config, 4, 9))
        audit.stop()
        noted = len(audit.rows)
        flops = device.flops["executed"] - before[1]
        trainer.step(*batch(config, 4, 9))
        assert len(audit.rows) == noted
        assert device.matmul is before[0]
        return audit.rows, flops

    return rd.run(program, plan.world_size)


@pytest.mark.parametrize("plan", [{}, {"micro_batches": 2, "recompute": "full"}, {"tp": 2}, {"fsdp": 2, "zero": 3}, {"cp": 2},
                                  {"pp": 2, "micro_batches": 2, "schedule": "zb_h1"}])
def test_every_product_of_a_step_is_there_once(plan):
    for rows, flops in audited(rd.Plan(**plan), "fp16"):
        assert sum(row.flops for row in rows) == flops > 0
        for row in rows:
            if not row.kernel.startswith("attention"):
                assert row.flops == 2 * np.prod(row.shape)
                assert row.parameter.endswith(".weight")


def test_shapes_and_names():
    rows = audited(rd.Plan(), "bf16")[0][0]
    down = [(row.kernel, row.shape) for row in rows if row.parameter == "model.layers.1.mlp.down_proj.weight"]
    assert down == [("linear", (36, 40, 24)), ("linear_input_grad", (36, 24, 40)), ("linear_weight_grad", (24, 36, 40))]
    assert [row.shape for row in rows if row.kernel == "attention"] == [(4 * 6, 9, 6, 9)] * 2


@pytest.mark.parametrize(("precision", "chip", "inputs", "unit"), PRESETS)
def test_formats_and_units(precision, chip, inputs, unit):
    rows = audited(rd.Plan(tensor_core=chip), precision)[0][0]
    assert {(row.inputs, row.unit, row.accumulate) for row in rows} == {
        ((inputs, inputs), unit, "fp64" if precision == "fp64" else "fp32")}


def shown(capsys, *options):
    common = "show precision --model tiny --num-hidden-layers 3 --batch 2 --seq 16 --in-process"
    assert main([*common.split(), *options]) == 0
    return capsys.readouterr().out


def test_a_planted_cast_is_reported_with_its_cost(monkeypatch, capsys):
    """One activation is cast to float32 in front of one product of one layer; what follows from it there stays FP32 too."""
    right = json.loads(shown(capsys, "--json"))
    assert right["lost_seconds"] == 0
    forward = transformer._Layer.linear

    def careless(self, name, x):
        if (self.layer, name) == (1, "mlp.up_proj"):
            return self.call(linear, x.astype(np.float32), self.weights[self.prefix + name + ".weight"])
        return forward(self, name, x)

    monkeypatch.setattr(transformer._Layer, "linear", careless)
    wrong = json.loads(shown(capsys, "--json"))
    slow = [row for row in wrong["products"] if row["unit"] == "FP32 cores"]
    assert [(row["kernel"], row["parameter"], row["inputs"], row["calls"]) for row in slow] == [
        ("linear", "model.layers.1.mlp.up_proj.weight", ["fp32", "fp16"], 1),
        ("linear_input_grad", "model.layers.1.mlp.up_proj.weight", ["fp32", "fp16"], 1),
        ("linear_weight_grad", "model.layers.1.mlp.up_proj.weight", ["fp32", "fp16"], 1)]
    flops = 2 * 32 * 64 * 176
    for row in slow:
        assert row["flops"] == flops
        assert row["seconds"] == pytest.approx(flops / 66.9e12)
        assert row["lost_seconds"] == pytest.approx(flops / 66.9e12 - flops / 989.4e12)
    assert wrong["flops"] == right["flops"]
    assert wrong["seconds"] - right["seconds"] == pytest.approx(wrong["lost_seconds"]) == pytest.approx(
        3 * flops * (1 / 66.9e12 - 1 / 989.4e12))
    table = shown(capsys)
    lines = [line for line in table.splitlines() if "µs lost to a cast" in line]
    assert len(lines) == 3
    assert all("fp32 × fp16" in line and "FP32 cores" in line and "layers.1.mlp.up_proj" in line for line in lines)
    assert "are lost where 16 bits meet FP32" in table
    assert "layers.0,2.mlp.up_proj" in table


def test_the_table_of_a_right_step(capsys):
    table = shown(capsys, "--precision", "bf16")
    assert "lost" not in table
    assert table.count("tensor cores") == 26 + 1  # kernels, and the sum below
    assert "layers.*.mlp.up_proj" in table
    assert shown(capsys, "--precision", "bf16", "--all").count("layers.2.mlp.up_proj") == 3

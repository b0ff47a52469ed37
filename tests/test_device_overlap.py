"""The timeline of kernels and collectives, from events made by hand and from the examples' real runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from models import batch, model
from mpirun import run_ranks

import refdist as rd
from refdist.device import Device, Overlap
from refdist.device.events import Kernel, Phase

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_bars_and_hidden_time():
    device = Device()
    timeline = Overlap(device)
    assert timeline.text() == "nothing has run"
    name = "gather of model.layers.3.mlp.up_proj.weight"
    for event in (Kernel("linear", (), 0, 10.0, 12.0, False), Phase(name, True, 11.0), Phase("F 0 0", True, 11.0),
                  Kernel("linear", (), 0, 13.0, 14.0, False), Phase(name, False, 15.0),
                  Phase("all-reduce of head, 3", True, 15.5), Phase("all-reduce of head, 3", False, 20.0)):
        device.emit(event)
    timeline.stop()
    device.emit(Kernel("late", (), 0, 30.0, 31.0, False))
    assert timeline.collectives == {"gather 3": [(11.0, 15.0)], "all-reduce head, 3": [(15.5, 20.0)]}
    assert timeline.hidden() == pytest.approx((1 + 1) / 8.5)
    rows = timeline.text(10).splitlines()
    assert rows[0] == "kernels             ▇▇▇▇▇"
    assert rows[1] == "gather 3             ░░░░░"
    assert rows[2] == "all-reduce head, 3       ░░░░░"
    assert rows[3].endswith("10000 ms")


def test_two_of_one_name_may_be_under_way():
    device = Device()
    timeline = Overlap(device)
    for begins, at in ((True, 1.0), (True, 2.0), (False, 3.0), (False, 5.0)):
        device.emit(Phase("reduce-scatter of 0", begins, at))
    assert timeline.collectives == {"reduce-scatter 0": [(1.0, 3.0), (2.0, 5.0)]}


@pytest.mark.parametrize(("plan", "collective", "kernels"), [
    (rd.Plan(cp=3), "hop of ring kv", ("attention", "attention_backward")),
    (rd.Plan(cp=3), "hop of ring dkv", ("attention_backward",)),
    (rd.Plan(tp=3, sequence_parallel=False), "all_reduce on tp", ("linear_weight_grad",))], ids=str)
def test_what_is_sent_while_what_is_computed(plan, collective, kernels):
    """Keys and values travel while their chunk is attended to, sums of input gradients while weight gradients are made."""
    config, params = model(num_attention_heads=3, num_key_value_heads=3)
    ids, labels = batch(config, 2, 9)

    def program(comm):
        under_way, seen = 0, set()

        def listen(event):
            nonlocal under_way
            if isinstance(event, Phase) and event.name == collective:
                under_way += 1 if event.begins else -1
            elif isinstance(event, Kernel) and under_way:
                seen.add(event.name)

        rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, device=Device(listeners=[listen]))
        return seen

    for seen in rd.run(program, 3):
        assert seen.issuperset(kernels)


@pytest.mark.parametrize(("name", "ranks"), [("data_parallel", 2), ("fully_sharded", 4), ("hybrid_sharding", 4)])
def test_the_examples_also_under_mpirun(name, ranks, capsys):
    program = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="example")["program"]
    results = rd.run(program, ranks)
    shown = capsys.readouterr().out
    assert "░" in shown
    assert "▇" in shown
    if name == "fully_sharded":
        assert results == [True] * ranks, "all stages train to the same bits"
        assert "ZeRO 3               0.25       0.25       0.50" in shown
        for text in ("ZeRO 1, micro-batches: 2", "ZeRO 2, micro-batches: 2", "ZeRO 3, micro-batches: 1"):
            assert "░" in shown.split(text)[1].split("\n\n")[0]
    elif name == "hybrid_sharding":
        assert max(results) < 1e-4
        table = [line.split()[3:] for line in shown.splitlines() if line[:4].strip() in ("1 ×", "2 ×", "4 ×")]
        assert [row[0] for row in table] == ["1.00", "2.00", "4.00"]
        assert [row[3] for row in table] == ["0.00", f"{2 / 2 * 1 / 2:.2f}", f"{2 * 3 / 4:.2f}"]
        assert "all-reduce 2 " in shown
    else:
        assert len(set(results)) == 1
        done = run_ranks(ranks, EXAMPLES / f"{name}.py")
        assert done.returncode == 0, done.stderr
        assert f"loss {results[0]:.4f}" in done.stdout

"""The memory ledger: what it says against formulas and against Python's own tracing, its pictures, and a device that is full."""

from __future__ import annotations

import json
import tracemalloc
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from models import batch, model

import refdist as rd
from refdist.cli.job import make_config, make_plan
from refdist.cli.main import main, parser
from refdist.cli.options import memory_size
from refdist.device import CATEGORIES, Device, Timeline
from refdist.device.events import Kernel

BIG = {"hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 8, "vocab_size": 101}


def trained(comm, plan, device, config, params, rows=6, seq=16, precision="fp32"):
    trainer = rd.Trainer(config, plan, comm, params=params, precision=precision, device=device)
    trainer.step(*batch(config, rows, seq))
    return trainer


def test_data_parallel_runs_out_where_zero_3_trains():
    config, params = model(dtype=np.float32, **BIG)

    def peak(plan):
        def program(comm):
            device = Device()
            trained(comm, plan, device, config, params)
            return device.peak["total"]
        return max(rd.run(program, 4))

    whole, sharded = peak(rd.Plan(dp=4)), peak(rd.Plan(fsdp=4))
    assert sharded < 0.7 * whole
    capacity = (whole + sharded) // 2
    rd.run(lambda comm: trained(comm, rd.Plan(fsdp=4), Device(capacity), config, params), 4)

    full = []

    def program(comm):
        try:
            trained(comm, rd.Plan(dp=4), Device(capacity), config, params)
        except rd.OutOfDeviceMemory as error:
            full.append((comm.rank, str(error)))
            raise

    with pytest.raises(rd.OutOfDeviceMemory, match="alive"):
        rd.run(program, 4)
    text = full[0][1]
    assert f"{capacity:,} bytes" in text
    assert all(f"\n  {category} " in text for category in (*CATEGORIES, "total"))


def test_every_rank_that_is_full_says_so():
    config, params = model(dtype=np.float32, **BIG)

    def program(comm):
        with pytest.raises(rd.OutOfDeviceMemory, match=r"for category (parameter|gradient)"):
            rd.Trainer(config, rd.Plan(), comm.split(comm.rank), params=params, device=Device(capacity=60_000))
        return True

    assert rd.run(program, 3) == [True] * 3


@pytest.mark.parametrize("plan", [{"dp": 1}, {"fsdp": 2, "micro_batches": 2}, {"dp": 2}])
def test_the_ledger_agrees_with_tracemalloc(plan):
    """NumPy's own memory grows by what the arenas took from the operating system: within 2 %."""
    config, params = model(dtype=np.float32, hidden_size=96, intermediate_size=256, num_hidden_layers=3, head_dim=16)
    plan = rd.Plan(**plan)
    trained_once = rd.run(lambda comm: trained(comm, plan, Device(), config, params, 8, 64), plan.world_size)
    del trained_once  # tables and caches that are made once are there now
    domain = [tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)]

    def numpy_bytes():
        return sum(stat.size for stat in tracemalloc.take_snapshot().filter_traces(domain).statistics("filename"))

    devices = [Device() for _ in range(plan.world_size)]
    tracemalloc.start()
    try:
        before = numpy_bytes()
        trainers = rd.run(lambda comm: trained(comm, plan, devices[comm.rank], config, params, 8, 64), plan.world_size)
        grown = numpy_bytes() - before
    finally:
        tracemalloc.stop()
    reserved = sum(device.reserved for device in devices)
    assert len(trainers) == plan.world_size
    assert grown == pytest.approx(reserved, rel=0.02)
    assert reserved >= sum(device.peak["total"] for device in devices)


@pytest.mark.parametrize(("precision", "rows"), [("fp64", 5), ("fp32", 3)])
def test_activations_when_the_logits_are_made(precision, rows):
    """Term by term what a Llama block keeps for backward, without dropout, with an online softmax."""
    config, params = model(num_hidden_layers=3)
    seq, n = 13, 8 if precision == "fp64" else 4
    device, seen = Device(), []

    def listen(event):
        if isinstance(event, Kernel) and event.name == "linear" and event.shapes[1] == (config.vocab_size, config.hidden_size):
            seen.append(device.live["activation"])

    device.listeners.append(listen)
    rd.run(lambda comm: rd.loss_and_grads(config, rd.Plan(), params, *batch(config, rows, seq), comm=comm, precision=precision,
                                          device=device), 1)
    sb, h = rows * seq, config.hidden_size
    heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = {"x, middle": 2 * n * sb * h, "q, attended": 2 * n * sb * heads * width, "k, v": 2 * n * sb * kv * width,
             "gate, up": 2 * n * sb * config.intermediate_size, "r, middle_r": 2 * n * sb, "lse": n * sb * heads}
    head = {"x": n * sb * h, "n": n * sb * h, "r": n * sb, "dn": n * sb * h, "logits": n * sb * config.vocab_size}
    assert seen == [3 * sum(layer.values()) + sum(head.values())]


def test_a_timeline_is_what_happened():
    config, params = model(dtype=np.float32)
    device = Device()

    def program(comm):
        trainer = trained(comm, rd.Plan(fsdp=2), device if comm.rank == 0 else Device(), config, params)
        device.peak["total"] = device.live["total"]
        timeline = Timeline(device) if comm.rank == 0 else None
        trainer.step(*batch(config, 6, 16))
        if timeline is not None:
            timeline.stop()
            assert timeline.points[-1][1] == tuple(device.live[category] for category in CATEGORIES)
            return timeline
        return trainer

    timeline = rd.run(program, 2)[0]
    assert timeline.peak == device.peak["total"]
    assert timeline not in device.listeners
    columns = timeline.columns(40)
    assert len(columns) == 40
    assert max(map(sum, columns)) == timeline.peak
    text = timeline.text(40, 10)
    assert "P parameter" in text
    assert "a activation" in text
    assert "M master" not in text
    assert max(map(len, text.splitlines()[:10])) <= 12 + 40
    assert any(line.count("a") > 3 for line in text.splitlines()[:10])
    picture = ElementTree.fromstring(timeline.svg("live <memory>"))
    names = [node.tag.rpartition("}")[2] for node in picture.iter()]
    assert names.count("polygon") == sum(any(live[i] for _, live in timeline.points) for i in range(len(CATEGORIES)))


def test_show_memory(capsys, tmp_path):
    arguments = ["show", "memory", "--fsdp", "2", "--in-process", "--seq", "16", "--batch", "4"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["ranks"]) == 2
    owned = [rank["parameter"]["now"] for rank in shown["ranks"]]
    assert sum(owned) == 4 * shown["parameters"]
    assert [rank["optimizer"]["now"] for rank in shown["ranks"]] == [2 * size for size in owned]
    assert main([*arguments, "--rank", "1", "--svg", str(tmp_path / "memory.svg")]) == 0
    printed = capsys.readouterr().out
    assert "live memory of rank 1" in printed
    assert "at most" in printed
    assert (tmp_path / "memory.svg").read_text(encoding="utf-8").startswith("<svg")
    assert main([*arguments, "--rank", "2"]) == 2
    capsys.readouterr()
    assert main([*arguments, "--device-memory", "100KiB"]) == 1
    assert "exceed the device's 102,400 bytes; alive:\n  parameter" in capsys.readouterr().err


def test_train_shows_memory_and_takes_a_capacity(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a line of text, and another one\n" * 800)
    arguments = ["train", "--data", str(text), "--dp", "2", "--in-process", "--steps", "2", "--batch", "4", "--seq", "16",
                 "--model", "tiny"]
    assert main([*arguments, "--memory"]) == 0
    shown = capsys.readouterr().out
    assert "at most" in shown
    assert "live memory of rank 0 over the last step" in shown
    assert "o optimizer" in shown
    assert main([*arguments, "--memory", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [rank["optimizer"]["now"] for rank in summary["memory"]] == [8 * summary["parameters"]] * 2
    assert main([*arguments, "--device-memory", "1MiB"]) == 1
    assert "exceed the device's 1,048,576 bytes; alive:\n  parameter" in capsys.readouterr().err


def test_show_layout(capsys):
    assert main(["show", "layout", "--fsdp", "3", "--dp", "2", "--vocab-size", "257", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    config = rd.ModelConfig(vocab_size=257, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2)
    params = rd.init_params(config)
    assert {row["name"]: tuple(row["shape"]) for row in rows} == {name: p.shape for name, p in params.items()}
    held = rd.run(lambda comm: {name: p for name, (p, _) in rd.Trainer(config, rd.Plan(fsdp=3), comm, params=params)
                                .replica.storage.owned().items()}, 3)
    for row in rows:
        assert row["cut_by"] == {"fsdp": 0}
        assert row["partial_over"] == ["fsdp", "dp"]
        for rank, place in enumerate(row["held_by"]):
            first, last = map(int, place["rows"].split(":"))
            assert place["who"] == f"fsdp {rank}"
            assert np.array_equal(held[rank][row["name"]], params[row["name"]][first:last])
            assert list(held[rank][row["name"]].shape) == place["shape"]
    assert main(["show", "layout", "--tp", "2"]) == 0
    assert "model.layers.1.mlp.down_proj.weight" in capsys.readouterr().out
    assert main(["show", "layout", "--preset", "llama3", "--tp", "3"]) == 2
    assert "tp=3" in capsys.readouterr().err


def test_show_layout_of_the_preset_says_what_each_of_its_ranks_holds(capsys):
    assert main(["show", "layout", "--preset", "llama3", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    args = parser().parse_args(["check", "--preset", "llama3"])
    config, plan = make_config(args), make_plan(args)

    def program(comm):
        mesh = rd.Mesh(comm, **plan.sizes)
        owned = rd.Trainer(config, plan, comm).replica.storage.owned()
        return {axis: mesh.coordinate(axis) for axis in ("tp", "pp", "fsdp")}, {name: p.shape for name, (p, _) in owned.items()}

    held = rd.run(program, 16)
    assert {row["stage"] for row in rows.values()} == {"0.0", "1.0", "0.1", "1.1"}
    for place, shapes in held:
        who = f"tp {place['tp']} fsdp {place['fsdp']}"
        wanted = {name: tuple(part["shape"]) for name, row in rows.items() for part in row["held_by"]
                  if part["who"] == who and row["stage"].split(".")[0] == str(place["pp"])}
        assert shapes == wanted
    assert main(["show", "layout", "--preset", "llama3"]) == 0
    assert "16 ranks, innermost first: tp 2, cp 2, pp 2, fsdp 2" in capsys.readouterr().out


def test_sizes_of_memory():
    assert [memory_size(text) for text in ("4096", "64MiB", "1.5 KB", "2g".upper() + "iB")] == [4096, 64 << 20, 1500, 2 << 30]
    for text in ("", "MiB", "-1", "12 parsecs", "0", "1e400GB"):
        with pytest.raises(Exception, match="64MiB"):
            memory_size(text)

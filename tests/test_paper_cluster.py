"""Hardware and clusters on paper: figures against each other and their sources, who crosses what against counting, pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refdist as rd
from refdist.cli.main import main
from refdist.comm.mesh import AXES
from refdist.paper import ACCELERATORS, CLUSTERS, Cluster, Level
from refdist.paper.cluster import cluster
from refdist.paper.hardware import accelerator, growth

H100 = ACCELERATORS["h100"]


def test_the_h100s_peak_comes_from_its_parts():
    """132 SMs of 4 tensor cores of 512 multiply-adds at 1.83 GHz; 128 FP32 multiply-adds a SM at 1.98 GHz."""
    assert H100.flops() == pytest.approx(132 * 4 * 512 * 2 * 1.83e9, rel=1e-4)
    assert H100.flops("fp32") == pytest.approx(132 * 128 * 2 * 1.98e9, rel=1e-3)
    assert H100.flops("fp8") == pytest.approx(2 * H100.flops(), rel=1e-3)
    assert H100.flops("tf32") == pytest.approx(H100.flops() / 2, rel=1e-3)
    assert (H100.memory, H100.memory_bandwidth, H100.link, H100.l2) == (80e9, 3.35e12, 900e9 / 2, 50 * 2**20)
    assert H100.ridge() == pytest.approx(295.3, abs=0.1)


def test_every_figure_has_a_source_or_is_missing():
    for found in ACCELERATORS.values():
        assert found.sources
        assert found.year
        for name, value in (("link", found.link), ("l2", found.l2)):
            absent = found.name == "NVIDIA Tesla K40" and name == "link"  # it has none
            assert (value is None) == (bool(found.missing) and (name == "l2" or "MI325X" in found.name)) or absent


def test_twelve_years_change_the_number_format():
    assert growth(ACCELERATORS["k40"], ACCELERATORS["b200"], "fp32", "fp8")["changed"] == ["fp32 → fp8"]
    like = growth(ACCELERATORS["k40"], ACCELERATORS["b200"], "fp32", "fp32")
    assert like["changed"] == []
    assert like["times"] == pytest.approx(15.9, abs=0.1)
    sparse = growth(ACCELERATORS["k40"], ACCELERATORS["b200"], "fp32", "bf16", sparse=True)
    assert sparse["to"] == 4.5e15
    assert sparse["changed"] == ["fp32 → bf16", "dense → sparse"]


def test_llama_3s_cluster():
    llama3 = CLUSTERS["llama3"]
    assert [llama3.holds(level) for level in range(4)] == [8, 16, 3072, 24576]
    assert llama3.flops() == pytest.approx(24.3e18, rel=1e-3)
    assert [llama3.bandwidth(level) for level in range(4)] == [450e9, 50e9, 50e9, 50e9 / 7]
    crossings = llama3.crossings({"tp": 8, "cp": 1, "pp": 16, "fsdp": 128, "dp": 1})
    assert {axis: crossing.level for axis, crossing in crossings.items()} == {"tp": 0, "cp": None, "pp": 2, "fsdp": 3, "dp": None}
    assert llama3.crossings({**dict.fromkeys(AXES, 1), "tp": 16})["tp"].level == 1


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=5, max_size=5))
def test_who_crosses_what_by_counting(children, sizes):
    built = Cluster("own", H100, tuple(Level(str(i), n, 1e9, 1e-6) for i, n in enumerate(children)))
    plan = dict(zip(AXES, sizes, strict=True))
    ranks = math.prod(sizes)
    if ranks > built.size:
        with pytest.raises(rd.PlanError, match=f"{ranks:,} "):
            built.check_size(ranks)
        return
    stride = 1
    for axis, crossing in built.crossings(plan).items():
        members = [[first + stride * k for k in range(plan[axis])] for first in range(ranks) if first // stride % plan[axis] == 0]
        widest = [min(level for level in range(len(children)) if len({rank // built.holds(level) for rank in group}) == 1)
                  for group in members]
        assert crossing.level == (None if plan[axis] == 1 else max(widest))
        stride *= plan[axis]


def test_a_cluster_of_ones_own(tmp_path, capsys):
    path = tmp_path / "lab.json"
    levels = [{"name": "server", "children": 4, "bandwidth": 300e9, "latency": 2e-6},
              {"name": "room", "children": 3, "bandwidth": 25e9, "latency": 5e-6}]
    lab = {"name": "lab", "accelerator": "a100", "levels": levels}
    path.write_text(json.dumps(lab))
    assert cluster(str(path)).size == 12
    path.write_text(json.dumps({**lab, "accelerator": dataclasses.asdict(ACCELERATORS["tpu-v5p"])}))
    assert cluster(str(path)).accelerator == ACCELERATORS["tpu-v5p"]
    for wrong, message in (
        ({**lab, "levels": []}, "has no levels"),
        ({**lab, "accelerator": "h1000"}, "'h1000': expected one of k40, v100"),
        ({**lab, "speed": 3}, "does not have speed: expected name, accelerator, levels"),
        ({"name": "lab"}, "lacks accelerator, levels"),
        ({**lab, "levels": [{**levels[0], "children": 0}]}, "children=0: expected an integer of at least 1"),
        ({**lab, "levels": [{**levels[0], "bandwidth": "fast"}]}, "bandwidth='fast': expected a number above 0"),
        ({**lab, "accelerator": {"name": "mine", "peak": {"fp12": 1e12}, "memory": 1, "memory_bandwidth": 1}}, "format 'fp12'"),
        ([lab], "expected a JSON object"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(rd.ConfigError, match=message):
            cluster(str(path))
    path.write_text("{")
    assert main(["show", "cluster", str(path)]) == 2
    assert main(["show", "cluster", "llama4"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "is not JSON" in errors[0]
    assert "'llama4': expected one of llama3, dgx-h100, or a .json file" in errors[1]


def test_show_cluster(tmp_path, capsys):
    assert main(["show", "cluster", "llama3", "--svg", str(tmp_path / "c.svg")]) == 0
    shown = capsys.readouterr().out
    assert "24.3 EFLOP/s in all" in shown
    assert "pod: 192 × rack" in shown
    texts = [node.text for node in ElementTree.fromstring((tmp_path / "c.svg").read_text()).iter() if node.tag.endswith("text")]
    assert "llama3: 24,576 × NVIDIA H100 SXM" in texts
    assert [text for text in texts if text.startswith("…")] == ["… × 192", "… × 8"]
    assert main(["show", "cluster", "llama3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"]["bf16"] == 24576 * 989.4e12


def test_show_hardware(capsys):
    assert main(["show", "hardware"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in ACCELERATORS)
    assert main(["show", "hardware", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert accelerator(rows["h100"]) == H100
    assert main(["show", "hardware", "--from", "k40:fp32", "--to", "b200:fp8"]) == 0
    assert "893 times as fast in 11 years; the comparison changes fp32 → fp8" in capsys.readouterr().out
    for wrong in ("--from k40:fp32", "--from k40:fp32 --to b200", "--from k40:bf16 --to b200:fp8", "--sparse"):
        assert main(["show", "hardware", *wrong.split()]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1

"""Pictures of collectives, the table that picks algorithms, meshes, and the benchmark's command line."""

from __future__ import annotations

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from test_comm_collectives import ALGORITHMS

import refdist as rd
from refdist.cli.main import main
from refdist.comm import Table, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, trace
from refdist.comm.choose import ANY, FASTEST
from refdist.comm.tracing import COLLECTIVES
from refdist.device import Device


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_algorithm_is_drawn(operation: str) -> None:
    """What is drawn as held at the end is held against what the call returned, inside ``trace``."""
    for algorithm in ALGORITHMS.get(operation, [None]):
        for ranks in (1, 2, 3, 4, 7):
            picture = trace(operation, algorithm, ranks, root=ranks - 1)
            root = ElementTree.fromstring(picture.svg())
            assert picture._repr_svg_() == picture.svg()
            arrows = [each for each in root.iter() if each.get("marker-end")]
            assert len(arrows) == sum(len(step.messages) for step in picture.steps)
            for step in range(1, len(picture.steps)):
                assert f"\nstep {step}\n" in str(picture)
            if operation == "all_reduce":
                for held in picture.steps[-1].held:
                    assert all(contents[0].ranks == tuple(range(ranks)) for contents in held.values())
                    assert len(held) == ranks


def test_ring_as_the_paper_draws_it() -> None:
    picture = trace("all_reduce", "ring", 3)
    moves = [[(m.source, m.dest, m.contents[0].chunk, m.contents[0].ranks) for m in step.messages] for step in picture.steps]
    assert moves == [
        [], [(0, 1, 0, (0,)), (1, 2, 1, (1,)), (2, 0, 2, (2,))], [(0, 1, 2, (0, 2)), (1, 2, 0, (0, 1)), (2, 0, 1, (1, 2))],
        [(0, 1, 1, (0, 1, 2)), (1, 2, 2, (0, 1, 2)), (2, 0, 0, (0, 1, 2))],
        [(0, 1, 0, (0, 1, 2)), (1, 2, 1, (0, 1, 2)), (2, 0, 2, (0, 1, 2))]]


def test_show_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "all-reduce", "--algorithm", "ring", "--ranks", "3"]) == 0
    assert "  rank  1  012* 012  012" in capsys.readouterr().out
    file = tmp_path / "tree.svg"
    assert main(["show", "broadcast", "--ranks", "5", "--root", "2", "--svg", str(file)]) == 0
    assert ElementTree.parse(file).getroot().tag.endswith("svg")
    capsys.readouterr()
    assert main(["show", "all-to-all", "--ranks", "3", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert main(["show", "all-reduce", "--algorithm", "snail"]) == 2
    assert "double_tree" in capsys.readouterr().err
    assert main(["show", "reduce", "--ranks", "3", "--root", "3"]) == 2
    assert main(["show", "reduce", "--ranks", "99"]) == 2


def test_table_picks_and_is_written_and_read(tmp_path: Path) -> None:
    assert set(FASTEST.rows) <= set(ALGORITHMS)
    for operation, rows in FASTEST.rows.items():
        assert {row.algorithm for row in rows} <= set(ALGORITHMS[operation])
    FASTEST.save(tmp_path / "table.json")
    assert Table.load(tmp_path / "table.json").rows == FASTEST.rows
    with pytest.raises(ValueError, match="any number of ranks"):
        Table({"all_reduce": [(4, 8, "ring")]})
    table = Table({"all_reduce": [(ANY, 64, "tree"), (ANY, ANY, "ring")]})

    def program(comm: rd.Comm) -> None:
        comm.table = table
        for group in (comm, comm.split(0), rd.Mesh(comm, dp=3).axis("dp"), comm.bind(Device())):
            assert group.prepare("all_reduce", dict.fromkeys(("ring", "tree")), None, 64).algorithm == "tree"
            assert group.prepare("all_reduce", dict.fromkeys(("ring", "tree")), None, 65).algorithm == "ring"
            np.testing.assert_array_equal(group.all_reduce(np.arange(9)), 3 * np.arange(9))

    rd.run(program, 3)


def test_mesh_axes_and_table() -> None:
    def program(comm: rd.Comm) -> None:
        mesh = rd.Mesh(comm, tp=2, pp=3, dp=2)
        rank = comm.rank
        assert mesh.coordinates() == {"tp": rank % 2, "cp": 0, "pp": rank // 2 % 3, "fsdp": 0, "dp": rank // 6}
        groups = {("tp",): [rank // 2 * 2, rank // 2 * 2 + 1], ("dp",): [rank % 6, rank % 6 + 6],
                  ("dp", "tp"): [rank % 6 // 2 * 2 + place for place in (0, 1, 6, 7)], (): [rank],
                  ("dp", "pp", "tp", "fsdp"): list(range(12))}
        for axes, members in groups.items():
            group = mesh.axis(*axes)
            assert list(group.members) == members
            assert group.rank == members.index(rank)
            assert mesh.axis(*reversed(axes)) is group
            assert group.all_gather(np.array([rank])).tolist() == members
        assert mesh.axis("tp", "dp").axis == "tp×dp"
        lines = mesh.table().splitlines()
        assert lines[0].split() == ["rank", "dp", "pp", "tp"]
        assert len(lines) == 13
        marked = [line for line in lines if "*" in line]
        assert [line.replace("*", "").split() for line in marked] == [[str(each) for each in (
            rank, rank // 6, rank // 2 % 3, rank % 2)]]
        assert len(mesh.table(limit=4).splitlines()) == 6
        assert repr(mesh) == (f"<Mesh dp 2 × pp 3 × tp 2: rank {rank} of 12 at "
                              f"dp {rank // 6}, pp {rank // 2 % 3}, tp {rank % 2}>")
        with pytest.raises(ValueError, match="axis='ep'"):
            mesh.axis("ep")
        with pytest.raises(rd.PlanError, match="needs 4 ranks"):
            rd.Mesh(comm, dp=4)

    rd.run(program, 12)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_mesh_agrees_in_few_messages(ranks: int) -> None:
    """⌈lg N⌉ messages a rank, none of them counted as the mesh's own; groups are then made without any."""
    devices = [Device() for _ in range(ranks)]
    sent = [0] * ranks

    def program(comm: rd.Comm) -> None:
        post = comm.transport.isend

        def isend(*args: object, **kwargs: object) -> object:
            sent[comm.rank] += 1
            return post(*args, **kwargs)

        comm.transport.isend = isend  # type: ignore[method-assign]
        mesh = rd.Mesh(comm, dp=ranks, device=devices[comm.rank])
        mesh.axis("dp")
        mesh.axis("tp", "dp")

    rd.run(program, ranks)
    assert sent == [ranks.bit_length() - 1] * ranks
    assert all(not device.traffic for device in devices)


def test_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "collectives", "--in-process", "--ranks", "3", "--sizes", "8,1K", "--seconds", "0.01"]
    assert main([*arguments, "--collectives", "all", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(record["collective"], record["bytes"]) for record in records} == {
        (name, nbytes) for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
        for nbytes in (8, 1024)}
    for record in records:
        assert record["ranks"] == 3
        assert record["native_time_us"] is None
        assert record["busbw_gb_s"] > 0
    table = tmp_path / "table.json"
    assert main([*arguments, "--collectives", "all_gather", "--table", str(table)]) == 0
    assert Table.load(table).rows["all_reduce"] == FASTEST.rows["all_reduce"]
    assert {row.algorithm for row in Table.load(table).rows["all_gather"]} <= set(ALGORITHMS["all_gather"])
    capsys.readouterr()
    for wrong in (["--sizes", "8X"], ["--collectives", "gossip"], ["--algorithms", "snail"], ["--dtype", "half-a-float"]):
        assert main([*arguments, *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err


def test_the_page_on_collectives(tmp_path: Path) -> None:
    """Its programs run, and its pictures are those that the code draws today."""
    root = Path(__file__).parents[1]
    page = (root / "docs" / "collectives.md").read_text(encoding="utf-8")
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(program, {})
    runpy.run_path(str(root / "examples" / "draw_collectives.py"))["draw"](tmp_path)
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_text(encoding="utf-8") for file in (root / "docs" / "pictures").iterdir()
                     if file.name in drawn}
    assert set(re.findall(r"\(pictures/(.*?)\)", page)) == set(drawn)
    for module in (all_reduce, reduce_scatter, all_gather, broadcast, all_to_all):
        assert all(f"| `{algorithm}` |" in page for algorithm in module.ALGORITHMS)


@pytest.mark.parametrize(("words", "says"), [
    ("show all-reduce --svg /no/folder/ring.svg", "a file in a folder that exists, not '/no/folder/ring.svg'"),
    ("show cluster llama3 --svg .", "a file in a folder that exists, not '.'"),
    ("show schedule 1f1b --stages 2 --micro-batches 2 --svg /no/folder/chart.svg", "a file in a folder that exists"),
    ("bench collectives --ranks 2 --table /no/folder/table.json", "a file in a folder that exists"),
    ("bench collectives --ranks 2 --sizes 8,some", "--sizes 8,some: expected bytes with commas, as in 8,64K,1M"),
    ("bench collectives --ranks 2 --sizes=-8", "--sizes -8: expected bytes"),
    ("bench collectives --ranks 2 --seconds -1", "a number above 0, not '-1'"),
    ("bench collectives --ranks 2 --dtype words", "--dtype words: expected the dtype of real numbers")])
def test_bad_options_are_one_line_before_anything_runs(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(words.split())
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2
    assert not said.out
    assert len(said.err.splitlines()) == 1
    assert says in said.err


@pytest.mark.parametrize(("words", "title"), [("all-reduce --ranks 1", "all-reduce on 1 rank"),
                                              ("broadcast --ranks 2", "broadcast by size on 2 ranks")])
def test_titles_are_english(words: str, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines()[0] == title

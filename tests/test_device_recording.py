"""Events as files for trace viewers: made by hand, and of whole runs, where what begins also ends."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mpirun import run_limited
from test_cli import REFDIST, SMALL

from refdist.cli.main import main
from refdist.device import Device, Recording
from refdist.device.events import Allocation, Kernel, Message, Phase
from refdist.device.recording import as_json


def test_each_kind_of_event() -> None:
    device = Device()
    device.emit(Phase("gather of 0", True, 0.5))  # before anybody listens
    recording = Recording(device, 3)
    for event in (Phase("F 0 0", True, 1.0), Phase("gather of 0", False, 1.0),
                  Kernel("linear", ((2, 3), (4, 3)), 48, 1.5, 1.75, True), Phase("gather of 1", True, 2.0),
                  Phase("gather of 1", True, 2.5), Message("tp", "all_reduce", 1, 64, 0, 3.0), Phase("gather of 1", False, 3.5),
                  Allocation("activation", 100, 4.0), Phase("gather of 1", False, 4.5), Allocation("activation", -40, 5.0),
                  Phase("F 0 0", False, 6.0)):
        device.emit(event)
    recording.stop()
    device.emit(Kernel("late", (), 0, 8.0, 9.0, False))
    read = json.loads(as_json([recording.events]))
    assert {event["pid"] for event in read["traceEvents"]} == {3}
    events = [event for event in read["traceEvents"] if event["ph"] != "M"]
    assert [(event["ph"], event["name"], event["ts"]) for event in events] == [
        ("B", "F 0 0", 0.0), ("X", "linear", 0.5e6), ("b", "gather of 1", 1e6), ("b", "gather of 1", 1.5e6),
        ("i", "all_reduce on tp", 2e6), ("e", "gather of 1", 2.5e6), ("C", "live bytes", 3e6), ("e", "gather of 1", 3.5e6),
        ("C", "live bytes", 4e6), ("E", "F 0 0", 5e6)]
    assert events[1]["dur"] == 0.25e6
    assert events[1]["args"] == {"shapes": [[2, 3], [4, 3]], "flops": 48, "recomputed": True}
    assert events[4]["args"] == {"to": 1, "bytes": 64, "step": 0}
    assert [event["args"]["activation"] for event in events if event["ph"] == "C"] == [100, 60]
    assert [event["id"] for event in events if event["ph"] in "be"] == ["3.1", "3.2", "3.1", "3.2"], "the oldest ends first"


def check(file: Path, ranks: int) -> dict[int, list[dict[str, Any]]]:
    """The events of each rank of a file, after a look at whether each beginning has its end."""
    of_rank: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(ranks)}
    for event in json.loads(file.read_text())["traceEvents"]:
        of_rank[event["pid"]].append(event)
    for events in of_rank.values():
        kinds = Counter(event["ph"] for event in events)
        assert kinds["X"]
        assert kinds["i"]
        assert kinds["C"]
        assert kinds["B"] == kinds["E"]
        ends = {event["id"] for event in events if event["ph"] == "e"}
        assert {event["id"] for event in events if event["ph"] == "b"} == ends
        assert all(event["ts"] >= 0 for event in events)
    return of_rank


def test_a_step_of_each_rank(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "new folder" / "step.json"
    text.write_text("to be, or not to be, that is the question. " * 200)
    words = ["train", *SMALL, "--in-process", "--pp", "2", "--fsdp", "2", "--batch", "4", "--micro-batches", "2", "--json"]
    assert main([*words, "--data", str(text), "--trace", str(file)]) == 0
    for rank, events in check(file, 4).items():
        actions = [event["name"] for event in events if event["ph"] == "B"]
        assert sorted(actions) == ["B 0 0", "B 1 0", "F 0 0", "F 1 0"]
        assert any(event["name"].startswith("gather of") for event in events)
        assert {event["args"]["to"] for event in events if event["ph"] == "i"} == {rank ^ 1, rank ^ 2} - {rank}
    with pytest.raises(SystemExit):
        main(["train", "--trace", ""])


def test_a_step_of_each_rank_under_mpirun(tmp_path: Path) -> None:
    text, file = tmp_path / "text", tmp_path / "step.json"
    text.write_text("to be, or not to be, that is the question. " * 200)
    done = run_limited([*REFDIST, "train", *SMALL, "--tp", "2", "--json", "--data", str(text), "--trace", str(file)], 120)
    assert done.returncode == 0, done.stderr
    assert "2 MPI ranks (" in done.stderr
    events = check(file, 2)
    assert all(any("on tp" in event["name"] for event in of_rank) for of_rank in events.values())


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--trace", str(tmp_path)]) == 2
    assert f"--trace {tmp_path}: expected a file, this is a folder" in capsys.readouterr().err

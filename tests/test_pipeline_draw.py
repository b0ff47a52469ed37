"""Charts and the command `refdist show schedule`: what is drawn is what the schedule says, in the terminal and as SVG."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from mpirun import run_ranks

from refdist.cli.main import main
from refdist.device.events import Phase
from refdist.parallel.pipeline import SCHEDULES, Action, Times, make_schedule, simulate
from refdist.parallel.pipeline.draw import svg_chart, terminal_chart
from refdist.parallel.pipeline.timing import Recorder, Span

CLASSIC = """\
stage 0  F0 F1 F2 ············B0    F3 B1    ···B2    ···B3
stage 1  ···F0 F1 ······B0    F2 B1    F3 B2    ···B3    ······
stage 2  ······F0 B0    F1 B1    F2 B2    F3 B3    ············
"""


def test_the_classic_chart() -> None:
    chart = terminal_chart(simulate(make_schedule("1f1b", 3, 4)), 60, color=False).plain
    assert [row.rstrip() for row in chart.splitlines()] == CLASSIC.splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_in_the_terminal_chart(name: str, color: bool, width: int) -> None:
    """Also in a narrow terminal: every row has as many boxes as actions, in order, and all rows are as long."""
    schedule = make_schedule(name, 4, 9)
    chart = terminal_chart(simulate(schedule), width, color, notes=["one", "two", "three", "four"])
    rows = chart.plain.splitlines()
    assert [row.split()[-1] for row in rows] == ["one", "two", "three", "four"]
    assert len({len(row.rsplit("  ", 1)[0]) for row in rows}) == 1
    for row, actions in zip(rows, schedule.actions, strict=True):
        letters = [(a.kind.lower() if a.chunk else a.kind) + str(a.micro_batch) for a in actions]
        boxes = row.rsplit("  ", 1)[0].removeprefix(f"stage {rows.index(row)}").replace("·", " ").split()
        if not color:
            assert boxes == letters
        elif width == 200:
            assert boxes == [str(a.micro_batch) for a in actions]


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_boxes_are_where_the_times_say(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    spans = simulate(schedule)
    picture = svg_chart(spans, "title <&>", ["fact one", "fact two"], [f"note {stage}" for stage in range(4)])
    root = ElementTree.fromstring(picture)
    width = float(root.attrib["width"])
    boxes = [element for element in root.iter() if element.tag.endswith("rect") and len(element)]
    titles = [str(action) for actions in schedule.actions for action in actions]
    assert [box[0].text for box in boxes] == titles
    flat = [span for lane in spans for span in lane]
    scale = float(boxes[0].attrib["width"]) / (flat[0].end - flat[0].start)
    left = float(boxes[0].attrib["x"]) - flat[0].start * scale
    for box, span in zip(boxes, flat, strict=True):
        assert float(box.attrib["x"]) == pytest.approx(left + span.start * scale, abs=0.1)
        assert float(box.attrib["width"]) == pytest.approx((span.end - span.start) * scale, abs=0.1)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"title <&>", "fact one", "fact two", "note 3", "stage 3"} <= set(texts)
    for element in root.iter():
        assert float(element.attrib.get("x", 0)) + float(element.attrib.get("width", 0)) <= width + 0.1 or element is root


def test_overlapping_pairs_share_their_time() -> None:
    schedule = make_schedule("dualpipe", 4, 8)
    spans = simulate(schedule, Times(1, 1, 1, 3))
    pair, after = [span.action for span in spans[0][7:9]], spans[0][9]
    assert [action.kind for action in pair] == ["F", "B"]
    assert spans[0][7][1:] == spans[0][8][1:] != after[1:]
    boxes = [box for box in ElementTree.fromstring(svg_chart(spans, "", [], [""] * 4)).iter() if len(box) and "x" in box.attrib]
    upper, lower = (next(box for box in boxes if box[0].text == str(action)) for action in pair)
    assert float(lower.attrib["y"]) == float(upper.attrib["y"]) + float(upper.attrib["height"])
    row = terminal_chart(spans, 100, color=False).plain.splitlines()[0]
    assert "F3 " in row
    assert "b5 " in row


def test_a_recorder_takes_the_phases_of_actions_only() -> None:
    recorder = Recorder()
    for phase in (("all_reduce", True, 0.5), ("F 3 1", True, 1.0), ("F 3 1", False, 2.5), ("all_reduce", False, 3.0)):
        recorder(Phase(*phase))
    assert recorder.spans == [Span(Action("F", 3, 1), 1.0, 2.5)]


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_chart_bubble_peak_and_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("show schedule 1f1b --stages 4 --micro-batches 8".split()) == 0
    printed = capsys.readouterr().out
    assert "1F1B: 4 stages, 8 micro-batches" in printed
    assert "stage 3  ·········F0 B0    F1 B1" in printed
    assert "bubble 9 of 33 (27.3%); formula (p-1)(F+B+W) = 9" in printed
    assert "in flight at most 4; formula min(p-stage, m) = 4" in printed


def test_json_is_the_plain_form_and_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main("show schedule zb_v --stages 2 --micro-batches 3 --json".split()) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain == make_schedule("zb_v", 2, 3).to_lists()
    file = tmp_path / "own.json"
    file.write_text(json.dumps(plain))
    assert main(["show", "schedule", str(file), "--placement", "v", "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert (found["stages"], found["micro_batches"], found["chunks"], found["placement"]) == (2, 3, 2, "v")
    file.write_text(json.dumps(found))  # what is known about a schedule can be read as a schedule
    assert main(["show", "schedule", str(file), "--check"]) == 0
    assert "the schedule is right" in capsys.readouterr().out


def test_check_says_where_a_schedule_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lists = make_schedule("zb_h1", 2, 2).to_lists()
    lists[1].remove(["W", 1, 0])
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(lists))
    assert main(["show", "schedule", str(file), "--check"]) == 1
    assert "stage 1: W of micro-batch 1 in chunk 0 is missing" in capsys.readouterr().out
    assert main(["show", "schedule", str(file), "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == ["stage 1: W of micro-batch 1 in chunk 0 is missing"]


@pytest.mark.parametrize(("words", "problem"), [
    ("2f2b", "expected one of gpipe, 1f1b"), ("nowhere.json", "No such file"), ("1f1b --virtual-stages 2", "has 1 chunk a stage"),
    ("dualpipe --from-run", "drawn and checked, not run")])
def test_errors_of_use_are_one_line(capsys: pytest.CaptureFixture[str], words: str, problem: str) -> None:
    assert main(["show", "schedule", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("refdist show: ")
    assert problem in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("times", ["1,1", "a,b,c", "0,0,0", "1,-1,1"])
def test_times_that_are_none(times: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["show", "schedule", "1f1b", "--times", times])
    assert stopped.value.code == 2


def test_from_run_draws_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    words = f"show schedule zb_h1 --stages 2 --micro-batches 3 --seq 8 --from-run --in-process --svg {file} --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is True
    for spans, actions in zip(found["spans"], found["actions"], strict=True):
        assert [span[:3] for span in spans] == actions
        assert all(before[4] <= after[3] for before, after in pairwise(spans))
    first, second = found["spans"]
    assert first[0][4] <= second[0][3]  # stage 1 begins when stage 0 has done its first forward
    assert "measured" in file.read_text()


def test_from_run_under_mpirun(tmp_path: Path) -> None:
    words = ["-m", "refdist", *"show schedule 1f1b --stages 2 --micro-batches 3 --seq 8 --from-run --json".split()]
    done = run_ranks(2, words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"] is True

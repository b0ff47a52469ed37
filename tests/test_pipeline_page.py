"""The page on pipelines: its charts are those that the code draws today, and its examples run in process and under mpirun."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from mpirun import run_limited, run_ranks

ROOT = Path(__file__).resolve().parents[1]


def test_the_charts_of_the_page(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "examples" / "draw_schedules.py"))["draw"](tmp_path)
    drawn = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "pictures").glob("pipeline-*.svg")}
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(pictures/(.*?)\)", page)) == set(drawn)


def test_the_schedule_of_ones_own_also_under_mpirun() -> None:
    example = str(ROOT / "examples" / "own_schedule.py")
    for done in (run_limited([sys.executable, example], 120), run_ranks(3, example)):
        assert done.returncode == 0, done.stderr
        assert "lazy: bubble 4, in flight at most 6" in done.stdout
        assert "the checker: stage 1, action 3: W of micro-batch 1 in chunk 0 comes before its I" in done.stdout
        assert "run on 3 ranks: gradients differ" in done.stdout


def test_one_model_under_every_schedule_also_under_mpirun() -> None:
    done = run_ranks(2, ROOT / "examples" / "pipeline_schedules.py")
    assert done.returncode == 0, done.stderr
    titles = [line[:16].strip() for line in done.stdout.splitlines()[2:]]
    assert titles == ["GPipe", "1F1B", "Interleaved 1F1B", "ZB-H1", "ZB-H2", "ZB-V", "DualPipe-V"]

"""The dress rehearsal (examples/dress_rehearsal.py): a short one, one that must fail, and what its page in the documents says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("dress_rehearsal", ROOT / "examples" / "dress_rehearsal.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = np.random.default_rng(0).integers(97, 123, 5000, np.uint8)
    monkeypatch.setattr(module, "load_corpus", lambda paths, seq: type("Text", (), {"train": text}))
    return module


def table(page: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if re.match(r"\| .*\d \|$", line)]
    return {name: cells for name, *cells in rows}


def test_curves_lie_on_the_single_devices(rehearsal: ModuleType, tmp_path: Path) -> None:
    names = ["fsdp4, ZeRO 2", "pp4, ZB-H1"]
    assert rehearsal.main(tmp_path, 2, *names) == 0
    rows = table((tmp_path / "rehearsal.md").read_text())
    assert list(rows) == names
    assert all(float(cells[2]) < 1e-13 for cells in rows.values())
    assert all(1e-9 < float(cells[3]) < 1e-5 for cells in rows.values())  # float32 is float32


@pytest.mark.parametrize(("precision", "error"), [("fp64", 2e-9), ("fp32", 1e-3)])
def test_a_curve_that_is_off_is_noticed(precision: str, error: float, rehearsal: ModuleType, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "under", lambda plan, text, steps, kind: [
        loss + error * (kind == precision and step == 1) for step, loss in enumerate(rehearsal.single_device(text, steps, kind))])
    assert rehearsal.main(tmp_path, 2, "dp4") == 1


def test_the_page_has_every_plan_within_its_bound(rehearsal: ModuleType) -> None:
    rows = table((ROOT / "docs" / "rehearsal.md").read_text())
    assert list(rows) == list(rehearsal.PLANS)
    assert all(float(cells[2]) <= rehearsal.FP64_BOUND and float(cells[4]) <= rehearsal.FP32_MULTIPLE for cells in rows.values())
    picture = (ROOT / "docs" / "pictures" / "rehearsal.svg").read_text()
    assert all(name.replace("'", "&#39;") in picture or name.split(",")[0] in picture for name in rows)

"""What docs/testing.md and docs/diagnosis.md say is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from refdist.testing.faults import FAULTS
from refdist.testing.mutations import find

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "test_wrong_ring.py"


def test_the_wrong_ring_is_found_and_shrunk() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "refdist.testing.plugin", "-p", "no:cacheprovider", "--tb=short", "-q",
               "--color=no", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert re.search(r"^1 failed, 2 passed", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"world=World\((?:\nE)?\s*3,", done.stdout), done.stdout
    assert "shapes=((2,),)," in done.stdout
    assert "all_reduce gives a wrong result on rank" in done.stdout


def test_the_page_shows_the_example() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    code = EXAMPLE.read_text()
    assert code[code.index("def wrong_ring"):].rstrip() in page
    assert f"pytest -q -p refdist.testing.plugin examples/{EXAMPLE.name}" in page
    assert find(re.search(r'mutations\.apply\("([0-9a-f]{6})"\)', page).group(1)).name in page  # type: ignore[union-attr]


def test_the_mutation_on_the_page_makes_the_result_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    imports = "import numpy as np\nimport refdist as rd\nfrom refdist.testing import mutations\n"
    (code,) = re.findall(f"```python\n({imports}.*?)```", page, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("[")
    assert printed not in ("[0. 3. 6.]", "[0. 0. 0.]")


def test_the_table_has_every_fault() -> None:
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    table = page[page.index("| fault |"):].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in table] == [fault.name for fault in FAULTS]
    seconds = [float(cell) for row in table for cell in re.findall(r"\| ([\d.]+) s", row)]
    assert len(seconds) == 3 * len(FAULTS) - sum(not fault.in_process for fault in FAULTS)
    assert max(seconds) < 10

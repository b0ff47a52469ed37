"""The pages on paper print what the commands print, to the character; "…" stands for lines that are left out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from refdist.cli.main import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("memory-wall.md", "machine.md", "choosing-a-plan.md")
SHOWN = re.compile(r"^```sh\n(.*?)^```\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shown():
    return [pytest.param(commands, text, id=commands.splitlines()[0])
            for page in PAGES for commands, text in SHOWN.findall((DOCS / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("commands", "text"), shown())
def test_pages_show_what_is_printed(commands, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    for line in commands.splitlines():
        assert main(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out
    for part in text.split("…\n"):
        assert part in printed
    if not text.endswith("…\n"):
        assert printed.endswith(text.split("…\n")[-1])
    if not text.startswith("…\n"):
        assert printed.startswith(text.split("…\n")[0])
    for picture in (tmp_path / "docs" / "pictures").glob("*.svg"):
        assert picture.read_text(encoding="utf-8") == (DOCS / "pictures" / picture.name).read_text(encoding="utf-8")

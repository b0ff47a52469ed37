"""What the documents say is true: their code runs, their output is what they print, their commands work.

A ```python block runs after the earlier ones of its document; if a ```text block follows it, it prints exactly that. A block
that opens with `# file: NAME` is written to that file first. The lines of ```sh blocks are run too, the long ones shortened.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from mpirun import run_limited, run_ranks

from refdist.cli import launch
from refdist.cli.main import main, parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = "--model tiny --batch 4 --seq 16 --steps 3"


def blocks(document: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(document.read_text(encoding="utf-8")) if found == language]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_print_what_they_say(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "document"}
    for i, (language, text) in enumerate(found):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"{document.name}, block {i}", "exec"), names)
        following = found[i + 1] if i + 1 < len(found) else ("", "")
        if following[0] == "text":
            assert printed.getvalue() == following[1]


def shell_lines(on_mpi_ranks: bool) -> list[str]:
    """The commands of the documents, each once, that run on MPI ranks, or those that do not; but for the two that install."""
    lines = [line for document in DOCUMENTS for block in blocks(document, "sh") for line in block.splitlines()]
    commands = [line.split("  #")[0].strip() for line in lines if line and not line.startswith("python3 -m venv")]
    return [command for command in dict.fromkeys(commands) if needs_mpi(command) == on_mpi_ranks]


def needs_mpi(command: str) -> bool:
    """Whether a command is `mpirun`, or one of refdist with a plan for several ranks, for which it starts mpirun."""
    if not command.startswith("refdist"):
        return command.startswith("mpirun")
    ranks = re.match(r"refdist (train|check) .*--(dp|fsdp|tp|cp|pp|preset) ", command) or "--from-run" in command
    return bool(ranks) and "--in-process" not in command


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples and the documents' own files, and this Python's commands first on the PATH."""
    for name in ("examples", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            if block.startswith("# file: "):
                (tmp_path / block.split()[2]).write_text(block)
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.once
@pytest.mark.parametrize("line", shell_lines(on_mpi_ranks=False))
def test_commands_run(line: str, shell: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(shell)
    words = python_words(shlex.split(line))
    status = main(words[2:]) if words[0] == "-m" else run_limited([sys.executable, *words], 120).returncode
    out, err = capfd.readouterr()
    assert status == (1 if "--mutate" in line and not line.endswith("list") else 0), err
    assert out or words[0] != "-m"


@pytest.mark.parametrize("line", shell_lines(on_mpi_ranks=True))
def test_commands_run_on_mpi_ranks(line: str, shell: Path) -> None:
    words = shlex.split(line)
    if words[0] == "mpirun":
        assert words[1] == "-n"
        done = run_ranks(int(words[2]), python_words(words[3:]), cwd=shell)
    else:
        done = run_limited([sys.executable, *python_words(words)], 120, cwd=shell)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def python_words(words: list[str]) -> list[str]:
    """What Python is given to run a command, training for a few steps."""
    if words[0] == "python":
        return words[1:]
    assert words[0] == "refdist"
    return ["-m", *words, *(shlex.split(SHORT) if words[1] == "train" else [])]


def test_the_example_runs_in_process_and_under_mpirun(shell: Path) -> None:
    example = shell / "examples" / "ring_all_reduce.py"
    expected = {f"rank {rank} of 4: [ 0. 10. 20. 30. 40. 50. 60. 70. 80. 90.]" for rank in range(4)}
    assert set(run_limited([sys.executable, str(example)], 120).stdout.splitlines()) == expected
    under_mpirun = run_ranks(4, example)
    assert under_mpirun.returncode == 0, under_mpirun.stderr
    for line in expected:
        assert line in under_mpirun.stdout


def first_block_line(start: str) -> str:
    lines = [block.strip() for block in blocks(ROOT / "README.md", "sh") if block.startswith("python3 -m venv")]
    (line,) = [line for line in lines if start in line]
    assert "\n" not in line
    return line


def test_the_ci_runs_the_second_line_of_the_readme() -> None:
    second = first_block_line("tox")
    script = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert script[-1] == second
    assert [line for line in script if "tox" in line or "pip install" in line] == [second]


def test_the_first_line_trains_on_four_ranks() -> None:
    command = first_block_line("'.[mpi]'").split(" && ")[-1].split()
    assert command[0].endswith("/refdist")
    args = parser().parse_args(command[1:])
    assert (args.command, args.dp) == ("train", 4)
    assert args.data == []


@pytest.mark.install
def test_the_first_line_works_in_a_clean_copy(tmp_path: Path) -> None:
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "refdist", tmp_path / "refdist", ignore=shutil.ignore_patterns("__pycache__"))
    line = first_block_line("'.[mpi]'")
    kept = {name: os.environ[name] for name in ("HOME", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "LANG") if name in os.environ}
    path = os.pathsep.join(f for f in os.environ["PATH"].split(os.pathsep) if not (Path(f) / "mpirun").exists())
    done = run_limited(["sh", "-c", f"{line} {SHORT}"], 280, env={**kept, "PATH": path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 MPI ranks (Open MPI" in done.stderr
    assert "3 steps in" in done.stdout


def skeleton(line: str) -> str:
    """A line of output without its figures, their units' prefixes, or what they say about bigrams."""
    line = re.sub("[kMGT]FLOP", "FLOP", line.replace("worse than", "better than"))
    return re.sub(r"[ ]+", " ", re.sub(r"[\d,.]+(e[-+]\d+)?", "0", line)).strip()


@pytest.mark.once
def test_the_table_of_strategies_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounding may differ on another machine, but not by an order of magnitude."""
    rows = re.findall(r"^\| .* \| `(--.*)` \| (\d\.\de-\d\d) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 12
    for options, stated in rows:
        assert main(["check", *options.split(), "--in-process", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert float(stated) / 10 < max(row["max_rel"] for row in result["parameters"].values()) < float(stated) * 10


MUTATED = "refdist check --mutate data/gradients_averaged_over_ranks_again --dp 3"


@pytest.mark.once
@pytest.mark.parametrize(("command", "document", "status"), [
    ("refdist train --dp 4", "README.md", 0), ("refdist check --dp 3", "README.md", 0), (MUTATED, "README.md", 1),
    (MUTATED, "docs/testing.md", 1), ("refdist show layout --preset llama3 --dp 2", "docs/overview.md", 0)])
def test_transcripts_look_like_real_output(command: str, document: str, status: int) -> None:
    """Each line of a transcript, up to the sample, is one that the command prints, but for the figures."""
    (transcript,) = [t for t in blocks(ROOT / document, "console") if t.startswith(f"$ {command}\n")]
    words = ["-m", *command.split(), *(shlex.split(SHORT) if "train" in command else [])]
    done = run_limited([sys.executable, *words], 120)
    assert done.returncode == status, done.stderr
    printed = {skeleton(line) for line in (done.stderr + done.stdout).splitlines()}
    runtime = launch.find_runtime()
    assert isinstance(runtime, launch.Runtime)
    shown = transcript.replace(".venv/bin/mpirun", launch.shortened(runtime.mpirun)).replace("Open MPI", runtime.kind)
    for line in shown.splitlines()[1:]:
        if line.startswith("a sample"):
            break
        if line != "…":
            assert skeleton(line) in printed

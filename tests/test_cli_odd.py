"""Odd surroundings and odd words: one line that says what is wrong, a status, and nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from mpirun import run_limited, run_ranks

import refdist as rd
from refdist.aside import write_aside
from refdist.cli import comparison, keep
from refdist.cli.main import main
from refdist.testing.mutate import Mutation, mutated

REFDIST = [sys.executable, "-m", "refdist"]
FULL = Path("/dev/full")
TINY = "--model tiny --batch 2 --seq 8 --steps 1".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_text("to be, or not to be, that is the question. " * 200)
    return file


def line(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that a wrong command line leads to."""
    with contextlib.suppress(SystemExit):
        assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert not captured.out
    (found,) = captured.err.splitlines()
    return found


@pytest.mark.parametrize(("words", "says"), [
    ("check --in-process --rope-scaling [1]", "rope_scaling=[1]: expected a mapping, as in config.json, or None"),
    ("plan --model llama3-8b --gpus 8 --cp-ulysses 3", "no plan with cp_ulysses=3 shares 8 GPUs out"),
    ("bench collectives --in-process --dtype complex64", "--dtype complex64: expected the dtype of real numbers"),
    ("train --data /dev/zero", "cannot read /dev/zero: a device, expected a file"),
    ("show plan --run llama3-16k --model llama3-8b", "is a run of llama3-405b: --model llama3-8b is another one"),
    ("show schedule 1f1b --placement v", "--placement is for a .json file"),
    ("show schedule 1f1b --seq 64", "--seq is for a measured run: it needs --from-run"),
    ("show memory --model llama3-8b --rank 1", "--rank is for what is run, not for paper"),
    ("show memory --on-paper --precision bf16", "--precision is for what is run, not for paper: --stored says what is kept"),
    ("show barrier --algorithm nope", "--algorithm nope: barrier has one algorithm only"),
    ("show all-reduce --algorithm ring --groups 0,1/2,3", "groups (rank 0): for algorithm='hierarchical', not 'ring'"),
])
def test_wrong_words_are_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in line(words, capsys)


@pytest.mark.parametrize("option", ["--save", "--data", "--plot"])
def test_an_empty_name_is_not_the_current_folder(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", option, ""])
    assert f"argument {option}: expected the name of a file or folder, not an empty one" in capsys.readouterr().err


@pytest.mark.parametrize(("contents", "says"), [
    (b"\xff\xfe[[]]", "is no text in UTF-8"), (b"[" * 100_000, "is not JSON, or deeper than a schedule is"),
    (b'[[["F", 30000000, 0]]]', "micro-batch 30000000 of a schedule of 1 actions"),
    (b'[[["F", 0, 9], ["B", 0, 9]]]', "chunk 9 of a schedule of 2 actions")])
def test_files_that_are_no_schedules(contents: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.json"
    file.write_bytes(contents)
    assert says in line(f"show schedule {file} --check", capsys)
    assert says in line(f"check --in-process --pp 2 --schedule {file}", capsys)


def test_a_schedules_file_has_its_own_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.json"
    file.write_text('[[["F", 0, 0], ["B", 0, 0]], [["F", 0, 0], ["B", 0, 0]]]')
    assert main(["show", "schedule", str(file), "--virtual-stages", "1"]) == 0
    capsys.readouterr()
    assert f"{file} has 1 virtual-stages, not 4" in line(f"show schedule {file} --virtual-stages 4", capsys)


# ------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dropout", ["--attention-dropout", "--hidden-dropout"])
def test_check_runs_the_dropout_that_it_is_given(dropout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake of dropout alone is seen with it, and not without."""
    words = "check --in-process --tp 2 --batch 2 --seq 8".split()
    old, new = ("first_head = axis.rank *", "first_head = 0 *") if "attention" in dropout else \
               ("positions[axis.part]", "positions[:len(positions[axis.part])]")
    assert main([*words, dropout, "0.3"]) == 0
    with mutated(Mutation("dropout", "tp", "", "refdist.parallel.replica:Replica._micro_batches", old, new)):
        assert main(words) == 0
        assert main([*words, dropout, "0.3"]) == 1


def test_a_model_of_one_token_has_no_gradients_and_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("check --in-process --vocab-size 1 --batch 2 --seq 4".split()) == 0
    row = comparison.compare({"w": np.zeros(2)}, {"w": np.zeros(2)}, {"w": 0.0})["w"]
    assert (row.max_rel, row.ok) == (0, True)


# ------------------------------------------------------------------------------------- files and streams


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_file_held_stays_if_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "picture.svg"
    write_aside(file, "old ü")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_aside(file, b"new")
    assert file.read_text(encoding="utf-8") == "old ü"
    assert os.listdir(tmp_path) == ["picture.svg"]


@pytest.mark.parametrize("words", ["show memory --model llama3-8b", "show all-reduce --ranks 3", "show schedule 1f1b",
                                   "show attention --cp 2", "show cluster llama3", "show plan --model llama3-8b --fsdp 8"])
def test_pictures_are_written_aside(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.svg"
    file.write_text("old")
    assert main([*words.split(), "--svg", str(file)]) == 0
    assert file.read_text(encoding="utf-8").startswith("<svg")
    file.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    assert main([*words.split(), "--svg", str(file)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "refdist show: [Errno 28] No space left on device"
    assert file.read_text() == "old"
    monkeypatch.undo()


def test_a_model_that_cannot_be_written_is_said_after_the_summary(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rd, "save_params", full)
    assert main(["train", *TINY, "--json", "--data", str(text), "--save", str(tmp_path / "model")]) == 2
    captured = capsys.readouterr()
    assert '"validation_loss"' in captured.out
    assert captured.err.splitlines()[-1] == \
        f"refdist train: --save {tmp_path / 'model'} could not be written: No space left on device"
    assert not (tmp_path / "model" / keep.METRICS).exists()


def test_saved_models_can_be_read_by_whoever_can_read_their_configuration(text: Path, tmp_path: Path) -> None:
    assert main(["train", *TINY, "--data", str(text), "--save", str(tmp_path / "model"), "--json"]) == 0
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()}
    assert len(modes) == 1


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["check --dp 2 --json", "check", "show layout", "train --dp 2 --json"])
def test_lost_output_is_no_success_under_mpirun_and_without(words: str, text: Path) -> None:
    command = [*words.split(), *([*TINY, "--data", str(text)] if words.startswith("train") else [])]
    script = 'exec "$@" > /dev/full'
    done = run_limited(["sh", "-c", script, "sh", *REFDIST, *command], 120)
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_closed_streams_are_written_to_in_vain() -> None:
    scripts = ['exec "$@" >&-', 'exec "$@" 2>&-', *(['exec "$@" 2> /dev/full'] if FULL.exists() else [])]
    for script in scripts:
        done = run_limited(["sh", "-c", script, "sh", *REFDIST, "check", "--in-process", "--dp", "2", "--json"], 120)
        assert done.returncode == 0, script
        assert ('"ok": true' in done.stdout) == (">&-" not in script or "2>" in script), script


def test_an_encoding_that_lacks_a_character_shows_a_question_mark() -> None:
    done = run_limited([*REFDIST, "show", "schedule", "1f1b"], 120, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_names_in_any_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "späce ü"
    folder.mkdir()
    (folder / "ä.txt").write_text("to be, or not to be, that is the question. " * 200)
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run_limited([*REFDIST, "train", *TINY, "--data", str(folder), "--json"], 120, env=environ)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ under a launcher


@pytest.mark.parametrize("words", ["show layout", "show hardware", "show flops", "plan --model llama3-8b --gpus 8",
                                   "show all-reduce --ranks 3", "show memory --model llama3-8b"])
def test_what_needs_no_ranks_runs_once_under_mpirun(words: str) -> None:
    alone = run_limited([*REFDIST, *words.split()], 120)
    done = run_ranks(2, ["-m", "refdist", *words.split()])
    assert done.returncode == alone.returncode == 0, done.stderr
    assert done.stdout.split() == alone.stdout.split()


def test_mpirun_needs_no_home() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = run_limited([*REFDIST, "check", "--dp", "2", "--json"], 120, env=environ)
    assert done.returncode == 0, done.stderr
    assert "2 MPI ranks (" in done.stderr


@pytest.mark.parametrize(("words", "says"), [
    ("train --dpp 4", "unknown option --dpp (perhaps --dp)"), ("check --cpp 2", "unknown option --cpp (perhaps --cp)"),
    ("show all-reduce --alg ring", "unknown option --alg (perhaps --algorithm)"),
    ("check dp=2", "unexpected argument 'dp=2' (perhaps --dp)"),
    ("check --in-process --mutate 45", "--mutate 45: expected a name, or 4 digits of a hash or more"),
    ("show attention --method ulysses --ulysses 2", "--ulysses 2 is for other methods: with --method ulysses all 4 ranks"),
    ("check --in-process --cp 4 --cp-method ulysses --cp-ulysses 2", "--cp-ulysses 2 is for other methods"),
    ("check --in-process --zero 3", "--zero 3 shares out what --fsdp ranks hold in common: expected --fsdp 2 or more"),
    ("show memory --stored lecture", "--stored is for paper: what is run stores what --precision and the plan say"),
    ("show hardware --from k40:fp32 --to b200:fp32 --sparse", "sparsity is of matrix units: not in fp32")])
def test_what_may_have_been_meant(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in line(words, capsys)


def test_a_published_run_with_other_formats(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (("", "gradients accumulated in FP32"), ("--stored mixed", "2+2+4+4+4")):
        assert main(f"show plan --run llama3-16k {words}".split()) == 0
        assert says in capsys.readouterr().out


def test_arguments_of_other_types_are_named() -> None:
    config = rd.ModelConfig(8, 4, 4, 1, 1)
    ids = np.zeros((2, 2), int)
    for call, says in (
        (lambda comm: rd.loss_and_grads(config, {"dp": 1}, rd.init_params(config), ids, ids, comm=comm), "plan is a dict"),
        (lambda comm: rd.Trainer(config, rd.Plan(), comm, "adam"), "optimizer is a str: expected an Optimizer"),
    ):
        with pytest.raises(TypeError, match=says):
            rd.run(call, 1)
    with pytest.raises(ValueError, match="lr='x': expected a number of at least 0"):
        rd.AdamW(lr="x")

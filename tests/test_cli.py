"""The commands as a user gives them: what they print, what they return, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpirun import PROMISED, SOON, run_limited, run_ranks

import refdist as rd
from refdist.cli import check, comparison, display, launch, train
from refdist.cli.main import main, parser
from refdist.cli.options import PRESETS
from refdist.train.generate import generate, pick

REFDIST = [sys.executable, "-m", "refdist"]
SMALL = "--model tiny --batch 5 --seq 16 --steps 3".split()


@pytest.fixture(autouse=True)
def _plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may themselves be run from a launcher's or a Slurm shell."""
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", launch.NOTE))]:
        monkeypatch.delenv(name)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    generator = np.random.default_rng(0)
    words = [b"the ", b"quick ", b"brown ", b"fox ", b"jumps ", b"over ", b"it.\n"]
    file.write_bytes(b"".join(words[i] for i in generator.integers(0, len(words), 4000)))
    return file


def json_lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# ---------------------------------------------------------------- train


def test_train_prints_json_lines(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dp", "2", "--in-process", "--json", "--data", str(text), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == "refdist: 2 in-process ranks (--in-process)\n"
    *steps, summary = json_lines(out)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert record["loss"] > 0
        assert record["grad_norm"] > 0
        assert record["tokens_per_s"] > 0
        assert record["tokens"] == 80
    # A ring over two ranks: each rank sends half of the parameters twice, in float32, and a few numbers more.
    parameters = summary["parameters"]
    assert 4 * parameters <= steps[0]["bytes_sent"] <= 4 * parameters + 10_000
    assert steps[-1]["validation_loss"] == summary["validation_loss"]
    assert (summary["world_size"], summary["transport"], summary["steps"]) == (2, "in-process", 3)
    assert summary["bigram_loss"] > 0
    assert len(summary["sample"]) > 0


def test_train_shows_lines_where_there_is_no_terminal(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(text), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == "refdist: 1 in-process rank (one rank needs no other)\n"
    for words in ["step 1/3", "tokens/s", "|g|", "MB sent", "validation loss", "bigram", "a sample, after", str(text)]:
        assert words in out
    assert "\x1b" not in out


def test_train_gives_the_same_losses_on_mpi_and_in_process_ranks(text: Path) -> None:
    arguments = ["train", "--precision", "fp64", "--json", "--data", str(text), "--eval-every", "1", *SMALL]
    four = [*arguments, "--dp", "4"]
    own_mpi = run_limited([*REFDIST, *four], 120)
    in_process = run_limited([*REFDIST, *four, "--in-process"], 120)
    under_mpirun = run_ranks(4, ["-m", "refdist", *four])
    one = run_limited([*REFDIST, *arguments], 120)
    runs = [own_mpi, in_process, under_mpirun, one]
    losses = []
    for done, transport in zip(runs, ["mpi", "in-process", "mpi", "in-process"], strict=True):
        assert done.returncode == 0, done.stderr
        *steps, summary = json_lines(done.stdout)
        assert summary["transport"] == transport
        assert len(steps) == 3
        losses.append([record[key] for record in steps for key in ("loss", "grad_norm", "validation_loss")])
    assert "4 MPI ranks (" in own_mpi.stderr
    assert "4 in-process ranks" in in_process.stderr
    assert under_mpirun.stderr.startswith("refdist: 4 MPI ranks, started by mpi")
    assert under_mpirun.stderr.count("refdist:") == 1
    for other in losses[1:3]:
        np.testing.assert_allclose(losses[0], other, rtol=0, atol=1e-12)
    np.testing.assert_allclose(losses[0], losses[3], rtol=0, atol=1e-10)


def test_train_falls_back_to_in_process_ranks_without_an_mpi_library(text: Path) -> None:
    environ = {**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = run_limited([*REFDIST, "train", "--dp", "2", "--json", "--data", str(text), *SMALL], 120, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "refdist: 2 in-process ranks (mpi4py finds no MPI library; `pip install 'refdist[mpi]'` brings one)\n"
    )
    assert json_lines(done.stdout)[-1]["transport"] == "in-process"


def test_ranks_that_are_far_too_many_for_the_cores_run_in_this_process(text: Path, capsys: pytest.CaptureFixture[str],
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RANKS_A_CORE", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("mpirun was started"))
    assert main(["train", "--dp", "3", "--json", "--data", str(text), *SMALL]) == 0
    assert "refdist: 3 in-process ranks (3 MPI ranks would be more than 1 a core" in capsys.readouterr().err


def test_mpi_ranks_take_no_modules_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "safetensors.py").write_text("raise RuntimeError('a module of the working directory was taken')")
    check = ["check", "--dp", "2", "--batch", "2", "--seq", "4"]
    done = run_limited([sys.executable, "-c", launch._ELSEWHERE, *check], 120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "refdist: 2 MPI ranks (" in done.stderr


def test_a_diverged_run_says_so_in_one_line(text: Path) -> None:
    for where in (["--in-process"], []):
        done = run_limited([*REFDIST, "train", "--dp", "2", "--lr", "1e30", "--json", "--data", str(text), *SMALL, *where], 120)
        assert done.returncode == 1, where
        first, *said = done.stderr.splitlines()
        assert ("2 in-process ranks" if where else "2 MPI ranks") in first
        assert len(said) == 1
        assert re.match(r"refdist train: the (validation )?loss is (nan|inf) in step \d: training has diverged", said[0]), said
        assert "sample" not in json_lines(done.stdout)[-1]


def test_train_learns_more_than_bigrams(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "train --model tiny --batch 8 --seq 32 --steps 90 --lr 0.01 --dp 2 --in-process --json --data".split()
    assert main([*arguments, str(text)]) == 0
    summary = json_lines(capsys.readouterr().out)[-1]
    assert summary["validation_loss"] < summary["bigram_loss"] - 0.2


def test_validation_is_the_mean_over_all_windows_whatever_the_batch() -> None:
    windows = np.random.default_rng(0).integers(0, 256, (7, 9), dtype=np.uint8)

    def mean_label(input_ids: np.ndarray, labels: np.ndarray) -> float:
        assert len(input_ids) == batch
        return float(labels[labels != -100].mean())

    for batch in (1, 2, 3, 7, 10, 20):
        assert np.isclose(train.evaluate(mean_label, windows, batch), windows[:, 1:].mean(), rtol=1e-12)


def test_ranks_that_read_other_texts_refuse() -> None:
    def program(comm: rd.Comm) -> None:
        own = train.Corpus(np.arange(9, dtype=np.uint8), np.full(5, comm.rank == 2, np.uint8), "here")
        train.check_same_text(comm, own)

    with pytest.raises(train.DataError, match="rank 2 has read another text than rank 0 from here"):
        rd.run(program, ranks=4)


# ---------------------------------------------------------------- check


def test_check_passes_and_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("check --dp 3 --in-process".split()) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.self_attn.q_proj.weight" in out
    assert "DIFFERS" not in out
    assert "21 of 21 gradients agree (fp64)" in out


@pytest.mark.parametrize("options", ["--dp 3", "--dp 2 --precision fp32", "--dp 2 --micro-batches 2 --tie-word-embeddings"])
def test_check_prints_json(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"check {options} --in-process --json".split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert result["loss_error"] < (1e-5 if "fp32" in options else 1e-12)
    assert ("lm_head.weight" in result["parameters"]) == ("tie" not in options)
    for row in result["parameters"].values():
        assert row["max_rel"] < (1e-4 if "fp32" in options else 1e-12)
        assert abs(row["ratio"] - 1) < 1e-4


@pytest.mark.parametrize("options", ["--precision fp16 --dp 3", "--precision bf16 --tp 2 --micro-batches 2",
                                     "--precision fp32 --tensor-core h100 --dp 2", "--precision fp64 --dp 2 --reduce-dtype bf16"])
def test_check_in_lower_precision(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"check {options} --batch 3 --seq 9 --in-process --json".split()) == 0
    rows = json.loads(capsys.readouterr().out)["parameters"].values()
    assert 1e-4 < max(row["max_rel"] for row in rows) < 0.2


def test_train_in_16_bits_shows_the_loss_scale_and_skipped_steps(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["train", "--data", str(text), "--in-process", "--dp", "2", *SMALL]
    assert main([*common, "--precision", "fp16", "--json"]) == 0
    *steps, summary = json_lines(capsys.readouterr().out)
    assert [(step["loss_scale"], step["skipped"]) for step in steps] == [(65536.0, False)] * 3
    assert 2 * summary["parameters"] <= steps[0]["bytes_sent"] <= 2 * summary["parameters"] + 10_000  # in float16
    assert main([*common, "--precision", "fp16", "--loss-scale", "1e9"]) == 0
    assert capsys.readouterr().out.count("loss × 1,000,000,000  overflow, skipped") == 3
    assert main([*common, "--precision", "fp16", "--loss-scale", "1e9", "--json"]) == 0
    *steps, _ = json_lines(capsys.readouterr().out)
    assert [(step["grad_norm"], step["skipped"], step["learning_rate"]) for step in steps] == [(None, True, 4e-3)] * 3
    assert main([*common, "--precision", "bf16", "--json"]) == 0
    assert "loss_scale" not in json_lines(capsys.readouterr().out)[0]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16"])
def test_check_finds_a_wrong_gradient_and_names_its_factor(
    precision: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = rd.loss_and_grads

    def wrong(*args: Any, **kwargs: Any) -> tuple[float, dict[str, np.ndarray]]:
        loss, grads = right(*args, **kwargs)
        return loss, grads | {"model.norm.weight": grads["model.norm.weight"] * 2}

    monkeypatch.setattr(rd, "loss_and_grads", wrong)
    assert main(["check", "--dp", "2", "--in-process", "--json", "--precision", precision]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert abs(result["parameters"]["model.norm.weight"]["ratio"] - 2) < (1e-2 if precision == "fp16" else 1e-4)
    assert main(["check", "--dp", "2", "--in-process", "--precision", precision]) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 1


@pytest.mark.parametrize("error", ["smallest", "nan"])
def test_check_is_as_strict_as_it_says(error: str) -> None:
    want = {"a": np.array([1.0, -2.0]), "b": np.array([1e-6, 0.0])}
    bounds = {"a": 2e-10, "b": 2e-13}
    off = {"smallest": 3e-13, "nan": np.nan}[error]
    rows = comparison.compare({"a": want["a"] + 1e-10, "b": want["b"] + np.array([0.0, off])}, want, bounds)
    assert rows["a"].ok
    assert not rows["b"].ok


def test_check_batches_have_unequal_numbers_of_labels() -> None:
    job = check.prepare(parser().parse_args("check --dp 2 --batch 6 --seq 40".split()))
    input_ids, labels = comparison.random_batch(job)
    counts = (labels != -100).sum(axis=1)
    assert len(set(counts)) > 3
    assert counts[0] == 40
    assert input_ids.max() < job.config.vocab_size
    params = comparison.random_params(job)
    assert all(value.std() > 0.01 for value in params.values())


SPOIL = """
import refdist.cli.comparison as comparison
good = comparison.compare
comparison.compare = lambda got, want, bounds: good({name: 2 * g for name, g in got.items()}, want, bounds)
"""


def test_check_under_its_own_mpirun_returns_1_without_a_word_from_mpirun(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOIL)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = run_limited([*REFDIST, "check", "--dp", "2", "--json"], 120, env=environ)
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    assert [line.split(" (")[0] for line in done.stderr.splitlines()] == ["refdist: 2 MPI ranks"]
    table = run_limited([*REFDIST, "check", "--dp", "2"], 120, env=environ)
    assert table.returncode == 1
    assert "DIFFERS" in table.stdout
    assert "\x1b" not in table.stdout


# ---------------------------------------------------------------- errors of use

REFUSED = {
    "train --data {tmp}/none": "cannot read {tmp}/none: No such file",
    "train --data {tmp}/empty": "no text in {tmp}/empty",
    "train --data {tmp}/short --seq 64": "{tmp}/short has 70 bytes, too short: --seq 64 needs 130",
    "train --dp 0": "dp=0: expected at least 1",
    "train --dp two": "argument --dp: invalid int value: 'two'",
    "train --micro-batches 0": "micro_batches=0",
    "train --dp 4 --batch 3": "a batch of 3 sequences cannot be cut over dp=4 ranks",
    "check --dp 9": "a batch of 8 sequences cannot be cut over dp=9 ranks",
    "train --batch 0": "argument --batch: expected a whole number of at least 1, not '0'",
    "train --steps -3": "argument --steps: expected",
    "train --lr 0": "--lr 0.0: expected a positive number",
    "train --lr nan": "--lr nan: expected a positive number",
    "train --vocab-size 100": "vocab_size=100: the tokens are bytes, expected at least 256",
    "train --num-key-value-heads 3": "num_key_value_heads=3 does not divide num_attention_heads=4",
    "train --max-position-embeddings 64 --seq 65": "--seq 65 is longer than max_position_embeddings=64",
    "train --rope-scaling x": "argument --rope-scaling: not JSON",
    "train --model huge": "argument --model: invalid choice: 'huge'",
    "train --nonsense 1": "refdist train: unknown option --nonsense; `refdist train --help` lists those there are",
    "train --micro-batch 4": "refdist train: unknown option --micro-batch (perhaps --micro-batches);",
    "show schedule 1f1b --stage=3": "refdist show schedule: unknown option --stage (perhaps --stages);",
    "plan --gpus 8 --preset llama3": "refdist plan: unknown option --preset",
    "show schedule 1f1b --latency -1": "argument --latency: expected a time of at least 0",
    "show barrier --root 1": "refdist show barrier: unknown option --root",
    "check gpipe": "refdist check: unexpected argument 'gpipe'; `refdist check --help` says what is expected",
    "fly": "'fly': expected one of train, sample, check, show, plan, bench; `refdist --help` describes them",
    "": "expected one of train, sample, check, show, plan, bench",
}


@pytest.mark.parametrize("command", REFUSED)
def test_errors_of_use_are_one_line_and_status_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"x" * 70)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("mpirun was started"))
    try:
        status = main(command.format(tmp=tmp_path).split())
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("refdist")
    assert REFUSED[command].format(tmp=tmp_path) in err


def test_an_error_of_use_has_no_traceback_in_a_real_shell() -> None:
    done = run_limited([*REFDIST, "train", "--dp", "4", "--batch", "2"], 120)
    assert done.returncode == 2
    assert done.stderr == (
        "refdist train: a batch of 2 sequences cannot be cut over dp=4 ranks: at least 4 are needed\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--dp 4", "dp=4 needs 4 ranks, mpi* started 3"),
        ("", "dp=1 needs 1 rank, mpi* started 3"),
        ("--dp 3 --in-process", "--in-process starts its own ranks; mpi* started 3 already"),
    ],
)
def test_a_plan_that_does_not_fit_mpirun_is_refused_once(options: str, words: str) -> None:
    done = run_ranks(3, ["-m", "refdist", "check", *options.split()])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    before, after = words.split("*")
    lines = [line for line in done.stderr.splitlines() if line.startswith("refdist")]
    assert len(lines) == 1
    assert lines[0].startswith(f"refdist check: {before}")
    assert lines[0].endswith(after)


def test_an_mpirun_of_another_library_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    alone: list[Any] = []
    monkeypatch.setattr(rd, "mpi_world", lambda: alone[0])
    rd.run(lambda comm: alone.append(comm), ranks=1)
    assert main(["check", "--dp", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("refdist: mpirun started 2 ranks, MPI sees 1: it belongs to another MPI library")
    assert err.count("\n") == 1


# ---------------------------------------------------------------- Ctrl-C


def start_training(*options: str) -> subprocess.Popen[str]:
    command = [*REFDIST, "train", "--model", "tiny", "--steps", "100000", "--json", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("options", [["--dp", "2"], ["--dp", "2", "--in-process"]], ids=["mpi", "in-process"])
def test_ctrl_c_ends_a_training_run_quickly_and_quietly(options: list[str]) -> None:
    process = start_training(*options)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["step"] == 1
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=2 * SOON)
    assert process.returncode == 130
    assert time.monotonic() - began < PROMISED
    assert err.splitlines()[1:] == ["refdist: interrupted"]


def require_end_without_reader(process: subprocess.Popen[str]) -> None:
    """Read one line, go away, and see the command end with the status of a broken pipe and no traceback."""
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=2 * SOON) == 141
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("options", [["--dp", "2"], []], ids=["mpi", "in-process"])
def test_a_reader_that_goes_away_ends_a_run_without_a_traceback(options: list[str]) -> None:
    require_end_without_reader(start_training(*options))


# ---------------------------------------------------------------- options


def test_every_field_of_plan_and_config_is_an_option() -> None:
    values = {int: "7", float: "0.5", bool: None}
    for command in ("train", "check"):
        for owner in (rd.Plan, rd.ModelConfig):
            for field in dataclasses.fields(owner):
                option = "--" + field.name.replace("_", "-")
                kind = {"int": int, "float": float, "bool": bool}.get(str(field.type))
                if kind is None:
                    continue
                words = [command, option] if values[kind] is None else [command, option, values[kind]]
                assert getattr(parser().parse_args(words), field.name) == (True if kind is bool else kind(values[kind]))


def test_options_override_a_preset_and_nothing_else() -> None:
    args = parser().parse_args("train --model tiny --hidden-size 32 --no-attention-bias --rope-scaling null".split())
    config = train.make_config(args)
    assert config.hidden_size == 32
    assert config.num_hidden_layers == PRESETS["tiny"]["num_hidden_layers"]
    assert config.rope_scaling is None


def test_options_read_every_kind_of_field() -> None:
    @dataclasses.dataclass
    class Kinds:
        whole: int = 1
        maybe: int | None = None
        part: float = 0.5
        name: str = "a"
        switch: bool = True
        several: tuple[int, ...] | None = None

    from refdist.cli.options import Parser, add_fields, given

    reader = Parser(prog="x")
    add_fields(reader.add_argument_group("kinds"), Kinds)
    assert given(Kinds, reader.parse_args([])) == {}
    words = "--whole 3 --maybe 4 --part 0.25 --name b --no-switch --several 2,3,3".split()
    assert given(Kinds, reader.parse_args(words)) == {
        "whole": 3, "maybe": 4, "part": 0.25, "name": "b", "switch": False, "several": (2, 3, 3)
    }  # fmt: skip


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "check"):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0
        out = capsys.readouterr().out
        for option in ("--dp", "--micro-batches", "--hidden-size", "--model", "--batch", "--seq", "--json", "--in-process"):
            assert option in out


# ---------------------------------------------------------------- display


RECORD = {"step": 1, "loss": 2.5, "grad_norm": 0.75, "tokens_per_s": 12345.6, "bytes_sent": 1_500_000}
FACTS = {"layers": 2, "hidden_size": 64, "parameters": 1234, "origin": "[here]", "train_bytes": 9, "validation_bytes": 1}
SUMMARY = {
    **FACTS, "validation_loss": 2.0, "bigram_loss": 2.4, "steps": 2, "seconds": 3.0, "world_size": 4,
    "model_flops": 2_500_000_000, "executed_flops": 3_000_000_000, "peak": "sgemm", "peak_flops_per_s": 1.5e11,
    "mfu": 0.25, "hfu": 0.3,
    "transport": "mpi", "prompt": "def", "sample": "[bold]x[/bold]",
}  # fmt: skip


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.NOTE, json.dumps({"status_file": "x", "terminal": True, "columns": 120}))


@pytest.mark.usefixtures("terminal")
def test_a_bar_is_drawn_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with display.make_display(False, 2, rank=0) as shown:
        assert isinstance(shown, display.Live)
        shown.begin(FACTS)
        shown.step(RECORD)
        shown.step({**RECORD, "step": 2, "validation_loss": 2.0})
        shown.end(SUMMARY)
    out = capsys.readouterr().out
    assert "\x1b" in out
    assert "12,346 tokens/s" in out
    assert "step 2/2" in out
    assert "validation loss 2.000 nats per byte, bigram 2.400: 0.400 better than the bigram" in out
    assert ("2.5 GFLOP of the model, 3.0 GFLOP executed: MFU 25.0 %, HFU 30.0 % of this machine's float32 product (150.0 GFLOP/s)"
            in out.replace("\n", ""))
    assert "[bold]x[/bold]" in out  # text is never taken for markup


@pytest.mark.usefixtures("terminal")
def test_each_picture_of_the_bar_is_a_whole_line_since_mpirun_keeps_parts_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with display.make_display(False, 2, rank=0) as shown:
        shown.begin(FACTS)
        assert capsys.readouterr().out.endswith("\n")
        shown.step(RECORD)
        again = capsys.readouterr().out
        assert again.startswith("\x1b[1A\x1b[J")  # back over the picture before
        assert again.endswith("\n")
        assert "\x1b[?25l" not in again  # the cursor is never hidden, so no failure can leave it so


def test_only_rank_0_shows_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with display.make_display(True, 2, rank=1) as shown:
        shown.begin(FACTS)
        shown.step(RECORD)
        shown.end(SUMMARY)
    assert capsys.readouterr().out == ""


def test_open_mpi_s_own_terminal_is_not_taken_for_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert type(display.make_display(False, 2, rank=0)) is display.Lines


def test_samples_are_safe_to_print() -> None:
    tokens = np.frombuffer(b"a\x1b[2J\x07\xff\xc3\xa9\n", np.uint8)
    assert train.as_text(tokens) == "a\ufffd[2J\ufffd\ufffdé\n"
    assert train.as_text(np.array([65, 300])) == "A\ufffd"


# ---------------------------------------------------------------- generate


def test_sampling_follows_the_distribution() -> None:
    logits = np.log([0.1, 0.6, 0.3])
    drawn = np.array([pick(logits, (i + 0.5) / 1000, 1.0) for i in range(1000)])
    assert [int((drawn == token).sum()) for token in range(3)] == [100, 600, 300]
    sharper = np.array([pick(logits, (i + 0.5) / 1000, 0.5) for i in range(1000)])
    assert abs((sharper == 1).mean() - 0.36 / 0.46) < 2e-3
    assert {pick(logits, x, 0.0) for x in (0.0, 0.999999)} == {1}


def test_generation_sees_its_window_and_can_be_repeated() -> None:
    seen: list[np.ndarray] = []

    def next_is_one_more(input_ids: np.ndarray) -> np.ndarray:
        seen.append(input_ids)
        return 50.0 * np.eye(10)[(input_ids + 1) % 10]

    made = generate(next_is_one_more, np.array([3, 4]), 5, window=3)
    assert made.tolist() == [5, 6, 7, 8, 9]
    assert [ids.shape for ids in seen] == [(1, 2), (1, 3), (1, 3), (1, 3), (1, 3)]
    assert seen[-1].tolist() == [[6, 7, 8]]

    def anything(input_ids: np.ndarray) -> np.ndarray:
        return np.zeros((1, input_ids.shape[1], 100))

    first = generate(anything, np.array([0]), 20, window=4, seed=1)
    assert np.array_equal(first, generate(anything, np.array([0]), 20, window=4, seed=1))
    assert not np.array_equal(first, generate(anything, np.array([0]), 20, window=4, seed=2))
    assert len(set(first.tolist())) > 10


def test_help_names_commands_algorithms_and_what_each_option_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("refdist: expected one of train, sample, check, show, plan, bench; "
                                       "`refdist --help` describes them\n")
    for command in ("train", "check", "bench step", "show memory", "show layout"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        bare = re.findall(r"^  --[a-z-]+(?:, --no-[a-z-]+)?(?: [A-Z]\S*| \{.*?\})?\n?\s*(\(default.*\))?\n(?=  --|\n|$)",
                          capsys.readouterr().out, re.MULTILINE)
        assert not bare
    for operation, algorithms in (("all-reduce", "rabenseifner"), ("all-gather", "bruck"), ("broadcast", "binomial")):
        with pytest.raises(SystemExit):
            main(["show", operation, "--help"])
        assert algorithms in capsys.readouterr().out
    assert main(["show", "all-reduce", "--algorithm", "ring", "--ranks", "3"]) == 0
    assert "*: has just come" in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("words", ["show schedule 1f1b --micro-batches 800", "train --model tiny --steps 100000",
                                   "show layout --num-hidden-layers 900"])
def test_a_reader_that_goes_away_has_one_status(words: str) -> None:
    process = subprocess.Popen([*REFDIST, *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    require_end_without_reader(process)


def test_one_of_something_has_no_s(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    words = ["train", "--data", str(text), "--in-process", *SMALL, "--num-hidden-layers", "1", "--steps", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Llama with 1 layer of" in out
    assert "1 step in" in out
    assert "on 1 rank (in-process)" in out

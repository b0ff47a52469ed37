"""What `refdist train` leaves behind, `refdist sample`, and `refdist bench step`: run in this process, as their user would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refdist as rd
from refdist.cli.main import main

TRAIN = ["train", "--model", "tiny", "--batch", "4", "--seq", "16", "--in-process"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    words = np.random.default_rng(0).choice(["ring ", "tree\n", "all ", "reduce ", "scatter\n"], 4000)
    path.write_text("".join(words))
    return path


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_a_run_can_be_kept_and_sampled_from(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    options = ["--steps", "3", "--dp", "2", "--data", str(text), "--save", str(out), "--json"]
    assert main([*TRAIN, *options]) == 0
    printed = lines(capsys.readouterr().out)
    assert lines((out / "metrics.jsonl").read_text()) == printed
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "metrics.jsonl", "model.safetensors"]
    config, params = rd.load_params(out)
    assert config.hidden_size == 64
    start = rd.init_params(config)
    assert all(np.abs(params[name] - start[name]).max() > 0 for name in params)  # it is the trained model, not the first one

    assert main(["sample", str(out), "--prompt", "ring ", "--length", "12", "--json"]) == 0
    (record,) = lines(capsys.readouterr().out)
    assert record["prompt"] == "ring "
    assert main(["sample", str(out), "--prompt", "ring ", "--length", "12", "--seed", "1"]) == 0
    other = capsys.readouterr().out
    assert other.startswith("ring ")
    assert other != record["prompt"] + record["sample"] + "\n"  # another seed, another text


def test_the_sample_at_temperature_0_takes_the_likeliest_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = rd.ModelConfig(vocab_size=256, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2)
    params = {name: array * 20 if array.ndim == 2 else array for name, array in rd.init_params(config, 3).items()}
    rd.save_params(tmp_path / "model", config, params)
    tokens = list(b"ab")
    for _ in range(4):
        tokens.append(int(rd.reference.logits(config, params, np.array([tokens]))[0, -1].argmax()))
    for seed in ("0", "1"):
        assert main(["sample", str(tmp_path / "model"), "--prompt", "ab", "--length", "4", "--temperature", "0", "--seed", seed,
                     "--json"]) == 0
        (record,) = lines(capsys.readouterr().out)
        want = bytes(tokens[2:]).decode(errors="replace")
        assert record["sample"] == "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in want)


def test_what_has_diverged_is_kept_but_not_sampled_from(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "diverged"
    assert main([*TRAIN, "--data", str(text), "--lr", "1e30", "--steps", "9", "--save", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "a sample" not in out
    assert "training has diverged and ends there (is --lr 1e+30 too high?)" in err
    *steps, summary = lines((folder / "metrics.jsonl").read_text())
    assert len(steps) == summary["steps"] < 9
    assert steps[-1]["loss"] is None
    assert summary["validation_loss"] is None
    assert main(["sample", str(folder)]) == 2
    assert capsys.readouterr().err == ("refdist sample: the model's logits are not finite: it has diverged, "
                                       "and cannot be sampled from\n")


def test_options_of_training_reach_the_trainer(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [*TRAIN, "--data", str(text), "--json", "--lr", "0.01"]
    assert main([*base, "--steps", "4", "--warmup", "2"]) == 0
    rates = [record["learning_rate"] for record in lines(capsys.readouterr().out)[:-1]]
    assert rates[:2] == pytest.approx([0.005, 0.01])
    assert rates[2] > rates[3]
    size = len(text.read_bytes())
    assert main([*base, "--epochs", "0.01"]) == 0
    printed = lines(capsys.readouterr().out)
    train_bytes = printed[-1]["train_bytes"]
    assert train_bytes < size
    assert printed[-1]["steps"] == -(-train_bytes // 100) // 64 + bool(-(-train_bytes // 100) % 64)
    assert main([*base, "--steps", "3", "--clip", "0.001", "--warmup", "0"]) == 0
    clipped = lines(capsys.readouterr().out)
    assert main([*base, "--steps", "3", "--clip", "0", "--warmup", "0", "--weight-decay", "30"]) == 0
    decayed = lines(capsys.readouterr().out)
    assert clipped[0]["loss"] == decayed[0]["loss"]
    assert clipped[2]["loss"] != decayed[2]["loss"]


@pytest.mark.parametrize(("words", "expected"), [
    (["train", "--epochs", "1", "--steps", "2"], "one of them"),
    (["train", "--epochs", "nan"], "positive"),
    (["train", "--clip", "-1"], "at least 0"),
    (["train", "--weight-decay", "inf"], "at least 0"),
    (["train", "--save", __file__], "a folder"),
    (["train", "--save", "/proc/none/of/these"], "cannot be written"),
    (["sample", "/nowhere"], "config.json"),
    (["sample", ".", "--prompt", ""], "empty"),
    (["sample", ".", "--temperature", "-1"], "at least 0"),
    (["bench", "step", "--ranks", "3", "--tp", "2"], "--ranks 3"),
    (["bench", "numerics", "--inputs", "fp16,fp8"], "--inputs fp16,fp8: 'fp8' is none of fp16, bf16, tf32, e4m3, e5m2, fp32"),
    (["bench", "numerics", "--tensor-cores", "h1000"], "--tensor-cores h1000: 'h1000' is none of none, v100, t4,"),
    (["bench", "numerics", "--sizes", "64,0"], "--sizes 64,0: expected numbers from 1 to 99999"),
])
def test_errors_of_use_are_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert expected in captured.err


def test_a_plot_is_drawn_where_matplotlib_is_installed(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "loss.svg"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert main([*TRAIN, "--data", str(text), "--plot", str(picture)]) == 2
        assert "pip install 'refdist[plot]'" in capsys.readouterr().err
        return
    assert main([*TRAIN, "--data", str(text), "--steps", "2", "--plot", str(picture)]) == 0
    assert b"<svg" in picture.read_bytes()


def test_bench_step_gives_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--hidden-size", "32", "--intermediate-size", "48", "--num-hidden-layers", "1", "--num-attention-heads", "4",
             "--num-key-value-heads", "2", "--batch", "2", "--seq", "16", "--steps", "1", "--in-process", "--json"]
    assert main(["bench", "step", *sizes, "--ranks", "2"]) == 0
    (record,) = lines(capsys.readouterr().out)
    head, attention, projections, ffn = 32 * 256, 2 * 16 * 32 / 2, 32 * (32 + 32 + 16 + 16), 3 * 32 * 48
    flops = 3 * 2 * 32 * (head + attention + projections + ffn)  # 3 × forward, 2 FLOPs a product, 32 tokens
    assert record["model_flops_per_s"] * record["step_seconds"] == pytest.approx(flops)
    assert record["world_size"] == 2
    assert record["fraction_of_sgemm"] == pytest.approx(record["model_flops_per_s"] / record["sgemm_flops_per_s"])
    assert record["tokens_per_s"] == pytest.approx(32 / record["step_seconds"])
    assert {"linear", "attention_backward"} <= set(record["kernels"])
    assert record["speedup"] == pytest.approx(record["tokens_per_s"] / record["single_rank_tokens_per_s"])
    assert record["peak_rss_mb"] >= record["rss_before_mb"] > 0


def test_bench_numerics_gives_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "numerics", "--sizes", "16,24", "--tensor-cores", "none,v100,h100", "--inputs", "fp16,tf32",
                 "--seconds", "0.001"]
    assert main([*arguments, "--json"]) == 0
    records = lines(capsys.readouterr().out)
    conversions = [record for record in records if "conversion" in record]
    assert {record["conversion"] for record in conversions} >= {"float32 to fp16", "fp16 to float32", "e4m3 to float32"}
    assert all(record["ns"] > 0 and record["ratio"] == record["ns"] / record["numpy_ns"] for record in conversions)
    products = [record for record in records if "product" in record]
    kinds = {(record["product"], record["tensor_core"], record["inputs"]) for record in products}
    assert kinds == {(size, chip, inputs) for size in (16, 24)
                     for chip, inputs in ((None, "fp16"), (None, "tf32"), ("v100", "fp16"), ("h100", "fp16"), ("h100", "tf32"))}
    assert all(0 < record["gflop_per_s"] < 1e4 for record in products)
    assert main(arguments) == 0
    assert "none (BLAS)" in capsys.readouterr().out


def test_bench_property_counts_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "property", "--examples", "4", "--largest", "2", "--json"]) == 0
    (record,) = lines(capsys.readouterr().out)
    assert record["all"]["examples"] == record["up to 4"]["examples"] == 4
    assert record["all"]["examples_per_s"] > 0
    assert sum(record[ranks]["examples"] for ranks in ("1", "2") if ranks in record) == 4
    assert main(["bench", "property", "--examples", "1"]) == 0
    assert "up to 4" in capsys.readouterr().out

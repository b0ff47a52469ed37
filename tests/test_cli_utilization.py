"""MFU and HFU of `refdist train`: FLOPs as counted by hand, under every kind of plan; recomputation raises HFU alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refdist as rd
from refdist.cli import utilization
from refdist.cli.main import main

STEPS, BATCH, SEQ, LAYERS, HIDDEN = 3, 4, 16, 2, 64
TRAIN = ["train", "--model", "tiny", "--in-process", "--json", "--steps", str(STEPS), "--batch", str(BATCH), "--seq", str(SEQ),
         "--eval-every", "1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 4000, np.uint8).tobytes())
    return path


def trained(text: Path, options: str, capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records of all steps, and the summary."""
    assert main([*TRAIN, "--data", str(text), *options.split()]) == 0
    *steps, summary = map(json.loads, capsys.readouterr().out.splitlines())
    return steps, summary


def flops_by_hand() -> int:
    """Of all steps: three forwards, two FLOPs a product, causal attention at half; nothing of the validation."""
    tokens = STEPS * BATCH * SEQ
    head, projections, ffn = HIDDEN * 256, HIDDEN * (HIDDEN + HIDDEN + 32 + 32), 3 * HIDDEN * 176
    attention = 2 * SEQ * HIDDEN // 2
    return 3 * 2 * tokens * (head + LAYERS * (attention + projections + ffn))


@pytest.mark.parametrize("plan", ["", "--dp 3", "--fsdp 2", "--tp 2", "--cp 2", "--pp 2 --micro-batches 2 --schedule zb_h1",
                                  "--tp 2 --cp 2 --pp 2 --fsdp 2 --micro-batches 2"])
def test_model_flops_are_those_of_the_formula_under_every_plan(plan: str, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, summary = trained(text, plan + " --peak h100", capsys)
    assert summary["model_flops"] == summary["executed_flops"] == flops_by_hand()
    assert summary["peak_flops_per_s"] == 989.4e12 * summary["world_size"]
    seconds = sum(step["seconds"] for step in steps)
    assert summary["mfu"] == summary["hfu"] == pytest.approx(flops_by_hand() / seconds / summary["peak_flops_per_s"])


def test_recomputation_raises_hfu_and_not_mfu(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executed = {}
    for recompute in ("none", "selective", "full"):
        _, summary = trained(text, f"--tp 2 --recompute {recompute}", capsys)
        assert summary["model_flops"] == flops_by_hand()
        assert summary["hfu"] / summary["mfu"] == pytest.approx(summary["executed_flops"] / summary["model_flops"])
        executed[recompute] = summary["executed_flops"]
        assert summary["peak"] == "sgemm"
        assert summary["peak_flops_per_s"] > 1e8
    forward_of_the_blocks = flops_by_hand() // 3 - 2 * STEPS * BATCH * SEQ * HIDDEN * 256
    assert executed["none"] == flops_by_hand()
    assert executed["full"] == flops_by_hand() + forward_of_the_blocks
    assert executed["none"] < executed["selective"] < executed["full"]


def test_ranks_in_one_process_share_one_core_and_a_gpu_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(utilization, "best_product", lambda together: calls.append(1) or 0.5)
    flops = {"model": 6, "executed": 8}
    used = rd.run(lambda comm: utilization.of_run(comm, flops, 2.0, "sgemm"), ranks=3)
    assert len(calls) == 1
    peak = 2 * 1024**3 / 0.5
    assert used == 3 * [utilization.Utilization(18, 24, "sgemm", peak, 9 / peak, 12 / peak)]
    calls.clear()
    (used_gpu, *_) = rd.run(lambda comm: utilization.of_run(comm, flops, 2.0, "a100"), ranks=3)
    assert used_gpu == utilization.Utilization(18, 24, "a100", 936e12, 9 / 936e12, 12 / 936e12)
    assert not calls


def test_the_run_shows_them_in_words(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in TRAIN if word != "--json"]
    assert main([*words, "--data", str(text), "--recompute", "full", "--peak", "v100"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "MFU" in line]
    assert line.startswith(f"{flops_by_hand() / 1e6:.1f} MFLOP of the model, ")
    assert "HFU" in line
    assert line.endswith("% of 1 × v100, 16 bit (125.0 TFLOP/s)")

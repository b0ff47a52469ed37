"""Axes that share a group of ranks: their collectives must be called in one order by all of its ranks, whatever the timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refdist as rd
from refdist.cli.job import make_config, make_plan
from refdist.cli.main import main, parser

CONFIG = rd.ModelConfig(vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2, tie_word_embeddings=True)


@pytest.mark.parametrize("plan", [
    {"fsdp": 2, "zero": 1, "cp": 2}, {"fsdp": 2, "zero": 2, "cp": 3, "micro_batches": 2},
    {"fsdp": 4, "zero": 3, "cp": 2, "micro_batches": 2}, {"fsdp": 2, "zero": 2, "cp": 2, "dp": 2},
], ids=str)
def test_sums_over_context_ranks_never_meet_the_ring(plan: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(0, 23, (2, 5, 12))
    params = {name: array + rng.normal(0, 0.1, array.shape) for name, array in rd.init_params(CONFIG, 1, np.float64).items()}
    want_loss, want = rd.reference.loss_and_grads(CONFIG, params, ids, labels)
    parallel = rd.Plan(**plan)
    for seed in range(8):
        loss, grads = rd.run(lambda comm: rd.loss_and_grads(CONFIG, parallel, params, ids, labels, comm=comm),
                             ranks=parallel.world_size, scheduler=seed, sends=("buffered", "rendezvous")[seed % 2])[-1]
        assert loss == pytest.approx(want_loss, abs=1e-12)
        for name, gradient in want.items():
            np.testing.assert_allclose(grads[name], gradient, rtol=0, atol=1e-10 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.once
def test_the_preset_is_llama_3_in_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = parser().parse_args(["train", "--preset", "llama3"])
    plan, config = make_plan(args), make_config(args)
    assert plan.sizes == {"tp": 2, "cp": 2, "pp": 2, "fsdp": 2, "dp": 1}
    assert (plan.schedule, plan.virtual_stages, plan.cp_layout, plan.reshard_after_forward) == ("interleaved", 2, "zigzag", False)
    assert plan.layers_per_stage == (1, 2, 2, 1)
    assert config.num_hidden_layers == 6
    words = ["--in-process", "--seq", "16", "--json"]
    assert main(["check", *words, "--preset", "llama3", "--dp", "2", "--batch", "16", "--micro-batches", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    (tmp_path / "text.txt").write_text("".join(str(number) for number in range(1000)))
    train = ["train", *words, "--steps", "2", "--model", "tiny", "--precision", "fp64", "--data", str(tmp_path / "text.txt")]
    losses = []
    for plan_words in (["--preset", "llama3"], ["--num-hidden-layers", "6"]):
        assert main([*train, *plan_words]) == 0
        losses.append([json.loads(line)["loss"] for line in capsys.readouterr().out.splitlines()[:2]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_what_is_given_replaces_the_presets_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = parser().parse_args("check --preset llama3 --fsdp 1 --layers-per-stage 2,2,2,2 --num-hidden-layers 8".split())
    assert make_plan(args).world_size == 8
    assert make_config(args).num_hidden_layers == 8
    for words, expected in (("--num-hidden-layers 4", "6 layers"), ("--tp 3", "tp=3"), ("--batch 1", "a batch of 1 sequences")):
        assert main(["check", "--preset", "llama3", *words.split()]) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1

"""The search for a plan: what it lists fits and is the fastest of its kind, and it follows the lecture's recipe."""

from __future__ import annotations

import dataclasses
import json

import pytest

import refdist as rd
from refdist.cli.main import main
from refdist.paper import CLUSTERS, MODELS
from refdist.paper.activations import Activations
from refdist.paper.estimate import estimate
from refdist.paper.memory import of_rank
from refdist.paper.part import Part, coordinates
from refdist.paper.search import Problem, of_plan, reasons, search
from refdist.paper.state import STORED

CONFIG = {name: rd.ModelConfig(**fields) for name, fields in MODELS.items()}
SMALL = rd.ModelConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16,
                       max_position_embeddings=8192)
LLAMA3 = CLUSTERS["llama3"]


def problem(config, gpus, batch, seq, stored="mixed", **fixed):
    return Problem(config, gpus, batch, seq, STORED[stored], LLAMA3, fixed=fixed)


def test_below_a_billion_parameters_plain_data_parallelism():
    assert SMALL.num_parameters() < 1e9
    asked = problem(SMALL, 64, 1024, 2048)
    best = search(asked)[0].plan
    assert (best.tp, best.cp, best.pp, best.recompute) == (1, 1, 1, "none")
    plain = min((one for one in search(asked) if one.plan.dp == 64), key=lambda one: one.seconds)
    assert plain.seconds < 1.03 * search(asked)[0].seconds  # sharding buys nothing
    assert "plain data parallelism (DP) is possible" in reasons(asked, search(asked))[0]


def test_above_it_fsdp():
    asked = problem(CONFIG["llama3-8b"], 64, 1024, 8192)
    found = search(asked)
    assert (found[0].plan.fsdp, found[0].plan.tp, found[0].plan.pp) == (64, 1, 1)
    assert all(one.plan.fsdp > 1 for one in found if one.plan.tp == one.plan.pp == 1)  # plain DP does not fit
    why = reasons(asked, found)
    assert "does not fit 80 GB; shared out it needs 2 ranks or more" in why[0]
    assert any(line.startswith("no TP: the best plan with it takes") for line in why)


def test_hybrid_sharding_keeps_fsdp_inside_of_a_server_or_rack():
    both = [one.plan for one in search(problem(CONFIG["llama3-8b"], 64, 1024, 8192)) if one.plan.dp > 1 and one.plan.fsdp > 1]
    assert {plan.tp * plan.cp * plan.pp * plan.fsdp for plan in both} == {8, 16}
    assert {plan.zero for plan in both} == {3}


def test_activations_then_recomputation():
    """FSDP alone on a sequence of 32,768: without recomputation 102 GB of activations do not fit."""
    found = search(problem(CONFIG["llama3-8b"], 64, 64, 32768, tp=1, cp=1, pp=1))
    assert {one.plan.recompute for one in found} == {"full"}


def test_it_finds_llama_3s_plan_and_says_what_it_would_do_otherwise():
    """TP inside a server and whole sequences, as Llama 3 had them: tp 8 × pp 16 × 128 data ranks."""
    asked = problem(CONFIG["llama3-405b"], 16384, 2048, 8192, "mixed-fp32-gradients", tp=8, cp=1)
    best = search(asked)[0].plan
    assert (best.tp, best.pp, best.batch_parts, best.schedule, best.micro_batches) == (8, 16, 128, "interleaved", 16)
    free = search(asked._replace(fixed={}))
    assert free[0].seconds <= search(asked)[0].seconds <= 1.15 * free[0].seconds
    why = reasons(asked, free)
    assert any("16,384 GPUs must share each sequence's work among 8 or more" in line for line in why)
    assert all(one.plan.world_size == 16384 and one.memory <= 80e9 for one in free)
    assert [one.seconds for one in free] == sorted(one.seconds for one in free)


def test_the_quick_formulas_are_the_walks():
    """What the search goes by against what `show memory` and `show plan` go by."""
    config = CONFIG["llama3-70b"]
    for fields in ({"pp": 4, "micro_batches": 8}, {"pp": 4, "micro_batches": 8, "schedule": "gpipe"},
                   {"fsdp": 8, "micro_batches": 3},
                   {"pp": 4, "micro_batches": 8, "schedule": "interleaved", "virtual_stages": 4, "tp": 8},
                   {"pp": 2, "tp": 2, "fsdp": 4, "micro_batches": 4, "recompute": "full"}):
        plan = rd.Plan(**fields)
        batch = plan.batch_parts * plan.micro_batches
        for stage in range(plan.pp):
            part = Part(config, plan, batch, 4096, {**coordinates(plan, 0), "pp": stage})
            quick, exact = (of_rank(part, STORED["mixed"], how)["total"] for how in (True, False))
            assert exact <= quick * 1.001
            assert quick <= 1.1 * exact, (fields, stage)
            kept, _ = Activations(part, STORED["mixed"]).quick()
            assert Activations(part, STORED["mixed"]).walk()[0] <= kept
        asked = problem(config, plan.world_size, batch, 4096)
        part = Part(config, plan, batch, 4096, coordinates(plan, 0))
        assert of_plan(asked, plan).seconds == pytest.approx(estimate(part, STORED["mixed"], LLAMA3).seconds, rel=0.01)


def test_nothing_faster_of_the_same_shapes_is_left_out():
    asked = problem(SMALL, 8, 16, 2048)
    found = search(asked)
    for plan in (rd.Plan(tp=2, fsdp=4, micro_batches=4), rd.Plan(dp=8, micro_batches=2), rd.Plan(pp=2, dp=4, micro_batches=4)):
        assert found[0].seconds <= of_plan(asked, plan).seconds
        assert any(one.plan == dataclasses.replace(plan, recompute=one.plan.recompute) for one in found)


def test_plan_command(capsys):
    words = "plan --model llama3-8b --gpus 64 --batch 1024 --seq 8192 --top 3".split()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "fsdp 64 = 64 ranks" in shown
    assert "times are estimates" in shown
    assert main([*words, "--tp", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["plans"]) == 3
    assert all(one["plan"]["tp"] == 8 for one in found["plans"])
    assert found["reasons"]


@pytest.mark.parametrize(("words", "message"), [
    ("plan --model llama3-405b --gpus 64 --tp 8", "no plan for 64 × NVIDIA H100 SXM was found that fits 80 GB each"),
    ("plan --model llama3-405b --gpus 64 --pp 2", "the training state alone needs 82"),
    ("plan --model llama3-8b --gpus 30000", "the plan needs 30,000 accelerators, cluster llama3 has 24,576"),
    ("plan --model llama3-8b --gpus 64 --tp 5", "tp=5 does not divide num_attention_heads=32"),
    ("plan --model llama3-8b --gpus 64 --dp 7", "no plan with dp=7 shares 64 GPUs out"),
    ("plan --model llama3-8b --gpus 64 --seq 200000", "--seq 200000 is longer than max_position_embeddings=131072"),
])
def test_bad_input_is_one_line(words, message, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_what_is_searched():
    """One long sequence a micro-batch; cp where sequences are few; no MLP that tp cuts unevenly; the fuller one of both ends."""
    small = CONFIG["llama3-8b"]
    found = search(problem(small, 64, 256, 16384, cp=1, pp=1))
    assert {256 // one.plan.batch_parts // one.plan.micro_batches for one in found} == {1}
    assert any(one.plan.cp > 1 for one in search(problem(small, 64, 8, 8192)))
    assert {one.plan.tp for one in search(problem(dataclasses.replace(small, intermediate_size=14337), 8, 8, 2048))} == {1}
    asked, plan = problem(small, 8, 8, 8192), rd.Plan(pp=8)
    ends = [of_rank(Part(small, plan, 8, 8192, {**coordinates(plan, 0), "pp": stage}), asked.stored, quick=True)["total"]
            for stage in (0, 7)]
    assert of_plan(asked, plan).memory == max(ends) == ends[1]


def test_a_stage_in_the_middle_may_be_the_fullest():
    """With a layer fewer at both ends, as Llama 3 had them."""
    asked = problem(CONFIG["llama3-8b"], 4, 16, 8192)
    cuts = (None, (4, 14, 12, 2))
    even, uneven = (of_plan(asked, rd.Plan(pp=4, micro_batches=16, layers_per_stage=cut)).memory for cut in cuts)
    assert uneven > even

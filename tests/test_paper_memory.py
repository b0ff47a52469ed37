"""Memory on paper: against the emulator's ledger, byte for byte, and against published figures."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batch, model

import refdist as rd
from refdist.cli.main import main
from refdist.device.events import Phase
from refdist.paper import MODELS
from refdist.paper.activations import Activations, korthikanti
from refdist.paper.memory import of_rank, of_stages, wall
from refdist.paper.part import Part, coordinates, every_part
from refdist.paper.state import STORED, gathers, published_zero, smallest_number, state
from refdist.testing import strategies

LLAMA = {name: rd.ModelConfig(**fields) for name, fields in MODELS.items()}
ULYSSES = {"hidden_size": 32, "intermediate_size": 88, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
DELAYED = ((*(("F", m) for m in range(4)), *(("I", m) for m in range(4)), *(("W", m) for m in range(4))),)
BY_PRECISION = {"fp64": STORED["fp64"], "fp32": STORED["fp32"], "bf16": STORED["mixed"]}


def ledgers(config, plan, rows, seq, precision="fp64"):
    """Each rank's bytes after a step: live, peak, and what each action of its schedule has left on the stacks of activations."""
    params = rd.init_params(config, 0, np.float64)

    def program(comm):
        device, changes = rd.Device(), []

        def listen(event):
            if isinstance(event, Phase) and event.name[:2] in ("F ", "B ", "I ", "W "):
                changes.append(device.live["activation"])

        trainer = rd.Trainer(config, plan, comm, params=params, precision=precision, device=device)
        device.listeners.append(listen)
        trainer.step(*batch(config, rows, seq))
        return dict(device.live), dict(device.peak), changes

    return rd.run(program, plan.world_size)


def check_ledger(config, plan, rows, seq, precision="fp64"):
    """What is exact is equal; what is an upper bound is one."""
    stored = BY_PRECISION[precision]
    whole_sequence = plan.cp == 1 and (plan.tp == 1 or not plan.sequence_parallel)
    tied_apart = config.tie_word_embeddings and plan.pp > 1
    measured = ledgers(config, plan, rows, seq, precision)
    for part, (live, peak, _) in zip(every_part(config, plan, rows, seq), measured, strict=True):
        where = f"{plan}, {part.at}"
        found, wanted = of_rank(part, stored), state(part, stored)
        if plan.reduce_dtype is None:
            assert {name: live[name] for name in wanted} == wanted, where
            assert peak["gradient"] <= found["gradient"] + found["gradient buffers"], where
            assert peak["total"] - peak["communication"] <= found["total"], where
        assert (peak["parameter"], peak["optimizer"]) == (wanted["parameter"], wanted["optimizer"]), where
        sending = part.numbers("embed") * stored.parameter if tied_apart else 0  # a tied matrix, until it has been sent
        assert peak["gathered"] in (found["gathered"], found["gathered"] + sending), where
        activation = found["activation: kept"] + found["activation: working"]
        if whole_sequence and sys.version_info >= (3, 11):  # before, a call keeps its arguments alive
            assert peak["activation"] == activation, where
        assert peak["activation"] <= activation * (1 if sys.version_info >= (3, 11) else 1.2), where
        assert activation <= 1.4 * peak["activation"], where


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_formulas_equal_the_ledger_for_any_plan(data):
    config = data.draw(strategies.model_configs())
    plan = data.draw(strategies.plans(config, largest=6))
    rows, seq = plan.batch_parts + data.draw(st.integers(0, 3)), data.draw(st.integers(max(2, plan.cp), 12))
    check_ledger(config, plan, rows, seq)


@pytest.mark.parametrize(("plan", "options"), [
    ({"dp": 3}, {"tie_word_embeddings": True}),
    ({"fsdp": 3, "zero": 1}, {}),
    ({"fsdp": 3, "zero": 2, "micro_batches": 2}, {"mlp_bias": True}),
    ({"fsdp": 5, "micro_batches": 2, "order": "rank"}, {"tie_word_embeddings": True}),
    ({"fsdp": 2, "recompute": "full", "recompute_blocks": 3}, {"num_hidden_layers": 5}),
    ({"fsdp": 2, "reshard_after_forward": False, "reshard_after_backward": False, "micro_batches": 2}, {}),
    ({"fsdp": 2, "dp": 2, "tp": 2}, {"attention_bias": True}),
    ({"tp": 3, "sequence_parallel": False, "recompute": "selective"}, {"num_key_value_heads": 3}),
    ({"pp": 3, "micro_batches": 4, "recompute": "full"}, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    ({"pp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2}, {"num_hidden_layers": 5}),
    ({"pp": 2, "micro_batches": 4, "schedule": "zb_h1"}, {"num_hidden_layers": 4}),
    ({"pp": 2, "micro_batches": 4, "schedule": "zb_v", "fsdp": 2}, {"num_hidden_layers": 4}),
    ({"fsdp": 2, "micro_batches": 2, "schedule": "gpipe"}, {"num_hidden_layers": 4}),
    ({"fsdp": 2, "pp": 2, "micro_batches": 4, "schedule": "gpipe"}, {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    ({"fsdp": 2, "pp": 2, "micro_batches": 4, "schedule": "dualpipe_v"}, {"num_hidden_layers": 5}),
    ({"fsdp": 2, "pp": 2, "micro_batches": 4, "schedule": "zb_h2"}, {"num_hidden_layers": 2, "vocab_size": 150}),
    ({"fsdp": 2, "zero": 2, "micro_batches": 4, "schedule": DELAYED}, {"num_hidden_layers": 1, "attention_bias": True}),
    ({"cp": 3}, {}),
    ({"cp": 2, "cp_method": "ulysses"}, ULYSSES),
    ({"cp": 4, "cp_method": "ulysses", "recompute": "full"}, ULYSSES),
    ({"cp": 3, "cp_method": "ulysses", "recompute": "selective"}, {"num_key_value_heads": 3}),
    ({"cp": 2, "cp_method": "all_gather", "tp": 2}, {}),
    ({"cp": 2, "cp_method": "ulysses", "pp": 2, "micro_batches": 2}, {}),
], ids=str)
@pytest.mark.parametrize("precision", BY_PRECISION)
def test_formulas_equal_the_ledger(plan, options, precision):
    config, _ = model(**options)
    check_ledger(config, rd.Plan(**plan), 9, 12, precision)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_forward_leaves_what_its_blocks_keep(recompute, tp):
    """Also where the sequence is cut: one F leaves alive exactly its blocks' terms, and what goes on to the next stage."""
    config, _ = model(num_hidden_layers=5)
    for cp, method in ((1, "ring"), (2, "ring"), (3, "ring"), (2, "all_gather"), (2, "ulysses")):
        if method == "ulysses" and tp == 2:
            continue  # three heads on each rank are not exchanged between two
        plan = rd.Plan(pp=2, tp=tp, cp=cp, cp_method=method, micro_batches=2, recompute=recompute, recompute_blocks=2,
                       save_gathered=cp == 2)
        for part, (_, _, seen) in zip(every_part(config, plan, 5, 13), ledgers(config, plan, 5, 13), strict=True):
            activations = Activations(part, STORED["fp64"])
            first = next(action for action in part.schedule.actions[part.at["pp"]])
            b = part.sequences[first.micro_batch]
            kept = sum(activations.kept(b, place) for place in range(part.layers))
            x = activations.residual(b) if part.at["pp"] else 0  # had come before
            assert seen[1] - seen[0] == kept + activations.residual(b) - x, (plan, part.at)  # y, or the head's dx


def test_a_gradient_format_of_its_own():
    config, _ = model()
    stored = dataclasses.replace(STORED["fp32"], gradient=8)
    plan = rd.Plan(fsdp=3, zero=2, reduce_dtype="fp64")
    for part, (live, _, _) in zip(every_part(config, plan, 4, 8), ledgers(config, plan, 4, 8, "fp32"), strict=True):
        assert live["gradient"] == state(part, stored)["gradient"]


@pytest.mark.parametrize("fields", [{"master_weights": False}, {"reduce_dtype": "fp32"}, {"accumulate_dtype": "fp32"},
                                    {"accumulate_dtype": "fp64", "reduce_dtype": "bf16"}])
def test_formats_that_a_plan_asks_for_are_on_paper(fields, capsys):
    config, _ = model()
    plan = rd.Plan(fsdp=3, zero=2, micro_batches=2, **fields)
    stored = STORED["mixed"].under(plan)
    for part, (live, _, _) in zip(every_part(config, plan, 6, 8), ledgers(config, plan, 6, 8, "bf16"), strict=True):
        wanted = state(part, stored)
        assert {name: live[name] for name in wanted} == wanted
    words = [f"--{'no-' * (value is False)}{name.replace('_', '-')}" + f" {value}" * (value is not False)
             for name, value in fields.items()]
    assert main(f"show memory --on-paper --model small --fsdp 3 --zero 2 --batch 6 --seq 8 {' '.join(words)} --json".split()) == 0
    said = capsys.readouterr().out
    small = rd.ModelConfig(256, 128, 352, 2, 4, 2)
    part = Part(small, rd.Plan(fsdp=3, zero=2, **fields), 6, 8, coordinates(rd.Plan(fsdp=3), 0))
    assert str(state(part, stored)["gradient"]) in said
    assert ('"master": 0' in said) == (not stored.master)


# ------------------------------------------------------------------------------------------------------- published


def test_zeros_figures():
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 ranks; 1 B parameters are 16 GB."""
    sizes = [f"{size / 1e9:.1f}" for size in published_zero(7.5e9, 64, STORED["mixed"])]
    assert sizes == ["120.0", "31.4", "16.6", "1.9"]
    assert STORED["mixed"].per_parameter * 10**9 == 16e9
    assert [STORED[name].per_parameter for name in ("lecture", "mixed-fp32-gradients", "mixed-both-gradients")] == [8, 18, 20]


@pytest.mark.parametrize(("zero", "which"), [(1, 1), (2, 2), (3, 3)])
def test_zeros_formulas_are_those_of_a_plan(zero, which):
    config = LLAMA["llama3-8b"]
    part = Part(config, rd.Plan(fsdp=64, zero=zero), 64, 8192, coordinates(rd.Plan(fsdp=64), 0))
    wanted = published_zero(config.num_parameters(), 64, STORED["mixed"])[which]
    assert sum(state(part, STORED["mixed"]).values()) == pytest.approx(wanted, rel=1e-3)


def test_how_many_gpus_hold_405_billion():
    assert [config.num_parameters() for config in LLAMA.values()] == [8_030_261_248, 70_553_706_496, 405_853_388_800]
    mixed = STORED["mixed"]
    assert LLAMA["llama3-405b"].num_parameters() * mixed.per_parameter == pytest.approx(6.49e12, rel=1e-3)
    assert smallest_number(405_853_388_800, mixed, 80e9) == 82
    assert smallest_number(405 * 10**9, mixed, 80e9) == 81


def test_where_data_parallelism_ends_and_fsdp_goes_on():
    rows = {row.name: row.ranks for row in wall(8_030_261_248, STORED["mixed"], 80e9)}
    assert rows == {"DP": None, "ZeRO 1": 3, "ZeRO 2": 2, "ZeRO 3, FSDP": 2}
    assert wall(5 * 10**9, STORED["mixed"], 80e9)[0].ranks == 1
    rows = {row.name: row.ranks for row in wall(405_853_388_800, STORED["mixed"], 80e9)}
    assert rows == {"DP": None, "ZeRO 1": None, "ZeRO 2": None, "ZeRO 3, FSDP": 82}
    for way, name in enumerate(("DP", "ZeRO 1", "ZeRO 2", "ZeRO 3, FSDP")):
        ranks = {row.name: row.ranks for row in wall(17 * 10**9, STORED["mixed"], 80e9)}[name]
        assert (ranks is None) == (published_zero(17e9, 10**9, STORED["mixed"])[way] > 80e9)
        if ranks is not None:  # so many hold it, one fewer does not
            enough, short = (published_zero(17e9, number, STORED["mixed"])[way] for number in (ranks, ranks - 1))
            assert enough <= 80e9 < short


def test_korthikantis_formulas():
    """Table 2, for GPT-3: s 2048, b 1, h 12288, a 96, t 8: 5as/h is 80, so that selective recomputation saves 70 %."""
    s, b, h, a, t = 2048, 1, 12288, 96, 8
    sbh = s * b * h
    assert korthikanti(s, b, h, a) == sbh * (34 + 80)
    assert korthikanti(s, b, h, a, t) == sbh * (10 + 24 / t + 80 / t)
    assert korthikanti(s, b, h, a, t, True) == sbh / t * (34 + 80)
    assert korthikanti(s, b, h, a, t, True, "selective") == sbh / t * 34
    assert korthikanti(s, b, h, a, t, True, "full") == 2 * sbh
    assert 1 - korthikanti(s, b, h, a, recompute="selective") / korthikanti(s, b, h, a) == pytest.approx(0.70, abs=0.005)


def test_our_block_is_a_gpt_block_term_by_term():
    """GeLU's 8sbh in and 8sbh out against SwiGLU's gate and up; q, k, v, attended alike; no dropout masks, no scores, and what

    Korthikanti et al. save and we make again: both norms' outputs, o's input is attended itself.
    """
    config = rd.ModelConfig(vocab_size=1000, hidden_size=768, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=12)
    part = Part(config, rd.Plan(), 1, 1024, coordinates(rd.Plan(), 0))
    terms = Activations(part, STORED["mixed"]).terms(1)
    sbh = 1024 * 768
    gpt = {"attention block": 11 * sbh, "MLP": 19 * sbh, "layer norms": 4 * sbh}
    assert sum(gpt.values()) == 34 * sbh
    again = {"norm outputs (inputs of q, k, v and of gate, up)": 2 * 2 * sbh, "dropout masks": 2 * sbh}
    same = {"x, middle": 4 * sbh, "q": 2 * sbh, "k, v": 4 * sbh, "attended": 2 * sbh, "gate, up": 16 * sbh}
    assert {name: terms[name] for name in same} == same
    assert sum(same.values()) + sum(again.values()) == 34 * sbh
    assert terms["norm statistics"] + terms["log-sum-exp"] == 4 * 1024 * (2 + 12)


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_micro_batches_in_flight(schedule, in_flight):
    config = dataclasses.replace(LLAMA["llama3-8b"], num_hidden_layers=4, vocab_size=1000)
    plan = rd.Plan(pp=4, micro_batches=8, schedule=schedule)
    part = Part(config, plan, 8, 4096, coordinates(plan, 0))
    activations = Activations(part, STORED["mixed"])
    block, dx = activations.kept(1, 0), activations.residual(1)
    for stage, found in enumerate(of_stages(part, STORED["mixed"])):
        assert found["activation: kept"] == in_flight[stage] * (block + (dx if stage == 3 else 0))


def test_llama_3s_plan_fits_80_gigabytes():
    config = LLAMA["llama3-405b"]
    plan = rd.Plan(tp=8, pp=16, fsdp=128, micro_batches=16, layers_per_stage=(7, *[8] * 14, 7), reshard_after_forward=False)
    part = Part(config, plan, 2048, 8192, coordinates(plan, 0))
    most = max(stage["total"] for stage in of_stages(part, STORED["mixed-fp32-gradients"]))
    assert 40e9 < most < 80e9
    without = dataclasses.replace(plan, pp=1, layers_per_stage=None)
    alone = of_rank(Part(config, without, 2048, 8192, coordinates(without, 0)), STORED["mixed-fp32-gradients"])
    assert alone["total"] > 80e9
    assert gathers(Part(config, without, 2048, 8192, coordinates(without, 0)))[0] * 2 > 80e9  # parameters that are kept


# --------------------------------------------------------------------------------------------------------- commands


def test_show_memory_on_paper(capsys, tmp_path):
    words = ["show", "memory", "--model", "llama3-405b", "--tp", "8", "--pp", "14", "--fsdp", "16", "--micro-batches", "14"]
    assert main([*words, "--svg", str(tmp_path / "m.svg")]) == 0
    shown = capsys.readouterr().out
    assert "405,853,388,800 parameters × 16 bytes = 6.49 TB" in shown
    assert "at least 82 × NVIDIA H100 SXM of 80 GB" in shown
    assert "(counted as 405 × 10⁹: 6.48 TB, 81)" in shown
    assert (tmp_path / "m.svg").read_text(encoding="utf-8").startswith("<svg")
    assert main([*words, "--stored", "lecture", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bytes_per_parameter"], found["ranks"], len(found["stages"])) == (8, 1792, 14)
    assert found["smallest_number"] == 41
    stage = found["stages"][0]
    assert stage["total"] == sum(size for name, size in stage.items() if name != "total")


def test_show_memory_on_paper_is_what_runs(capsys):
    words = ["show", "memory", "--fsdp", "2", "--seq", "16", "--batch", "4", "--json"]
    assert main([*words, "--in-process"]) == 0
    ran = json.loads(capsys.readouterr().out)["ranks"][0]
    assert main([*words, "--on-paper", "--stored", "fp32"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][0]
    for name in ("parameter", "optimizer", "gathered"):
        assert stage[name] == ran[name]["peak"]
    assert stage["gradient"] == ran["gradient"]["now"]


@pytest.mark.parametrize(("words", "message"), [
    (["train", "--model", "llama3-8b"], "llama3-8b is on paper only: its parameters, gradients and moments alone are 128,484,"),
    (["show", "memory", "--model", "llama3-8b", "--tp", "3"], "tp=3 does not divide num_attention_heads=32"),
    (["show", "memory", "--model", "llama3-8b", "--pp", "33"], "need a layer each: the model has 32"),
    (["show", "memory", "--model", "llama3-8b", "--seq", "200000"], "seq=200,000: the model was made for at most 131,072"),
    (["show", "memory", "--model", "llama3-8b", "--fsdp", "8", "--batch", "4"], "a batch of 4 sequences cannot be cut"),
    (["show", "memory", "--model", "llama3-8b", "--accelerator", "h1000"], "'h1000': expected one of k40"),
])
def test_bad_input_is_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1

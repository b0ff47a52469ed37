"""Traffic and FLOPs on paper: against what the emulator's ranks really sent and computed, and against published figures."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batch, model

import refdist as rd
from refdist.cli.main import main
from refdist.comm.choose import ANY, Row, Table
from refdist.paper.activations import Activations
from refdist.paper.flops import RUNS, megatron, of_model, of_part, palm, per_token
from refdist.paper.part import Part, coordinates, every_part
from refdist.paper.state import STORED
from refdist.paper.traffic import by_axis
from refdist.paper.traffic import of_part as traffic_of_part
from refdist.testing import strategies

RING = Table({**{name: [Row(ANY, ANY, "ring")] for name in ("all_reduce", "reduce_scatter", "all_gather")},
              "broadcast": [Row(ANY, ANY, "binomial")], "all_to_all": [Row(ANY, ANY, "pairwise")]})


def measured(config, plan, rows, seq, precision="fp64"):
    """All ranks' bytes by axis and operation in a step, scalars aside, and each rank's FLOPs."""
    params = rd.init_params(config, 0, np.float64)

    def program(comm):
        comm.table = RING
        device = rd.Device()
        rd.Trainer(config, plan, comm, params=params, precision=precision, device=device).step(*batch(config, rows, seq))
        return device.traffic, dict(device.flops)

    results = rd.run(program, plan.world_size)
    sent: Counter[tuple[str, str]] = Counter()
    for traffic, _ in results:
        for row in traffic:
            scalars = row.axis == "world" or row.axis.endswith("fsdp×dp") or row.operation == "broadcast"
            if not scalars:
                sent[row.axis, row.operation] += row.bytes
    return dict(sent), [flops for _, flops in results]


def on_paper(config, plan, rows, seq, stored):
    """The same by formulas: each group counts once, by its first rank."""
    sent: Counter[tuple[str, str]] = Counter()
    for part in every_part(config, plan, rows, seq):
        for (axis, operation), nbytes in traffic_of_part(part, stored).items():
            if all(part.at[name] == 0 for name in axis.split("×")):
                sent[axis, operation] += nbytes
    return dict(sent)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_bytes_and_flops_are_what_ran_for_any_plan(data):
    config = data.draw(strategies.model_configs())
    plan = data.draw(strategies.plans(config, largest=8))
    rows, seq = plan.batch_parts + data.draw(st.integers(0, 3)), data.draw(st.integers(max(2, plan.cp), 12))
    sent, flops = measured(config, plan, rows, seq)
    assert sent == on_paper(config, plan, rows, seq, STORED["fp64"])
    assert flops == [of_part(part) for part in every_part(config, plan, rows, seq)]
    whole = of_model(config, rows, seq, plan.recompute)
    for kind in ("model", "executed"):  # where tp has more ranks than KV heads, several compute the same ones
        total = sum(found[kind] for found in flops)
        assert total == pytest.approx(whole[kind], rel=1e-12) or (plan.tp > config.num_key_value_heads and total > whole[kind])


@pytest.mark.parametrize(("plan", "options"), [
    ({"pp": 2, "fsdp": 2, "zero": 2, "micro_batches": 2, "order": "rank"}, {"tie_word_embeddings": True}),
    ({"dp": 3}, {"tie_word_embeddings": True}),
    ({"dp": 2, "fsdp": 2, "zero": 2, "micro_batches": 3, "order": "rank"}, {"tie_word_embeddings": True}),
    ({"fsdp": 3, "zero": 1, "tp": 2}, {"attention_bias": True, "mlp_bias": True}),
    ({"fsdp": 3, "reshard_after_forward": False, "micro_batches": 2}, {}),
    ({"fsdp": 2, "recompute": "full", "recompute_blocks": 3}, {"num_hidden_layers": 5}),
    ({"tp": 2}, {"num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True}),
    ({"tp": 3, "sequence_parallel": False}, {"num_key_value_heads": 3}),
    ({"tp": 2, "save_gathered": True, "recompute": "full"}, {}),
    ({"cp": 3, "recompute": "selective"}, {}),
    ({"cp": 3, "cp_method": "all_gather", "cp_layout": "contiguous", "recompute": "full"}, {}),
    ({"cp": 2, "cp_method": "ulysses", "recompute": "selective"}, {}),
    ({"cp": 4, "cp_ulysses": 2}, {}),
    ({"pp": 2, "micro_batches": 4, "schedule": "zb_v"}, {"num_hidden_layers": 4}),
    ({"pp": 3, "micro_batches": 2, "tp": 2, "dp": 2}, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
], ids=str)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_bytes_and_flops_are_what_ran(plan, options, precision):
    config, _ = model(**options)
    plan = rd.Plan(**plan)
    sent, flops = measured(config, plan, 9, 13, precision)
    assert sent == on_paper(config, plan, 9, 13, STORED["mixed" if precision == "bf16" else precision])
    assert flops == [of_part(part) for part in every_part(config, plan, 9, 13)]


# ------------------------------------------------------------------------------------------------- published formulas


def part_of(config, plan, sequences, seq):
    return Part(config, plan, sequences, seq, coordinates(plan, 0))


def test_zeros_volumes():
    """Rajbhandari et al. 2020, section 7: 2 Ψ for data parallelism and ZeRO 1, (m + 1) Ψ for ZeRO 2, 3 m Ψ for ZeRO 3."""
    config, _ = model(num_hidden_layers=3)
    psi, ranks, m = config.num_parameters() * 8, 4, 3
    for plan, volume in (({"dp": ranks}, 2), ({"fsdp": ranks, "zero": 1}, 2), ({"fsdp": ranks, "zero": 2}, m + 1)):
        sent = sum(traffic_of_part(part_of(config, rd.Plan(**plan, micro_batches=m), 12, 8), STORED["fp64"]).values())
        assert sent == volume * (ranks - 1) * psi
    head_and_embedding = 2 * config.vocab_size * config.hidden_size * 8 + config.hidden_size * 8  # are gathered once
    sent = sum(traffic_of_part(part_of(config, rd.Plan(fsdp=ranks, micro_batches=m), 12, 8), STORED["fp64"]).values())
    assert sent == (ranks - 1) * m * (3 * psi - head_and_embedding)


@pytest.mark.parametrize(("fields", "times"), [({}, 10), ({"save_gathered": True}, 8), ({"sequence_parallel": False}, 8)])
def test_tensor_parallel_volume_per_block(fields, times):
    """8·bsh·(t − 1)/t elements per rank, block and micro-batch; two gathers more when inputs are saved in shards."""
    one, two = (part_of(model(num_hidden_layers=layers)[0], rd.Plan(tp=2, **fields), 3, 8) for layers in (1, 2))
    found = [sum(size for (axis, _), size in traffic_of_part(part, STORED["fp64"]).items()) for part in (one, two)]
    gains = 2 * 2 * 24 * 8 if fields.get("sequence_parallel", True) else 0  # whose gradients are summed over tp
    assert found[1] - found[0] - gains == times * 3 * 8 * 24 * 8  # summed over both ranks
    assert by_axis(two, STORED["fp64"])["tp"] == found[1] / 2
    assert Activations(two, STORED["fp64"]).whole(3) == 3 * 8 * 24 * 8


def test_megatrons_formula_is_ours_under_its_convention():
    """A GPT has 12 h² in a layer's matrices; ours has as many with an MLP of 8h/3 and all heads its own KV heads."""
    hidden, layers, vocab, seq, sequences = 48, 5, 1000, 96, 7
    config = rd.ModelConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers,
                            num_attention_heads=6)
    formula = 96 * sequences * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert megatron(sequences, seq, layers, hidden, vocab) == pytest.approx(formula, rel=1e-12)
    assert of_model(config, sequences, seq, "full", causal=False)["executed"] == pytest.approx(formula, rel=1e-12)
    without = megatron(sequences, seq, layers, hidden, vocab, recompute=False)
    assert of_model(config, sequences, seq, causal=False)["model"] == pytest.approx(without, rel=1e-12)
    assert of_model(config, sequences, seq)["model"] < without


def test_palms_formula_counts_every_parameter():
    config, _ = model(tie_word_embeddings=True)  # the head's use of a tied matrix is its only product
    gains = sum(row for row in (config.hidden_size,) * (2 * config.num_hidden_layers + 1))
    wanted = palm(config.num_parameters() - gains, config.num_hidden_layers, config.num_attention_heads, config.head_dim, 64)
    assert 3 * sum(per_token(config, 64, causal=False).values()) == wanted


def test_published_mfu():
    """Llama 3: 43, 41 and 38 % (400 of 989.4 is 40.4); PaLM: 46.2 %, 45.7 % without attention."""
    found = {name: 100 * run.figures()["mfu"] for name, run in RUNS.items()}
    assert {name: round(mfu, 1) for name, mfu in found.items()} == {
        "llama3-8k": 43.5, "llama3-16k": 40.4, "llama3-128k": 38.4, "palm-540b": 46.2, "palm-540b-no-attention": 45.7}
    for name, run in RUNS.items():
        assert abs(found[name] - run.published) < 0.65


def test_llama_3s_flops_a_token():
    """6 N, nearly: 2.45 PFLOP for 1,000 tokens at 8,192, and attention twice the rest's eighth at 131,072."""
    config = rd.ModelConfig(vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
                            num_attention_heads=128, num_key_value_heads=8)
    short, long = per_token(config, 8192), per_token(config, 131072)
    products = config.num_parameters() - 128256 * 16384  # the embedding is a look-up
    assert 3 * sum(short.values()) == pytest.approx(6 * products + 3 * short["attention"], rel=1e-4)
    assert long["attention"] == 16 * short["attention"]
    assert short["attention"] / sum(short.values()) == pytest.approx(0.040, abs=0.001)
    assert long["attention"] / sum(long.values()) == pytest.approx(0.402, abs=0.001)


def test_show_flops(capsys):
    words = ["show", "flops", "--model", "llama3-405b", "--seq", "8192", "--batch", "2048", "--gpus", "16384"]
    assert main([*words, "--tflops", "400"]) == 0
    shown = capsys.readouterr().out
    assert "MFU 40.4 %, HFU 40.4 % with recompute=none" in shown
    assert main([*words, "--tflops", "400", "--recompute", "full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hfu"] / found["mfu"] == pytest.approx(4 / 3, abs=0.003)  # the head is not computed again
    assert main([*words, "--tokens-per-s", str(found["tokens_per_second"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flops_per_second"] == pytest.approx(400e12, rel=1e-9)
    assert main(["show", "flops", "--published", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert runs["palm-540b"]["mfu"] == pytest.approx(0.462, abs=0.0005)
    assert main(["show", "flops", "--published"]) == 0
    assert "45.7 %" in capsys.readouterr().out
    for wrong in (["--tflops", "400", "--tokens-per-s", "1e6"], ["--tflops", "-3"], ["--format", "fp4", "--tflops", "3"]):
        try:
            status = main([*words, *wrong])
        except SystemExit as error:
            status = error.code
        assert status == 2
        assert len(capsys.readouterr().err.splitlines()) == 1

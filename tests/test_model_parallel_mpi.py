"""Tensor and context parallelism on MPI ranks: gradients, and after two AdamW steps parameters and moments, of one device."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mpirun import run_limited, run_ranks
from training import Case

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
UNEVEN = {**HEADS, "vocab_size": 43, "intermediate_size": 39, "attention_bias": True, "mlp_bias": True}
TIED = {**HEADS, "tie_word_embeddings": True}
FIVE = {"num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 43, "intermediate_size": 39, "mlp_bias": True}

CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [({"tp": 2}, UNEVEN), ({"tp": 2, "sequence_parallel": False}, TIED), ({"tp": 2, "save_gathered": True}, TIED),
        ({"cp": 2}, UNEVEN), ({"cp": 2, "cp_method": "all_gather"}, TIED), ({"cp": 2, "cp_method": "ulysses"}, UNEVEN)],
    3: [({"cp": 3, "micro_batches": 2}, TIED), ({"cp": 3, "cp_layout": "contiguous", "recompute": "selective"}, UNEVEN),
        ({"cp": 3, "cp_method": "all_gather", "recompute": "full"}, TIED)],
    4: [({"tp": 4, "micro_batches": 2}, UNEVEN), ({"tp": 4, "sequence_parallel": False, "recompute": "full"}, UNEVEN),
        ({"tp": 2, "cp": 2}, TIED), ({"tp": 2, "cp": 2, "cp_method": "ulysses"}, UNEVEN),
        ({"cp": 4, "cp_method": "ulysses"}, TIED), ({"cp": 4, "cp_ulysses": 2, "recompute": "selective"}, UNEVEN),
        ({"cp": 4, "cp_method": "all_gather", "cp_ulysses": 2}, TIED), ({"dp": 2, "tp": 2}, TIED), ({"dp": 2, "cp": 2}, UNEVEN)],
    5: [({"tp": 5}, FIVE), ({"cp": 5}, UNEVEN), ({"cp": 5, "cp_method": "ulysses"}, FIVE)],
}


@pytest.mark.parametrize("ranks", CASES)
def test_training_on_mpi_ranks_equals_one_device(ranks: int) -> None:
    cases = [dataclasses.asdict(Case(plan, options, clip=0.5)) for plan, options in CASES[ranks]]
    done = run_ranks(ranks, [Path(__file__).with_name("training.py"), json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


@pytest.mark.parametrize(("name", "says"), [
    ("ring_attention", "{size} ranks with their own ring: loss 3.716811 and 21 gradients equal the single device's"),
    ("tensor_parallel_mlp", "of {size}: hidden columns 0 to")])
def test_the_examples_in_process_and_on_mpi_ranks(name: str, says: str) -> None:
    """In process on four ranks; under mpirun on those that it started, and not in each of them once more."""
    example = str(Path(__file__).resolve().parents[1] / "examples" / f"{name}.py")
    for size, done in ((4, run_limited([sys.executable, example], 120)), (3, run_ranks(3, example))):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(says.format(size=size)) == 1

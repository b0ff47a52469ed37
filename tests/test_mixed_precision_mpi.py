"""16 bits over MPI: messages of float16 and bfloat16, and an overflow on one rank that all of them skip."""

from __future__ import annotations

import pytest
from mpirun import run_ranks

SKIPS = """
import numpy as np
import refdist as rd
from refdist.numerics import LossScale
from refdist.parallel import fsdp
from refdist.testing.precision import poisoned

comm = rd.mpi_world()
config = rd.ModelConfig(vocab_size=17, hidden_size=9, intermediate_size=7, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=1, head_dim=4)
trainer = rd.Trainer(config, rd.Plan(fsdp=3), comm, precision="fp16", loss_scale=LossScale(64.0),
                     implementations={"fsdp": poisoned(fsdp, 2, np.inf)})
tokens = np.random.default_rng(0).integers(0, 17, (5, 9))
results = [trainer.step(tokens[:, :-1], tokens[:, 1:]) for _ in range(3)]
assert [result.skipped for result in results] == [False, True, False], results
assert [result.loss_scale for result in results] == [64.0, 64.0, 32.0], results
total = comm.all_reduce(sum(np.sum(np.abs(array)) for array in trainer.full_params().values()))
assert np.isfinite(total)
print("skipped")
"""


@pytest.mark.parametrize("options", [
    "--precision bf16 --dp 3 --micro-batches 2", "--precision fp16 --fsdp 3 --accumulate-dtype fp32",
    "--precision bf16 --tp 3 --num-attention-heads 3 --num-key-value-heads 3 --head-dim 8"])
def test_gradients_under_mpirun(options):
    done = run_ranks(3, ["-m", "refdist", "check", "--batch", "6", "--seq", "9", *options.split()])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradients agree" in done.stdout


def test_an_overflow_on_one_rank_under_mpirun(tmp_path):
    script = tmp_path / "skips.py"
    script.write_text(SKIPS)
    done = run_ranks(3, [script])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped") == 3

"""Replicas of sharded groups (HSDP): the same ranks as one group, as several, and as replicas only; memory, traffic by axis.

    mpirun -n 4 python examples/hybrid_sharding.py
    python examples/hybrid_sharding.py               four ranks in this process

    dp 0:  fsdp 0 ─ fsdp 1        gathers and reduce-scatters along a row: many bytes, between neighbours
             │        │
    dp 1:  fsdp 0 ─ fsdp 1        all-reduce of a shard along a column: few bytes, between distant groups
"""

import os

import numpy as np

import refdist as rd
from refdist.cli.launch import launched
from refdist.device import Overlap

CONFIG = rd.ModelConfig(vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2)
BATCH, SEQ, STEPS = 8, 64, 3


def train(comm: rd.Comm, plan: rd.Plan) -> tuple[rd.Trainer, dict[str, int], Overlap]:
    """A few steps; the trainer, the bytes that the last step sent along each axis, and its timeline."""
    trainer = rd.Trainer(CONFIG, plan, comm, rd.AdamW(lr=1e-3), precision="fp32")
    generator = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = generator.integers(0, 256, (BATCH, SEQ + 1))
        before = {row[:2]: row.bytes for row in trainer.device.traffic}
        timeline = Overlap(trainer.device)
        trainer.step(tokens[:, :-1], tokens[:, 1:])
        timeline.stop()
    sent = {"fsdp": 0, "dp": 0}
    for row in trainer.device.traffic:
        if row.axis in sent:
            sent[row.axis] += row.bytes - before.get(row[:2], 0)
    return trainer, sent, timeline


def program(comm: rd.Comm) -> float:
    """On each rank: every way to cut the ranks into dp groups of fsdp; how far they end from the first."""
    size, want, apart, drawn = 4 * CONFIG.num_parameters(), None, 0.0, ""
    if comm.rank == 0:
        print(f"rank 0 of {comm.size}; Ψ = {size:,} bytes of parameters, everything in units of Ψ")
        print("dp × fsdp  parameters, gradients, moments  gathered at most  sent along fsdp  sent along dp")
    for replicas in [number for number in range(1, comm.size + 1) if comm.size % number == 0]:
        trainer, sent, timeline = train(comm, rd.Plan(dp=replicas, fsdp=comm.size // replicas))
        params = trainer.full_params()
        want = want or params
        apart = max(apart, *(float(np.abs(params[name] - want[name]).max() / np.abs(want[name]).max()) for name in want))
        if comm.rank == 0:
            print(f"{replicas:>2} × {comm.size // replicas:<6} {trainer.device.live['total'] / size:>28.2f} "
                  f"{trainer.device.peak['gathered'] / size:>17.2f} {sent['fsdp'] / size:>16.2f} {sent['dp'] / size:>14.2f}")
        if 1 < replicas < comm.size:
            drawn = f"\n\nthe last step of rank 0, {replicas} groups:\n{timeline.text()}"
    if comm.rank == 0:
        print(f"\nafter {STEPS} steps of AdamW parameters differ by {apart:.0e} of the largest{drawn}")
    return apart


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        assert max(rd.run(program, ranks=4)) < 1e-3

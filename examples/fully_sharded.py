"""ZeRO 1, 2 and 3 side by side: the same training, what each keeps whole, what each sends and when.

    mpirun -n 4 python examples/fully_sharded.py
    python examples/fully_sharded.py                 four ranks in this process

With ``order="rank"`` gradients are added up in rank order, so that all of them end with the very same bits. The timelines are
those of a step; ZeRO 1 and 2 have two micro-batches there, which is where they differ.
"""

import os

import numpy as np

import refdist as rd
from refdist.cli.launch import launched
from refdist.device import Overlap

CONFIG = rd.ModelConfig(vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2)
BATCH, SEQ, STEPS = 8, 64, 3


def train(comm: rd.Comm, plan: rd.Plan) -> tuple[rd.Trainer, int, Overlap]:
    """A few steps; the trainer, the bytes that the last step sent, and its timeline."""
    trainer = rd.Trainer(CONFIG, plan, comm, rd.AdamW(lr=1e-3), clip_norm=1.0)
    generator = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = generator.integers(0, 256, (BATCH, SEQ + 1))
        sent = trainer.device.bytes_sent
        timeline = Overlap(trainer.device)
        trainer.step(tokens[:, :-1], tokens[:, 1:])
        timeline.stop()
    return trainer, trainer.device.bytes_sent - sent, timeline


def program(comm: rd.Comm) -> bool:
    """On each rank: data parallelism and the three stages of ZeRO."""
    plans = {"data parallel": rd.Plan(dp=comm.size, order="rank")}
    plans |= {f"ZeRO {zero}": rd.Plan(fsdp=comm.size, zero=zero, order="rank") for zero in (1, 2, 3)}
    size, want, same = 4 * CONFIG.num_parameters(), None, True
    if comm.rank == 0:
        print(f"rank 0 of {comm.size}; Ψ = {size:,} bytes of parameters, everything in units of Ψ")
        print(f"{'':<14} parameters  gradients  optimizer  gathered at most  sent a step")
    for name, plan in plans.items():
        trainer, sent, _ = train(comm, plan)
        device, params = trainer.device, trainer.full_params()
        want = params if want is None else want
        same &= all(np.array_equal(params[key], want[key]) for key in want)
        if comm.rank == 0:
            kept = [device.live[category] / size for category in ("parameter", "gradient", "optimizer")]
            print(f"{name:<14} {kept[0]:>10.2f} {kept[1]:>10.2f} {kept[2]:>10.2f} {device.peak['gathered'] / size:>17.2f} "
                  f"{sent / size:>12.2f}")
    if comm.rank == 0:
        print(f"\nall four trained to the same bits: {same}")
    for zero, micro_batches in ((1, 2), (2, 2), (3, 1)):
        timeline = train(comm, rd.Plan(fsdp=comm.size, zero=zero, micro_batches=micro_batches))[2]
        if comm.rank == 0:
            print(f"\nZeRO {zero}, micro-batches: {micro_batches}\n{timeline.text()}")
    return same


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        assert all(rd.run(program, ranks=4))

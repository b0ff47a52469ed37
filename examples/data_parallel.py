"""Data parallelism: train a small Llama on several ranks; see when gradients travel, what is sent, and what memory holds.

    mpirun -n 2 python examples/data_parallel.py
    python examples/data_parallel.py                 two ranks in this process

Every rank holds the whole model. Buckets of gradients are summed over the ranks while backward goes on: in the picture the bars
of the all-reduces lie under the kernels of the layers before them.
"""

import os

import numpy as np

import refdist as rd
from refdist.cli.launch import launched
from refdist.device import Overlap

CONFIG = rd.ModelConfig(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
                        num_key_value_heads=2)
BATCH, SEQ = 8, 128


def program(comm: rd.Comm) -> float:
    """On each rank: train three steps, and show the last one."""
    trainer = rd.Trainer(CONFIG, rd.Plan(dp=comm.size, micro_batches=2, bucket_bytes=1 << 19), comm, rd.AdamW(lr=1e-3))
    generator = np.random.default_rng(0)
    for _ in range(3):
        tokens = generator.integers(0, 256, (BATCH, SEQ + 1))  # every rank passes the whole batch, and trains on its part
        sent = {row[:2]: row.bytes for row in trainer.device.traffic}
        timeline = Overlap(trainer.device)
        result = trainer.step(tokens[:, :-1], tokens[:, 1:])
        timeline.stop()
    if comm.rank == 0:
        size = 4 * CONFIG.num_parameters()  # Ψ in bytes
        print(f"loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}, {result.tokens} tokens\n")
        print(f"{timeline.text()}\n{timeline.hidden():.0%} of the time with a reduction under way, kernels ran\n")
        print(f"sent by rank 0 in the last step, where 2 Ψ (N - 1) / N is {2 * size * (comm.size - 1) // comm.size:,} bytes:")
        for row in trainer.device.traffic:
            print(f"  {row.axis:<10} {row.operation:<16} {row.bytes - sent.get(row[:2], 0):>12,} bytes")
        print(f"\nmemory of rank 0, where Ψ is {size:,} bytes:\n{trainer.device.memory_table()}")
    return result.loss


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        rd.run(program, ranks=2)

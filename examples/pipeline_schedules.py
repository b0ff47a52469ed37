"""One model under every pipeline schedule: time, bubble and memory side by side.

    mpirun -n 2 python examples/pipeline_schedules.py        one stage on each rank, 8 micro-batches
    python examples/pipeline_schedules.py                    two stages in this process, which take turns: no speed-up

In flight: micro-batches whose activations a stage holds at most. Bubble: the largest part of a step in which a stage waits, as
the schedule promises for F = B = W, and as it was measured.
"""

import os
import time

import numpy as np

import refdist as rd
from refdist.cli.launch import launched
from refdist.parallel.pipeline import SCHEDULES, bubble, make_schedule, makespan, peak_in_flight, simulate
from refdist.parallel.pipeline.timing import Recorder

MICRO_BATCHES, STEPS = 8, 3


def measure(comm: rd.Comm, name: str, chunks: int) -> list[float]:
    """Milliseconds a step, the bubble in per cent, and the peak of activations in MiB, at most over the stages."""
    config = rd.ModelConfig(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4 * comm.size,
                            num_attention_heads=4, num_key_value_heads=2)
    recorder = Recorder()
    device = rd.Device(listeners=[recorder])
    plan = rd.Plan(pp=comm.size, schedule=name, virtual_stages=chunks, micro_batches=MICRO_BATCHES)
    trainer = rd.Trainer(config, plan, comm, device=device)
    tokens = np.random.default_rng(0).integers(0, 256, (MICRO_BATCHES, 65))
    best = [np.inf, 0.0]
    for _ in range(STEPS):
        recorder.spans.clear()
        start = time.perf_counter()
        trainer.step(tokens[:, :-1], tokens[:, 1:])
        seconds = time.perf_counter() - start
        if seconds < best[0]:
            best = [seconds, bubble([recorder.spans]) / makespan([recorder.spans])]
    mine = np.array([1e3 * best[0], 100 * best[1], device.peak["activation"] / 2**20])
    return comm.all_reduce(mine, op="max").tolist()


def program(comm: rd.Comm) -> None:
    if comm.rank == 0:
        print(f"{comm.size} stages, {MICRO_BATCHES} micro-batches ({comm.transport.name} ranks)")
        print("schedule          in flight   promised bubble   measured bubble   ms a step   activations MiB")
    for name, entry in SCHEDULES.items():
        if entry.placement == "bidirectional":
            continue  # every stage of the model on two ranks: drawn and checked only
        chunks = entry.chunks or 2
        schedule = make_schedule(name, comm.size, MICRO_BATCHES, chunks)
        spans = simulate(schedule)
        in_flight = max(peak_in_flight(schedule)) / schedule.chunks
        promised = 100 * bubble(spans) / makespan(spans)
        milliseconds, waited, mebibytes = measure(comm, name, chunks)
        if comm.rank == 0:
            print(f"{entry.title:<16} {in_flight:>10.1f} {promised:>15.1f} % {waited:>15.1f} % {milliseconds:>11.1f} "
                  f"{mebibytes:>17.2f}")


if __name__ == "__main__":
    if launched(os.environ):
        program(rd.mpi_world())
    else:
        rd.run(program, ranks=2)

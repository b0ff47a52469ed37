"""MFU and HFU: which part of the peak a run's FLOPs are.

    MFU = model FLOPs / (seconds · peak)        what one forward and one backward need (Chowdhery et al. 2022, appendix B)
    HFU = executed FLOPs / (seconds · peak)     with what was computed again

The peak is this machine's float32 matrix product, whatever the run's precision: the best of 8 products of 1024³, on as many cores
at once as the ranks can use. Or it is a GPU's (`paper/hardware.py`), dense in 16 bits, times the ranks.
"""

from __future__ import annotations

import math
import os
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import refdist as rd
from refdist.paper.hardware import ACCELERATORS

__all__ = ["GPUS", "SGEMM", "Utilization", "best_product", "of_run", "sgemm_peak"]

SGEMM = "sgemm"
GPUS = {name: max(gpu.peak.get(kind, 0.0) for kind in ("fp16", "bf16")) for name, gpu in ACCELERATORS.items()
        if {"fp16", "bf16"} & set(gpu.peak)}
"""Accelerator -> dense 16-bit FLOP/s."""

SIZE = 1024  # rows, columns and products of the matrix product that everything is compared with
TURNS = 8
ASLEEP = 0.2  # seconds: about what 8 products take


@dataclass(frozen=True)
class Utilization:
    """What a run has computed, over all ranks, and which part of the peak that is.

    Attributes:
        model_flops, executed_flops: of all steps; without and with what was computed again.
        peak: what the run is held against: ``"sgemm"`` or the name of a GPU.
        peak_flops_per_s: of all ranks together.
        mfu, hfu: parts of that peak, between 0 and 1.
    """

    model_flops: int
    executed_flops: int
    peak: str
    peak_flops_per_s: float
    mfu: float
    hfu: float


def of_run(comm: rd.Comm, flops: dict[str, int], seconds: float, peak: str) -> Utilization:
    """The utilization of a run; collective.

    Args:
        flops: ``"model"`` and ``"executed"`` of this rank.
        seconds: that they took, on rank 0.
        peak: ``"sgemm"``, which is measured now, or the name of a GPU, one of which every rank stands for.
    """
    model, executed = comm.all_reduce(np.array([flops["model"], flops["executed"]], np.int64)).tolist()
    fastest = sgemm_peak(comm) if peak == SGEMM else GPUS[peak] * comm.size
    return Utilization(model, executed, peak, fastest, model / seconds / fastest, executed / seconds / fastest)


def sgemm_peak(comm: rd.Comm) -> float:
    """FLOP/s of float32 matrix products on all cores that the ranks can use at once, one BLAS thread each; collective.

    In-process ranks take turns on one core. On each host of MPI ranks as many multiply as there are cores, the others wait.
    """
    in_process = comm.transport.name != "mpi"
    host = comm.split(0 if in_process else zlib.crc32(socket.gethostname().encode()))
    assert host is not None
    cores = 1 if in_process else np.unique(host.all_gather(_own_cores())).size
    group = comm.split(0 if host.rank < cores else None)
    if group is None:
        time.sleep(0 if in_process else ASLEEP)  # waiting polls, which would cost those that multiply their core
    rate = 0.0 if group is None else 2 * SIZE**3 / best_product(group.barrier)
    return float(comm.all_reduce(np.array(rate)))


def _own_cores() -> np.ndarray:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return np.array(sorted(os.sched_getaffinity(0)))
    return np.arange(os.cpu_count() or 1)


def best_product(together: Callable[[], None]) -> float:
    """Seconds of the fastest of 8 float32 products of 1024³; ``together`` is called before each."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((SIZE, SIZE), dtype=np.float32) for _ in range(2))
    out, best = np.empty_like(a), math.inf
    for _ in range(TURNS):
        together()
        start = time.perf_counter()
        np.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return best

"""On paper: what a model and a plan need and cost on hardware that nobody here has, in closed forms. Nothing runs.

    hardware.py     accelerators, with sources
    cluster.py      servers, racks, pods: how many accelerators, how fast they are connected, which mesh axis crosses what
    models.py       models that are too big to be run here, and published plans for them
    part.py         what one rank holds of a model and a batch, in sizes: what all further formulas are made of
    state.py        bytes of parameters, gradients, master copy and moments; gathered parameters
    activations.py  bytes that blocks keep for backward, and need while they run
    memory.py       all of it, and how far each way of sharding goes
    traffic.py      bytes along each axis, by operation
    flops.py        FLOPs of a step; MFU of published runs, by named conventions
    estimate.py     the time of a step: an estimate
    balance.py      when a strategy is communication-bound
    search.py       which plans fit, and which of them the estimate likes best
    draw.py         pictures

It stands above ``parallel``, whose layout table, placement and schedules it asks, and below ``cli``. Memory, traffic, FLOPs are
held against what the emulator measures (``tests/test_paper_*.py``).
"""

from refdist.paper.cluster import CLUSTERS, Cluster, Level
from refdist.paper.hardware import ACCELERATORS, Accelerator
from refdist.paper.models import MODELS

__all__ = ["ACCELERATORS", "CLUSTERS", "MODELS", "Accelerator", "Cluster", "Level"]

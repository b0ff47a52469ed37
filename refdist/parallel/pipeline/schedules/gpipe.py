"""GPipe: every micro-batch forward, then every micro-batch backward.

    stage 0   F0 F1 F2 F3                         B0    B1    B2    B3
    stage 1      F0 F1 F2 F3                   B0    B1    B2    B3
    stage 2         F0 F1 F2 F3             B0    B1    B2    B3
    stage 3            F0 F1 F2 F3    B0    B1    B2    B3

Huang et al. 2019, "GPipe", figure 2(c). Bubble (p-1)(F+B+W); all m micro-batches are in flight on every stage. The figure runs
backward from the last micro-batch to the first; here it runs in their order, so that their gradients are always added in the
same order, whatever the schedule. Time and memory are the same.
"""

from __future__ import annotations

from refdist.parallel.pipeline.action import Action

__all__ = ["gpipe"]


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The actions of each stage."""
    forward = [Action("F", micro_batch) for micro_batch in range(micro_batches)]
    backward = [Action("B", micro_batch) for micro_batch in range(micro_batches)]
    return [forward + backward for _ in range(stages)]

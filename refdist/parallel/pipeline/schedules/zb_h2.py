"""ZB-H2: ZB-H1 with about twice the forwards ahead and twice the delay: no bubble when F = B = W, for twice the memory.

    stage 0   F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 …
    stage 1      F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 …
    stage 2         F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 …
    stage 3            F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 …

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2 and figure 3 (bottom). The trapezoid of busy time becomes a
parallelogram: a later stage begins later and ends later, so the optimizer must not wait for all of them at once.
Bubble (p-1)(F+B-2W); 2p-1 micro-batches in flight.
"""

from __future__ import annotations

from refdist.parallel.pipeline.action import Action
from refdist.parallel.pipeline.schedules.zb_h1 import delayed_weight_gradients

__all__ = ["zb_h2"]


def zb_h2(stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The actions of each stage."""
    return [delayed_weight_gradients(2 * (stages - stage - 1), 2 * stage, micro_batches) for stage in range(stages)]

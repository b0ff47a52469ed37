"""ZB-H1: 1F1B with backward in two halves; weight gradients wait to fill the bubble at the end, in the memory of 1F1B.

    stage 0   F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 …
    stage 1      F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 …
    stage 2         F0 F1    I0 F2 I1 F3 I2 W0 …
    stage 3            F0 I0 F1 I1 F2 I2 F3 I3 W0 …

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1 and figure 3 (top). Stage i (from 0) puts a weight gradient off by
i micro-batches, so that p micro-batches are in flight on every stage. Bubble (p-1)(F+B-W).
"""

from __future__ import annotations

from refdist.parallel.pipeline.action import Action

__all__ = ["delayed_weight_gradients", "zb_h1"]


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The actions of each stage."""
    return [delayed_weight_gradients(stages - stage - 1, stage, micro_batches) for stage in range(stages)]


def delayed_weight_gradients(warm_up: int, delay: int, micro_batches: int) -> list[Action]:
    """``warm_up`` forwards, then forward, input gradient, and the weight gradient of ``delay`` micro-batches before."""
    actions = [Action("F", micro_batch) for micro_batch in range(min(warm_up, micro_batches))]
    for micro_batch in range(micro_batches):
        if warm_up + micro_batch < micro_batches:
            actions.append(Action("F", warm_up + micro_batch))
        actions.append(Action("I", micro_batch))
        if micro_batch >= delay:
            actions.append(Action("W", micro_batch - delay))
    return actions + [Action("W", micro_batch) for micro_batch in range(max(micro_batches - delay, 0), micro_batches)]

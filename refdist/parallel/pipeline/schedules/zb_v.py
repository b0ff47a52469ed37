"""ZB-V: two chunks a stage, placed as a V: no bubble when F = B = W, in the memory of 1F1B.

    stage 0   F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 …       F, I, W: chunk 0, on the way down;  f, i, w: chunk 1, on the way up
    stage 1      F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 …
    stage 2         F0 F1 F2 f0 F3 f1 F4 f2 i0 …    A stage that is early on the way down is late on the way up, so all stages
    stage 3            F0 f0 F1 f1 F2 f2 F3 f3 …    hold a micro-batch for about the same time.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6 and figure 8; placement also Qi et al. 2024, "Pipeline Parallelism
with Controllable Memory", section 4. First and last layers are both on stage 0. At most p micro-batches are in flight on a stage.
The phases assume 2p - 1 micro-batches or more; with fewer, those that do not exist are left out.
"""

from __future__ import annotations

from refdist.parallel.pipeline.action import Action
from refdist.parallel.pipeline.schedules.stage_writer import StageWriter

__all__ = ["zb_v"]


def zb_v(stages: int, micro_batches: int, chunks: int = 2) -> list[list[Action]]:
    """The actions of each stage."""
    return [_stage(stage, stages, max(micro_batches, 2 * stages - 1)).up_to(micro_batches) for stage in range(stages)]


def _stage(stage: int, stages: int, micro_batches: int) -> StageWriter:
    do = StageWriter()
    from_bottom = stages - stage  # stages from here to the bottom of the V, this one too

    for _ in range(2 * from_bottom - 1):  # fill the way down
        do("F", 0)
    for _ in range(stage):  # the first micro-batches come back up
        do("F", 1)
        do("F", 0)
    for _ in range(from_bottom):  # the first gradients come back down
        do("F", 1)
        do("I", 1)
        do("W", 1)
    while do.count["F", 1] < micro_batches:  # steady: one action of each kind and chunk
        if do.count["F", 0] < micro_batches:
            do("F", 0)
        do("I", 0)
        do("W", 0)
        do("F", 1)
        do("I", 1)
        do("W", 1)
    for _ in range(stage):  # no forwards are left: input gradients first, others wait for them
        do("I", 0)
        do("I", 1)
    for _ in range(from_bottom):  # weight gradients fill the gaps between the last input gradients
        do("I", 0)
        do("W", 0)
    do.remaining_weight_gradients()
    return do

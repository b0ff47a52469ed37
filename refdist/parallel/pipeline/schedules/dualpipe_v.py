"""DualPipe-V: DualPipe cut in half and folded: the two directions are the two arms of a V, and parameters lie on one rank only.

    stage 0   F0 F1 F2 F3 F4 F5 F6 f0 F7 b0 …    F, B: chunk 0, on the way down;  f, b: chunk 1, on the way up
    stage 1      F0 F1 F2 F3 F4 f0 F5 f1 …       In the steady phase a forward stands next to the backward of another
    stage 2         F0 F1 F2 f0 F3 f1 …          micro-batch in the other chunk: on real machines the one computes while
    stage 3            F0 f0 F1 b0 f1 B0 …       the other communicates.

DeepSeek-V3 2024 (section 3.2.1, figure 5) for the eight phases; the fold is from the Sea AI Lab's remark on it and from the
DualPipe repository's DualPipeV. p stages here do what 2p ranks do in DualPipe. The phases assume 2p micro-batches or more; with
fewer, those that do not exist are left out.
"""

from __future__ import annotations

from refdist.parallel.pipeline.action import Action
from refdist.parallel.pipeline.schedules.dualpipe import eight_phases

__all__ = ["dualpipe_v"]


def dualpipe_v(stages: int, micro_batches: int, chunks: int = 2) -> list[list[Action]]:
    """The actions of each stage."""
    padded = max(micro_batches, 2 * stages)
    return [eight_phases(stage, stages, padded).up_to(micro_batches) for stage in range(stages)]

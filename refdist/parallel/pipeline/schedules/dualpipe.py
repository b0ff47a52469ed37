"""DualPipe: micro-batches enter at both ends, and a forward of one direction stands next to a backward of the other.

    stage 0   F0 F1 F2 F3 F4 F5 F6 f0 F7 b0 …         F, B: this half of the micro-batches goes 0, 1, … p-1
    stage 1      F0 F1 F2 F3 F4 f0 …                  f, b: the other half goes p-1, … 1, 0
    …
    stage p-1  the same as stage 0, with the directions exchanged

DeepSeek-V3 2024, section 3.2.1, figure 5, and the DualPipe repository for its eight phases. Each stage of the model lies on two
ranks, stage i and p-1-i: twice the parameters. p is even. Bubble (p/2-1)(F&B + B_whole - 3W) for an even m of at least 2p, where
F&B is a forward and a backward that overlap. The phases assume 2p micro-batches; of fewer, those that do not exist are left out.
"""

from __future__ import annotations

from refdist.errors import PlanError
from refdist.parallel.pipeline.action import Action
from refdist.parallel.pipeline.schedules.stage_writer import StageWriter

__all__ = ["dualpipe", "eight_phases"]


def dualpipe(stages: int, micro_batches: int, chunks: int = 2) -> list[list[Action]]:
    """The actions of each stage; chunk 0 is the layers of this stage, chunk 1 those of stage p-1 minus this one."""
    if stages % 2:
        raise PlanError(f"dualpipe needs an even number of stages, not {stages}")
    per_direction = max(stages, (micro_batches + 1) // 2)
    first_half = (micro_batches + 1) // 2  # micro-batches that go from stage 0 to stage p-1
    schedule = []
    for stage in range(stages):
        near = 0 if stage < stages // 2 else 1  # the chunk whose micro-batches enter at this stage's end of the pipeline
        written = eight_phases(min(stage, stages - 1 - stage), stages // 2, per_direction).actions
        actions = []
        for kind, number, far in written:
            chunk = near ^ far
            if number < (micro_batches - first_half if chunk else first_half):
                actions.append(Action(kind, number + first_half * chunk, chunk))
        schedule.append(actions)
    return schedule


def eight_phases(stage: int, stages: int, micro_batches: int) -> StageWriter:
    """What a stage does with two chunks, through each of which all micro-batches go.

    Chunk 0 gets its input from lower stages and chunk 1 from higher ones; ``stages`` is where the two directions meet.
    """
    do = StageWriter()
    to_middle = stages - stage - 1

    for _ in range(2 * to_middle):  # 1: forward of the near direction
        do("F", 0)
    for _ in range(stage + 1):  # 2: forward of both
        do("F", 0)
        do("F", 1)
    for _ in range(to_middle):  # 3: the far direction's first gradients; weight gradients fill the gaps
        do("I", 1)
        do("W", 1)
        do("F", 1)
    for _ in range(micro_batches - 2 * stages + stage + 1):  # 4: steady, forward beside backward
        do("F", 0)
        do("B", 1)
        do("F", 1)
        do("B", 0)
    for _ in range(to_middle):  # 5: the near direction has no forward left
        do("B", 1)
        do("F", 1)
        do("B", 0)
    for number in range(stage + 1):  # 6: no forward left; the later half puts its weight gradients off
        early = 2 * number < stage + 1
        exactly_half = 2 * number == stage
        do("B" if early else "I", 1)
        do("B" if early and not exactly_half else "I", 0)
    for _ in range(to_middle):  # 7: weight gradients fill the gaps between the last input gradients
        do.oldest_weight_gradient()
        do("I", 0)
    do.remaining_weight_gradients()  # 8
    return do

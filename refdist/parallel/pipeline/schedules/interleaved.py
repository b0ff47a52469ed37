"""Interleaved 1F1B: each stage holds several chunks, every p-th part of the model, and the bubble shrinks by their number.

    stage 0   F0 F1 F2 F3 f0 f1 f2 f3 …          F, B: chunk 0;  f, b: chunk 1 (two stages, two chunks, groups of two:)
    stage 0   F0 F1 f0 f1 F2          b0 f2 …
    stage 1      F0 F1 f0 b0 f1 b1 …

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2 and figure 4 (bottom). There
the number of micro-batches must be a multiple of p. Llama 3 (2024, section 3.3.2, figure 6) makes the number of contiguous
micro-batches N on one chunk a choice and runs any number of micro-batches: N = p is depth first, N = m is breadth first.

A micro-batch count that N does not divide is cut into groups of N or a few more. A stage runs 2 (p - stage - 1) forwards ahead of
its backwards; where groups are so small that this would wait in a circle (two groups of less than p micro-batches lie between a
forward and its backward), it runs fewer ahead. Bubble (p-1)(F+B+W)/V when p divides m and N = p.
"""

from __future__ import annotations

from itertools import chain, pairwise

from refdist.comm.reduction import bounds
from refdist.errors import PlanError
from refdist.parallel.pipeline.action import Action
from refdist.parallel.pipeline.schedules.one_f_one_b import one_f_one_b

__all__ = ["interleaved"]


def interleaved(stages: int, micro_batches: int, chunks: int = 2, group: int | None = None) -> list[list[Action]]:
    """The actions of each stage; ``group`` is Llama 3's N, by default as many micro-batches as there are stages."""
    if group is not None and group < 1:
        raise PlanError(f"interleave_group={group}: expected at least 1")
    if chunks == 1:
        return one_f_one_b(stages, micro_batches)
    cuts = bounds(micro_batches, max(1, micro_batches // (group or stages)))
    groups = [range(start, end) for start, end in pairwise(cuts)]
    forward = [Action("F", micro_batch, chunk) for group in groups for chunk in range(chunks) for micro_batch in group]
    backward = [Action("B", micro_batch, chunk) for group in groups for chunk in reversed(range(chunks)) for micro_batch in group]
    sizes = [len(group) for group in groups]
    return [_stage(forward, backward, (chunks - 1) * max(sizes) + 2 * min(stages - stage - 1, *sizes, micro_batches))
            for stage in range(stages)]


def _stage(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    return [*forward[:warm_up], *chain.from_iterable(zip(forward[warm_up:], backward[:steady], strict=True)), *backward[steady:]]

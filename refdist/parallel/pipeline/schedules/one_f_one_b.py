"""1F1B: after a few forwards, one forward and one backward in turn, so that few micro-batches are in flight.

    stage 0   F0 F1 F2 F3                   B0    F4 B1    F5 B2 …
    stage 1      F0 F1 F2             B0    F3 B1    F4 B2 …
    stage 2         F0 F1       B0    F2 B1    F3 B2 …
    stage 3            F0 B0    F1 B1    F2 B2 …

Narayanan et al. 2019, "PipeDream", section 3.2; with a flush after each batch: Narayanan et al. 2021, "Efficient Large-Scale
Language Model Training on GPU Clusters", figure 4 (top). Bubble (p-1)(F+B+W); min(p - stage, m) micro-batches in flight.
"""

from __future__ import annotations

from refdist.parallel.pipeline.action import Action

__all__ = ["one_f_one_b"]


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The actions of each stage."""
    return [_stage(min(stages - stage - 1, micro_batches), micro_batches) for stage in range(stages)]


def _stage(warm_up: int, micro_batches: int) -> list[Action]:
    actions = [Action("F", micro_batch) for micro_batch in range(warm_up)]
    for micro_batch in range(micro_batches - warm_up):
        actions += [Action("F", warm_up + micro_batch), Action("B", micro_batch)]
    return actions + [Action("B", micro_batch) for micro_batch in range(micro_batches - warm_up, micro_batches)]

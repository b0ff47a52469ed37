"""One pass that adds communication to any schedule.

    stage 0   F0 ▸send   F1 ▸send          receive◂ B0
    stage 1              receive◂ F0 B0 ▸send   receive◂ F1 B1 ▸send

An action that another stage waits for is followed by a send, and one that needs another stage's result has the receive before it.
Activations from one stage to another are received in the order in which they are sent, and so are gradients: a stage that works
in another order receives early and keeps (the pass looks at the sender's list, nothing else). A send only starts: it ends when
its receive is there, and nobody waits for that before the end. So a schedule whose actions do not wait in a circle cannot hang,
not even when no message is buffered.

Separating what a stage does from how its results travel is the way of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", and of
Megatron-LM's and PyTorch's schedules after it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, TypeAlias

from refdist.parallel.pipeline.action import Action, Place, Schedule, result_kind

__all__ = ["Message", "Program", "add_communication", "message_after", "message_before"]


class Message(NamedTuple):
    """A result that goes from one stage to another.

    Attributes:
        kind: ``"send"`` or ``"receive"``.
        what: ``"F"``: the activation that a forward has made; ``"B"``: the gradient that a backward has made.
        micro_batch: of which it is.
        source, target: the chunk that has made it, and the one that needs it.
    """

    kind: str
    what: str
    micro_batch: int
    source: Place
    target: Place

    @property
    def peer(self) -> int:
        """The other stage."""
        return self.target.stage if self.kind == "send" else self.source.stage

    def __str__(self) -> str:
        what = "activation" if self.what == "F" else "gradient"
        way = f"to stage {self.target.stage}" if self.kind == "send" else f"from stage {self.source.stage}"
        return f"{self.kind} of the {what} of micro-batch {self.micro_batch} {way}"


Program: TypeAlias = list[Action | Message]
Channels: TypeAlias = dict[tuple[int, int, str], list[Message]]  # (from, to, what) -> receives, in the order of the sends


def message_after(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """The send that an action's result needs; None where it stays on the stage."""
    target = schedule.target(stage, action)
    if target is None or target.stage == stage:
        return None
    return Message("send", result_kind(action), action.micro_batch, Place(stage, action.chunk), target)


def message_before(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """The receive that an action waits for; None where its input is on the stage already."""
    source = schedule.source(stage, action)
    if source is None or source.stage == stage:
        return None
    return Message("receive", result_kind(action), action.micro_batch, source, Place(stage, action.chunk))


def add_communication(schedule: Schedule) -> list[Program]:
    """What each stage does and sends and receives, in order."""
    arriving: Channels = defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            send = message_after(schedule, stage, action)
            if send is not None:
                arriving[stage, send.peer, send.what].append(send._replace(kind="receive"))
    return [_stage(schedule, stage, arriving) for stage in range(schedule.stages)]


def _stage(schedule: Schedule, stage: int, arriving: Channels) -> Program:
    program: Program = []
    received: set[Message] = set()
    for action in schedule.actions[stage]:
        needed = message_before(schedule, stage, action)
        if needed is not None and needed not in received:
            queue = arriving[needed.peer, stage, needed.what]
            end = queue.index(needed) + 1 if needed in queue else 0
            program += [*queue[:end]] or [needed]  # a receive that nobody sends for stays visible to the checker
            received.update(queue[:end])
            del queue[:end]
        program.append(action)
        send = message_after(schedule, stage, action)
        if send is not None:
            program.append(send)
    return program

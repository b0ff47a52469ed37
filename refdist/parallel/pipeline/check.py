"""The checker: whether a schedule computes every gradient once, in an order that can be executed; and if not, where it is wrong.

    each stage alone    every micro-batch forward once and backward once in each chunk on its path, nothing else;
                        forward before backward, input gradient before weight gradient
    its messages        every send has its receive, both in the same order; sent after it is made, used after it is received
    all stages          nobody waits in a circle, also when a send ends only as its receive begins

The last part runs the programs of all stages without numbers: a stage goes on until it has to receive what has not been sent.
When nobody can go on, the stages that wait for each other are the answer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refdist.errors import PlanError
from refdist.parallel.pipeline.action import Action, Schedule, result_kind
from refdist.parallel.pipeline.communication import Message, Program, add_communication, message_after, message_before

__all__ = ["Fault", "check", "check_programs", "require_valid"]


@dataclass(frozen=True)
class Fault:
    """A mistake in a schedule.

    Attributes:
        kind: ``"extra"``, ``"missing"``, ``"order"``, ``"message"`` or ``"deadlock"``.
        stage: where it is.
        index: the position in that stage's list, or None where something is missing.
        text: what is wrong.
    """

    kind: str
    stage: int
    index: int | None
    text: str

    def __str__(self) -> str:
        where = f"stage {self.stage}" + (f", action {self.index}" if self.index is not None else "")
        return f"{where}: {self.text}"


def check(schedule: Schedule) -> list[Fault]:
    """All mistakes of a schedule: none for one that can be executed and gives the gradients of all micro-batches."""
    faults = [fault for stage in range(schedule.stages) for fault in _check_stage(schedule, stage)]
    return faults or check_programs(schedule, add_communication(schedule))


def require_valid(schedule: Schedule) -> None:
    """Raise PlanError, with where the mistakes are, unless the schedule is valid."""
    faults = check(schedule)
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise PlanError(f"the schedule {schedule.name} is wrong: " + "; ".join(map(str, faults[:8])) + more)


# ---------------------------------------------------------------------------------------------------- each stage alone


def _check_stage(schedule: Schedule, stage: int) -> Iterator[Fault]:
    found: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)  # (micro-batch, chunk) -> kind -> index
    for index, action in enumerate(schedule.actions[stage]):
        refusal = _refusal(schedule, stage, action, found)
        if refusal:
            yield Fault("extra", stage, index, f"{action}: {refusal}")
        else:
            found[action.micro_batch, action.chunk][action.kind] = index
    for micro_batch in range(schedule.micro_batches):
        for chunk in (place.chunk for place in schedule.path(micro_batch) if place.stage == stage):
            kinds = found[micro_batch, chunk]
            for kind in ("F", *("IW" if "I" in kinds or "W" in kinds else "B")):
                if kind not in kinds:
                    yield Fault("missing", stage, None, f"{Action(kind, micro_batch, chunk)} is missing")
            yield from _check_order(stage, kinds, micro_batch, chunk)


def _refusal(schedule: Schedule, stage: int, action: Action, found: dict[tuple[int, int], dict[str, int]]) -> str:
    """Why an action has no place in the schedule; empty if it has one."""
    if not 0 <= action.micro_batch < schedule.micro_batches:
        return f"there are micro-batches 0 to {schedule.micro_batches - 1} only"
    if schedule.position(stage, action) is None:
        return f"the micro-batch does not come through chunk {action.chunk} of this stage"
    kinds = found[action.micro_batch, action.chunk]
    if action.kind in kinds:
        return f"it is done already, by action {kinds[action.kind]}"
    for other in {"B": "IW", "I": "B", "W": "B"}.get(action.kind, ""):
        if other in kinds:
            return f"action {kinds[other]} ({other}) has done that already: backward is whole (B) or in two halves (I, W)"
    return ""


def _check_order(stage: int, kinds: dict[str, int], micro_batch: int, chunk: int) -> Iterator[Fault]:
    for first, second in ("FB", "FI", "IW"):
        if first in kinds and second in kinds and kinds[first] > kinds[second]:
            yield Fault("order", stage, kinds[second], f"{Action(second, micro_batch, chunk)} comes before its {first}, "
                        f"which is action {kinds[first]}")


# --------------------------------------------------------------------------------------------- messages, and all stages


def check_programs(schedule: Schedule, programs: Sequence[Program]) -> list[Fault]:
    """All mistakes in sends and receives, whether the pass has added them or somebody has written them by hand.

    Args:
        schedule: whose actions the programs contain.
        programs: for each stage its actions, sends and receives in order.
    """
    faults = [fault for stage, program in enumerate(programs) for fault in _check_messages(schedule, stage, program)]
    return [*faults, *_run(schedule, programs)]


def _check_messages(schedule: Schedule, stage: int, program: Program) -> Iterator[Fault]:
    at = {step: index for index, step in enumerate(program)}
    for index, step in enumerate(program):
        if isinstance(step, Message):
            if at[step] != index:
                yield Fault("message", stage, index, f"{step}: it is there twice")
            continue
        needed, sent = message_before(schedule, stage, step), message_after(schedule, stage, step)
        if needed is not None and at.get(needed, index) >= index:
            there = f"it comes at {at[needed]}" if needed in at else "there is none"
            yield Fault("message", stage, index, f"{step} needs the {needed} before it: {there}")
        if sent is not None and at.get(sent, -1) <= index:
            there = f"it comes at {at[sent]}" if sent in at else "there is none"
            yield Fault("message", stage, index, f"{step} needs the {sent} after it: {there}")


def _run(schedule: Schedule, programs: Sequence[Program]) -> list[Fault]:
    """Execute all programs as far as they go; what is wrong when nobody can go on."""
    counters = [0] * len(programs)
    sent: dict[tuple[int, int, str], deque[tuple[Message, int]]] = defaultdict(deque)  # (from, to, what) -> under way, index
    done: set[tuple[str, int, int, int]] = set()
    faults: list[Fault] = []
    ready = deque(range(len(programs)))
    while ready:
        stage = ready.popleft()
        while counters[stage] < len(programs[stage]):
            index = counters[stage]
            step = programs[stage][index]
            if isinstance(step, Action):
                if not _local_input(schedule, stage, step, done):
                    break
                done.add((result_kind(step), stage, step.micro_batch, step.chunk))
            elif step.kind == "send":
                sent[stage, step.peer, step.what].append((step, index))
                ready.append(step.peer)
            else:
                queue = sent[step.peer, stage, step.what]
                if not queue:
                    break
                message, _ = queue.popleft()
                if message._replace(kind="receive") != step:
                    faults.append(Fault("message", stage, index, f"{step}, but the next message from there is the {message}"))
            counters[stage] += 1
    stuck = [stage for stage, counter in enumerate(counters) if counter < len(programs[stage])]
    if stuck:
        faults.append(_explain(schedule, programs, counters))
    elif not faults:
        faults += [Fault("message", source, index, f"{message}: it is never received")
                   for (source, _, _), queue in sent.items() for message, index in queue]
    return faults


def _local_input(schedule: Schedule, stage: int, action: Action, done: set[tuple[str, int, int, int]]) -> bool:
    """Whether what an action needs from another chunk of its own stage, as at the turn of a V, has been done."""
    source = schedule.source(stage, action)
    if source is None or source.stage != stage:
        return True
    return (result_kind(action), stage, action.micro_batch, source.chunk) in done


def _explain(schedule: Schedule, programs: Sequence[Program], counters: list[int]) -> Fault:
    """The stages that wait in a circle, or for something that never comes."""
    stage = next(stage for stage, counter in enumerate(counters) if counter < len(programs[stage]))
    first: dict[int, int] = {}
    chain: list[tuple[int, int, str]] = []
    while stage not in first and counters[stage] < len(programs[stage]):
        first[stage] = len(chain)
        step = programs[stage][counters[stage]]
        chain.append((stage, counters[stage], str(step)))
        stage = step.peer if isinstance(step, Message) else stage
    if stage in first:
        circle = chain[first[stage]:]
        text = ", which waits for ".join(f"the {step} (stage {where}, action {index})" for where, index, step in circle)
        return Fault("deadlock", *circle[0][:2], f"waits in a circle: {text}, which waits for stage {circle[0][0]} again")
    where, index, last = chain[-1]
    return Fault("deadlock", where, index, f"{last}: stage {stage} has ended and never sends that")

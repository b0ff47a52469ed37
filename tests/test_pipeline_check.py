"""The checker finds every kind of mistake, and says where it is."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refdist.errors import PlanError
from refdist.parallel.pipeline import SCHEDULES, Action, Fault, Schedule, add_communication, check, make_schedule, require_valid
from refdist.parallel.pipeline.check import check_programs
from refdist.parallel.pipeline.communication import Message, Program


def changed(schedule: Schedule, stage: int, actions: list[Action]) -> Schedule:
    stages = list(schedule.actions)
    stages[stage] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(stages))


def only(faults: list[Fault]) -> Fault:
    assert len(faults) == 1, faults
    return faults[0]


def test_a_swapped_pair() -> None:
    schedule = make_schedule("zb_h1", 3, 4)
    actions = list(schedule.actions[1])
    index = actions.index(Action("I", 2))
    other = actions.index(Action("W", 2))
    actions[index], actions[other] = actions[other], actions[index]
    fault = only(check(changed(schedule, 1, actions)))
    assert (fault.kind, fault.stage, fault.index) == ("order", 1, index)
    assert str(fault) == f"stage 1, action {index}: W of micro-batch 2 in chunk 0 comes before its I, which is action {other}"


def test_a_missing_weight_gradient() -> None:
    schedule = make_schedule("zb_h2", 2, 4)
    fault = only(check(changed(schedule, 1, [action for action in schedule.actions[1] if action != Action("W", 3)])))
    assert (fault.kind, fault.stage, str(fault)) == ("missing", 1, "stage 1: W of micro-batch 3 in chunk 0 is missing")


@pytest.mark.parametrize(("extra", "reason"), [
    (Action("F", 1), "it is done already, by action 2"), (Action("F", 4), "there are micro-batches 0 to 3 only"),
    (Action("B", 0, 1), "does not come through chunk 1"), (Action("W", 0), "(B) has done that already"),
    (Action("F", -1), "there are micro-batches 0 to 3 only")])
def test_an_extra_action(extra: Action, reason: str) -> None:
    schedule = make_schedule("1f1b", 2, 4)
    fault = only(check(changed(schedule, 1, [*schedule.actions[1], extra])))
    assert (fault.kind, fault.stage, fault.index) == ("extra", 1, 8)
    assert reason in fault.text


def test_whole_and_halved_backward_exclude_each_other() -> None:
    schedule = make_schedule("zb_h1", 1, 2)
    faults = check(changed(schedule, 0, [*schedule.actions[0], Action("B", 1)]))
    assert "is whole (B) or in two halves (I, W)" in only(faults).text


def test_a_cycle() -> None:
    """Stage 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; stage 1 wants both forwards first."""
    first = [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)]
    second = [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)]
    fault = only(check(Schedule((tuple(first), tuple(second)), 2)))
    assert fault.kind == "deadlock"
    assert "receive of the gradient of micro-batch 0 from stage 1 (stage 0, action 2)" in fault.text
    assert "receive of the activation of micro-batch 1 from stage 0 (stage 1, action 2)" in fault.text
    with pytest.raises(PlanError, match="waits in a circle"):
        require_valid(Schedule((tuple(first), tuple(second)), 2, name="circle"))


def test_a_cycle_at_the_turn_of_a_v_is_on_one_stage() -> None:
    actions = (Action("F", 0, 1), Action("F", 0, 0), Action("B", 0, 1), Action("B", 0, 0))
    fault = only(check(Schedule((actions,), 1, 2, "v")))
    assert (fault.kind, fault.stage, fault.index) == ("deadlock", 0, 0)


def test_a_stage_that_ends_too_early_is_named() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    faults = check_programs(schedule, [[], *add_communication(schedule)[1:]])
    assert any("stage 0 has ended and never sends that" in fault.text for fault in faults)


def programs(name: str = "1f1b", stages: int = 2, micro_batches: int = 3) -> tuple[Schedule, list[Program]]:
    schedule = make_schedule(name, stages, micro_batches)
    return schedule, add_communication(schedule)


def test_the_pass_is_right() -> None:
    schedule, steps = programs()
    assert [str(step) for step in steps[0][:5]] == [
        "F of micro-batch 0 in chunk 0", "send of the activation of micro-batch 0 to stage 1", "F of micro-batch 1 in chunk 0",
        "send of the activation of micro-batch 1 to stage 1", "receive of the gradient of micro-batch 0 from stage 1"]
    assert check_programs(schedule, steps) == []


def test_a_receive_before_its_send() -> None:
    """Stage 0 receives the gradient of micro-batch 0 before it has sent that micro-batch."""
    schedule, steps = programs()
    receive = next(step for step in steps[0] if isinstance(step, Message) and step.kind == "receive")
    steps[0].remove(receive)
    steps[0].insert(1, receive)
    fault = only(check_programs(schedule, steps))
    assert (fault.kind, fault.stage, fault.index) == ("deadlock", 0, 1)
    assert "waits in a circle" in fault.text


def test_a_receive_after_its_use_and_a_send_before_its_making() -> None:
    schedule, steps = programs()
    steps[1][0], steps[1][1] = steps[1][1], steps[1][0]
    fault = check_programs(schedule, steps)[0]
    assert str(fault).startswith("stage 1, action 0: F of micro-batch 0 in chunk 0 needs the receive of the activation")
    schedule, steps = programs()
    steps[0][0], steps[0][1] = steps[0][1], steps[0][0]
    fault = check_programs(schedule, steps)[0]
    assert str(fault).startswith("stage 0, action 1: F of micro-batch 0 in chunk 0 needs the send of the activation")


def test_receives_in_another_order_than_the_sends() -> None:
    schedule, steps = programs("gpipe")
    first, second = [i for i, step in enumerate(steps[1]) if isinstance(step, Message) and step.kind == "receive"][:2]
    steps[1][first], steps[1][second] = steps[1][second], steps[1][first]
    kinds = {(fault.kind, fault.stage) for fault in check_programs(schedule, steps)}
    assert ("message", 1) in kinds
    schedule, steps = programs("gpipe")
    receive = steps[1].pop(2)
    steps[1].insert(0, receive)  # both before their use, the second first
    faults = check_programs(schedule, steps)
    assert [(fault.kind, fault.stage, fault.index) for fault in faults] == [("message", 1, 0), ("message", 1, 1)]
    assert "but the next message from there is the send of the activation of micro-batch 0" in faults[0].text


def test_a_send_that_nobody_receives_and_one_that_is_there_twice() -> None:
    schedule, steps = programs()
    steps[0].append(steps[0][1])
    texts = [str(fault) for fault in check_programs(schedule, steps)]
    assert any("is there twice" in text for text in texts)
    assert any("never received" in text for text in texts)


def test_the_pass_receives_in_the_order_of_the_sends() -> None:
    """The second stage works backwards through the micro-batches: it receives early and keeps."""
    order = ([0, 1, 2], [2, 1, 0])
    stages = [tuple(Action(kind, number) for kind in "FB" for number in numbers) for numbers in order]
    schedule = Schedule(tuple(stages), 3)
    assert check(schedule) == []
    received = [[step.micro_batch for step in program if isinstance(step, Message) and step.kind == "receive"]
                for program in add_communication(schedule)]
    assert received == [[2, 1, 0], [0, 1, 2]]


@given(st.sampled_from([name for name in SCHEDULES if name != "dualpipe"]), st.integers(2, 5), st.integers(1, 8), st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_is_found_twice_or_missed(name: str, stages: int, micro_batches: int, data: st.DataObject) -> None:
    """Every action is needed: without one, with one twice, with a forward after its backward, the checker complains there."""
    schedule = make_schedule(name, stages, micro_batches)
    stage = data.draw(st.integers(0, stages - 1))
    actions = list(schedule.actions[stage])
    index = data.draw(st.integers(0, len(actions) - 1))
    what = data.draw(st.sampled_from(["drop", "double", "forward last"]))
    if what == "drop":
        del actions[index]
    elif what == "double":
        actions.append(actions[index])
    else:
        assume(actions[index].kind == "F")
        actions.append(actions.pop(index))
    faults = check(changed(schedule, stage, actions))
    assert faults
    assert {fault.stage for fault in faults} == {stage}


@given(st.integers(2, 4), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_any_order_of_a_topological_sort_is_valid(stages: int, micro_batches: int, random) -> None:
    """Actions drawn one by one among those whose inputs are there: whatever comes out is a schedule."""
    lists: list[list[Action]] = [[] for _ in range(stages)]
    todo = {(stage, kind, number) for stage in range(stages) for kind in "FIW" for number in range(micro_batches)}

    def ready(item: tuple[int, str, int]) -> bool:
        stage, kind, number = item
        needs = {"F": [(stage - 1, "F")], "I": [(stage, "F"), (stage + 1, "I")], "W": [(stage, "I")]}[kind]
        return not any((where, what, number) in todo for where, what in needs)

    while todo:
        stage, kind, number = random.choice(sorted(item for item in todo if ready(item)))
        todo.remove((stage, kind, number))
        lists[stage].append(Action(kind, number))
    assert check(Schedule(tuple(map(tuple, lists)), micro_batches)) == []

"""Every schedule over many sizes: valid, as its figure shows it, and with the bubble and the peak that its paper promises."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refdist.errors import PlanError
from refdist.parallel.pipeline import (
    SCHEDULES,
    Action,
    Schedule,
    Times,
    bubble,
    check,
    make_schedule,
    makespan,
    peak_in_flight,
    promise,
    read_schedule,
    simulate,
)
from refdist.parallel.pipeline.timing import lower_bound, peak_memory

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 24))
TIMES = st.tuples(*[st.integers(1, 9).map(Fraction)] * 3)
ONE = Fraction(1)


def made(name: str, stages: int, micro_batches: int, chunks: int = 1, group: int | None = None) -> Schedule:
    if name == "dualpipe":
        stages += stages % 2
    return make_schedule(name, stages, micro_batches, chunks, group)


def text(schedule: Schedule) -> list[str]:
    """One line a stage, as the papers' figures: the first chunk in capitals, the second in small letters."""
    return [" ".join((a.kind.lower() if a.chunk else a.kind) + str(a.micro_batch) for a in stage) for stage in schedule.actions]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_small_size_is_valid(name: str) -> None:
    for stages in range(1, 7):
        for micro_batches in range(1, 13):
            schedule = made(name, stages, micro_batches)
            assert check(schedule) == [], (stages, micro_batches)


@pytest.mark.once
def test_interleaved_is_valid_for_any_chunks_and_group() -> None:
    for stages in range(1, 6):
        for micro_batches in range(1, 12):
            for chunks in (2, 3, 4):
                for group in (None, *range(1, micro_batches + 2)):
                    sizes = (stages, micro_batches, chunks, group)
                    assert check(made("interleaved", *sizes)) == [], sizes


def test_the_charts_of_the_papers() -> None:
    assert text(made("1f1b", 4, 8))[1] == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert text(made("1f1b", 4, 8))[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert text(made("gpipe", 2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    # Narayanan et al. 2021, figure 4: four devices, eight micro-batches, two chunks
    assert text(made("interleaved", 4, 8, 2))[0].startswith("F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1")
    assert text(made("interleaved", 4, 8, 2))[3].startswith("F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1")
    # Qi et al. 2023, figures 2 and 3, last and first device
    assert text(made("zb_h1", 4, 8))[3].startswith("F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1")
    assert text(made("zb_h1", 4, 8))[0].startswith("F0 F1 F2 F3 I0 W0 F4 I1 W1")
    assert text(made("zb_h2", 4, 8))[0].startswith("F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2")
    # Qi et al. 2023, figure 8: the turn of the V is on the last stage
    assert text(made("zb_v", 4, 8))[3].startswith("F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1")
    assert text(made("zb_v", 4, 8))[0].startswith("F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 F7 I0 W0 f4 i4 w4")
    # DeepSeek-V3, figure 5, of its first and last rank (of eight there)
    assert text(made("dualpipe", 4, 8))[0].startswith("F0 F1 F2 f4 i4 w4 f5 F3 b5 f6 B0")
    assert text(made("dualpipe", 4, 8))[3].startswith("f4 f5 f6 F0 I0 W0 F1 f7 B1 F2 b4")


def test_breadth_first_and_depth_first() -> None:
    depth, breadth = made("interleaved", 2, 4, 2, 2), made("interleaved", 2, 4, 2, 4)
    assert [a for a in text(depth)[0].split() if a[0] in "Ff"] == "F0 F1 f0 f1 F2 F3 f2 f3".split()
    assert [a for a in text(breadth)[0].split() if a[0] in "Ff"] == "F0 F1 F2 F3 f0 f1 f2 f3".split()


@pytest.mark.parametrize("name", SCHEDULES)
@given(sizes=SIZES, chunks=st.integers(1, 4), times=TIMES, equal=st.booleans(), ordered=st.booleans())
@settings(max_examples=80, deadline=None)
def test_bubble_and_peak_are_the_papers(name: str, sizes: tuple[int, int], chunks: int, times: tuple[Fraction, ...], equal: bool,
                                        ordered: bool) -> None:
    forward, backward, weights = (ONE, ONE, ONE) if equal else times
    if ordered:
        weights, forward, backward = sorted((forward, backward, weights))
    stages, micro_batches = sizes
    schedule = made(name, stages, micro_batches, chunks if name == "interleaved" else 1)
    paired = name.startswith("dualpipe") and micro_batches >= 2 * schedule.stages
    unit = Times(forward, backward, weights, forward + backward + weights if paired else None)
    spans = simulate(schedule, unit)
    assert all(before.end <= after.start or paired for stage in spans for before, after in pairwise(stage))
    assert makespan(spans) >= lower_bound(schedule, unit)
    promised = promise(schedule, unit)
    assert promised is not None
    if promised.bubble is not None:
        assert bubble(spans) == promised.bubble
        assert [Fraction(peak, schedule.visits) for peak in peak_in_flight(schedule)] == promised.peaks


@pytest.mark.parametrize(("name", "sizes", "chunks"), [
    ("gpipe", (4, 8), 1), ("1f1b", (4, 8), 1), ("interleaved", (4, 8), 2), ("zb_h1", (4, 8), 1), ("zb_h2", (4, 8), 1),
    ("zb_v", (4, 8), 1), ("dualpipe_v", (4, 8), 1), ("dualpipe", (4, 8), 2)])
def test_the_formulas_do_hold_somewhere(name: str, sizes: tuple[int, int], chunks: int) -> None:
    promised = promise(make_schedule(name, *sizes, chunks), Times(ONE, ONE, ONE, 3 * ONE if name.startswith("dual") else None))
    assert promised is not None
    assert promised.bubble is not None
    assert promised.peaks is not None


@given(sizes=SIZES, whole=st.integers(1, 9), share=st.fractions(0, 1))
def test_zero_bubble_memory_is_the_papers(sizes: tuple[int, int], whole: int, share: Fraction) -> None:
    p, m = sizes
    for i, actions in enumerate(made("zb_h1", p, m).actions, start=1):
        if m >= p:
            assert peak_memory(actions, whole, whole * share) == (p - i + 1) * whole + (i - 1) * whole * share
    for i, actions in enumerate(made("zb_h2", p, m).actions, start=1):
        if m >= 2 * p - 1:
            assert peak_memory(actions, whole, whole * share) == (2 * p - 2 * i + 1) * whole + (2 * i - 2) * whole * share


@pytest.mark.parametrize("name", SCHEDULES)
@given(sizes=SIZES)
@settings(max_examples=30)
def test_gradients_are_added_in_the_order_of_the_micro_batches(name: str, sizes: tuple[int, int]) -> None:
    schedule = made(name, *sizes, 3 if name == "interleaved" else 1)
    for actions in schedule.actions:
        for chunk in range(schedule.chunks):
            for kinds in ("F", "BW", "BI"):
                numbers = [a.micro_batch for a in actions if a.kind in kinds and a.chunk == chunk]
                assert numbers == sorted(numbers)


def test_zero_bubble_is_no_slower_than_1f1b_and_zb_v_has_none() -> None:
    for p, m in ((2, 4), (4, 8), (6, 17)):
        one = makespan(simulate(made("1f1b", p, m)))
        assert makespan(simulate(made("zb_h1", p, m))) <= one
        assert bubble(simulate(made("zb_v", p, m))) == 0
        assert bubble(simulate(made("zb_h2", p, m))) == 0


def test_latency_delays_messages_only() -> None:
    assert makespan(simulate(made("1f1b", 1, 3), Times(1, 1, 1), latency=5)) == 9
    assert makespan(simulate(made("1f1b", 1, 1), Times(1, 1, 1, FB=2))) == 3  # F and its own B do not overlap
    assert lower_bound(made("zb_h1", 2, 1), Times(1, 2, 4)) == makespan(simulate(made("zb_h1", 2, 1), Times(1, 2, 4))) == 10
    assert makespan(simulate(made("1f1b", 2, 1), Times(1, 1, 1), latency=5)) == 6 + 2 * 5
    assert makespan(simulate(made("zb_v", 2, 1), Times(2, 2, 2), latency=5)) == 4 + 4 + 2 + 4 * 5  # none at the turn of the V


@pytest.mark.parametrize("name", SCHEDULES)
def test_json_and_back(name: str) -> None:
    schedule = made(name, 2, 3)
    lists = json.loads(json.dumps(schedule.to_lists()))
    assert lists[0][0] == ["F", 0, 0]
    assert read_schedule(json.dumps(lists), schedule.placement, name) == schedule
    assert read_schedule(json.dumps({"actions": lists, "placement": schedule.placement}), name=name) == schedule


@pytest.mark.parametrize(("json_text", "problem"), [
    ("nonsense", "not JSON"), ("[]", "one list of actions for each stage"), ('"F"', "one list of actions"), ("[1]", "stage 0"),
    ('[[["F", 0]], [["X", 0, 0]]]', "stage 1, action 0"), ('[[["F", 0, 0], ["B", "0", 0]]]', "stage 0, action 1"),
    ('[[["F", 0, 0, 0]]]', "stage 0, action 0"), ('[[["F", true, 0]]]', "stage 0, action 0"), ("{}", "one list of actions"),
    ('[[[["F"], 0, 0]]]', "stage 0, action 0"), ('[[[{}, 0]]]', "stage 0, action 0")])
def test_what_is_no_schedule_is_refused(json_text: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        read_schedule(json_text)


def test_make_schedule_takes_names_functions_lists_and_files(tmp_path) -> None:
    lists = made("1f1b", 2, 3).to_lists()
    file = tmp_path / "own.json"
    file.write_text(json.dumps(lists))
    wanted = made("1f1b", 2, 3).actions
    for given_one in (lists, str(file), lambda stages, micro_batches, chunks: lists, made("1f1b", 2, 3),
                      lambda stages, micro_batches, chunks: made("1f1b", stages, micro_batches)):
        assert make_schedule(given_one, 2, 3).actions == wanted
    with pytest.raises(PlanError, match="for 2 stages and 3 micro-batches, not for 2 and 4"):
        make_schedule(lists, 2, 4)


@pytest.mark.parametrize(("arguments", "problem"), [
    (("2f2b", 2, 2), "expected one of gpipe"), (("1f1b", 2, 2, 2), "virtual_stages=2: 1f1b has 1 chunk"),
    (("zb_v", 2, 2, 3), "zb_v has 2 chunks"), (("dualpipe", 3, 6), "even number of stages"), (("1f1b", 0, 2), "at least 1"),
    (("1f1b", 2, 2, 1, 2), "not interleaved"), (("interleaved", 2, 2, 2, 0), "interleave_group=0"),
    (("nowhere.json", 2, 2), "No such file")])
def test_what_cannot_be_made_is_refused(arguments: tuple, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make_schedule(*arguments)


def test_placements() -> None:
    assert [tuple(place) for place in Schedule(((), ()), 1, 2, "loop").paths[0]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [tuple(place) for place in Schedule(((), ()), 1, 3, "v").paths[0]] == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]
    both = Schedule(((), ()), 3, 2, "bidirectional")
    assert [tuple(place) for place in both.path(1)] == [(0, 0), (1, 0)]
    assert [tuple(place) for place in both.path(2)] == [(1, 1), (0, 1)]
    assert both.source(0, Action("F", 2, 1)) == (1, 1)
    assert both.source(0, Action("F", 1, 0)) is None
    assert both.target(0, Action("I", 2, 1)) == (1, 1)
    for wrong in (("ring", 1), ("bidirectional", 3)):
        with pytest.raises(PlanError):
            Schedule(((),), 1, wrong[1], wrong[0])


@pytest.mark.parametrize(("stages", "micro_batches", "idle_time"), [
    (2, 2, 1.0), (2, 3, 0.5), (3, 3, 2.0), (3, 4, 1.0), (3, 5, 1.0), (4, 4, 3.0), (4, 5, 2.0), (4, 7, 1.5)])
def test_zb_v_with_few_micro_batches_idles_no_longer_than_it_has_to(stages, micro_batches, idle_time):
    """Below 2 p micro-batches the paper promises nothing; its order, with one micro-batch more to warm up, would idle longer."""
    spans = simulate(make_schedule("zb_v", stages, micro_batches), Times(ONE, ONE, ONE))
    assert makespan(spans) - 3 * micro_batches <= idle_time

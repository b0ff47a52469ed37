"""The executor against one device: every schedule, many sizes, uneven and tied models, in any interleaving, and under mpirun."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from models import batch, model
from mpirun import run_ranks
from training import Case, assert_close, check_training

import refdist as rd
from refdist.parallel.pipeline import SCHEDULES, Action, Schedule, make_schedule
from refdist.parallel.pipeline.action import result_kind
from refdist.parallel.pipeline.stages import pieces_of_places
from refdist.parallel.pipeline.timing import Recorder, in_flight, peak_memory

EXECUTED = [name for name in SCHEDULES if name != "dualpipe"]
TINY = {"vocab_size": 13, "hidden_size": 12, "intermediate_size": 10,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}


def chunks_of(name: str) -> int:
    return {"interleaved": 2, "zb_v": 2, "dualpipe_v": 2}.get(name, 1)


def uneven(layers: int, places: int, seed: int) -> tuple[int, ...]:
    """A random split of the layers in which every place has one."""
    cuts = np.sort(np.random.default_rng(seed).permutation(np.arange(1, layers))[: places - 1])
    return tuple(int(count) for count in np.diff([0, *cuts, layers]))


@pytest.mark.once
@pytest.mark.parametrize("stages", range(1, 7))
@pytest.mark.parametrize("name", EXECUTED)
def test_every_schedule_and_size_gives_the_single_devices_gradients(name: str, stages: int) -> None:
    """Micro-batches 1 to 12 of six sequences (the later ones are empty), tied or not, even or uneven layers, by turns."""
    places = stages * chunks_of(name)
    for tied in (False, True):
        config, params = model(places, **TINY, num_hidden_layers=places + 1, tie_word_embeddings=tied, attention_bias=not tied)
        ids, labels = batch(config, 6, 4, seed=stages, ignored=0.6)
        loss, grads = rd.reference.loss_and_grads(config, params, ids, labels)
        for micro_batches in range(1 + (tied + stages) % 2, 13, 2):
            split = uneven(places + 1, places, micro_batches) if micro_batches % 3 else None
            plan = rd.Plan(pp=stages, schedule=name, micro_batches=micro_batches, virtual_stages=chunks_of(name),
                           layers_per_stage=split, recompute=("none", "selective", "full")[micro_batches % 3])
            program = functools.partial(rd.loss_and_grads, config, plan, params, ids, labels)
            results = rd.run(lambda comm, program=program: program(comm=comm), stages, scheduler=micro_batches,
                             sends="rendezvous" if micro_batches % 4 else "buffered", checks=True)
            for got_loss, got in (results[0], results[-1]):
                assert abs(got_loss - loss) <= 1e-12 * abs(loss)
                assert_close(got, grads, f"gradient under {plan}")


@pytest.mark.parametrize("name", ["interleaved", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("blocks", [2, 4])
def test_groups_of_recomputed_blocks_end_with_their_chunk(name: str, blocks: int) -> None:
    """Chunks of three and two layers: their blocks lie on one stack, and a group never has blocks of two chunks."""
    config, params = model(0, **TINY, num_hidden_layers=10)
    ids, labels = batch(config, 4, 4, ignored=0.6)
    loss, grads = rd.reference.loss_and_grads(config, params, ids, labels)
    plan = rd.Plan(pp=2, schedule=name, micro_batches=4, virtual_stages=2, layers_per_stage=(3, 2, 3, 2), recompute="full",
                   recompute_blocks=blocks)
    got_loss, got = rd.run(lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm), 2)[0]
    assert abs(got_loss - loss) <= 1e-12 * abs(loss)
    assert_close(got, grads, f"gradient under {plan}")


CASES = {name: Case({"pp": 3, "schedule": name, "micro_batches": 4, "virtual_stages": chunks_of(name),
                     "recompute": ("full", "none", "selective")[index % 3]},
                    {**TINY, "num_hidden_layers": 7, "tie_word_embeddings": index % 2 == 0, "mlp_bias": index % 3 == 0},
                    clip=0.5 if index % 2 == 0 else 3.0) for index, name in enumerate(EXECUTED)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
def test_two_adamw_steps_equal_one_device(case: Case, sends: str) -> None:
    """Parameters, moments and the norm, which counts a tied matrix once, on both sides of the clipping threshold."""
    for seed, options in enumerate([{}, {"tie_word_embeddings": not case.options["tie_word_embeddings"]}]):
        changed = dataclasses.replace(case, options={**case.options, **options}, clip=3.5 - (case.clip or 0))
        rd.run(lambda comm, changed=changed: check_training(comm, changed), 3, scheduler=seed, sends=sends, checks=True)


@pytest.mark.parametrize(("plan", "tied"), [
    ({"pp": 2, "dp": 2, "micro_batches": 3, "schedule": "zb_h1"}, True),
    ({"pp": 2, "dp": 3, "micro_batches": 2, "schedule": "interleaved", "virtual_stages": 2}, True),
    ({"pp": 2, "dp": 2, "micro_batches": 2, "schedule": "zb_v"}, True),
    ({"pp": 3, "dp": 2, "micro_batches": 2, "schedule": "1f1b", "layers_per_stage": [1, 3, 1]}, False),
    ({"pp": 2, "fsdp": 2, "zero": 3, "micro_batches": 3, "schedule": "zb_h2"}, True),
    ({"pp": 2, "fsdp": 2, "zero": 1, "dp": 2, "micro_batches": 2, "schedule": "dualpipe_v"}, True),
    ({"pp": 2, "fsdp": 3, "zero": 2, "micro_batches": 2, "schedule": "gpipe"}, True),
    ({"pp": 2, "tp": 2, "micro_batches": 2, "schedule": "1f1b"}, True),
    ({"pp": 2, "tp": 3, "sequence_parallel": False, "micro_batches": 2, "schedule": "zb_h1"}, True),
])
def test_with_other_axes(plan: dict, tied: bool) -> None:
    layers = {"num_hidden_layers": 5, "tie_word_embeddings": tied}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6} if plan.get("tp", 1) > 1 else {}
    case = Case(plan, {**TINY, **layers, **heads}, clip=0.5, rows=9)
    rd.run(lambda comm: check_training(comm, case), rd.Plan(**plan).world_size, scheduler=1, sends="rendezvous", checks=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", EXECUTED)
def test_bitwise_equal_to_one_device_in_the_same_grouping(name: str, ranks: int, tied: bool) -> None:
    """In fp32, with gradients added in rank order: the same bits, not nearly the same numbers."""
    config, params = model(3, np.float32, **TINY, num_hidden_layers=6, tie_word_embeddings=tied)
    ids, labels = batch(config, 7, 9, seed=2)
    rows = [list(map(int, part)) for part in np.array_split(np.arange(7), ranks)]
    groups = [[list(map(int, part)) for part in np.array_split(part, 3)] for part in rows]
    loss, grads = rd.reference.loss_and_grads(config, params, ids, labels, groups=groups)
    plan = rd.Plan(pp=3, dp=ranks, schedule=name, micro_batches=3, virtual_stages=chunks_of(name), order="rank")
    results = rd.run(lambda comm: rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, precision="fp32"), 3 * ranks,
                     scheduler=5)
    for got_loss, got in results:
        assert got_loss == loss
        for parameter, gradient in grads.items():
            assert got[parameter].dtype == np.float32
            assert np.array_equal(got[parameter], gradient), parameter


# --------------------------------------------------------------------------------------------------- schedules of one's own


def test_schedules_of_ones_own(tmp_path) -> None:
    """A function, lists and a file; in the last, the second stage takes the micro-batches in another order than the first."""
    config, params = model(1, **TINY, num_hidden_layers=3)
    ids, labels = batch(config, 5, 6)
    loss, grads = rd.reference.loss_and_grads(config, params, ids, labels)

    def one_by_one(stages: int, micro_batches: int, chunks: int) -> list[list[Action]]:
        return [[Action(kind, number) for number in range(micro_batches) for kind in "FIW"] for _ in range(stages)]

    def crossed(stages: int, micro_batches: int, chunks: int) -> list[list[list]]:
        orders = [list(range(micro_batches)), list(range(micro_batches))[::-1], list(range(micro_batches))]
        return [[[kind, number, 0] for kind in "FB" for number in order] for order in orders]

    file = tmp_path / "own.json"
    file.write_text(json.dumps(crossed(3, 4, 1)))
    for schedule in (one_by_one, crossed(3, 4, 1), crossed, str(file), make_schedule("zb_h1", 3, 4)):
        plan = rd.Plan(pp=3, schedule=schedule, micro_batches=4)
        program = functools.partial(rd.loss_and_grads, config, plan, params, ids, labels)
        for sends in ("buffered", "rendezvous"):
            for got in rd.run(lambda comm, program=program: program(comm=comm), 3, sends=sends):
                assert abs(got[0] - loss) < 1e-12
                assert_close(got[1], grads, "gradient")


@pytest.mark.parametrize(("plan", "problem"), [
    ({"schedule": "dualpipe", "pp": 2, "micro_batches": 4}, "needs every stage of the model on two ranks"),
    ({"schedule": "2f2b", "pp": 2}, "expected one of gpipe, 1f1b"),
    ({"schedule": "zb_v", "pp": 3}, "need a layer each: the model has 4 layers"),
    ({"schedule": "interleaved", "pp": 2, "virtual_stages": 3}, "need a layer each"),
    ({"pp": 2, "layers_per_stage": (1, 2)}, "are 3 layers, the model has 4"),
    ({"pp": 2, "layers_per_stage": (4,)}, "has 1 entries: expected one for each of 2 stages"),
    ({"pp": 2, "layers_per_stage": (4, 0)}, "layers_per_stage=0: expected at least 1"),
    ({"pp": 2, "layers_per_stage": 4}, "layers_per_stage=4: expected integers"),
    ({"pp": 2, "schedule": [[["F", 0, 0]], [["F", 0, 0], ["B", 0, 0]]]}, "stage 0: B of micro-batch 0 in chunk 0 is missing"),
    ({"pp": 2, "schedule": [[["F", 0, 0], ["B", 0, 0]]]}, "is for 1 stages and 1 micro-batches, not for 2 and 1"),
    ({"pp": 2, "virtual_stages": 2}, "1f1b has 1 chunk a stage"), ({"pp": 2, "interleave_group": 2}, "not interleaved"),
])
def test_what_cannot_run_is_refused_before_anything_is_sent(plan: dict, problem: str) -> None:
    config, params = model(1, **TINY, num_hidden_layers=4)
    ids, labels = batch(config)
    with pytest.raises(rd.PlanError, match=problem.replace("(", r"\(")):
        rd.run(lambda comm: rd.loss_and_grads(config, rd.Plan(**plan), params, ids, labels, comm=comm), plan["pp"])


def test_where_the_layers_lie() -> None:
    config, _ = model(0, num_hidden_layers=14)
    pieces = pieces_of_places(config, make_schedule("1f1b", 4, 4), (3, 4, 4, 3))
    assert pieces == [["embed", 0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, "head"]]
    pieces = pieces_of_places(config, make_schedule("interleaved", 2, 4, 2), (6, 8))
    assert pieces == [["embed", 0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, "head"]]
    pieces = pieces_of_places(config, make_schedule("zb_v", 2, 4), (1, 2, 3, 8))
    assert pieces == [["embed", 0], [1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13, "head"]]
    pieces = pieces_of_places(config, make_schedule("zb_v", 2, 4), (4, 10))  # the first stage has both ends of the V
    assert pieces == [["embed", 0, 1], [2, 3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, "head"]]


# ------------------------------------------------------------------------------------------------------- memory


class LiveAfter:
    """A listener: live activation bytes after each action of the schedule."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.device = rd.Device(listeners=[self.recorder, self])
        self.live: list[int] = []

    def __call__(self, event: object) -> None:
        if len(self.recorder.spans) > len(self.live):
            self.live.append(self.device.live["activation"])


def activations(name: str, stages: int, micro_batches: int, layers: int) -> list[tuple[list[Action], list[int]]]:
    """Each stage's actions, and what is alive after each of them above what was alive before the first."""
    config, params = model(1, **TINY, num_hidden_layers=layers)
    ids, labels = batch(config, micro_batches, 6)
    plan = rd.Plan(pp=stages, schedule=name, micro_batches=micro_batches, virtual_stages=chunks_of(name))

    def program(comm: rd.Comm) -> tuple[list[Action], list[int]]:
        listener = LiveAfter()
        rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, device=listener.device)
        return [span.action for span in listener.recorder.spans], listener.live

    return rd.run(program, stages)


@pytest.mark.parametrize("name", EXECUTED)
def test_live_activations_are_the_micro_batches_in_flight(name: str) -> None:
    """After each action exactly what the schedule has in flight is alive, to the byte: M_B from F to I, M_W from I to W."""
    stages, micro_batches = 4, 8
    schedule = make_schedule(name, stages, micro_batches, chunks_of(name))
    for stage, (actions, live) in enumerate(activations(name, stages, micro_batches, stages * chunks_of(name))):
        assert tuple(actions) == schedule.actions[stage]
        held = [held_after(actions[: index + 1]) for index in range(len(actions))]
        assert [sum(counts.values()) for counts in held] == in_flight(actions)
        alive = np.array(live) - MESSAGE * np.array(results_waiting(schedule, stage))
        sizes = solve(held, alive)
        assert all(size > 0 for state, size in sizes.items() if any(counts.get(state) for counts in held))
        if schedule.chunks == 1:  # the peak that the schedule promises for this M_B and M_W
            assert alive.max() == peak_memory(actions, sizes["F", 0], sizes.get(("I", 0), 0))


MESSAGE = 1 * 6 * 12 * 8  # bytes of an activation of one sequence of six tokens, twelve wide, in float64


def held_after(actions: list[Action]) -> dict[tuple[str, int], int]:
    """How many micro-batches of each chunk are held after these actions, since their F or since their I."""
    held = {(state, chunk): 0 for state in "FI" for chunk in {action.chunk for action in actions}}
    for kind, _, chunk in actions:
        for state, change in {"F": [("F", 1)], "B": [("F", -1)], "I": [("F", -1), ("I", 1)], "W": [("I", -1)]}[kind]:
            held[state, chunk] += change
    return held


def results_waiting(schedule: Schedule, stage: int) -> list[int]:
    """At the end of each action: its result, and those for another chunk on this stage, which have not been taken yet."""
    waiting: set[tuple[str, int, int]] = set()
    counts = []
    for action in schedule.actions[stage]:
        waiting.discard((result_kind(action), action.micro_batch, action.chunk))
        target = schedule.target(stage, action)
        leaves = target is not None and target.stage != stage
        if target is not None and not leaves:
            waiting.add((result_kind(action), action.micro_batch, target.chunk))
        counts.append(len(waiting) + leaves)
    return counts


def solve(held: list[dict[tuple[str, int], int]], alive: np.ndarray) -> dict[tuple[str, int], int]:
    """The bytes for each state and chunk that explain every measurement exactly."""
    states = list(dict.fromkeys(state for counts in held for state in counts))
    counts = np.array([[counts.get(state, 0) for state in states] for counts in held])
    found, *_ = np.linalg.lstsq(counts.astype(np.float64), alive.astype(np.float64), rcond=None)
    sizes = np.rint(found).astype(np.int64)
    assert np.array_equal(counts @ sizes, alive), "live memory is not what is in flight"
    return dict(zip(states, sizes.tolist(), strict=True))


# ----------------------------------------------------------------------------------------------------- under mpirun


def test_every_schedule_under_mpirun() -> None:
    """Four micro-batches of seven sequences; and nine, of which the last two are empty, in every other schedule."""
    cases = [dataclasses.asdict(case) for case in CASES.values()]
    cases += [dataclasses.asdict(dataclasses.replace(case, plan={**case.plan, "micro_batches": 9}))
              for case in list(CASES.values())[::2]]
    done = run_ranks(3, [Path(__file__).with_name("training.py"), json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout

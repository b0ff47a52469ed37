"""Messages and bytes of every algorithm, as counted on the device, against the closed formulas; and steps and memory.

With n elements in all, N ranks, L[r] the shard of rank r (``np.array_split``), and P the largest power of two up to N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import batch, model

import refdist as rd
from refdist.comm import all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter, trace
from refdist.comm.broadcast import PIECE
from refdist.comm.reduction import bounds
from refdist.device import Device
from refdist.device.events import Message
from refdist.parallel.fsdp.units import gather_rows, reduce_scatter_rows

SIZES = st.integers(1, 17), st.integers(0, 90)
LG = {ranks: ranks.bit_length() - 1 for ranks in range(1, 18)}  # ⌊lg N⌋
UP = {ranks: (ranks - 1).bit_length() for ranks in range(1, 18)}  # ⌈lg N⌉


def counted(ranks: int, operation: str, program: Callable[[rd.Comm], Any]) -> tuple[list[int], list[int]]:
    """Messages and elements (of 4 bytes) that each rank has sent under the name of the operation."""
    devices = [Device() for _ in range(ranks)]
    rd.run(lambda comm: program(comm.bind(devices[comm.rank])), ranks)
    rows = [[row for row in device.traffic if row.operation == operation] for device in devices]
    assert all(row.axis == "world" for each in rows for row in each)
    assert all(row.bytes % 4 == 0 for each in rows for row in each)
    return [sum(row.messages for row in each) for each in rows], [sum(row.bytes for row in each) // 4 for each in rows]


def lengths(n: int, parts: int) -> list[int]:
    offsets = bounds(n, parts)
    return [offsets[part + 1] - offsets[part] for part in range(parts)]


def folded(ranks: int) -> tuple[int, list[int], list[int]]:
    """P, the ranks that are folded into others, and their partners."""
    power = 1 << LG[ranks]
    pairs = 2 * (ranks - power)
    return power, list(range(0, pairs, 2)), list(range(1, pairs, 2))


@settings(max_examples=40, deadline=None)
@given(*SIZES)
def test_all_reduce(ranks: int, n: int) -> None:
    x, part = np.ones(n, np.int32), lengths(n, ranks)
    power, out, partners = folded(ranks)

    def of(algorithm: str, **kwargs: Any) -> tuple[list[int], list[int]]:
        return counted(ranks, "all_reduce", lambda comm: comm.all_reduce(x, algorithm=algorithm, **kwargs))

    messages, sent = of("ring")
    assert messages == [2 * (ranks - 1)] * ranks
    assert sent == [2 * n - part[(r + 1) % ranks] - part[(r + 2) % ranks] if ranks > 1 else 0 for r in range(ranks)]
    messages, direct = of("direct")
    assert messages == [2 * (ranks - 1)] * ranks
    assert direct == [n + (ranks - 2) * part[r] if ranks > 1 else 0 for r in range(ranks)]
    messages, doubling = of("recursive_doubling")
    for r in range(ranks):
        assert messages[r] == (1 if r in out else LG[ranks] + (r in partners))
        assert doubling[r] == n * messages[r]
    messages, halving = of("rabenseifner")
    for r in range(ranks):
        assert messages[r] == (1 if r in out else 2 * LG[ranks] + (r in partners))
        if n % power == 0:
            assert halving[r] == (n if r in out else 2 * n * (power - 1) // power + n * (r in partners))
    assert sum(halving) == 2 * n * (power - 1) + 2 * n * len(out)
    messages, tree = of("tree")
    assert messages[0] == UP[ranks]
    assert sum(tree) == 2 * n * (ranks - 1)
    assert all(sent == n * count for sent, count in zip(tree, messages, strict=True))
    messages, double = of("double_tree")
    assert sum(double) == 2 * n * (ranks - 1)
    assert max(double) <= 2 * n + 2
    assert all(sum(each) == 2 * n * (ranks - 1) for each in (sent, direct))
    if n % ranks == 0:
        assert sent == direct == [2 * n * (ranks - 1) // ranks] * ranks


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_hierarchical_is_the_sum_of_its_levels(group: int, nodes: int, units: int) -> None:
    ranks, n = group * nodes, units * group * nodes
    groups = [list(range(node, ranks, nodes)) for node in range(nodes)]
    messages, sent = counted(ranks, "all_reduce", lambda comm: comm.all_reduce(np.ones(n, np.int32), algorithm="hierarchical",
                                                                              groups=groups))
    if ranks > 1:
        assert messages == [2 * (group - 1) + 2 * (nodes - 1)] * ranks
        assert sent == [2 * n * (group - 1) // group + 2 * (n // group) * (nodes - 1) // nodes] * ranks


@settings(max_examples=40, deadline=None)
@given(*SIZES)
def test_reduce_scatter(ranks: int, n: int) -> None:
    part = lengths(n, ranks)
    _, out, partners = folded(ranks)
    for algorithm in reduce_scatter.ALGORITHMS:
        messages, sent = counted(ranks, "reduce_scatter",
                                 lambda comm, a=algorithm: comm.reduce_scatter(np.ones(n, np.int32), algorithm=a))
        if algorithm == "recursive_halving":
            for r in range(ranks):
                assert messages[r] == (1 if r in out else LG[ranks] + (r in partners))
                pair = part[r] + (part[r - 1] if r in partners else 0)
                assert sent[r] == (n if r in out else n - pair + (part[r - 1] if r in partners else 0))
        elif algorithm == "recursive_doubling":
            assert messages == [1 if r in out else LG[ranks] + (r in partners) for r in range(ranks)]
            assert sent == [n if r in out else n * LG[ranks] + (part[r - 1] if r in partners else 0) for r in range(ranks)]
        else:
            assert messages == [ranks - 1] * ranks
            assert sent == [n - part[r] for r in range(ranks)]
            assert sum(sent) == (ranks - 1) * n


@settings(max_examples=40, deadline=None)
@given(*SIZES, st.booleans())
def test_all_gather(ranks: int, n: int, known: bool) -> None:
    part = lengths(n, ranks)
    _, out, partners = folded(ranks)

    def of(algorithm: str) -> tuple[list[int], list[int]]:
        return counted(ranks, "all_gather", lambda comm: comm.all_gather(
            np.ones(part[comm.rank], np.int32), algorithm=algorithm, lengths=part if known else None))

    messages, sent = of("ring")
    assert messages == [ranks - 1] * ranks
    assert sent == [n - part[(r + 1) % ranks] for r in range(ranks)]
    messages, sent = of("direct")
    assert messages == [ranks - 1] * ranks
    assert sent == [(ranks - 1) * part[r] for r in range(ranks)]
    messages, sent = of("bruck")
    assert messages == [UP[ranks]] * ranks
    assert sum(sent) == (ranks - 1) * n
    messages, sent = of("recursive_doubling")
    for r in range(ranks):
        assert messages[r] == (1 if r in out else LG[ranks] + (r in partners))
    if out:
        assert sum(sent) == (ranks - len(out) - 1) * n + sum(part[r] + n for r in out)
    else:
        held = [[sum(part[r & -d:(r & -d) + d]) for d in (1, 2, 4, 8) if d < ranks] for r in range(ranks)]
        assert sent == [sum(each) for each in held]
    if n % ranks == 0:
        for algorithm in ("ring", "direct", "bruck", *([] if out else ["recursive_doubling"])):
            assert of(algorithm)[1] == [n * (ranks - 1) // ranks] * ranks


def test_lengths_are_counted_apart() -> None:
    messages, sent = counted(5, "all_gather lengths", lambda comm: comm.all_gather(np.ones(3, np.int32)))
    assert messages == [3] * 5
    assert sent == [2 * 4] * 5
    for with_out in ({"out": np.ones(15, np.int32)}, {"lengths": [3] * 5}):
        assert counted(5, "all_gather lengths", lambda comm, w=with_out: comm.all_gather(np.ones(3, np.int32), **w))[0] == [0] * 5


@settings(max_examples=30, deadline=None)
@given(*SIZES, st.data())
def test_rooted(ranks: int, n: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, ranks - 1))
    x, part = np.ones(n, np.int32), lengths(n, ranks)

    def of(operation: str, argument: Any = x, **kwargs: Any) -> tuple[list[int], list[int]]:
        return counted(ranks, operation, lambda comm: getattr(comm, operation)(argument, root=root, **kwargs))

    messages, sent = of("broadcast", algorithm="binomial")
    assert messages[root] == UP[ranks]
    assert sent == [n * count for count in messages]
    assert sum(sent) == n * (ranks - 1)
    messages, sent = of("broadcast", algorithm="scatter_all_gather")
    if ranks > 1:
        assert messages[root] == UP[ranks] + ranks - 1
        assert sent[root] == n - part[0] + n - part[1]
    messages, sent = of("reduce")
    assert sent == [0 if r == root else n for r in range(ranks)]
    assert messages == [int(r != root) for r in range(ranks)]
    distances = {r: (r - root) % ranks for r in range(ranks)}
    messages, sent = of("gather")
    subtree = {r: min(d & -d, ranks - d) if d else 0 for r, d in distances.items()}
    assert sent == [n * subtree[r] for r in range(ranks)]
    messages, sent = of("scatter", [x] * ranks)
    assert sum(sent) == n * sum(subtree.values())
    assert messages[root] == UP[ranks]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_chain(ranks: int) -> None:
    """n bytes, the last rank none; N - 2 + c steps for c pieces."""
    for pieces in (1, 4):
        n = pieces * PIECE // 4
        messages, sent = counted(ranks, "broadcast", lambda comm, n=n: comm.broadcast(np.ones(n, np.int32), 1, "chain"))
        assert sent == [0 if r == 0 else n for r in range(ranks)]
        assert messages == [0 if r == 0 else pieces for r in range(ranks)]
    assert len(trace("broadcast", "chain", ranks).steps) - 1 == ranks - 2 + ranks


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 17), st.integers(0, 5))
def test_all_to_all(ranks: int, block: int) -> None:
    x = np.ones(ranks * block, np.int32)
    messages, sent = counted(ranks, "all_to_all", lambda comm: comm.all_to_all(x, algorithm="pairwise"))
    assert messages == [ranks - 1] * ranks
    assert sent == [block * (ranks - 1)] * ranks
    messages, sent = counted(ranks, "all_to_all", lambda comm: comm.all_to_all(x, algorithm="bruck"))
    assert messages == [UP[ranks]] * ranks
    assert sent == [block * sum(bin(distance).count("1") for distance in range(ranks))] * ranks


@pytest.mark.parametrize("ranks", range(1, 18))
def test_barrier(ranks: int) -> None:
    assert counted(ranks, "barrier", lambda comm: comm.barrier()) == ([UP[ranks]] * ranks, [0] * ranks)


@pytest.mark.parametrize("ranks", range(2, 10))
def test_steps(ranks: int) -> None:
    """The longest chain of messages, as drawn."""
    more = 2 * (ranks & (ranks - 1) != 0)  # for a fold
    steps = {
        ("all_reduce", "ring"): 2 * (ranks - 1), ("all_reduce", "recursive_doubling"): LG[ranks] + more,
        ("all_reduce", "rabenseifner"): 2 * LG[ranks] + more, ("all_reduce", "tree"): 2 * UP[ranks],
        ("all_reduce", "direct"): 2, ("reduce_scatter", "ring"): ranks - 1, ("reduce_scatter", "direct"): 1,
        ("reduce_scatter", "recursive_halving"): LG[ranks] + more, ("reduce_scatter", "recursive_doubling"): LG[ranks] + more,
        ("all_gather", "ring"): ranks - 1,
        ("all_gather", "bruck"): UP[ranks], ("all_gather", "recursive_doubling"): LG[ranks] + more, ("all_gather", "direct"): 1,
        ("broadcast", "binomial"): UP[ranks], ("broadcast", "scatter_all_gather"): UP[ranks] + ranks - 1,
        ("reduce", "binomial"): UP[ranks], ("gather", "binomial"): UP[ranks], ("scatter", "binomial"): UP[ranks],
        ("all_to_all", "pairwise"): ranks - 1, ("all_to_all", "bruck"): UP[ranks], ("barrier", None): UP[ranks],
    }
    for (operation, algorithm), expected in steps.items():
        found = len(trace(operation, algorithm, ranks).steps) - 1
        if algorithm in ("tree", "scatter_all_gather"):
            assert found <= expected, (operation, algorithm)
        else:
            assert found == expected, (operation, algorithm)
    double = len(trace("all_reduce", "double_tree", ranks).steps) - 1  # an odd number has a rank with children in both trees
    assert double <= (4 if ranks % 2 else 2) * UP[ranks]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13])
def test_memory_for_messages(ranks: int) -> None:
    """At most one more copy of the input (of the result, for an all-gather); what a fold adds is said in the module."""
    n = 5 * 1040 * ranks
    calls: dict[str, tuple[dict[str, Any], Callable[[rd.Comm, str], Any]]] = {
        "all_reduce": (all_reduce.ALGORITHMS, lambda comm, a: comm.all_reduce(np.ones(n, np.int32), algorithm=a)),
        "reduce_scatter": (reduce_scatter.ALGORITHMS, lambda comm, a: comm.reduce_scatter(np.ones(n, np.int32), algorithm=a)),
        "all_gather": (all_gather.ALGORITHMS, lambda comm, a: comm.all_gather(np.ones(n // ranks, np.int32), algorithm=a)),
        "reduce": (reduce.ALGORITHMS, lambda comm, a: comm.reduce(np.ones(n, np.int32), algorithm=a)),
    }
    for operation, (algorithms, call) in calls.items():
        for algorithm in algorithms:
            devices = [Device() for _ in range(ranks)]
            rd.run(lambda comm, a=algorithm, c=call, d=devices: c(comm.bind(d[comm.rank]), a), ranks)
            fold = 5 / 3 if algorithm == "recursive_halving" and ranks & (ranks - 1) else 1
            fold = 2 if (operation, algorithm) == ("reduce_scatter", "recursive_doubling") else fold
            for device in devices:
                assert device.peak["communication"] <= 4 * n * fold + 64, (operation, algorithm)
                assert device.live["communication"] == 0, (operation, algorithm)


def test_every_algorithm_is_counted_here() -> None:
    names = {module.__name__.rpartition(".")[2]: sorted(module.ALGORITHMS) for module in (
        all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all)}
    assert names == {
        "all_reduce": ["direct", "double_tree", "hierarchical", "rabenseifner", "recursive_doubling", "ring", "tree"],
        "reduce_scatter": ["direct", "recursive_doubling", "recursive_halving", "ring"],
        "all_gather": ["bruck", "direct", "recursive_doubling", "ring"],
        "broadcast": ["binomial", "chain", "scatter_all_gather"], "reduce": ["binomial"], "gather": ["binomial"],
        "scatter": ["binomial"], "all_to_all": ["bruck", "pairwise"]}


def messages_of(ranks: int, program: Callable[[rd.Comm], Any]) -> list[list[Message]]:
    """The message events of each rank's device."""
    seen: list[list[Message]] = [[] for _ in range(ranks)]

    def listened(comm: rd.Comm) -> None:
        listener = seen[comm.rank].append
        program(comm.bind(Device(listeners=[lambda event: listener(event) if isinstance(event, Message) else None])))

    rd.run(listened, ranks)
    return seen


def test_a_split_group_counts_on_the_same_device_and_names_world_ranks() -> None:
    def program(comm: rd.Comm) -> None:
        group = comm.split(comm.rank // 2, axis="tp")
        assert group is not None
        group.all_reduce(np.ones(600), algorithm="ring")

    seen = messages_of(4, program)
    for rank, events in enumerate(seen):
        mine = [event for event in events if event.operation == "all_reduce"]
        assert [(event.axis, event.peer, event.step) for event in mine] == [("tp", rank ^ 1, 0), ("tp", rank ^ 1, 1)]


def test_every_message_knows_its_step() -> None:
    """Of the collectives that are written outside of comm: rows of a layer (FSDP), and heads (Ulysses)."""
    x = [np.arange(8.0), np.arange(4.0)]
    offsets = [(0, 2, 4, 6, 8), (0, 1, 2, 3, 4)]

    def rows(comm: rd.Comm) -> None:
        mine = [each[at[comm.rank]:at[comm.rank + 1]] for each, at in zip(x, offsets, strict=True)]
        comm.start_steps(gather_rows(comm, mine, [np.empty_like(each) for each in x], offsets), "gather").wait()
        comm.start_steps(reduce_scatter_rows(comm, x, [each.copy() for each in mine], offsets), "sums").wait()

    for events in messages_of(4, rows):
        assert [event.step for event in events if event.operation == "all_gather"] == [0, 1, 2]
        assert [event.step for event in events if event.operation == "reduce_scatter"] == [0, 1, 2]

    config, params = model(num_attention_heads=4, num_key_value_heads=4)
    ids, labels = batch(config, 1, 8)
    plan = rd.Plan(cp=4, cp_method="ulysses")

    def heads(comm: rd.Comm) -> None:
        rd.loss_and_grads(config, plan, params, ids, labels, comm=comm, device=comm.device)

    for events in messages_of(4, heads):
        steps = [event.step for event in events if event.operation == "all_to_all"]
        assert steps
        assert set(steps) == {0, 1, 2}

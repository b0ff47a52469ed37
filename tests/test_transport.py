"""The parts that diagnosis rests on: the board, the stuck set, the watchdog's proof, headers, and what transports promise."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refdist as rd
from refdist.comm.board import LEFT, RUNNING, TEXT_BYTES, WAITING, Board, MessageBoard, SharedBoard
from refdist.comm.diagnosis import Doing, Wait, explain, stuck
from refdist.comm.message import fingerprint, meaning
from refdist.comm.transport import Request
from refdist.comm.watchdog import FAREWELL, Watchdog
from refdist.comm.work import wait_among_others
from refdist.errors import PeerFailed
from refdist.testing import World, strategies


def waits_for(*peers: int, any_of: bool = False) -> Doing:
    return Doing(peers, any_of, (Wait(f"receive from {peers}"),), "somewhere")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[int, Doing], set[int]]:
    ranks = range(draw(st.integers(1, 6)))
    waiting, left = {}, set()
    for rank in ranks:
        state = draw(st.sampled_from(["waits", "waits", "computes", "has left"]))
        if state == "waits":
            peers = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=3))
            waiting[rank] = waits_for(*peers, any_of=draw(st.booleans()))
        elif state == "has left":
            left.add(rank)
    return waiting, left


@given(graphs())
def test_the_stuck_set_is_the_largest_one_that_only_needs_itself(graph: tuple[dict[int, Doing], set[int]]) -> None:
    waiting, left = graph

    def closed(members: Iterable[int]) -> bool:
        silent = set(members) | left
        return all((all if waiting[rank].any_of else any)(peer in silent for peer in waiting[rank].peers) for rank in members)

    sizes = range(len(waiting), -1, -1)
    largest = next(set(members) for size in sizes for members in itertools.combinations(waiting, size) if closed(members))
    assert stuck(waiting, left) == largest


def test_what_it_is_called() -> None:
    def doing(mark: int) -> Doing:
        return Doing((0,), False, (Wait("a call", 0, 5, mark),), "here")

    assert isinstance(explain({0: doing(1), 1: doing(1)}, {}), rd.DeadlockError)
    assert isinstance(explain({0: doing(1), 1: doing(2)}, {}), rd.MismatchError)
    assert "rank 2 has finished" in str(explain({0: doing(1)}, {2: "has finished"}))


def test_a_doing_travels_whole_and_is_cut_when_it_is_long() -> None:
    doing = waits_for(1, 2, 3, any_of=True)
    assert Doing.decode(doing.encode(8192)) == doing
    for peers in (tuple(range(5000)), (*range(7), *range(8, 1000, 2))):  # in runs, and hardly any two neighbours
        long = Doing(peers, False, (Wait("ü" * 5000),) * 4, "y" * 5000)
        assert len(long.encode(8192)) <= 8192
        assert Doing.decode(long.encode(8192)).peers == long.peers
    far = Doing(tuple(range(0, 9000, 2)), True, (Wait("x"),), "y")
    assert len(far.encode(8192)) <= 8192
    assert not stuck({0: Doing.decode(far.encode(8192))}, set(range(1, 9000)))


def boards(kind: str, ranks: int) -> list[Board]:
    """A board as each rank sees it; control messages are delivered when they are asked for."""
    if kind == "shared":
        path = SharedBoard.create(ranks)
        boards = [SharedBoard(path, ranks, rank) for rank in range(ranks)]
        os.unlink(path)
        return boards
    boxes: list[deque[tuple[int, bytes]]] = [deque() for _ in range(ranks)]

    def make(rank: int) -> MessageBoard:
        def send(record: bytes) -> None:
            for other in range(ranks):
                if other != rank:
                    boxes[other].append((rank, record))

        def receive() -> Iterable[tuple[int, bytes]]:
            while boxes[rank]:
                yield boxes[rank].popleft()

        return MessageBoard(ranks, rank, send, receive)

    return [make(rank) for rank in range(ranks)]


@pytest.mark.parametrize("kind", ["shared", "messages"])
def test_the_board_says_on_every_rank_what_each_has_said(kind: str) -> None:
    views = boards(kind, 3)
    views[1].publish(b"waits")
    views[2].leave()
    views[1].confirm(77)
    for view in views:
        view.refresh()
        assert [view.status(rank) for rank in range(3)] == [RUNNING, WAITING, LEFT]
        assert view.doing(1) == b"waits"
        assert view.confirmed(1) == 77
        assert view.first_failure() == -1
    number = views[0].number(1)
    views[1].publish(b"waits for another one")
    views[0].refresh()
    assert views[0].number(1) > number, "a wait for something else has a number of its own"
    views[1].resume()
    views[1].publish(b"waits for something else, with more words")
    views[0].fail("ValueError", "of rank 0\nin two lines", complete=False)
    views[1].fail("KeyError", "later", complete=True)
    for view in views:
        view.refresh()
        assert view.number(1) > number
        assert view.confirmed(1) == 0
        assert view.doing(1) == b"waits for something else, with more words"
        assert view.first_failure() == 0
        assert not view.complete(0)
        assert view.account(0) == ("ValueError", "of rank 0\nin two lines")
    views[0].answer(b"old")
    for view in views:
        view.reset()
    for view in views:
        view.refresh()
        assert view.first_failure() == -1
        assert [view.status(rank) for rank in range(3)] == [RUNNING] * 3
        assert not view.answered(0)


def test_a_text_that_is_too_long_stays_in_its_record() -> None:
    views = boards("shared", 2)
    views[1].publish(b"of rank 1")
    views[0].publish(b"x" * 3 * TEXT_BYTES)
    for view in views:
        assert view.doing(0) == b"x" * TEXT_BYTES
        assert view.doing(1) == b"of rank 1"


def test_what_was_said_before_a_new_start_does_not_count_after_it() -> None:
    views = boards("messages", 2)
    views[1].fail("ValueError", "old", complete=True)
    views[0].reset()  # and only then the old record comes
    views[0].refresh()
    assert views[0].first_failure() == -1


class FakeChannel:
    """Marks and messages between ranks of one test, delivered when the test says so."""

    def __init__(self, rank: int, size: int, network: dict[tuple[int, int], deque[Any]]) -> None:
        self.rank, self.size, self.network = rank, size, network
        self.seen: dict[int, int] = {}
        self.arrived = False

    def send_mark(self, rank: int, mark: int) -> None:
        self.network[self.rank, rank].append(mark)

    def marks(self) -> dict[int, int]:
        return dict(self.seen)

    def moving(self, requests: Any) -> bool:
        moved, self.arrived = self.arrived, False
        for request in requests if moved else ():
            request.done = True
        return moved

    def deliver(self) -> None:
        for (source, dest), queue in self.network.items():
            if dest == self.rank:
                while queue:
                    item = queue.popleft()
                    if item == "message":
                        self.arrived = True
                    else:
                        self.seen[source] = item


def a_world_that_waits(size: int, kind: str = "shared") -> tuple[list[Watchdog], list[FakeChannel], list[list[Request]]]:
    network: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in range(size) for b in range(size)}
    channels = [FakeChannel(rank, size, network) for rank in range(size)]
    dogs = [Watchdog(board, channel) for board, channel in zip(boards(kind, size), channels, strict=True)]
    requests = [[Request("receive", (rank + 1) % size, 0, 0, None, b"", b"", None, "recv")] for rank in range(size)]
    return dogs, channels, requests


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refdist.comm.watchdog._PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr("refdist.comm.watchdog._LOOK_SECONDS", 0.0)


@pytest.mark.parametrize("kind", ["shared", "messages"])
@pytest.mark.usefixtures("no_waiting")
def test_a_cycle_is_proven_when_all_marks_are_here(kind: str) -> None:
    dogs, channels, requests = a_world_that_waits(3, kind)

    def look() -> None:
        for dog, request in zip(dogs, requests, strict=True):
            dog.look(request, False)

    for _ in range(5):  # no mark is delivered: nothing is proven, however long it lasts
        look()
    for channel in channels[:2]:
        channel.deliver()
    for _ in range(5):  # rank 2 has none of the marks
        look()
    channels[2].deliver()
    errors = []
    for _ in range(4):
        for dog, request in zip(dogs, requests, strict=True):
            try:
                dog.look(request, False)
            except rd.DeadlockError as error:
                errors.append(str(error))
    assert len(set(errors)) == 1, errors
    assert "3 ranks wait for each other" in errors[0]


@pytest.mark.usefixtures("no_waiting")
def test_a_message_under_way_is_no_deadlock() -> None:
    """Rank 1 has sent to rank 0 before it began to wait; the message is slow, and its mark is behind it."""
    dogs, channels, requests = a_world_that_waits(2)
    channels[0].network[1, 0].append("message")
    for _ in range(3):
        for dog, request in zip(dogs, requests, strict=True):
            dog.look(request, False)
    for _ in range(3):
        for channel in channels:
            channel.deliver()
        for dog, request in zip(dogs, requests, strict=True):
            if not request[0].done:
                dog.look(request, False)
    assert requests[0][0].done
    assert dogs[0].board.first_failure() == -1
    assert dogs[0].board.status(0) == RUNNING


@pytest.mark.usefixtures("no_waiting")
def test_marks_of_an_earlier_wait_prove_nothing() -> None:
    """Both ranks have said that they are stuck; then rank 0 goes on after all, sends to rank 1, and waits again."""
    dogs, channels, requests = a_world_that_waits(2)
    for _ in range(2):
        for dog, request in zip(dogs, requests, strict=True):
            dog.look(request, False)
    for channel in channels:
        channel.deliver()
    channels[0].arrived = True
    dogs[0].look(requests[0], False)
    assert requests[0][0].done
    dogs[0].end()
    channels[0].network[0, 1].append("message")
    again = [Request("receive", 1, 0, 0, None, b"", b"", None, "recv")]
    for _ in range(4):
        dogs[0].look(again, False)
        dogs[1].look(requests[1], False)
    assert dogs[0].board.first_failure() == -1


@pytest.mark.usefixtures("no_waiting")
def test_a_message_may_come_between_two_looks() -> None:
    """Rank 1 has sent to rank 0; message and mark arrive while rank 0 looks for marks, after its look for messages."""
    dogs, channels, requests = a_world_that_waits(2)
    channels[0].network[1, 0].append("message")
    marks = channels[0].marks

    def late() -> dict[int, int]:
        if dogs[1].board.confirmed(1):
            channels[0].deliver()
        return marks()

    channels[0].marks = late  # type: ignore[method-assign]
    for _ in range(6):
        for dog, request in zip(dogs, requests, strict=True):
            if not request[0].done:
                dog.look(request, False)
        channels[1].deliver()
    assert requests[0][0].done
    assert dogs[0].board.first_failure() == -1


@pytest.mark.usefixtures("no_waiting")
def test_a_rank_that_computes_protects_those_that_need_it() -> None:
    dogs, channels, requests = a_world_that_waits(3)

    def look() -> None:
        for rank in (0, 1):
            dogs[rank].look(requests[rank], False)  # 0 waits for 1, 1 waits for 2
            channels[rank].deliver()

    def look_often() -> None:
        for _ in range(6):
            look()

    look_often()
    dogs[2].board.leave()
    look_often()  # its farewell is not here: what it sent before may still come
    for channel in channels:
        channel.seen[2] = FAREWELL
    with pytest.raises(rd.DeadlockError, match="rank 2 has finished"):
        look_often()


def test_another_ranks_failure_is_raised_in_a_wait() -> None:
    dogs, _, requests = a_world_that_waits(2)
    dogs[1].board.fail("ValueError", "bad", complete=True)
    with pytest.raises(PeerFailed, match="rank 1 failed: ValueError: bad"):
        dogs[0].check(requests[0])


def test_fingerprints_are_the_same_everywhere_and_have_a_meaning() -> None:
    mark = fingerprint("all_reduce", "ring", "float64", (3,))
    assert mark == 0xFFFFFFFF & mark
    assert mark == fingerprint("all_reduce", "ring", "float64", (3,))
    assert mark != fingerprint("all_reduce", "ring", "float64", (4,))
    assert meaning(mark) == ("all_reduce", "ring", "float64", (3,))
    assert meaning(12345) == ()


@settings(max_examples=40, deadline=None)
@given(strategies.worlds(strategies.ranks(2, 5)), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_messages_of_one_tag_arrive_in_order_whatever_the_interleaving(world: World, tags: list[int]) -> None:
    def program(comm: rd.Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        works = [comm.isend(np.array([number, comm.rank]), right, tag=tag) for number, tag in enumerate(tags)]
        for tag in sorted(set(tags)):
            numbers = [comm.recv(left, tag=tag).tolist() for _ in range(tags.count(tag))]
            assert numbers == [[number, left] for number, sent in enumerate(tags) if sent == tag]
        for work in works:
            work.wait()

    world.run(program)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
@pytest.mark.parametrize("scheduler", ["fifo", 0, 1, 2, 3])
def test_what_sendrecv_has_sent_may_be_changed_after_it(scheduler: str | int, sends: str, checks: bool) -> None:
    def program(comm: rd.Comm) -> float:
        x = np.full(5000, float(comm.rank))
        got = comm.sendrecv(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        x[:] = 99
        return float(got[0])

    assert rd.run(program, 4, scheduler=scheduler, sends=sends, checks=checks) == [3.0, 0.0, 1.0, 2.0]


def test_a_groups_nodes_are_those_of_its_members() -> None:
    """Ranks 1, 2, 3 of four on two hosts: one host has the first of the group, the other one the rest."""
    def program(comm: rd.Comm) -> Any:
        comm.transport.nodes = [0, 0, 2, 2]
        group = comm.split(0 if comm.rank else None)
        return None if group is None else group.nodes()

    assert rd.run(program, 4)[1:] == [[[0], [1, 2]]] * 3


class Looks:
    """A transport where a look at one request completes those before it in its queue, as a later header does under MPI."""

    def __init__(self, work: Any) -> None:
        self.active = [work]

    def look(self, request: Any) -> bool:
        for earlier in request.before:
            earlier.done = True
        request.done = bool(request.before)
        return request.done

    def test(self, requests: Sequence[Any]) -> bool:
        done = [request.done or self.look(request) for request in requests]
        return all(done)

    def wait_any(self, requests: Sequence[Any]) -> None:
        assert any(request.done or self.look(request) for request in requests), "waits for what is there"


def test_what_is_completed_by_a_look_at_something_else_ends_the_wait() -> None:
    first = SimpleNamespace(done=False, before=[])
    second = SimpleNamespace(done=False, before=[first])
    never = SimpleNamespace(done=False, before=[])
    work = SimpleNamespace(done=False, _pending=[second, never], pending=[never])
    wait_among_others(Looks(work), [first])  # type: ignore[arg-type]
    assert first.done
    first.done = second.done = False
    wait_among_others(Looks(SimpleNamespace(done=True, _pending=[], pending=[])), [first, second])  # type: ignore[arg-type]
    assert second.done

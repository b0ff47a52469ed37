"""The pytest plugin: a test is a rank program.

    @pytest.mark.ranks(2, 3, sends="rendezvous", checks=True)
    def test_ring(comm):
        total = my_ring(comm, np.arange(5.0) * comm.rank)
        assert …

    pytest test_ring.py                        in process, once with 2 and once with 3 ranks
    mpirun -n 4 pytest --mpi test_ring.py      the same tests on the first 2 and 3 of 4 MPI ranks

Under ``--mpi`` rank 0 is pytest as ever. The other ranks collect the same tests and then follow: rank 0 tells them which test
comes next and, with Hypothesis, which example; each rank runs it; all settle (``together.py``), and rank 0 reports what has
happened, with the failing rank in the header and each rank's output in one piece. So rank 0 draws, every rank runs the same
example, a failure of any rank counts, and shrinking asks all of them.

Tests without the marker run on rank 0 only. Use it with ``pytest_plugins = ["refdist.testing.plugin"]`` in a ``conftest.py``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import greenlet
import numpy as np
import pytest

from refdist.comm import Comm, inprocess, run
from refdist.testing import together
from refdist.testing.together import (
    Outcome,
    TimeLimitExceeded,
    alarm,
    explained,
    note_rank,
    raise_at,
    raise_together,
    run_example,
)
from refdist.testing.worlds import Choices

__all__ = ["Ranks"]

_LIMIT = 120.0  # seconds a test may take, all examples together
_OPTIONS = {"scheduler": "fifo", "sends": "buffered", "checks": False, "limit": _LIMIT}


@dataclass(frozen=True)
class Ranks:
    """What a ``ranks`` marker asks for: how many, and the options of :func:`refdist.run`."""

    count: int
    scheduler: Any = "fifo"
    sends: str = "buffered"
    checks: bool = False
    limit: float | None = _LIMIT

    def __repr__(self) -> str:
        return f"<{self.count} ranks>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


Body = Callable[..., Any]
_NOT_THE_PROGRAM = (__file__, inprocess.__file__, together.__file__, contextlib.__file__)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--mpi``."""
    group = parser.getgroup("refdist")
    group.addoption("--mpi", action="store_true", help="run tests that are marked with `ranks` on the ranks of mpirun")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; under ``--mpi`` take up the ranks of ``mpirun``."""
    config.addinivalue_line("markers", "ranks(*counts, scheduler='fifo', sends='buffered', checks=False, limit=120): the test is "
                            "a program that runs on so many ranks; its argument comm is each rank's group of all of them")
    if config.getoption("mpi"):
        from refdist import mpi_world

        _no_deadlines()
        session = _MPISession(mpi_world())
        config.pluginmanager.register(session, "refdist-mpi")
        if session.world.rank:
            config.pluginmanager.register(_Follower(session), "refdist-follower")


def _no_deadlines() -> None:
    """A deadline per example makes no sense where ranks share cores."""
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("refdist-mpi", settings(), deadline=None)
        settings.load_profile("refdist-mpi")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each number of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    where = f"{metafunc.definition.nodeid}: @pytest.mark.ranks"
    unknown = set(marker.kwargs) - set(_OPTIONS)
    if unknown or not marker.args or not all(isinstance(count, int) and count > 0 for count in marker.args):
        raise pytest.UsageError(f"{where}{marker.args} {marker.kwargs}: expected numbers of ranks, and {', '.join(_OPTIONS)}")
    if "comm" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{where}: the test has no argument comm")
    worlds = [Ranks(count, **marker.kwargs) for count in marker.args]
    metafunc.parametrize("comm", worlds, ids=[f"{count}-ranks" if count > 1 else "1-rank" for count in marker.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks."""
    asked = pyfuncitem.funcargs.get("comm")
    if not isinstance(asked, Ranks):
        return None
    session = pyfuncitem.config.pluginmanager.get_plugin("refdist-mpi")
    call = session.call if session is not None else _call_in_process
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    function = pyfuncitem.obj
    body, put = _body_of(function)
    if session is not None and session.world.rank:
        session.follow(body, arguments)
        return True
    if session is not None and asked.count > session.world.size:
        pytest.skip(f"needs {asked.count} ranks, there are {session.world.size}")

    @functools.wraps(body)
    def on_ranks(**drawn: Any) -> None:
        __tracebackhide__ = True
        call(asked, body, drawn)

    __tracebackhide__ = True
    with put(on_ranks) as test, alarm(asked.limit if session is None else None):
        test(**arguments)
    return True


def _body_of(function: Any) -> tuple[Body, Callable[[Body], contextlib.AbstractContextManager[Body]]]:
    """The rank program of a test, and how to put something in its place: inside of Hypothesis's search, if that is used."""
    search = getattr(function, "hypothesis", None)
    if search is None:
        return function, contextlib.nullcontext

    @contextlib.contextmanager
    def put(body: Body) -> Iterator[Body]:
        original = search.inner_test
        search.inner_test = body
        try:
            yield function
        finally:
            search.inner_test = original

    return search.inner_test, put


def _call_in_process(asked: Ranks, body: Body, arguments: dict[str, Any]) -> None:
    """One run of a test's body on in-process ranks."""
    output = _OutputByRank()

    def program(comm: Comm) -> None:
        output.ranks[greenlet.getcurrent()] = comm.rank
        try:
            with explained(comm):
                body(**{**arguments, "comm": comm})
        except (Exception, TimeLimitExceeded) as error:
            note_rank(error, comm.rank, comm.size)
            raise

    scheduler = asked.scheduler.scheduler() if isinstance(asked.scheduler, Choices) else asked.scheduler
    __tracebackhide__ = True
    try:
        with contextlib.redirect_stdout(output):
            run(program, asked.count, scheduler=scheduler, sends=asked.sends, checks=asked.checks)
    except BaseException as error:
        _raise_from_the_program(error, body)
    finally:
        output.show()


def _raise_from_the_program(error: BaseException, body: Body) -> NoReturn:
    """Raise with a traceback that begins in the rank's program; at the test itself if it was raised outside of any."""
    __tracebackhide__ = True
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_PROGRAM:
        trace = trace.tb_next
    if trace is None:
        code = body.__code__
        raise_at(error, code.co_filename, code.co_firstlineno, code.co_name)
    raise error.with_traceback(trace) from error.__cause__


class _OutputByRank(io.TextIOBase):
    """Standard output of in-process ranks, kept apart."""

    def __init__(self) -> None:
        self.ranks: dict[Any, int] = {}
        self.texts: dict[int, list[str]] = {}

    def write(self, text: str) -> int:
        self.texts.setdefault(self.ranks.get(greenlet.getcurrent(), -1), []).append(text)
        return len(text)

    def show(self) -> None:
        _show({rank: "".join(texts) for rank, texts in self.texts.items()})


def _show(outputs: dict[int, str]) -> None:
    """Print what each rank has printed, one rank after the other."""
    for rank, text in sorted(outputs.items()):
        if text:
            print(f"--- rank {rank}" if rank >= 0 else "--- outside of the ranks")
            print(text, end="" if text.endswith("\n") else "\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Put the failing rank in the header of a report, and the other ranks' own failures below it."""
    outcome: Any = yield
    report = outcome.get_result()
    error = call.excinfo.value if call.excinfo is not None else None
    rank = getattr(error, "failed_rank", None)
    if rank is None or not report.failed:
        return
    file, line, name = report.location
    report.location = (file, line, f"{name} [rank {rank} of {error.world_size}]")  # type: ignore[union-attr]
    for other, text in getattr(error, "rank_texts", {}).items():
        if text:
            report.sections.append((f"rank {other}", text))


# ------------------------------------------------------------------------------------------------------------ MPI


class _MPISession:
    """Rank 0's side of a session on MPI ranks, and what all ranks share."""

    def __init__(self, world: Comm) -> None:
        self.world = world
        self.serving = False

    def tell(self, *message: Any) -> None:
        """Rank 0 tells the others what to do next."""
        try:
            data = pickle.dumps(message)
        except Exception as error:
            raise TypeError(f"under --mpi a test's arguments go to every rank, and cannot be pickled: {error}") from None
        self.world.broadcast(np.frombuffer(data, np.uint8))

    def told(self) -> tuple[Any, ...]:
        """The other side of :meth:`tell`."""
        return pickle.loads(self.world.broadcast(None).tobytes())

    def call(self, asked: Ranks, body: Body, arguments: dict[str, Any]) -> None:
        """One run of a test's body on all ranks, from rank 0."""
        __tracebackhide__ = True
        drawn = {name: value for name, value in arguments.items() if name != "comm"}
        self.tell("example", asked, drawn)
        outcomes, left_over = self._run(asked, body, drawn)
        _show({rank: outcome.output for rank, outcome in enumerate(outcomes)})
        try:
            raise_together(outcomes[:asked.count], left_over, self.world.rank)
        except BaseException as error:
            _raise_from_the_program(error, body)

    def follow(self, body: Body, arguments: dict[str, Any]) -> None:
        """Run what rank 0 says until the test is done; its fixtures' values are this rank's own."""
        self.serving = False
        while True:
            kind, *rest = self.told()
            if kind == "done":
                return
            asked, drawn = rest
            self._run(asked, body, {**drawn, **{name: value for name, value in arguments.items() if name != "comm"}})

    def _run(self, asked: Ranks, body: Body, arguments: dict[str, Any]) -> tuple[list[Outcome], list[str]]:
        return run_example(self.world, lambda comm: body(**arguments, comm=comm), asked.count, asked.checks,
                           asked.sends == "rendezvous", asked.limit)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """A test begins: on a marked one the others set out as well."""
        if self.world.rank == 0 and item.get_closest_marker("ranks"):
            self.serving = True
            self.tell("item", item.nodeid, nextitem.nodeid if nextitem is not None else None)
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """A test's body is over: the others tear down as well."""
        if not self.serving:
            return
        self.serving = False
        if self.world.rank == 0:
            self.tell("done")
        else:  # the test has not been called here: setting it up has failed, and says so when it is to run
            self.follow(_not_set_up, {})

    def pytest_sessionfinish(self) -> None:
        """The end, for all ranks."""
        if self.world.rank == 0:
            self.tell("end")


def _not_set_up(comm: Comm, **arguments: Any) -> None:
    raise RuntimeError(f"rank {comm.rank} could not set up this test; its own report says why")


class _Follower:
    """What pytest does on the other ranks: no terminal, and tests in the order that rank 0 says."""

    def __init__(self, session: _MPISession) -> None:
        self.session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Write nothing; rank 0 does."""
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from _pytest.runner import runtestprotocol

        items = {item.nodeid: item for item in session.items}
        while True:
            kind, *rest = self.session.told()
            if kind == "end":
                return True
            item = items.get(rest[0])
            if item is None:
                self.session.follow(_not_collected, {})
                continue
            self.session.serving = True
            reports = runtestprotocol(item, nextitem=items.get(rest[1]), log=False)
            for report in reports:
                if report.failed and report.when != "call":
                    sys.stderr.write(f"rank {self.session.world.rank}: {report.when} of {item.nodeid}:\n{report.longreprtext}\n")


def _not_collected(comm: Comm, **arguments: Any) -> None:
    raise RuntimeError(f"rank {comm.rank} has not collected this test: do all ranks see the same files?")

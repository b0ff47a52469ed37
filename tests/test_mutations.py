"""Every mutation of the list is noticed by the property test, drawing that mutation's own axis only."""

from __future__ import annotations

import dataclasses
import re

import pytest

from refdist.testing.mutate import Mutation, MutationError, mutated
from refdist.testing.mutations import MUTATIONS, REPORTS, apply, find
from refdist.testing.properties import notices
from refdist.testing.strategies import PLAN_AXES


@pytest.mark.once
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_property_test_notices(mutation: Mutation) -> None:
    """A training run that goes wrong silently is named by what differs and by the ratio parallel/single."""
    error = notices(mutation)
    assert error is not None, f"nothing failed with {mutation.old!r} → {mutation.new!r} in {mutation.target}"
    print(f"{type(error).__name__}: {error}")
    if isinstance(error, AssertionError) and mutation.axis in (*PLAN_AXES, "optimizer"):
        assert re.search(r"parallel/single = \[?[-\d.nainf]+", str(error)), error


@pytest.mark.once
@pytest.mark.parametrize("mutation", [entry for entry in MUTATIONS if entry.also][::6], ids=lambda mutation: mutation.name)
def test_the_other_axes_that_an_entry_names_suffice_too(mutation: Mutation) -> None:
    for axis in mutation.also:
        assert notices(dataclasses.replace(mutation, axis=axis), 200) is not None, axis


def test_names_hashes_and_reports() -> None:
    assert all(axis in PLAN_AXES and axis != mutation.axis for mutation in MUTATIONS for axis in mutation.also)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({mutation.key for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {mutation.report for mutation in MUTATIONS} - {""} <= REPORTS.keys()
    assert find(MUTATIONS[0].key) is MUTATIONS[0]
    with pytest.raises(MutationError, match="no mutation is named 'nothing'"):
        find("nothing")


def plain(x: int) -> int:
    return x + 1


class Method:
    @property
    def doubled(self) -> int:
        return 2 * 1

    def counted(self, n: int):
        yield from range(n)

    def plain(self, x: int) -> int:
        return plain(x) * 10

    def text(self) -> str:
        return "text " + super().__str__()[:1]


HERE = __name__ + ":"


def test_a_mutation_holds_for_references_methods_generators_and_closures() -> None:
    kept = plain
    with mutated(Mutation("a", "", "", HERE + "plain", "x + 1", "x + 2")):
        assert kept(1) == plain(1) == 3
    assert kept(1) == 2
    with mutated(Mutation("b", "", "", HERE + "Method.counted", "range(n)", "range(n - 1)")):
        assert list(Method().counted(3)) == [0, 1]
    assert list(Method().counted(3)) == [0, 1, 2]
    with mutated(Mutation("c", "", "", HERE + "Method.doubled", "2 * 1", "3 * 1")):
        assert Method().doubled == 3
    with mutated(Mutation("d", "", "", HERE + "Method.text", '"text "', '"other "')):
        assert Method().text() == "other <"
    with mutated(Mutation("e", "", "", HERE + "Method.plain", "* 10", "* 100")):
        assert Method().plain(1) == 200
    assert (Method().doubled, Method().text()) == (2, "text <")


@pytest.mark.parametrize(("target", "old", "new", "problem"), [
    ("plain", "x + 7", "x", "occurs 0 times"),
    ("plain", "x", "y", "occurs 2 times"),
    ("plain", "x + 1", "x +", "does not parse"),
    ("missing", "x", "y", "does not exist"),
    ("HERE", "x", "y", "is no function"),
    ("Method.text", "super().__str__()[:1]", "''", "uses"),
])
def test_a_mutation_that_does_not_fit_is_refused(target: str, old: str, new: str, problem: str) -> None:
    with pytest.raises(MutationError, match=problem), mutated(Mutation("e", "", "", HERE + target, old, new)):
        pass
    assert plain(1) == 2


def test_the_original_comes_back_after_an_exception() -> None:
    original = plain.__code__
    with pytest.raises(TypeError), mutated(Mutation("f", "", "", HERE + "plain", "x + 1", "x + ''")):
        plain(1)
    assert plain.__code__ is original
    with apply(MUTATIONS[0].key) as mutation:
        changed = mutation.function().__code__
    assert mutation.function().__code__ is not changed

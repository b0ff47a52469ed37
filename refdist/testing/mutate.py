"""Break a function on purpose, for as long as a test lasts.

A :class:`Mutation` replaces one fragment of one function's source. The changed source is compiled, and the function's
``__code__`` is swapped, so that the mutation holds wherever the function is already bound: imported by name, kept in a table, a
method, a generator function. Frames that are running keep the code that they started with.

    with mutations.apply("comm/ring_accumulates_its_own"):
        …                                           # every ring all-reduce is wrong here

A check that has never failed proves nothing: ``tests/test_mutations.py`` applies every entry of ``mutations.MUTATIONS`` and
requires the property tests to fail. For exercises, an entry can be applied by its hash, which does not give the answer away.
"""

from __future__ import annotations
import __future__

import ast
import difflib
import functools
import importlib
import inspect
import textwrap
import types
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Mutation", "MutationError", "mutated"]


class MutationError(LookupError):
    """A mutation does not fit the code that is there (it has been rewritten since), or does not exist."""


@dataclass(frozen=True)
class Mutation:
    """One way to break one function.

    Attributes:
        name: ``room/what_goes_wrong``; unique.
        axis: what must be drawn for it to show: ``"comm"``, ``"dp"``, ``"optimizer"``, …; the property test draws only that.
        report: the id of the public report of such a mistake (``mutations.REPORTS`` has its address), or "" if it is our own.
        target: ``"module:function"`` or ``"module:Class.method"``.
        old, new: the source fragment, which occurs exactly once in the function, and what takes its place. Lines after the
            first are indented as in the file.
        also: other axes of plans whose draws alone find it too.
    """

    name: str
    axis: str
    report: str
    target: str
    old: str
    new: str
    also: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Each axis whose draws alone are enough to find it; the room's own first."""
        return self.axis, *self.also

    @property
    def key(self) -> str:
        """Six hexadecimal digits that stand for this entry and do not say what it does."""
        return f"{zlib.crc32(self.name.encode()) & 0xFFFFFF:06x}"

    def function(self) -> types.FunctionType:
        """The function that this mutation breaks, without a cache around it."""
        module, _, path = self.target.partition(":")
        try:
            found: Any = functools.reduce(inspect.getattr_static, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise MutationError(f"{self.name}: {self.target} does not exist ({error})") from error
        if isinstance(found, property):
            found = found.fget
        elif isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        found = inspect.unwrap(found)
        if not isinstance(found, types.FunctionType):
            raise MutationError(f"{self.name}: {self.target} is no function but {found!r}")
        return found

    def sources(self) -> tuple[str, str, int]:
        """The function's source as it is and broken, and its first line's number in its file."""
        function = self.function()
        lines, first = inspect.getsourcelines(function)
        source = "".join(lines)
        count = source.count(self.old)
        if count != 1:
            raise MutationError(f"{self.name}: the fragment occurs {count} times in {self.target}, not once: {self.old!r}")
        return source, source.replace(self.old, self.new), first

    def diff(self) -> str:
        """The mutation as a unified diff of its file."""
        before, after, first = self.sources()
        file = self.function().__module__.replace(".", "/") + ".py"  # a method may be inherited
        above = ["\n"] * (first - 1)  # so that lines are numbered as in the file
        lines = difflib.unified_diff([*above, *before.splitlines(True)], [*above, *after.splitlines(True)], file, file, n=2)
        return "".join(lines)

    def code(self) -> types.CodeType:
        """The broken function's code."""
        _, broken, first = self.sources()
        changed = textwrap.dedent(broken)
        try:
            tree = ast.parse(changed)
        except SyntaxError as error:
            raise MutationError(f"{self.name}: {self.target} does not parse any more: {error}") from error
        ast.increment_lineno(tree, first - 1)
        return _compile(self, self.function(), tree)


def _compile(mutation: Mutation, function: types.FunctionType, tree: ast.Module) -> types.CodeType:
    """The code object of the one function in ``tree``, with the closure of the original; nothing is executed for it."""
    code = function.__code__
    definition = tree.body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.Lambda)):
        raise MutationError(f"{mutation.name}: {mutation.target} is not written as a function of its own")
    definition.decorator_list = []
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass")
    assert isinstance(outer.body[0], ast.FunctionDef)
    outer.body[0].body = [definition]
    if code.co_name not in code.co_freevars:  # a method may share its name with a global that it calls
        outer.body[0].body.insert(0, ast.Global([code.co_name], lineno=1, col_offset=0))
    flags = code.co_flags & __future__.annotations.compiler_flag
    compiled = _inner(_inner(compile(outer, code.co_filename, "exec", flags, dont_inherit=True), "outer"), code.co_name)
    if compiled.co_freevars != code.co_freevars:
        raise MutationError(f"{mutation.name}: {mutation.target} uses {code.co_freevars} from around it, "
                            f"the changed one {compiled.co_freevars}")
    return compiled


def _inner(code: types.CodeType, name: str) -> types.CodeType:
    return next(const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == name)


@contextmanager
def mutated(mutation: Mutation) -> Iterator[Mutation]:
    """Inside, the mutation's function is broken; after, it is as it was."""
    function = mutation.function()
    original = function.__code__
    function.__code__ = mutation.code()
    _forget(mutation)
    try:
        yield mutation
    finally:
        function.__code__ = original
        _forget(mutation)


def _forget(mutation: Mutation) -> None:
    """Clear the target's cache, if it has one."""
    module, _, path = mutation.target.partition(":")
    found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    if hasattr(found, "cache_clear"):
        found.cache_clear()

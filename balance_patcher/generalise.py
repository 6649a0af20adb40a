"""What the statements of several lanes have in common: a pattern, and the parts of it that can be left out.

Where the lanes are equal the pattern is literal, where they differ it has a hole with a name (the least general
generalisation, or anti-unification). What is literal is cut into *parts*: a part that is not kept is a ``$_``, or
the end of a list that becomes ``$$$_``. So every smaller pattern is a set of parts, and the smallest can be searched.

The size of a pattern is the number of its syntax nodes, holes included. A dotted name is one node, as it is one for
a reader: ``self.running`` is no larger than ``$_``, and so it is never left out for the sake of size.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .matching import LIST, ONE, OperatorHole
from .parts import Part, Parts
from .render import as_pattern

Maker = Callable[[frozenset[int]], Any]

#: How a compound statement is taken: by its header, whatever its suites hold, or whole.
HEADER, WHOLE = "header", "whole"

_SKIPPED = {"ctx", "type_comment", "kind"}
SUITES = ("body", "orelse", "finalbody", "handlers")
_LEAVES = (ast.Name, ast.Constant, ast.JoinedStr, ast.Lambda)
_NAMES = (*_LEAVES, ast.Attribute)
# What says a name by itself, which has to be the same on every lane.
_DEFINITIONS = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal,
)  # fmt: skip
_CLAUSES = (ast.withitem, ast.comprehension, ast.ExceptHandler, ast.keyword)
# Fields that a list hole can stand in; a boolean operator needs an operand before it.
_LISTS: dict[tuple[type[ast.AST], str], int] = {
    (ast.Tuple, "elts"): 0, (ast.List, "elts"): 0, (ast.Set, "elts"): 0, (ast.BoolOp, "values"): 1,
}  # fmt: skip
_LONGEST = 3  # so many statements of a suite are looked at; what follows is `$$$_`


class _Differ(Exception):  # noqa: N818 - no error: where lanes differ, a hole stands
    """The lanes differ in something that no hole can stand for; so the node around it becomes one."""


class Common:
    """One statement, as it is on every lane.

    Attributes:
        size: That of the pattern with no part kept.
    """

    def __init__(self, statements: Sequence[ast.stmt], parts: Parts, form: str = HEADER) -> None:
        self._parts = parts
        first = len(parts.all)
        self.size, self._make = self._root(tuple(statements), form)
        self._own = range(first, len(parts.all))
        self._told = isinstance(statements[0], _DEFINITIONS)
        self._nameless = not any(isinstance(node, _NAMES) for node in _walked(statements[0], form))

    @classmethod
    def of(cls, statements: Sequence[ast.stmt], parts: Parts, form: str = HEADER) -> Common | None:
        """``None`` where the lanes have nothing in common."""
        try:
            return cls(statements, parts, form)
        except _Differ:
            return None

    def pattern(self, kept: frozenset[int]) -> str:
        """The text of the pattern with these parts."""
        node, header = self._make(kept)
        return as_pattern(node, header=header)

    @property
    def named(self) -> bool:
        """Whether the lanes have a name or a constant in common, in one place; or there is none to have."""
        return self._nameless or self._told or any(self._parts.all[number].names for number in self._own)

    def naming(self) -> list[Part]:
        """The parts of which one has to be kept so that the pattern has a name in it; none if it has one anyway."""
        found: list[Part] = []
        for number in () if self._told else self._own:
            part = self._parts.all[number]
            if part.names:
                while part.size == 0:
                    if part.under < 0:
                        return []
                    part = self._parts.all[part.under]
                found.append(part)
        return found

    def _root(self, nodes: tuple[ast.stmt, ...], form: str) -> tuple[int, Maker]:
        first = nodes[0]
        if len({type(node) for node in nodes}) > 1:
            raise _Differ
        if isinstance(first, ast.Expr):
            size, make = self._expanded(tuple(node.value for node in nodes), -1)  # type: ignore[attr-defined]
            return size + 1, lambda kept: (ast.Expr(make(kept)), False)
        suites = [field for field in SUITES if isinstance(getattr(first, field, None), list)]
        size, fields = self._fields(nodes, -1, [field for field in first._fields if field not in suites])
        bare = bool(suites) and form == HEADER
        if bare:
            fields |= {field: lambda _: [] for field in suites}
        else:
            inner, filled = self._fields(nodes, -1, suites)
            size, fields = size + inner, fields | filled
        return size + 1, lambda kept: (_node(first, fields, kept), bare)

    # -- nodes -----------------------------------------------------------------------------------

    def _slot(self, nodes: tuple[Any, ...], under: int, field: str) -> tuple[int, Maker]:
        """A place for one expression or statement, which may be a hole."""
        before = self._parts.state
        anything = _any(nodes[0])
        part = self._parts.add(under)
        try:
            size, make = self._expanded(nodes, part)
        except _Differ:
            self._parts.cut(*before)
            name = self._parts.hole(tuple(map(ast.dump, nodes)), field)
            return 1, lambda _: _any(nodes[0], name)
        self._parts.grow(part, size, names=isinstance(nodes[0], _NAMES))
        return 1, lambda kept: make(kept) if part in kept else anything

    def _expanded(self, nodes: tuple[Any, ...], part: int) -> tuple[int, Maker]:
        """The nodes themselves, and what is in them beyond one node."""
        first = nodes[0]
        if len({type(node) for node in nodes}) > 1:
            raise _Differ
        if isinstance(first, _LEAVES):
            return 0, self._equal(nodes)
        if _dotted(first):
            return 0, self._name(nodes)
        if isinstance(first, ast.Call):
            return self._call(nodes, part)
        size, fields = self._fields(nodes, part, first._fields)
        return size, lambda kept: _node(first, fields, kept)

    @staticmethod
    def _equal(values: tuple[Any, ...]) -> Maker:
        shown = {ast.dump(value) if isinstance(value, ast.AST) else repr(value) for value in values}
        if len(shown) > 1:
            raise _Differ
        return lambda _: values[0]

    def _name(self, nodes: tuple[Any, ...]) -> Maker:
        """``self.a.b``: one name to a reader; where lanes differ in a part of it, that is a hole."""
        if len({type(node) for node in nodes}) > 1 or not all(map(_dotted, nodes)):
            raise _Differ
        if isinstance(nodes[0], ast.Name):
            return self._equal(nodes)
        value = self._name(tuple(node.value for node in nodes))
        attr = self._word(tuple(node.attr for node in nodes), "attr")
        return lambda kept: ast.Attribute(value(kept), attr, ast.Load())

    def _word(self, words: tuple[Any, ...], field: str) -> Any:
        if len(set(words)) == 1:
            return words[0]
        if None in words:
            raise _Differ
        return ONE + self._parts.hole(words, field)

    def _call(self, nodes: tuple[Any, ...], part: int) -> tuple[int, Maker]:
        """The positional arguments one after the other, then the keywords all at once: ``$$$_`` must be last."""
        size, func = self._slot(tuple(node.func for node in nodes), part, "func")
        positional = tuple(node.args for node in nodes)
        keywords = tuple(node.keywords for node in nodes)
        names = {tuple(keyword.arg for keyword in found) for found in keywords}
        more = keywords[0] if len(names) == 1 else None
        count, args, last, whole = self._list(positional, part, 0, follows=more != [])
        closes = -1
        fixed: Maker = lambda _: []  # noqa: E731 - as its neighbours
        if more and whole:
            closes = self._parts.add(last, len(more) - 1)
            _, fixed = self._fixed(keywords, closes, "keywords")

        def make(kept: frozenset[int]) -> ast.Call:
            taken = args(kept)
            return ast.Call(func(kept), taken[:-1], fixed(kept)) if closes in kept else ast.Call(func(kept), taken, [])

        return size + count, make

    # -- fields ----------------------------------------------------------------------------------

    def _fields(self, nodes: tuple[Any, ...], under: int, names: Sequence[str]) -> tuple[int, dict[str, Maker]]:
        size, makers = 0, {}
        for name in names:
            if name not in _SKIPPED:
                grown, makers[name] = self._field(nodes, name, under)
                size += grown
        return size, makers

    def _field(self, nodes: tuple[Any, ...], name: str, under: int) -> tuple[int, Maker]:
        values: tuple[Any, ...] = tuple(getattr(node, name, None) for node in nodes)
        if not isinstance(values[0], list):
            return self._one(values, name, under)
        least = _LISTS.get((type(nodes[0]), name), 0 if name in SUITES and name != "handlers" else None)
        if least is None:
            return self._fixed(values, under, name)
        size, make, _, _ = self._list(values, under, least, longest=_LONGEST if name in SUITES else None)
        return size, make

    def _one(self, values: tuple[Any, ...], name: str, under: int) -> tuple[int, Maker]:
        first = values[0]
        if all(isinstance(value, (ast.expr, ast.stmt)) for value in values):
            return self._slot(values, under, name)
        if isinstance(first, _CLAUSES) and len({type(value) for value in values}) == 1:
            size, fields = self._fields(values, under, first._fields)
            return size, lambda kept: _node(first, fields, kept)
        if isinstance(first, ast.cmpop):
            kinds = tuple(type(value).__name__ for value in values)
            operator = first if len(set(kinds)) == 1 else OperatorHole(self._parts.hole(kinds, "op"))
            return 1, lambda _: operator
        if name in {"arg", "attr"}:
            word = self._word(values, name)
            return 0, lambda _: word
        return 0, self._equal(values)

    def _fixed(self, values: tuple[list[Any], ...], under: int, name: str) -> tuple[int, Maker]:
        """A list that no list hole can stand in: as long on every lane."""
        if len(set(map(len, values))) > 1:
            raise _Differ
        found = [self._one(item, name, under) for item in zip(*values, strict=True)]
        return sum(size for size, _ in found), lambda kept: [make(kept) for _, make in found]

    def _list(
        self,
        values: tuple[list[Any], ...],
        under: int,
        least: int,
        *,
        longest: int | None = None,
        follows: bool = False,
    ) -> tuple[int, Maker, int, bool]:
        """A list whose end may be ``$$$_``.

        Args:
            values: The list of each lane.
            under: The part that it hangs on.
            least: So many of its items are there, if only as holes.
            longest: So many are looked at.
            follows: ``$$$_`` is there in any case, because it stands for something else too.

        Returns:
            Its size with no part kept, what makes it, the part of its last item, and whether that is the end.
        """
        lengths = set(map(len, values))
        count = min(*lengths, longest) if longest is not None else min(lengths)
        whole = lengths == {count}
        opened = follows or not whole
        items: list[tuple[int, Maker]] = []
        for at in range(count):
            if at >= least:
                under = self._parts.add(under, int(opened or at < count - 1))
            _, make = self._slot(tuple(value[at] for value in values), under, "statement" if longest else "arg")
            items.append((under if at >= least else -1, make))

        def made(kept: frozenset[int]) -> list[ast.AST]:
            found = [make(kept) for part, make in items if part < 0 or part in kept]
            if opened or len(found) < count:
                rest = ast.Name(f"{LIST}_", ast.Load())
                found.append(ast.Expr(rest) if longest else rest)
            return found

        return min(count, least) + int(opened or count > least), made, under, whole


def _any(like: ast.AST, name: str = "_") -> ast.AST:
    hole = ast.Name(ONE + name, ast.Load())
    return ast.Expr(hole) if isinstance(like, ast.stmt) else hole


def _node(like: ast.AST, fields: dict[str, Maker], kept: frozenset[int]) -> ast.AST:
    return type(like)(**{name: make(kept) for name, make in fields.items()})


def _walked(statement: ast.stmt, form: str) -> Iterator[ast.AST]:
    """The nodes that a pattern of the statement can have."""
    for name, value in ast.iter_fields(statement):
        if form == WHOLE or name not in SUITES:
            for node in value if isinstance(value, list) else [value]:
                yield from ast.walk(node) if isinstance(node, ast.AST) else ()


def _dotted(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)

"""What of a copy runs on one vLLM, where its text asks for vLLM's version.

vllm-ascend serves two vLLMs at a time, and its text says ``if vllm_version_is("0.23.0"):`` where they differ. On a
release one side of that runs, and a call on the other side hurts nobody. Where the version is not known (a commit has
none), each version that the text asks for may be it, or yet another: what a copy does for sure is what it does in all
of these cases.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary

from balance_patcher.errors import PatchError
from balance_patcher.index import parse_version
from balance_patcher.targets import Function, own_nodes

#: The function by which vllm-ascend asks.
ASKS = "vllm_version_is"

#: A version that no text asks for.
OTHER = ""

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_DEEPEST = 8  # flags that are kept in flags


def cases(tree: ast.Module, version: str | None) -> tuple[str, ...]:
    """The versions that a text may run on: the one that is known, or each that it asks for, and another one."""
    asked = [node.args[0].value for node in ast.walk(tree) if _asks(node)]  # type: ignore[attr-defined]
    if not asked:
        return (OTHER,)
    return (version,) if version else (*dict.fromkeys(asked), OTHER)


_known: WeakKeyDictionary[ast.Module, dict[str, frozenset[int]]] = WeakKeyDictionary()


def running(tree: ast.Module, version: str) -> frozenset[int]:
    """The nodes of a module, by their ids, that are reached on a version, as far as that decides; found once."""
    found = _known.setdefault(tree, {})
    if version not in found:
        found[version] = frozenset(map(id, _Reader(version).module(tree)))
    return found[version]


def _asks(node: ast.AST) -> bool:
    """Whether a node is the question, for a version that is written there."""
    return (
        isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == ASKS
        and len(node.args) == 1 and not node.keywords
        and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    )  # fmt: skip


def _equal(one: str, other: str) -> bool:
    """Whether two texts are one version."""
    try:
        return bool(parse_version(one) == parse_version(other))
    except PatchError:
        return one == other


class _Reader:
    """Goes where a version leads."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._scopes: list[Mapping[str, ast.expr | None]] = []

    def module(self, tree: ast.Module) -> Iterator[ast.AST]:
        yield from self._within(tree)

    def _within(self, scope: ast.AST) -> Iterator[ast.AST]:
        """A module or a function, with the names that it binds."""
        self._scopes.append(_bound(scope))
        yield from self._node(scope)
        self._scopes.pop()

    def _node(self, node: ast.AST) -> Iterator[ast.AST]:
        yield node
        if isinstance(node, (ast.If, ast.IfExp)):
            yield from self._any(node.test)
            for side in self._sides(node):
                yield from self._any(side)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._any(value)
                if self._said(value) is isinstance(node.op, ast.Or):
                    break  # what stands behind it is not asked
        else:
            for _, value in ast.iter_fields(node):
                yield from self._any(value)

    def _any(self, value: object) -> Iterator[ast.AST]:
        """A node, or a list of them; of statements those up to one that always leaves."""
        if isinstance(value, list):
            for one in value:
                yield from self._any(one)
                if isinstance(one, ast.stmt) and self._leaves(one):
                    return
        elif isinstance(value, Function):
            yield from self._within(value)
        elif isinstance(value, ast.AST):
            yield from self._node(value)

    def _sides(self, node: ast.If | ast.IfExp) -> Sequence[object]:
        """The sides of a branch that can be reached; a missing one is an empty suite."""
        said = self._said(node.test)
        return [node.body] * (said is not False) + [node.orelse] * (said is not True)

    def _leaves(self, statement: ast.stmt) -> bool:
        """Whether nothing behind a statement is reached, whatever else is the case."""
        if isinstance(statement, ast.If):
            sides: list[Sequence[ast.stmt]] = self._sides(statement)  # type: ignore[assignment]
            return all(any(map(self._leaves, side)) for side in sides)
        return isinstance(statement, _LEAVES)

    def _said(self, test: ast.expr, depth: int = _DEEPEST) -> bool | None:
        """What an expression is on this version; ``None`` where something else decides."""
        if _asks(test):
            return _equal(self._version, test.args[0].value)  # type: ignore[attr-defined]
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            said = self._said(test.operand, depth)
            return None if said is None else not said
        if isinstance(test, ast.BoolOp):
            parts = [self._said(value, depth) for value in test.values]
            decides = isinstance(test.op, ast.Or)
            return decides if decides in parts else None if None in parts else not decides
        if isinstance(test, ast.Name) and depth:
            scope = next((names for names in reversed(self._scopes) if test.id in names), {})
            value = scope.get(test.id)
            return self._said(value, depth - 1) if value is not None else None
        return None


def _bound(scope: ast.AST) -> Mapping[str, ast.expr | None]:
    """The names that a scope binds, each with its value where it is given one, once."""
    found: dict[str, ast.expr | None] = {}
    values: dict[int, ast.expr] = {}
    for node in own_nodes(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            values[id(node.targets[0])] = node.value
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
        if isinstance(name, str) and not isinstance(node, ast.keyword):
            found[name] = None if name in found else values.get(id(node))
    return found

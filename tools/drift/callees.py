"""What a target calls at one ref, and which of it is another thing at the next.

The worst breaks of copied functions kept every signature that a checker compares: a helper handed back three things
where it had handed back two. A rewritten function cannot break so, because upstream's own calls are in it. Who has a
copy wants to know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from balance_patcher.errors import Failure, PatchError
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import FunctionNode, Target, find_target

from .lookup import Defined, lookup, member
from .shapes import Shape, shape_of
from .types_of import Types

#: What is most likely to matter comes first.
RANKS = ("return", "gone", "parameters", "kind", "body")


@dataclass(frozen=True)
class Calls:
    """What a target calls at one ref.

    Attributes:
        callees: Each with the lines of the target that call it.
        unknown: Calls through attributes of ``self`` that could not be followed, as they are written.
    """

    callees: tuple[tuple[Shape, tuple[int, ...]], ...]
    unknown: tuple[str, ...] = ()


def calls_of(lane: Lane, name: str) -> Calls | None:
    """What a target calls; ``None`` where the lane has no such target.

    Raises:
        PatchError: BP5xx, if the target's own module cannot be read.
    """
    target = find_target(lane, name)
    return None if isinstance(target, Failure) else calls_in(lane, target, target.node)


def calls_in(lane: Lane, target: Target, node: FunctionNode) -> Calls:
    """What a function calls if it stood where the target stands: the target itself, or somebody's copy of it."""
    found: dict[str, tuple[Shape, list[int]]] = {}
    unknown: list[str] = []
    for call, callee in followed(lane, target, node):
        if callee is None:
            if _is_of_self(call):
                unknown.append(ast.unparse(call.func))
            continue
        shape = found[callee.name][0] if callee.name in found else shape_of(lane, callee)
        found.setdefault(callee.name, (shape, []))[1].append(call.lineno)
    rows = tuple((shape, tuple(dict.fromkeys(lines))) for shape, lines in found.values())
    return Calls(rows, tuple(dict.fromkeys(unknown)))


def followed(lane: Lane, target: Target, node: FunctionNode) -> Iterator[tuple[ast.Call, Defined | None]]:
    """Every call in a function, with what it calls where the text says so."""
    types = Types(lane, target.text, node, _owner(target))
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield inner, types.called(inner)


def _owner(target: Target) -> Defined | None:
    if target.owner is None:
        return None
    return Defined(target.text, target.qualname.rpartition(".")[0], target.owner)


def _is_of_self(call: ast.Call) -> bool:
    """``self.connector.build(…)``: not a list's ``append``, and not a function of the standard library."""
    func, depth = call.func, 0
    while isinstance(func, ast.Attribute):
        func, depth = func.value, depth + 1
    last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return isinstance(func, ast.Name) and func.id == "self" and depth > 1 and last not in _CONTAINERS


_CONTAINERS = {name for kind in (list, dict, set, str, bytes) for name in dir(kind)} | {"appendleft", "popleft"}


@dataclass(frozen=True)
class Change:
    """One callee that is another thing since; ``now`` is ``None`` where it is gone."""

    what: str
    was: Shape
    now: Shape | None
    lines: tuple[int, ...]

    @property
    def rank(self) -> int:
        return RANKS.index(self.what) + 1

    @property
    def texts(self) -> tuple[str, str]:
        """What it was and what it is, in the respect in which it changed."""
        field = {"return": "returns", "parameters": "parameters", "kind": "kind"}.get(self.what, "parameters")
        return getattr(self.was, field), getattr(self.now, field) if self.now is not None else ""


def changes(old: Calls, new: Calls, there: Lane) -> list[Change]:
    """What became of the callees of a target, the likeliest to matter first.

    Args:
        old: At the ref before.
        new: At this one.
        there: This one's lane, for what the target does not call any more.
    """
    known = {shape.name: (shape, lines) for shape, lines in new.callees}
    found = []
    for was, lines in old.callees:
        now, now_lines = known.get(was.name, (None, lines))
        if now is None:
            now = named(there, was.name)
        if now is None and not _readable(there, was.name):
            continue
        what = _what(was, now)
        found += [Change(one, was, now, now_lines) for one in what[:1]]
    return sorted(found, key=lambda change: (change.rank, change.was.name))


def _what(was: Shape, now: Shape | None) -> list[str]:
    """In which respects two shapes differ, the likeliest to matter first."""
    if now is None:
        return ["gone"]
    pairs = {
        "return": (was.returns, now.returns),
        "parameters": (was.parameters, now.parameters),
        "kind": (was.kind, now.kind),
        "body": (was.body, now.body),
    }
    return [name for name in RANKS if name in pairs and pairs[name][0] != pairs[name][1]]


def named(lane: Lane, name: str) -> Shape | None:
    """The shape of ``module:Qual.name``, wherever a class has it from; ``None`` where there is none."""
    module, _, qualname = name.partition(":")
    text = _text(lane, module)
    if text is None:
        return None
    first, _, rest = qualname.partition(".")
    found = lookup(lane, text, first)
    if isinstance(found, Defined) and rest:
        found = member(lane, found, rest)
    return shape_of(lane, found) if isinstance(found, Defined) else None


def _text(lane: Lane, module: str) -> ModuleText | None:
    try:
        text = lane.module(module)
        if text is not None:
            _ = text.tree
    except PatchError:
        return None
    return text


def _readable(lane: Lane, name: str) -> bool:
    """Whether that a callee is not found means that it is not there."""
    try:
        text = lane.module(name.partition(":")[0])
        if text is not None:
            _ = text.tree
    except PatchError:
        return False
    return True

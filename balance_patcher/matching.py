"""Compare a pattern's tree with a node: what is bound, or where the two first differ."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

#: What a hole can be bound to: a node, an identifier, or a list of nodes.
Bound = Union[ast.AST, str, "tuple[ast.AST, ...]"]
Bindings = Mapping[str, Bound]
Found = dict[str, Bound]
#: For a hole, the texts that it may be bound to.
Allowed = Mapping[str, "tuple[str, ...]"]

ONE, LIST, OP = "__bp_one_", "__bp_list_", "__bp_op_"
_SKIPPED = {"ctx", "type_comment", "kind", "type_ignores"}
#: For each kind of node that was met, the fields that are compared.
_COMPARED: dict[type[ast.AST], tuple[str, ...]] = {}
_SUITES = {"body", "orelse", "handlers", "finalbody", "cases", "decorator_list"}

#: Comparison operators as they are written.
OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


@dataclass(frozen=True)
class Mismatch:
    """Where a node first differs from a pattern.

    Attributes:
        path: The field, from the statement down: ``test.comparators[0].attr``.
        wanted: What the pattern has there.
        found: What the node has there.
    """

    path: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"differs at {self.path or 'the node itself'}: {self.wanted} → {self.found}"


class OperatorHole(ast.cmpop):
    """Stands in a pattern for any comparison operator."""

    _fields = ()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def hole_name(node: ast.AST, prefix: str) -> str | None:
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Name) and node.id.startswith(prefix):
        return node.id[len(prefix) :]
    return None


def kind_of(value: object) -> str:
    """How to name a node or a field's value to a person."""
    if isinstance(value, ast.AST):
        if isinstance(value, OperatorHole):
            return "any operator"
        if type(value) in OPERATORS:
            return OPERATORS[type(value)]  # type: ignore[index]
        if isinstance(value, ast.Name):
            return f"`{value.id}`"
        if isinstance(value, ast.Constant):
            return repr(value.value)
        return type(value).__name__
    return f"`{value}`" if isinstance(value, str) else repr(value)


class Matcher:
    """One match; ``allow`` limits what its holes can be bound to."""

    def __init__(self, allow: Allowed) -> None:
        self.allow = allow

    def node(self, pat: ast.AST, node: ast.AST, bound: Found, path: str, *, header: bool = False) -> Found | Mismatch:
        name = hole_name(pat, ONE)
        if name is not None:
            if isinstance(pat, ast.Expr) and not isinstance(node, ast.stmt):
                return Mismatch(path, "a statement", kind_of(node))
            if isinstance(node, ast.keyword):
                return Mismatch(path, "a positional argument", kind_of(node))
            return self.bind(name, node, bound, path)
        if isinstance(pat, OperatorHole):
            return self.bind(pat.name, node, bound, path)
        if type(pat) is not type(node):
            return Mismatch(path, kind_of(pat), kind_of(node))
        open_call = isinstance(pat, ast.Call) and _takes_keywords(pat)
        for field in pat._fields:
            if field in _SKIPPED or (header and field in _SUITES) or (open_call and field == "keywords"):
                continue
            wanted, found = getattr(pat, field, None), getattr(node, field, None)
            if open_call and field == "args":
                found = [*node.args, *node.keywords]  # type: ignore[attr-defined]
            result = self.value(pat, wanted, found, bound, f"{path}.{field}" if path else field)
            if isinstance(result, Mismatch):
                return result
            bound = result
        return bound

    def value(self, pat: ast.AST, wanted: object, found: object, bound: Found, path: str) -> Found | Mismatch:
        if wanted is found and wanted is None:
            return bound
        if isinstance(wanted, list):
            return self.sequence(wanted, found if isinstance(found, list) else [], bound, path)
        if isinstance(wanted, ast.AST):
            if not isinstance(found, ast.AST):
                return Mismatch(path, kind_of(wanted), "nothing")
            return self.node(wanted, found, bound, path)
        if isinstance(wanted, str) and wanted.startswith(ONE) and not isinstance(pat, ast.Constant):
            if not isinstance(found, str):
                return Mismatch(path, "an identifier", kind_of(found))
            return self.bind(wanted[len(ONE) :], found, bound, path)
        if type(wanted) is type(found) and repr(wanted) == repr(found):
            return bound
        return Mismatch(path, kind_of(wanted), "nothing" if found is None else kind_of(found))

    def sequence(self, pats: list[ast.AST], nodes: list[ast.AST], bound: Found, path: str) -> Found | Mismatch:
        for at, pat in enumerate(pats):
            name = hole_name(pat, LIST) if isinstance(pat, ast.AST) else None
            if name is not None:
                return self.rest(name, pats[at + 1 :], nodes[at:], bound, path)
            if at >= len(nodes):
                return Mismatch(f"{path}[{at}]", kind_of(pat), "nothing")
            result = self.value(pat, pat, nodes[at], bound, f"{path}[{at}]")
            if isinstance(result, Mismatch):
                return result
            bound = result
        if len(nodes) > len(pats):
            return Mismatch(f"{path}[{len(pats)}]", "nothing", kind_of(nodes[len(pats)]))
        return bound

    def rest(self, name: str, pats: list[ast.AST], nodes: list[ast.AST], bound: Found, path: str) -> Found | Mismatch:
        last: Found | Mismatch = Mismatch(path, "more", "nothing")
        for taken in range(len(nodes) + 1):
            last = self.bind(name, tuple(nodes[:taken]), bound, path)
            if not isinstance(last, Mismatch):
                last = self.sequence(pats, nodes[taken:], last, path)
            if not isinstance(last, Mismatch):
                break
        return last

    def bind(self, name: str, value: Bound, bound: Found, path: str) -> Found | Mismatch:
        if name == "_":
            return bound
        if name in bound:
            if same(bound[name], value):
                return bound
            return Mismatch(path, f"the same as ${name} before", render_bound(value))
        if name in self.allow and render_bound(value) not in self.allow[name]:
            return Mismatch(path, " or ".join(self.allow[name]), render_bound(value))
        return {**bound, name: value}


def _takes_keywords(call: ast.Call) -> bool:
    """A call whose last argument is a list hole takes keyword arguments too."""
    return bool(call.args) and not call.keywords and hole_name(call.args[-1], LIST) is not None


def same(one: Bound, other: Bound) -> bool:
    """Whether two bound values are equal trees; an identifier equals the name node of it."""
    if isinstance(one, ast.Name) and isinstance(other, str):
        return one.id == other
    if isinstance(other, ast.Name) and isinstance(one, str):
        return other.id == one
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return _alike(one, other)
    return one == other


def _alike(one: ast.AST, other: ast.AST) -> bool:
    """Whether two trees without holes are equal, as a pattern is to what it matches."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind not in _COMPARED:
        _COMPARED[kind] = tuple(name for name in kind._fields if name not in _SKIPPED)
    for name in _COMPARED[kind]:
        ours, its = getattr(one, name, None), getattr(other, name, None)
        if ours is not its and not _alike_value(ours, its):
            return False
    return True


def _alike_value(one: object, other: object) -> bool:
    if isinstance(one, ast.AST):
        return isinstance(other, ast.AST) and _alike(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_alike_value, one, other))
    # By type and value, 1 is not True; and by its text, 0.0 is not -0.0.
    return one is other or (type(one) is type(other) and repr(one) == repr(other))


def render_bound(value: Bound) -> str:
    """A bound value as Python text on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(map(render_bound, value))
    if type(value) in OPERATORS:
        return OPERATORS[type(value)]  # type: ignore[index]
    return ast.unparse(value)


def weight(node: ast.AST, *, header: bool = False) -> int:
    fields = (value for field, value in ast.iter_fields(node) if not (header and field in _SUITES))
    children = [child for value in fields for child in (value if isinstance(value, list) else [value])]
    return 1 + sum(weight(child) for child in children if isinstance(child, ast.AST) and not _is_context(child))


def _is_context(node: ast.AST) -> bool:
    return isinstance(node, ast.expr_context)


def overlap(pat: ast.AST, node: ast.AST, allow: Allowed, *, header: bool = False) -> float:
    if _is_context(pat):
        return 0.0
    hole = hole_name(pat, ONE)
    if isinstance(pat, OperatorHole):
        hole = pat.name
    if hole is not None:
        return float(hole not in allow or render_bound(node) in allow[hole])
    if type(pat) is not type(node):
        return 0.0
    score = 1.0
    for field, wanted in ast.iter_fields(pat):
        if field in _SKIPPED or (header and field in _SUITES):
            continue
        found = getattr(node, field, None)
        if isinstance(wanted, list):
            pairs = zip(wanted, found or [], strict=False)
            score += sum(overlap(p, n, allow) for p, n in pairs if isinstance(p, ast.AST))
        elif isinstance(wanted, ast.AST):
            score += overlap(wanted, found, allow) if isinstance(found, ast.AST) else 0.0
        elif isinstance(wanted, str) and wanted.startswith(ONE):
            allowed = allow.get(wanted[len(ONE) :])
            score -= 0.5 * (allowed is not None and found not in allowed)
        elif wanted is not None or isinstance(pat, ast.Constant):
            score -= 0.5 * (repr(wanted) != repr(found))
    return score

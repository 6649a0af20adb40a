"""Which class an expression is an instance of, as far as upstream's text says so.

It says so in annotations, in what a constructor or an annotated function returns, and in what ``__init__`` keeps. That
is little, and enough for most calls of a scheduler: ``self.kv_cache_manager.get_computed_blocks(request)``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from balance_patcher.bound import definitions
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import Function, FunctionNode, own_nodes

from .lookup import Defined, chain, lookup, member

_DEEPEST = 8
_MANY = {"list", "set", "deque", "tuple", "Iterable", "Iterator", "Sequence", "frozenset", "Collection"}


@dataclass(frozen=True)
class Typed:
    """A class, or with ``many`` a collection of its instances."""

    of: Defined
    many: bool = False


@dataclass
class Types:
    """The types in one function; ``owner`` is the class of its first parameter."""

    lane: Lane
    text: ModuleText
    node: FunctionNode
    owner: Defined | None
    _busy: set[tuple[str, str]] = field(default_factory=set)

    def of(self, node: ast.AST, depth: int = _DEEPEST) -> Typed | None:
        """The type of an expression."""
        if depth == 0:
            return None
        if isinstance(node, ast.Await):
            return self.of(node.value, depth - 1)
        if isinstance(node, (ast.BoolOp, ast.IfExp)):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next((found for part in parts if (found := self.of(part, depth - 1))), None)
        if isinstance(node, ast.Subscript):
            whole = self.of(node.value, depth - 1)
            return Typed(whole.of) if whole is not None and whole.many else None
        if isinstance(node, ast.Name):
            return self._local(node.id, depth)
        if isinstance(node, ast.Attribute):
            base = self.of(node.value, depth - 1)
            return self._attribute(base.of, node.attr, depth - 1) if base is not None and not base.many else None
        if isinstance(node, ast.Call):
            return self._returned(node, depth)
        return None

    def called(self, call: ast.Call, depth: int = _DEEPEST) -> Defined | None:
        """The function or class that a call calls."""
        func = call.func
        if isinstance(func, ast.Name):
            found = lookup(self.lane, self.text, func.id)
            return found if isinstance(found, Defined) else None
        if not isinstance(func, ast.Attribute):
            return None
        if (
            isinstance(func.value, ast.Call)
            and getattr(func.value.func, "id", "") == "super"
            and self.owner is not None
        ):
            bases = list(chain(self.lane, self.owner))[1:]
            return next((found for base in bases if (found := member(self.lane, base, func.attr))), None)
        if isinstance(func.value, ast.Name):
            whole = lookup(self.lane, self.text, func.value.id)
            if isinstance(whole, ModuleText):
                found = lookup(self.lane, whole, func.attr)
                return found if isinstance(found, Defined) else None
            if isinstance(whole, Defined) and isinstance(whole.node, ast.ClassDef):
                return member(self.lane, whole, func.attr)
        base = self.of(func.value, depth)
        return member(self.lane, base.of, func.attr) if base is not None and not base.many else None

    def _returned(self, call: ast.Call, depth: int) -> Typed | None:
        found = self.called(call, depth - 1)
        if found is None:
            return None
        if isinstance(found.node, ast.ClassDef):
            return Typed(found)
        return self._annotated(found.text, found.node.returns)

    def _local(self, name: str, depth: int) -> Typed | None:
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if self.owner is not None and positional and positional[0].arg == name:
            return Typed(self.owner)
        for argument in (*positional, *arguments.kwonlyargs):
            if argument.arg == name:
                return self._annotated(self.text, argument.annotation)
        for value, annotation, many in _bindings(self.node).names.get(name, ()):
            if annotation is not None:
                found = self._annotated(self.text, annotation)
            else:
                found = self.of(value, depth - 1) if value is not None else None
                found = Typed(found.of) if found is not None and many else None if many else found
            if found is not None:
                return found
        return None

    def _attribute(self, owner: Defined, name: str, depth: int) -> Typed | None:
        """What a class says of an attribute: in its body, as a property, or where a method sets it."""
        if (owner.name, name) in self._busy or depth <= 0:
            return None
        self._busy.add((owner.name, name))
        try:
            return next((found for one in chain(self.lane, owner) if (found := self._said(one, name, depth))), None)
        finally:
            self._busy.discard((owner.name, name))

    def _said(self, one: Defined, name: str, depth: int) -> Typed | None:
        for statement in getattr(one.node, "body", ()):
            if isinstance(statement, ast.AnnAssign) and getattr(statement.target, "id", "") == name:
                return self._annotated(one.text, statement.annotation)
        for node in definitions(one.node):
            if not isinstance(node, Function):
                continue
            if node.name == name and any(
                getattr(d, "id", "") in {"property", "cached_property"} for d in node.decorator_list
            ):
                return self._annotated(one.text, node.returns)
            inner = Types(self.lane, one.text, node, one, self._busy)
            for value, annotation, many in _bindings(node).attributes.get(name, ()):
                if many:
                    continue
                found = self._annotated(one.text, annotation) if annotation is not None else None
                found = found or (inner.of(value, depth - 1) if value is not None else None)
                if found is not None:
                    return found
        return None

    def _annotated(self, text: ModuleText, annotation: ast.expr | None) -> Typed | None:
        """The class that an annotation names; of ``X | None`` it is X, of ``list[X]`` many X."""
        if annotation is None:
            return None
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                return self._annotated(text, ast.parse(annotation.value, mode="eval").body)
            except SyntaxError:
                return None
        if isinstance(annotation, ast.BinOp):
            return self._annotated(text, annotation.left) or self._annotated(text, annotation.right)
        if isinstance(annotation, ast.Subscript):
            outer = getattr(annotation.value, "id", getattr(annotation.value, "attr", ""))
            inner = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
            if outer == "Optional":
                return self._annotated(text, inner)
            if outer in _MANY and (outer != "tuple" or _open(annotation.slice)):
                found = self._annotated(text, inner)
                return Typed(found.of, many=True) if found is not None else None
            return self._annotated(text, annotation.value)
        if isinstance(annotation, ast.Name):
            named = lookup(self.lane, text, annotation.id)
            return Typed(named) if isinstance(named, Defined) and isinstance(named.node, ast.ClassDef) else None
        return None


def _open(inner: ast.expr) -> bool:
    """``tuple[X, ...]``."""
    return isinstance(inner, ast.Tuple) and getattr(inner.elts[-1], "value", None) is Ellipsis


Value = tuple[ast.expr | None, ast.expr | None, bool]


@dataclass
class _Bound:
    """What one function binds: names, and attributes of its first parameter."""

    names: dict[str, list[Value]] = field(default_factory=dict)
    attributes: dict[str, list[Value]] = field(default_factory=dict)


_bound: WeakKeyDictionary[FunctionNode, _Bound] = WeakKeyDictionary()


def _bindings(node: FunctionNode) -> _Bound:
    """Every value that a function gives to a name or keeps in an attribute; found once."""
    found = _bound.get(node)
    if found is not None:
        return found
    found = _Bound()
    first = node.args.args[0].arg if node.args.args else ""
    for inner in own_nodes(node):
        if isinstance(inner, (ast.For, ast.AsyncFor, ast.comprehension)):
            pairs: list[tuple[ast.expr, Value]] = [(inner.target, (inner.iter, None, True))]
        elif isinstance(inner, ast.Assign):
            pairs = [(target, (inner.value, None, False)) for target in inner.targets]
        elif isinstance(inner, ast.AnnAssign):
            pairs = [(inner.target, (inner.value, inner.annotation, False))]
        elif isinstance(inner, ast.NamedExpr):
            pairs = [(inner.target, (inner.value, None, False))]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name):
                found.names.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == first:
                found.attributes.setdefault(target.attr, []).append(value)
    _bound[node] = found
    return found

"""What a caller of a function relies on: its parameters, what it returns, and what it does, each as a short text.

Two texts are equal where a caller cannot tell the difference: formatting, comments, docstrings and annotations do not
count; an annotation does where it says how many things are returned.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from balance_patcher.source import Lane
from balance_patcher.targets import FunctionNode, own_nodes

from .lookup import Defined, chain, member


@dataclass(frozen=True)
class Shape:
    """One callee.

    Attributes:
        name: ``module:Qual.name``.
        path: Its file, with the ``line`` of the definition and the ``last`` of it.
        parameters: As they are called, ``(self, request, *, count=None)``; of a class, those of its constructor.
        returns: ``one value``, ``nothing``, ``a tuple of 2``, ``a generator`` …; several, where paths differ.
        kind: ``method``, ``static method``, ``property`` …: how it is bound.
        body: A digest of what it does.
    """

    name: str
    path: str
    line: int
    last: int
    parameters: str
    returns: str
    kind: str
    body: str


def shape_of(lane: Lane, found: Defined) -> Shape:
    """The shape of a function, or of a class as it is called."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        made = member(lane, found, "__init__")
        if made is None or not isinstance(made.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            fields = f"({', '.join(_fields(lane, found))})"
            return Shape(
                found.name, found.text.path, node.lineno, node.end_lineno or 0, fields, "an instance", "class", ""
            )
        inner = shape_of(lane, made)
        called = _without_first(made.node.args)
        return Shape(found.name, inner.path, inner.line, inner.last, called, "an instance", "class", inner.body)
    kind = kind_of(node, method=found.owner is not None)
    bound = found.owner is not None and kind != "static method"
    parameters = _without_first(node.args) if bound else f"({_bare(node.args)})"
    return Shape(
        found.name, found.text.path, node.lineno, node.end_lineno or 0, parameters, returns(node), kind, _body(node)
    )


def kind_of(node: FunctionNode, *, method: bool) -> str:
    """How a function is bound, and how it is run."""
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    kinds = {"staticmethod": "static method", "classmethod": "class method", "property": "property"}
    found = next((kinds[name] for name in kinds if name in names), "method" if method else "function")
    return f"async {found}" if isinstance(node, ast.AsyncFunctionDef) else found


def returns(node: FunctionNode) -> str:
    """How many things a function hands back."""
    inner = list(own_nodes(node))
    if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inner):
        return "a generator"
    values = [one.value for one in inner if isinstance(one, ast.Return)]
    said = _annotated(node.returns)
    found = {_handed(value, said) for value in values} or {"nothing"}
    return " or ".join(sorted(found))


def _handed(value: ast.expr | None, said: str) -> str:
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return "nothing"
    if isinstance(value, ast.Tuple) and not any(isinstance(item, ast.Starred) for item in value.elts):
        return f"a tuple of {len(value.elts)}"
    return said or "one value"


def _annotated(annotation: ast.expr | None) -> str:
    """``a tuple of 2`` for ``tuple[X, int]``; empty where an annotation says no such thing."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return ""
    if not isinstance(annotation, ast.Subscript):
        return ""
    outer = getattr(annotation.value, "id", getattr(annotation.value, "attr", ""))
    inner = annotation.slice
    if outer not in {"tuple", "Tuple"}:
        return ""
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    open_end = getattr(parts[-1], "value", None) is Ellipsis if parts else False
    return "" if open_end else f"a tuple of {len(parts)}"


def _bare(arguments: ast.arguments) -> str:
    """Parameters without annotations."""
    bare = copy.deepcopy(arguments)
    every = [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, *filter(None, [bare.vararg, bare.kwarg])]
    for argument in every:
        argument.annotation = None
    return ast.unparse(bare)


def _without_first(arguments: ast.arguments) -> str:
    """Parameters as a caller passes them: what is bound is left out."""
    bare = copy.deepcopy(arguments)
    first = bare.posonlyargs or bare.args
    if first:
        del first[0]
    while len(bare.defaults) > len(bare.posonlyargs) + len(bare.args):
        del bare.defaults[0]
    return f"({_bare(bare)})"


_UNSAID = {"returns", "annotation", "decorator_list", "type_comment", "ctx", "kind", "type_params"}


def _body(node: FunctionNode) -> str:
    """A digest of the statements, without docstrings and annotations."""
    parts: list[str] = []
    _say(node, parts)
    return hashlib.sha256(" ".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _say(value: object, parts: list[str]) -> None:
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for name in value._fields:
            if name not in _UNSAID:
                _say(getattr(value, name, None), parts)
        parts.append(")")
    elif isinstance(value, list):
        parts.append("[")
        for item in value:
            if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)):
                _say(item, parts)
        parts.append("]")
    else:
        parts.append(repr(value))


def _fields(lane: Lane, found: Defined) -> Iterator[str]:
    """The fields of a dataclass as parameters, those of bases first."""
    names: dict[str, str] = {}
    for one in reversed(list(chain(lane, found))):
        for statement in getattr(one.node, "body", ()):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if "ClassVar" in ast.unparse(statement.annotation):
                continue
            name = statement.target.id
            names[name] = name if statement.value is None else f"{name}={ast.unparse(statement.value)}"
    yield from names.values()

"""What a piece of Python defines and binds in its own scope, told from its tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Fields that never hold a node, or only what says of their own that it is loaded, stored, added or compared.
_PLAIN = {"ctx", "op", "ops", "id", "attr", "kind", "type_comment", "level", "module", "asname", "conversion", "simple"}
#: For each kind of node that was met, the fields that can.
_HOLDING: dict[type[ast.AST], tuple[str, ...]] = {}
#: What binds nothing and holds nothing that does.
_EMPTY = (ast.Constant, ast.Pass)


def children(node: ast.AST) -> list[ast.AST]:
    """What :func:`ast.iter_child_nodes` gives, but contexts and operators; a module has ten thousand nodes and more."""
    found: list[ast.AST] = []
    kind = type(node)
    if kind not in _HOLDING:
        _HOLDING[kind] = () if kind is ast.Constant else tuple(name for name in kind._fields if name not in _PLAIN)
    for name in _HOLDING[kind]:
        value = getattr(node, name, None)
        if type(value) is list:
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """What :func:`ast.walk` gives, in its order, but contexts and operators: a node comes before its parts."""
    todo = [node]
    for at in todo:
        todo += children(at)
        yield at


def definitions(scope: ast.AST) -> Iterator[ast.AST]:
    """The classes and functions that a scope defines itself, under ``if`` and ``try`` too."""
    for child in children(scope):
        if isinstance(child, DEFINITIONS):
            yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from definitions(child)


def stored(tree: ast.AST) -> Iterator[str]:
    """The names that the parts of a node bind where it stands; what they bind in scopes of their own is not told."""
    for node in children(tree):
        if isinstance(node, _EMPTY):
            continue
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, (ast.Store, ast.Del)):
                yield node.id
            continue
        if isinstance(node, _COMPREHENSIONS):
            yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
            continue
        if isinstance(node, (*DEFINITIONS, ast.Lambda)):
            yield from _header(node)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            yield from (name for name in names if name != "*")
        elif (isinstance(node, ast.ExceptHandler) and node.name) or (
            isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name
        ):
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        yield from stored(node)


def _header(node: ast.AST) -> Iterator[str]:
    """The name of a definition, and what is bound by what is evaluated where it stands: not by its body."""
    parts: list[ast.AST | None] = [*getattr(node, "decorator_list", ())]
    if isinstance(node, ast.ClassDef):
        yield node.name
        parts += [*node.bases, *node.keywords]
    elif isinstance(node, (*_FUNCTIONS, ast.Lambda)):
        parts += [*node.args.defaults, *node.args.kw_defaults]
        if not isinstance(node, ast.Lambda):
            yield node.name
    for part in parts:
        if isinstance(part, ast.AST):
            yield from stored(ast.Expression(part))  # type: ignore[arg-type]

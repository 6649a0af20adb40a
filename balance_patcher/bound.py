"""What a piece of Python defines and binds in its own scope, told from its tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: Fields that never hold a node, or only what says of their own that it is loaded, stored, added or compared.
_PLAIN = {"ctx", "op", "ops", "id", "attr", "kind", "type_comment", "level", "module", "asname", "conversion", "simple"}
#: For each kind of node that was met, the fields that can.
_HOLDING: dict[type[ast.AST], tuple[str, ...]] = {}
#: What binds nothing and holds nothing that does.
_EMPTY = (ast.Constant, ast.Pass)
#: The most frequent statements below which there are none.
_FLAT = (ast.Expr, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Return)


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


def begins_at(node: ast.stmt) -> int:
    """The line of a statement, or of the first of its decorators: ``co_firstlineno`` of a definition."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def words_at(text: str, word: str) -> Iterator[int]:
    """Where a word stands in a text, not as a part of another; an expression for each would take longer to make."""
    at = text.find(word)
    while at >= 0:
        beside = text[max(at - 1, 0) : at] + text[at + len(word) : at + len(word) + 1]
        if not any(character.isalnum() or character == "_" for character in beside):
            yield at
        at = text.find(word, at + 1)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """What :func:`ast.walk` gives, in its order, but contexts and operators: a node comes before its parts."""
    todo = [node]
    for at in todo:
        todo += children(at)
        yield at


def suites_of(statement: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The suites directly below a statement, each with its field; those of handlers and cases among them."""
    for name in ("body", "orelse", "finalbody"):
        suite = getattr(statement, name, None)
        if isinstance(suite, list) and suite:
            yield name, suite
    for name in ("handlers", "cases"):
        for part in getattr(statement, name, ()):
            yield name, part.body


def attributes_set(function: ast.AST, *, nested: bool) -> Iterator[ast.Attribute]:
    """The attributes that the statements of a function give a value; one that is only annotated gets none.

    Args:
        function: Its definition.
        nested: Also those of functions and classes in it.
    """
    todo: list[ast.AST] = [function]
    for at in todo:
        for _, suite in suites_of(at):
            todo += suite if nested else (one for one in suite if not isinstance(one, DEFINITIONS))
        for target in _targets(at):
            # What stands in a subscript, or before a dot, is read.
            found = (target,) if isinstance(target, ast.Attribute) else walk(target)
            yield from (n for n in found if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))


def _targets(statement: ast.AST) -> Iterable[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    if isinstance(statement, ast.AnnAssign):
        return () if statement.value is None else (statement.target,)
    if isinstance(statement, (ast.AugAssign, ast.For, ast.AsyncFor)):
        return (statement.target,)
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [item.optional_vars for item in statement.items if item.optional_vars is not None]
    return ()


def definitions(scope: ast.AST) -> Iterator[ast.AST]:
    """The classes and functions that a scope defines itself, under ``if`` and ``try`` too."""
    suites = [suite for _, suite in suites_of(scope)]
    if len(suites) > 2:  # noqa: PLR2004 - handlers stand between the body and what follows it
        suites.sort(key=lambda suite: suite[0].lineno)
    for suite in suites:
        for child in suite:
            if isinstance(child, DEFINITIONS):
                yield child
            elif not isinstance(child, _FLAT):
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

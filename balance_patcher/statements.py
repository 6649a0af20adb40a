"""Statements and their suites, as a comparison looks at them: formatting, comments and docstrings do not exist."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from .bound import suites_of
from .render import head
from .targets import SCOPES

_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.ExceptHandler, ast.match_case)


def function_of(body: Sequence[ast.stmt]) -> ast.FunctionDef:
    """A function with these very statements, so that a module and a class are looked at as a function is."""
    made = ast.parse("def scope(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)  # noqa: S101 - it was just parsed
    made.body = list(body)
    return made


def suites(node: ast.AST) -> Iterator[tuple[str, Sequence[ast.AST]]]:
    """The suites below a statement by name; ``except`` and ``case`` clauses are statements of a suite of their own."""
    for name, suite in suites_of(node):
        if name not in {"handlers", "cases"}:
            yield name, suite
    for name in ("handlers", "cases"):
        clauses = getattr(node, name, None)
        if clauses:
            yield name, clauses


def doing(suite: Sequence[ast.AST]) -> list[ast.AST]:
    return [node for node in suite if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def does_nothing(node: ast.AST) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def header(node: ast.AST) -> str:
    """A statement's text without its suites."""
    bare = copy.copy(node)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(bare, name, None), list):
            setattr(bare, name, [])
    return f"{type(node).__name__} {ast.unparse(bare)}"


def line(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef):
        return header(node).splitlines()[-1].removeprefix("ClassDef ").rstrip(":")
    return head(node).rstrip(":")


def without_keywords(statement: ast.AST) -> ast.AST:
    bare = copy.copy(statement)
    call = copy.copy(bare.value)  # type: ignore[attr-defined]
    call.keywords = []
    bare.value = call  # type: ignore[attr-defined]
    return bare


def leaves(node: ast.AST) -> bool:
    """Whether a statement leaves a loop or the function that it stands in, or holds one that does."""
    if isinstance(node, SCOPES):
        return False
    return isinstance(node, _LEAVING) or any(map(leaves, ast.iter_child_nodes(node)))


def alike(one: ast.AST, other: ast.AST) -> bool:
    """Whether two statements are of one kind and hold the same kinds of statements."""
    kinds = [[[type(statement) for statement in suite] for _, suite in suites_of(node)] for node in (one, other)]
    return type(one) is type(other) and kinds[0] == kinds[1]

"""What the names of a module are: where each that it imports or defines comes from.

A copy runs in the module that it stands in, so a name means there what that module makes of it. A copied
line is upstream's line only where its names are upstream's names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from .source import Lane, ModuleText
from .standin import StandIn

_IMPORTS = (ast.Import, ast.ImportFrom)


def imported(node: ast.stmt, package: str) -> Iterator[tuple[str, str]]:
    """Each name that an import binds and what it is: ``module`` or ``module:name``; ``*`` binds what it likes.

    Args:
        node: Any statement; one that is no import binds nothing here.
        package: The package of its module.
    """
    if isinstance(node, ast.Import):
        for name in node.names:
            yield name.asname or name.name.partition(".")[0], name.name
    elif isinstance(node, ast.ImportFrom):
        parts = package.split(".")
        above = parts[: len(parts) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for name in node.names:
            yield name.asname or name.name, f"{module}:{name.name}"


class Origins:
    """What the names of a stand-in's module have to be."""

    def __init__(self, stand_in: StandIn, upstream: Lane) -> None:
        self._declared = stand_in.imports
        modules = dict.fromkeys(target.partition(":")[0] for target in stand_in.copies.values())
        self._tables = [_names(text) for text in map(upstream.module, modules) if text is not None]

    def strange(self, node: ast.stmt, package: str) -> list[str]:
        """What an import brings that is neither declared nor upstream's, for a person."""
        return [
            f"{name} = {origin}" for name, origin in imported(node, package)
            if name == "*" or not self._allowed(name, origin)
        ]  # fmt: skip

    def _allowed(self, name: str, origin: str) -> bool:
        if name in self._declared:
            return self._declared[name] == origin
        tables = [table[name] for table in self._tables if name in table]
        return bool(tables) and all(origin in table for table in tables)


def _names(text: ModuleText) -> Mapping[str, frozenset[str]]:
    """For each name of a module, what it may be there; conditional imports make it more than one thing."""
    package = text.module.rpartition(".")[0]
    found: dict[str, set[str]] = {}
    for statement in _own(text.tree.body):
        for name, origin in imported(statement, package):
            found.setdefault(name, set()).add(origin)
        for name in _defined(statement):
            found.setdefault(name, set()).add(f"{text.module}:{name}")
    return {name: frozenset(origins) for name, origins in found.items()}


def _own(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run in the module itself, under ``if`` and ``try`` too."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.stmt):
                    yield from _own([child])
                elif isinstance(child, ast.ExceptHandler):
                    yield from _own(child.body)


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def is_import(node: ast.AST) -> bool:
    return isinstance(node, _IMPORTS)

"""The names of one function: those that are its own, those that it uses, and those of its module."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .alone import symbols_of
from .bound import words_at
from .delta import is_private
from .source import ModuleText
from .targets import Target


def in_class(name: str, owner: ast.ClassDef | None) -> str:
    """What a name means in the methods of a class: a private one begins with the class's."""
    own = owner.name.lstrip("_") if owner is not None else ""
    return f"_{own}{name}" if own and is_private(name) else name


def known_in(text: ModuleText) -> set[str]:
    """The names that a module itself has."""
    return {*text.bound, "__name__", "__file__", "__doc__"}


@dataclass
class Scope:
    """What names a target's function and module have."""

    target: Target

    @cached_property
    def module(self) -> frozenset[str]:
        return frozenset(known_in(self.target.text))

    @cached_property
    def _symbols(self) -> symtable.SymbolTable:
        return symbols_of(self.target.text, self.target.qualname, self.target.node)

    @cached_property
    def local(self) -> frozenset[str]:
        symbols = self._symbols.get_symbols()
        return frozenset(s.get_name() for s in symbols if s.is_local() or s.is_parameter() or s.is_free())

    @cached_property
    def parameters(self) -> frozenset[str]:
        arguments = self.target.node.args
        each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        return frozenset(in_class(a.arg, self.target.owner) for a in each if a is not None)

    def uses(self, name: str) -> bool:
        """Whether a name stands anywhere in the function, in nested scopes too."""
        return self._may_hold(name) and name in self._everywhere

    def binds(self, name: str) -> bool:
        """Whether a name is the function's own: a parameter, a local one, or one of the scope around it."""
        if name in self.parameters or name in self._assigned:
            return True
        return self._may_hold(name, bound=True) and name in self.local

    @cached_property
    def _assigned(self) -> frozenset[str]:
        """Names that statements of its own assign to; none where one may be declared to be another scope's."""
        if "global" in self.target.own_text or "nonlocal" in self.target.own_text:
            return frozenset()
        statements = (suite[at] for _, _, suite, at in self.target.places.values())
        targets = (target for one in statements if isinstance(one, ast.Assign) for target in one.targets)
        return frozenset(in_class(one.id, self.target.owner) for one in targets if isinstance(one, ast.Name))

    @cached_property
    def _everywhere(self) -> frozenset[str]:
        return frozenset(_all_symbols(self._symbols))

    def _may_hold(self, name: str, *, bound: bool = False) -> bool:
        """Whether the function's text leaves room for a name. To ask for all its symbols takes a hundred times longer.

        A private name is written in another way than it is called, and so may be one with letters of others.

        Args:
            name: As it is called.
            bound: Whether it must get a meaning there: an attribute does not, nor what is only called.
        """
        private = "__" in name and not name.endswith("__")
        if private or not self.target.plain:
            return True
        return any(
            not bound or _may_bind(self.target.own_text, at, at + len(name))
            for at in words_at(self.target.own_text, name)
        )

    def line_of(self, name: str) -> int:
        for tree in (self.target.node, self.target.text.tree):
            for node in ast.walk(tree):
                if name in _named(node):
                    return node.lineno  # type: ignore[attr-defined, no-any-return]
        return self.target.node.lineno


def _may_bind(text: str, at: int, end: int) -> bool:
    """Whether the word there can be one that gets a meaning."""
    code, sign, _ = text[text.rfind("\n", 0, at) + 1 : at].partition("#")
    if sign and not ('"' in code or "'" in code):
        return False  # in a comment
    before, after = text[max(0, at - 40) : at], text[end : end + 40]
    defined = before.split()[-1:] in (["def"], ["class"])
    return defined or not (before.endswith(".") or after.lstrip().startswith("("))


def _named(node: ast.AST) -> set[object]:
    """The identifiers that a node itself holds, attributes left out."""
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return set(node.names)
    return {getattr(node, field, None) for field in ("id", "arg", "name", "rest")} - {None}


def _all_symbols(table: symtable.SymbolTable) -> Iterator[str]:
    yield from (symbol.get_name() for symbol in table.get_symbols())
    for child in table.get_children():
        yield from _all_symbols(child)

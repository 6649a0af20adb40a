"""The covers of one function: which of them a statement uses, in their order, each for one statement.

A cover says more than that a statement is known. It says where it stands: what is around it, what is right
beside it, and what may stand before it. A known statement in another place does something else.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .anchors import Match, all_places, beside
from .matching import Bound
from .standin import Cover
from .targets import Target


class Covers:
    """The covers of one place, used up from the first to the last as its text is read."""

    def __init__(self, target: Target, covers: Sequence[Cover]) -> None:
        self._covers = covers
        self._found: dict[int, list[int]] = {}
        self._near: dict[int, str] = {}
        self._last = -1
        for at, cover in enumerate(covers):
            for match in all_places(target, cover.anchor):
                (statement,) = match.statements
                # An expression covers itself and the statement that it is, never one that only contains it.
                nodes = [match.node]
                if isinstance(statement, ast.Expr) and statement.value is match.node:
                    nodes.append(statement)
                wrong = _wrong(target, cover, match)
                for node in nodes:
                    if wrong is None:
                        self._found.setdefault(id(node), []).append(at)
                    else:
                        self._near.setdefault(id(node), wrong)

    def use(self, node: ast.AST) -> Cover | None:
        """The cover of a statement that comes next in the text, if it has one that was not passed yet."""
        at = next((at for at in self._found.get(id(node), ()) if at > self._last), None)
        if at is None:
            return None
        self._last = at
        return self._covers[at]

    def use_all(self, nodes: Sequence[ast.AST]) -> list[Cover] | None:
        """The covers of several, or ``None`` and nothing used."""
        before = self._last
        used = [cover for cover in map(self.use, nodes) if cover is not None]
        if len(used) < len(nodes):
            self._last = before
            return None
        return used

    def why_not(self, node: ast.AST) -> str:
        """Why a statement that looks like a known one has no cover; empty where it is simply unknown."""
        if id(node) in self._found:
            return "it is known, but not a second time, and not after what stands before it here"
        return self._near.get(id(node), "")


def _wrong(target: Target, cover: Cover, match: Match) -> str | None:
    """What is wrong with a place that a cover's pattern matches."""
    for name, bound in match.bound.items():
        if not _plain(bound):
            return f"${name} stands for a name, an attribute or a constant"
    placed = beside(target, cover.anchor, match)
    return placed if isinstance(placed, str) else None


def _plain(bound: Bound) -> bool:
    """Whether something is only looked up: a name, an attribute of one, a constant, or several of those."""
    if isinstance(bound, tuple):
        return all(map(_plain, bound))
    if isinstance(bound, ast.Attribute):
        return _plain(bound.value)
    return isinstance(bound, (str, ast.Name, ast.Constant, ast.cmpop))

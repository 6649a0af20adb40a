"""What became of an anchor's statement in another version of its function.

The statement is looked for as a person would: where it stood, by what stands around it. So that it was changed is told
apart from that it went, and either from that it stands somewhere else.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from dataclasses import dataclass

from balance_patcher.anchors import Match, all_places, beside, find_anchor
from balance_patcher.bound import suites_of
from balance_patcher.delta import Anchor
from balance_patcher.errors import PatchError
from balance_patcher.matching import Matcher, Mismatch
from balance_patcher.pointing import counterpart
from balance_patcher.proposal import Place
from balance_patcher.render import head
from balance_patcher.source import ModuleText
from balance_patcher.statements import header
from balance_patcher.targets import Function, Target

from .changed import Difference
from .kinds import Kind

_WIDEST = 160  # characters of a reason


@dataclass(frozen=True)
class Fate:
    """What became of it.

    Attributes:
        kind: ``MOVED``, ``CHANGED``, ``AMBIGUOUS`` or ``GONE``; ``VARIANT``, where it is as it was.
        said: In words.
        text: The module that the new place is in.
        node: The new place, if there is one.
        function: The function that it stands in, where that is another one than the target.
        difference: Where its tree differs.
    """

    kind: Kind
    said: str
    text: ModuleText
    node: ast.AST | None = None
    function: str = ""
    difference: Difference | None = None


def fate_of(anchor: Anchor, old: Target, match: Match, new: Target) -> Fate:
    """What became of a matched anchor in a newer target."""
    statement = match.statements[0]
    found, misses = find_anchor(new, anchor)
    if len(found) == 1:
        return Fate(Kind.VARIANT, "the anchor stands there as it stood", new.text, found[0].node)
    other = other_place(Place("", old, statement), new)
    if len(found) > 1:
        lines = ", ".join(str(getattr(one.node, "lineno", "?")) for one in found)
        fitting = [one.node for one in found if not isinstance(beside(new, anchor, one), str)]
        own = fitting[0] if len(fitting) == 1 and (anchor.after or anchor.before) else other
        node = own if own is not None else found[0].node
        return Fate(Kind.AMBIGUOUS, f"the anchor is found {len(found)} times, in lines {lines}", new.text, node)
    elsewhere = next((miss for miss in misses if miss.code == "BP117" and _is(miss.node, statement)), None)
    if elsewhere is not None:
        return Fate(Kind.MOVED, f"the anchor's statement {_moved(elsewhere.reason)}", new.text, elsewhere.node)
    outside = _outside(anchor, old, statement, new) if other is None or header(other) != header(statement) else None
    if outside is not None:
        function, node = outside
        return Fate(Kind.MOVED, f"the anchor's statement stands in `{function}` now", new.text, node, function)
    if other is None:
        return Fate(Kind.GONE, f"nothing in {new.qualname} is like `{head(statement)}`", new.text)
    difference = difference_of(statement, other, anchor)
    if difference is None:
        return Fate(Kind.MOVED, f"`{head(statement)}` stands in another place", new.text, other)
    return Fate(Kind.CHANGED, f"`{head(statement)}` became `{head(other)}`", new.text, other, "", difference)


def other_place(place: Place, new: Target) -> ast.stmt | None:
    """The statement of a newer target that is this one, changed or not."""
    try:
        return counterpart(place, "", new).statement
    except PatchError:
        return None


def difference_of(old: ast.stmt, new: ast.stmt, anchor: Anchor | None = None) -> Difference | None:
    """Where two statements first differ; by the anchor's pattern, where that sees a difference."""
    if anchor is not None and anchor.compiled.kind != "expression":
        pattern = anchor.compiled
        result = pattern.match(new, {}, anchor.allow) if pattern.kind != "statements" else None
        if isinstance(result, Mismatch):
            return Difference(result.path, result.wanted, result.found)
    compound = any(suites_of(old)) and any(suites_of(new))
    result = Matcher({}).node(copy.copy(old), new, {}, "", header=compound)
    if isinstance(result, Mismatch):
        return Difference(result.path, result.wanted, result.found)
    whole = Matcher({}).node(copy.copy(old), new, {}, "")
    return Difference(whole.path, whole.wanted, whole.found) if isinstance(whole, Mismatch) else None


def _is(node: ast.AST, statement: ast.stmt) -> bool:
    """Whether a candidate is the old statement, or an expression of it."""
    return not isinstance(node, ast.stmt) or header(node) == header(statement)


def _moved(reason: str) -> str:
    """As it follows on "the anchor's statement"."""
    short = textwrap.shorten(reason, _WIDEST, placeholder=" …")
    return f"is there, but {short}" if reason.startswith("the statement") else short


def _outside(anchor: Anchor, old: Target, statement: ast.stmt, new: Target) -> tuple[str, ast.AST] | None:
    """Another function of the module that has the anchor's very statement, and did not have it before."""
    bare = Anchor(anchor.pattern, allow=anchor.allow)
    wanted = header(statement)
    before = {node.name for node in ast.walk(old.text.tree) if isinstance(node, Function) and _has(node, wanted)}
    for node in ast.walk(new.text.tree):
        if not isinstance(node, Function) or node.name == new.node.name or node.name in before:
            continue
        places = all_places(Target(new.text, node.name, node, None), bare)
        if len(places) == 1 and header(places[0].statements[0]) == wanted:
            return node.name, places[0].node
    return None


def _has(function: ast.AST, wanted: str) -> bool:
    return any(isinstance(node, ast.stmt) and header(node) == wanted for node in ast.walk(function))

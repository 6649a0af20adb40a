"""Find where an anchor stands in a target, and what comes near it where it does not.

Exactly one match or none: there is no fuzz. A near miss is only for the text of the refusal.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .bound import suites_of
from .delta import Anchor
from .matching import LIST, ONE, Bindings, Bound, Mismatch, hole_name
from .pattern import Pattern, compile_pattern
from .render import head
from .targets import Target

_NEAR = 0.55  # a candidate that scores less than this is not worth naming
# What standing in the right place, or doing the right thing, adds to how much of the pattern a candidate has.
_IN_PLACE, _BESIDE, _SUITES = 0.6, 0.1, 0.5
CHANGED = 1.4  # from here on a candidate is the anchor itself, changed where it stands


@dataclass(frozen=True)
class Match:
    """One place where an anchor stands.

    Attributes:
        statements: The matched run of statements; for an expression, the statement that holds it.
        levels: The anchor's named levels.
        bound: What the holes are bound to.
        node: The matched node itself.
    """

    statements: tuple[ast.stmt, ...]
    levels: dict[str, ast.stmt]
    bound: Bindings
    node: ast.AST

    def at(self, name: str) -> tuple[ast.stmt, ...]:
        return self.statements if name == "anchor" else (self.levels[name],)


@dataclass(frozen=True)
class Miss:
    """A candidate that is no match: what differs, and how near it is (2 and more: only its place differs)."""

    node: ast.AST
    code: str
    reason: str
    score: float


def find_anchor(target: Target, anchor: Anchor, *, near: bool = True) -> tuple[list[Match], list[Miss]]:
    """All places of an anchor in a target, and, where it is not found once, the candidates that come near.

    Args:
        target: Where to look.
        anchor: What to look for.
        near: Whether a refusal may have to name them. To compare every statement costs far more than to match.
    """
    matches: list[Match] = []
    misses: list[Miss] = []
    pattern = anchor.compiled
    for node, statements in _of_its_kind(target, pattern):
        result = pattern.match(statements if pattern.kind == "statements" else node, {}, anchor.allow)
        if isinstance(result, Mismatch):
            continue
        placed = _inside(target, anchor, statements, result)
        if isinstance(placed, str):
            misses.append(Miss(node, "BP117", placed, 2.0))
        else:
            matches.append(Match(tuple(statements), placed[0], placed[1], node))
    if len(matches) == 1:
        found = beside(target, anchor, matches[0])
        if not isinstance(found, str):
            return [found], misses
        return [], [*misses, Miss(matches[0].node, "BP117", found, 3.0)]
    return matches, [*misses, *_near_misses(target, anchor)] if near and not matches else misses


def all_places(target: Target, anchor: Anchor) -> list[Match]:
    """Every place of an anchor, however often it stands; what stands beside it is not looked at."""
    found = []
    pattern = anchor.compiled
    for node, statements in _of_its_kind(target, pattern):
        result = pattern.match(statements if pattern.kind == "statements" else node, {}, anchor.allow)
        placed = "" if isinstance(result, Mismatch) else _inside(target, anchor, statements, result)
        if not isinstance(placed, str):
            found.append(Match(tuple(statements), placed[0], placed[1], node))
    return found


def _near_misses(target: Target, anchor: Anchor) -> list[Miss]:
    pattern = anchor.compiled
    found = []
    for node, statements in _candidates(target, pattern):
        score = pattern.similarity(node, anchor.allow) + _SUITES * _same_suites(pattern.nodes[0], node)
        if not isinstance(_inside(target, anchor, statements, {}), str):
            score += _IN_PLACE if anchor.inside else 0.0
            score += _BESIDE * (not isinstance(beside(target, anchor, Match(tuple(statements), {}, {}, node)), str))
        if score >= _NEAR:
            result = pattern.match(statements if pattern.kind == "statements" else node, {}, anchor.allow)
            if isinstance(result, Mismatch):
                found.append(Miss(node, _code_of(result, pattern, statements), str(result), score))
    return found


def _same_suites(wanted: ast.AST, node: ast.AST) -> bool:
    """Whether a compound statement has statements of the same kinds in it, ``break`` and ``break``."""
    kinds = [[[type(statement) for statement in suite] for _, suite in suites_of(item)] for item in (wanted, node)]
    return type(wanted) is type(node) and kinds[0] == kinds[1] != []


def _candidates(target: Target, pattern: Pattern) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    if pattern.kind == "expression":
        yield from target.expressions
        return
    size = len(pattern.nodes) if pattern.kind == "statements" else 1
    kind = type(pattern.nodes[0])
    for _, _, suite, at in target.places.values():
        statement = suite[at]
        if at + size <= len(suite) and (type(statement) is kind or kind is ast.Expr):
            yield statement, suite[at : at + size]


def _of_its_kind(target: Target, pattern: Pattern) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """The candidates that can match: a pattern's first node is of the kind that it matches, unless it is a hole."""
    if not target.may_hold(pattern.words):
        return
    first = pattern.nodes[0]
    if hole_name(first, ONE) is not None or hole_name(first, LIST) is not None:
        yield from _candidates(target, pattern)
        return
    size = len(pattern.nodes) if pattern.kind == "statements" else 1
    for node, suite, at in target.of_kind(type(first), pattern.words):
        # What differs is told of near misses only; here it is enough that something does.
        if at + size <= len(suite) and all(
            type(part := getattr(node, name)) is kind and (not attribute or getattr(part, "attr", "") == attribute)
            for name, kind, attribute in pattern.sketch
        ):
            yield node, suite[at : at + size]


def _code_of(miss: Mismatch, pattern: Pattern, statements: Sequence[ast.stmt]) -> str:
    """Which refusal a first difference stands for."""
    within = re.match(r"statements\[(\d+)\]\.", miss.path)
    at = int(within[1]) if within else 0
    path = miss.path[within.end() :] if within else miss.path
    if path.rpartition(".")[2].startswith("ops["):
        return "BP112"
    if path.startswith("orelse[") and miss.wanted == "nothing":
        return "BP115"
    if path.startswith("body["):
        wanted, found = (len(getattr(node, "body", ())) for node in (pattern.nodes[at], statements[at]))
        return "BP114" if found > wanted else "BP113"
    return "BP101"


def _inside(
    target: Target, anchor: Anchor, statements: Sequence[ast.stmt], bound: dict[str, Bound]
) -> tuple[dict[str, ast.stmt], dict[str, Bound]] | str:
    levels: dict[str, ast.stmt] = {}
    chain = list(target.ancestors(statements[0]))
    for level in reversed(anchor.inside):
        pattern = compile_pattern(level.pattern)
        for at, (parent, name) in enumerate(chain):
            result = pattern.match(parent, bound, anchor.allow)
            if not isinstance(result, Mismatch) and name == "body" and isinstance(parent, ast.stmt):
                bound, levels[level.name], chain = result, parent, chain[at + 1 :]
                if level.outermost and (not chain or chain[0][0] is not target.node):
                    return f"is inside `{pattern}`, but not directly in the function"
                break
            if level.direct:
                found = f"`{head(parent)}`" if parent is not target.node else "the function itself"
                found = found if name == "body" else f"the `{name}` of {found}"
                return f"stands directly in {found}, not in `{pattern}`"
        else:
            return f"is not inside `{pattern}`"
    return levels, bound


def beside(target: Target, anchor: Anchor, match: Match) -> Match | str:
    """The match with what its neighbours bind; or, where they are not the anchor's, what stands there instead."""
    _, _, suite, first = target.places[id(match.statements[0])]
    bound = dict(match.bound)
    for text, at, word in (
        (anchor.after, first - 1, "before"),
        (anchor.before, first + len(match.statements), "after"),
    ):
        if text is None:
            continue
        pattern = compile_pattern(text)
        neighbour = suite[at] if 0 <= at < len(suite) else None
        result = (
            pattern.match(
                neighbour.value if isinstance(neighbour, ast.Expr) and pattern.kind == "expression" else neighbour,
                bound,
                anchor.allow,
            )
            if neighbour is not None
            else None
        )
        if result is None or isinstance(result, Mismatch):
            found = f"`{head(neighbour)}`" if neighbour is not None else "nothing"
            return f"the statement {word} it must be `{pattern}` and is {found}"
        bound = result
    return Match(match.statements, match.levels, bound, match.node)

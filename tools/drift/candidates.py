"""Anchors that might stand for a statement that was changed, was moved, or is there twice; the smallest change first.

None of them is trusted: each is tried on both refs by who asked for it.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from balance_patcher.delta import APART, Anchor, InsertAfter, InsertBefore, Level, Variant
from balance_patcher.errors import PatchError
from balance_patcher.generalise import Common
from balance_patcher.parts import Parts
from balance_patcher.pattern import compile_pattern
from balance_patcher.targets import Target

from .opening import opened, opened_anchor


@dataclass(frozen=True)
class Candidate:
    """An anchor that might do.

    Attributes:
        renamed: What was literal in its pattern, by the hole that stands for it now.
        note: What a person has to look at before it is believed.
        at: Which of the matched statements is the one that is meant.
    """

    anchor: Anchor
    renamed: Mapping[str, str]
    note: str = ""
    at: int = 0


@dataclass(frozen=True)
class Spot:
    """A statement in a target."""

    target: Target
    statement: ast.stmt

    def beside(self, distance: int) -> ast.stmt | None:
        _, _, suite, at = self.target.places[id(self.statement)]
        return suite[at + distance] if 0 <= at + distance < len(suite) else None

    def run(self, length: int) -> list[ast.stmt]:
        _, _, suite, at = self.target.places[id(self.statement)]
        return suite[at : at + length]

    def around(self) -> list[ast.stmt]:
        """The statements around it in whose own body it stands, the outermost first."""
        found = [
            node
            for node, field in self.target.ancestors(self.statement)
            if isinstance(node, ast.stmt) and node is not self.target.node and field == "body"
        ]
        return found[::-1]


def candidates(variant: Variant, old: Spot, new: Spot) -> Iterator[Candidate]:
    """Anchors for the new statement that may stand for the old one too."""
    anchor = variant.anchor
    if anchor is None:
        return
    length = len(anchor.compiled.nodes)
    found = new.run(length) if anchor.compiled.kind == "statements" else new.statement
    first = opened_anchor(anchor, _value(anchor, found))
    if first is None:
        return
    needed = {getattr(edit, "at", "anchor") for edit in variant.edits if not isinstance(edit, APART)}
    for base in (Candidate(first[0], first[1]), *_joined(variant, first[0], first[1], old, new)):
        for inside, said in _levels(base.anchor, new, needed):
            for sides, more in _neighbours(base.anchor, old, new, length):
                try:
                    made = replace(base.anchor, inside=inside, after=sides[0], before=sides[1])
                except PatchError:
                    continue
                yield replace(base, anchor=made, note="; ".join(filter(None, [base.note, said, more])))


def _joined(variant: Variant, anchor: Anchor, renamed: Mapping[str, str], old: Spot, new: Spot) -> Iterator[Candidate]:
    """The anchor with a neighbour taken into its pattern, where what is put in stands on the other side."""
    kinds = {type(edit) for edit in variant.edits if getattr(edit, "at", "") == "anchor"}
    length = len(anchor.compiled.nodes)
    if anchor.compiled.kind in {"expression", "header"}:
        return
    said = "the statement beside it is a part of the anchor now"
    if kinds <= {InsertAfter}:
        for text in [anchor.after] if anchor.after else _common(old.beside(-1), new.beside(-1)):
            made = _with(replace(anchor, after=None), f"{_whole(text)}\n{_whole(anchor.pattern)}")
            if made is not None:
                yield Candidate(made, renamed, said, 1)
    if kinds <= {InsertBefore}:
        for text in [anchor.before] if anchor.before else _common(old.beside(length), new.beside(length)):
            made = _with(replace(anchor, before=None), f"{_whole(anchor.pattern)}\n{_whole(text)}")
            if made is not None:
                yield Candidate(made, renamed, said)


def _whole(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def _with(anchor: Anchor, pattern: str) -> Anchor | None:
    try:
        return replace(anchor, pattern=pattern)
    except PatchError:
        return None


def _value(anchor: Anchor, found: ast.stmt | list[ast.stmt]) -> ast.AST | list[ast.stmt]:
    """What the pattern is matched with: of an expression's own statement, the expression."""
    if anchor.compiled.kind == "expression" and isinstance(found, ast.Expr):
        return found.value
    return found


# -- the levels around it ------------------------------------------------------------------------


def _levels(anchor: Anchor, new: Spot, needed: set[str]) -> Iterator[tuple[tuple[Level, ...], str]]:
    """The levels as they are; then ever less strict about how they stand; then those that are left."""
    levels = anchor.inside
    yield levels, ""
    if any(level.outermost for level in levels):
        yield (
            tuple(replace(level, outermost=False) for level in levels),
            "a level does not stand directly in the function any more: check that what is put before it always runs",
        )
    loose = tuple(replace(level, outermost=False, direct=False) for level in levels)
    if loose != levels:
        yield loose, "something stands between the levels now: check that what is put before one runs on every path"
    opened_levels = _opened_levels(loose, new)
    if opened_levels is not None and opened_levels != loose:
        yield opened_levels, "a level was changed: check that it is still the same loop or branch"
    for count in range(1, len(levels) + 1):
        for left in itertools.combinations(range(len(loose)), len(levels) - count):
            kept = tuple(loose[at] for at in left)
            if needed - {"anchor"} <= {level.name for level in kept}:
                yield kept, "a level is gone: check that the statement is still the one that is meant"


def _opened_levels(levels: tuple[Level, ...], new: Spot) -> tuple[Level, ...] | None:
    """Each level opened for the statement around the new place that is of its kind, the nearest first."""
    around = new.around()
    made: list[Level] = []
    for level in reversed(levels):
        pattern = compile_pattern(level.pattern)
        while around:
            done = opened(pattern, {}, around.pop())
            if done is not None:
                made.append(replace(level, pattern=done.pattern))
                break
        else:
            return None
    return tuple(reversed(made))


# -- what stands beside it -----------------------------------------------------------------------


def _neighbours(
    anchor: Anchor, old: Spot, new: Spot, length: int
) -> Iterator[tuple[tuple[str | None, str | None], str]]:
    """The neighbours as they are declared; then what stands there on both sides; then fewer of them."""
    declared = anchor.after, anchor.before
    yield declared, ""
    said = "it is told from others by what stands beside it"
    after = _common(old.beside(-1), new.beside(-1)) if anchor.after is None else ()
    before = _common(old.beside(length), new.beside(length)) if anchor.before is None else ()
    for text in after:
        yield (text, anchor.before), said
    for text in before:
        yield (anchor.after, text), said
    for one, other in itertools.product(after, before):
        yield (one, other), said
    gone = "a neighbour is not asked for any more: check that the statement is still the one that is meant"
    if anchor.after is not None:
        yield (None, anchor.before), gone
    if anchor.before is not None:
        yield (anchor.after, None), gone
    if None not in declared:
        yield (None, None), gone


def _common(old: ast.stmt | None, new: ast.stmt | None) -> tuple[str, ...]:
    """Patterns of one statement that fit both, the smallest first."""
    if old is None or new is None:
        return ()
    parts = Parts()
    common = Common.of([old, new], parts)
    if common is None or not common.named:
        return ()
    every = frozenset(part.number for part in parts.all)
    found = []
    for kept in (frozenset[int](), parts.free(frozenset()), every):
        try:
            text = common.pattern(kept)
            compile_pattern(text)
        except PatchError:
            continue
        found.append(text)
    return tuple(dict.fromkeys(found))

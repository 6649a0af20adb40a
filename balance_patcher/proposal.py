"""Propose an anchor for a statement: the smallest one that is found exactly once on every lane.

*Smallest* is, in this order: it needs the fewest statements beside the one that it is for; the fewest levels around
it; of a compound statement the header, where that will do; and then the fewest syntax nodes, as
:mod:`balance_patcher.generalise` counts them. The pattern of a statement has at least one of upstream's names or
constants in it, so that a reader sees what it speaks of. Where that leaves several anchors it is the one whose levels
are nearest, and whose parts come first in the text. Nothing is left to chance or to a clock.

It is searched by counter-examples. Take the smallest pattern; ask the project's own matcher; for each statement that
it finds besides, note which parts would keep it out, and take the smallest pattern that has one of them for each. The
matcher is asked on every lane, and what it finds in the end is what is proposed.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .anchors import Match, all_places, find_anchor
from .bound import suites_of
from .delta import Anchor, Level
from .errors import PatchError, refuse
from .generalise import HEADER, WHOLE, Common
from .holes import Hole, fill, scan
from .matching import render_bound
from .parts import Part, Parts, cheapest
from .render import head, shown
from .targets import Target

_AROUND, _BESIDE = 4, 2  # so many levels and neighbours: an anchor that needs more says nothing to a reader


@dataclass(frozen=True)
class Place:
    """One statement of a target on a lane."""

    lane: str
    target: Target
    statement: ast.stmt

    @property
    def where(self) -> str:
        return self.target.where(self.statement)

    def neighbour(self, distance: int) -> ast.stmt | None:
        """The statement so far behind it in its suite; before it, where the distance is negative."""
        _, _, suite, at = self.target.places[id(self.statement)]
        return suite[at + distance] if 0 <= at + distance < len(suite) else None


@dataclass(frozen=True)
class Proposal:
    """An anchor that is found exactly once on every lane.

    Attributes:
        anchor: It.
        places: The statement that it stands for, on each lane.
        matches: What it matches there.
        behind: The statement is the last of the anchor's, so that what is inserted comes after it.
    """

    anchor: Anchor
    places: tuple[Place, ...]
    matches: tuple[Match, ...]
    behind: bool

    @property
    def differs(self) -> dict[str, tuple[str, ...]]:
        """For each hole with a name, what it is bound to on each lane."""
        names = sorted(self.anchor.holes)
        return {name: tuple(_short(match, name) for match in self.matches) for name in names}


def propose(places: Sequence[Place]) -> Proposal:
    """The smallest anchor for one statement, which each lane has.

    Raises:
        PatchError: BP804, if the lanes have nothing in common there; BP805, if nothing around it tells it from others.
    """
    common = Common.of([place.statement for place in places], Parts())
    if common is None or not common.named:
        raise refuse(
            "BP804", f"lanes {' and '.join(place.lane for place in places)} have nothing in common there",
            *((place.lane, f"{place.where}  {shown(place.statement)}") for place in places),
            next="leave all but one of them out, and declare a variant for each shape",
        )  # fmt: skip
    chains = _chains(places)
    for beside, count, form in _orders(places[0]):
        frames = [
            Frame(places, chains, chosen, beside, form) for chosen in itertools.combinations(range(len(chains)), count)
        ]
        found = [best for frame in frames if frame.usable and (best := frame.smallest()) is not None]
        if found:
            return min(found, key=lambda item: item[0])[1]
    raise _not_unique(places, chains)


def _orders(place: Place) -> Iterator[tuple[int, int, str]]:
    """How many neighbours (before it, if negative), how many levels, and how a compound statement is taken."""
    forms = (HEADER, WHOLE) if any(suites_of(place.statement)) else (HEADER,)
    for beside in range(_BESIDE + 1):
        for count in range(_AROUND + 1):
            if not beside:
                yield from ((0, count, form) for form in forms)
            else:
                yield from ((beside, count, WHOLE), (-beside, count, WHOLE))


Chain = list[tuple[ast.stmt, ...]]


def _chains(places: Sequence[Place]) -> Chain:
    """The statements around it that all lanes have, the nearest first, each as it is on every lane.

    Only those are levels in whose own body it stands, not in an ``else``.
    """
    around = [
        [node for node, field in place.target.ancestors(place.statement)
         if isinstance(node, ast.stmt) and node is not place.target.node and field == "body"]
        for place in places
    ]  # fmt: skip
    found: Chain = []
    starts = [0] * len(places)
    for node in around[0]:
        row = [node]
        ends = [starts[0]]
        for chain, start in zip(around[1:], starts[1:], strict=True):
            at = next((at for at in range(start, len(chain)) if type(chain[at]) is type(node)), None)
            if at is None:
                break
            row.append(chain[at])
            ends.append(at + 1)
        else:
            if Common.of(row, Parts()) is not None and not isinstance(node, ast.Match):
                found.append(tuple(row))
                starts = ends
    return found


class Frame:
    """The anchors that have the same levels and neighbours; they differ in the parts that are kept."""

    def __init__(
        self, places: Sequence[Place], chains: Chain, chosen: Sequence[int], beside: int = 0, form: str = HEADER
    ) -> None:
        self.places = tuple(places)
        self.behind = beside < 0
        self.parts = Parts()
        reach = range(min(beside, 0), max(beside, 0) + 1)
        run = [[place.neighbour(distance) for place in places] for distance in reach]
        self.run = [self._common(row, form) for row in run]
        self.levels = [self._common(chains[at], HEADER) for at in chosen]
        self._around = [chains[at] for at in chosen]
        self._direct = self._adjacent()
        self.usable = all(item is not None and item.named for item in self.run) and None not in self.levels

    def _common(self, row: Sequence[ast.stmt | None], form: str) -> Common | None:
        statements = [statement for statement in row if statement is not None]
        return Common.of(statements, self.parts, form) if len(statements) == len(row) else None

    def _adjacent(self) -> list[bool]:
        """Whether each level holds the next one (the nearest: the statement) directly, on every lane."""
        found = []
        for at, row in enumerate(self._around):
            inner = self._around[at - 1] if at else [place.statement for place in self.places]
            pairs = zip(self.places, row, inner, strict=True)
            found.append(all(place.target.places[id(node)][:2] == (level, "body") for place, level, node in pairs))
        return found

    def anchor(self, kept: frozenset[int]) -> Anchor:
        """The anchor with these parts, and all that cost nothing.

        Raises:
            PatchError: BP001, if a pattern cannot be written: a hole would stand where none can.
        """
        whole = self.parts.free(kept)
        levels: list[Level] = []
        for common, direct, row in zip(self.levels, self._direct, self._around, strict=True):
            if common is not None:
                name = type(row[0]).__name__.lower().removeprefix("async")
                taken = sum(level.name.rstrip("0123456789") == name for level in levels)
                levels.append(Level(f"{name}{taken + 1 if taken else ''}", common.pattern(whole), direct=direct))
        text = "\n".join(common.pattern(whole) for common in self.run if common is not None)
        return Anchor(text, inside=tuple(reversed(levels)))

    def smallest(self) -> tuple[int, Proposal] | None:
        """The smallest anchor of this frame with its size; ``None`` if even the whole one is not found once."""
        everything = frozenset(part.number for part in self.parts.all)
        if self.strangers(everything):
            return None
        named = [common.naming() for common in self.run if common is not None]
        clauses = [clause for clause in named if clause]
        while True:
            kept = cheapest(self.parts.all, clauses)
            strangers = self.strangers(kept)
            if not strangers:
                size = sum(common.size for common in [*self.run, *self.levels] if common is not None)
                return size + sum(self.parts.all[number].size for number in kept), self._proposal(kept)
            clause = self._against(kept, strangers[0])
            if not clause:  # pragma: no cover - the whole anchor is found once, so some part keeps it out
                return None
            clauses.append(clause)

    def strangers(self, kept: frozenset[int], only: int | None = None) -> list[tuple[int, int]]:
        """What the anchor finds besides, as lane and node; the lane with 0, where it does not find what it should."""
        try:
            anchor = self.anchor(kept)
        except PatchError:
            return [(at, 0) for at in range(len(self.places)) if only in (None, at)]
        found: list[tuple[int, int]] = []
        for at, place in enumerate(self.places):
            if only not in (None, at):
                continue
            matches = all_places(place.target, anchor)
            right = [match for match in matches if self._right(match, at)]
            found += [] if right else [(at, 0)]
            found += [(at, id(match.node)) for match in matches if match not in right]
        return found

    def _right(self, match: Match, lane: int) -> bool:
        own = match.statements[-1 if self.behind else 0] is self.places[lane].statement
        whole = not isinstance(match.node, ast.expr) or getattr(match.statements[0], "value", None) is match.node
        levels = [match.levels[name] for name in reversed(match.levels)]
        rows = [row[lane] for row in self._around]
        return own and whole and {id(level) for level in levels} == {id(node) for node in rows}

    def _against(self, kept: frozenset[int], stranger: tuple[int, int]) -> list[Part]:
        """The parts of which one has to be kept, so that a stranger is not found: without them it always is."""
        large, needed = set(kept), []
        for part in self.parts.all:
            if part.size == 0 or part.number in large:
                continue
            if part.under >= 0 and part.under not in self.parts.free(frozenset(large)):
                continue
            if stranger in self.strangers(frozenset(large | {part.number}), stranger[0]):
                large.add(part.number)
            else:
                needed.append(part)
        return needed

    def _proposal(self, kept: frozenset[int]) -> Proposal:
        anchor = self.anchor(kept)
        matches = [find_anchor(place.target, anchor, near=False)[0] for place in self.places]
        (once,) = zip(*matches, strict=True)  # once on every lane, or this is an error
        allow = {name: tuple(dict.fromkeys(_short(match, name) for match in once)) for name in sorted(anchor.operators)}
        limited = _renumbered(Anchor(anchor.pattern, inside=anchor.inside, allow=allow))
        (again,) = zip(*(find_anchor(place.target, limited, near=False)[0] for place in self.places), strict=True)
        return Proposal(limited, self.places, again, self.behind)


def _renumbered(anchor: Anchor) -> Anchor:
    """The same anchor with its holes numbered anew: those of parts that were not kept have left gaps."""
    texts = [*(level.pattern for level in anchor.inside), anchor.pattern]
    old = dict.fromkeys(hole.name for text in texts for hole in scan(text) if hole.name != "_")
    new: dict[str, str] = {}
    for name in old:
        stem = name.rstrip("0123456789")
        same = sum(other.rstrip("0123456789") == stem for other in new)
        new[name] = f"{stem}{same + 1}" if same else stem

    def put(hole: Hole) -> str:
        name = new.get(hole.name, hole.name)
        return {"op": f"<${name}>", "list": f"$$${name}", "one": f"${name}"}[hole.kind]

    def again(text: str) -> str:
        return fill(text, scan(text), put)

    return Anchor(
        again(anchor.pattern),
        inside=tuple(replace(level, pattern=again(level.pattern)) for level in anchor.inside),
        allow={new[name]: texts for name, texts in anchor.allow.items()},
    )


def _short(match: Match, name: str) -> str:
    return render_bound(match.bound[name])


def _not_unique(places: Sequence[Place], chains: Chain) -> PatchError:
    """Nothing that may be said of the statement tells it from others; which, is what the whole of it still finds."""
    frame = Frame(places, chains, range(min(len(chains), _AROUND)), 0, WHOLE)
    frame = frame if frame.usable else Frame(places, chains, range(min(len(chains), _AROUND)))
    anchor = frame.anchor(frozenset(part.number for part in frame.parts.all))
    rows = [("anchor", f"{anchor}")]
    for place in places:
        found = [match.node for match in all_places(place.target, anchor) if match.statements[0] is not place.statement]
        also = ", ".join(place.target.where(node) for node in found)
        rows.append((place.lane, f"{place.where}, and {also}" if also else f"{place.where}, once"))
    first = places[0]
    several = "what the lanes have in common of " if len(places) > 1 else ""
    return refuse(
        "BP805", f"{several}`{head(first.statement)}` is found more than once", *rows,
        next="point at a statement beside it that is there once" + (", or name fewer lanes" if several else ""),
        file=first.target.text.display, line=first.statement.lineno,
    )  # fmt: skip

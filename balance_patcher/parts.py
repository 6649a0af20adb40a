"""The parts that patterns are made of, and the smallest set of them that meets what is asked.

A part can be kept only with the one that it hangs on. Each demand is a list of parts of which one has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """A part of a pattern.

    Attributes:
        number: Its own.
        under: The part that has to be kept with it; -1 where it hangs on the statement itself.
        size: By how many nodes the pattern grows with it.
        names: It is a name or a constant.
    """

    number: int
    under: int
    size: int
    names: bool = False


class Parts:
    """The parts of one anchor's patterns, and the names of the holes in all of them.

    Lanes that differ in the same way in two places have the same hole there.
    """

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._names: dict[tuple[str, ...], str] = {}

    def add(self, under: int, size: int = 0) -> int:
        self.all.append(Part(len(self.all), under, size))
        return len(self.all) - 1

    def grow(self, number: int, size: int, *, names: bool) -> None:
        self.all[number] = replace(self.all[number], size=size, names=names)

    def hole(self, found: tuple[str, ...], field: str) -> str:
        """The name of the hole for what was found on each lane; after the field of the syntax tree."""
        if found not in self._names:
            stem = field.rstrip("s").upper()
            taken = set(self._names.values())
            self._names[found] = next(
                name for name in (stem, *(f"{stem}{at}" for at in range(2, len(taken) + 3))) if name not in taken
            )
        return self._names[found]

    def free(self, kept: frozenset[int]) -> frozenset[int]:
        """The same with every part that costs nothing: at one size, the pattern that says more."""
        found = set(kept)
        for part in self.all:
            if part.size == 0 and (part.under in found or part.under < 0):
                found.add(part.number)
        return frozenset(found)

    def cut(self, length: int, names: dict[tuple[str, ...], str]) -> None:
        del self.all[length:]
        self._names = names

    @property
    def state(self) -> tuple[int, dict[tuple[str, ...], str]]:
        return len(self.all), dict(self._names)


def cheapest(parts: Sequence[Part], clauses: Sequence[Sequence[Part]]) -> frozenset[int]:
    """The parts that have one of each clause, with all that they hang on, and are the smallest such set."""
    best: tuple[int, frozenset[int]] | None = None

    def closure(part: Part, chosen: frozenset[int]) -> tuple[int, frozenset[int]]:
        size, found = 0, set(chosen)
        at = part.number
        while at >= 0 and at not in found:
            found.add(at)
            size += parts[at].size
            at = parts[at].under
        return size, frozenset(found)

    def extend(chosen: frozenset[int], size: int, banned: frozenset[int]) -> None:
        nonlocal best
        if best is not None and size >= best[0]:
            return
        clause = next((c for c in clauses if not any(part.number in chosen for part in c)), None)
        if clause is None:
            best = size, chosen
            return
        ways = sorted((*closure(part, chosen), part.number) for part in clause if part.number not in banned)
        for grown, wider, number in sorted(ways, key=lambda way: (way[0], way[2])):
            if not wider & banned:
                extend(wider, size + grown, banned)
            banned |= {number}

    extend(frozenset(), 0, frozenset())
    if best is None:  # pragma: no cover - the set of all parts has one of each
        return frozenset(part.number for part in parts)
    return best[1]

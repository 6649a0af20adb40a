"""Which statements of two functions are the same one, changed or not.

First the loops, from the outermost in: those of one loop are laid beside those of the loop that it became, by what
they hold and in their order. Then the statements of one loop beside those of the other, and never beyond it: what runs
once a request and what runs once a step may read alike, and are not the same. In there a statement is known by its
text and by what it stands in, if both are there once; else by the best way to lay the whole of the two loops side by
side. Where another way is about as good, nobody can say which is meant, and nothing is.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .bound import suites_of
from .generalise import Common
from .matching import overlap, weight
from .parts import Parts
from .statements import alike, header
from .targets import Target

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SAME = 0.5  # so like must two be, in text and place together, to be laid side by side
_LIKE = 0.5  # so much of two statements must be equal for one to be the other, changed
_LOOP = 0.3  # so much of what two loops hold must be equal
_DOUBT = 0.2  # a way to lay all of them side by side that is no worse than this is about as good
_PLACE = 0.4  # what the statement around it counts beside its own text; of one without a name it is all but everything
_NAMELESS = 0.8
_SUITES = 0.2  # what the same kinds of statements in it add
_WORD = re.compile(r"[A-Za-z0-9]+")


class _Side:
    """One of the two functions: its statements by the loop that they stand in."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._headers: dict[int, str] = {}
        self.members: dict[int, list[ast.stmt]] = {}
        for _, _, suite, at in target.places.values():
            self.members.setdefault(id(self.loop(suite[at])), []).append(suite[at])

    def loop(self, statement: ast.stmt) -> ast.AST:
        """The innermost loop around a statement, or the function."""
        return next(node for node, _ in self.target.ancestors(statement) if self.encloses(node))

    def encloses(self, node: ast.AST) -> bool:
        return isinstance(node, _LOOPS) or node is self.target.node

    def header(self, node: ast.AST) -> str:
        if id(node) not in self._headers:
            self._headers[id(node)] = header(node)
        return self._headers[id(node)]

    def path(self, statement: ast.stmt) -> tuple[str, ...]:
        """What it stands in up to its loop, and what it says."""
        found = [self.header(statement)]
        for node, field in self.target.ancestors(statement):
            found.append(field)
            if self.encloses(node):
                break
            found.append(self.header(node))
        return tuple(found)

    def held(self, loop: ast.AST) -> Counter[str]:
        """What a loop holds, all the way down."""
        found: Counter[str] = Counter()
        for statement in self.members.get(id(loop), ()):
            found[self.header(statement)] += 1
            found += self.held(statement) if isinstance(statement, _LOOPS) else Counter()
        return found


@dataclass(frozen=True)
class Found:
    """What became of a statement: itself, or why nobody can say.

    Attributes:
        statement: It, on the other side.
        doubtful: Those that it could be about as well.
    """

    statement: ast.stmt | None
    doubtful: tuple[ast.stmt, ...] = ()


class Counterparts:
    """Two functions, laid side by side."""

    def __init__(self, one: Target, other: Target) -> None:
        self._there, self._back = _Way(_Side(one), _Side(other)), _Way(_Side(other), _Side(one))

    def of(self, statement: ast.stmt) -> Found:
        """What became of a statement of the first function; seen from there, it has to be that statement again."""
        found = self._there.of(statement)
        if found.statement is None or self._back.of(found.statement).statement is statement:
            return found
        return Found(None, (found.statement,))


class _Way:
    """From one of the two functions to the other."""

    def __init__(self, one: _Side, other: _Side) -> None:
        self._one, self._other = one, other
        self._texts: dict[tuple[int, int], float] = {}
        self._became: dict[int, Found] = {}

    def of(self, statement: ast.stmt) -> Found:
        if id(statement) not in self._became:
            self._became[id(statement)] = self._find(statement)
        return self._became[id(statement)]

    def _find(self, statement: ast.stmt) -> Found:
        around = self._one.loop(statement)
        there: ast.AST | None = self._other.target.node
        if isinstance(around, _LOOPS):
            there = self.of(around).statement
        if there is None:
            return Found(None)
        own, others = self._one.members[id(around)], self._other.members.get(id(there), [])
        if isinstance(statement, _LOOPS):
            loops = [[item for item in side if isinstance(item, _LOOPS)] for side in (own, others)]
            return _laid(statement, loops[0], loops[1], self._loops_alike)
        keys: tuple[Callable[[_Side, ast.stmt], object], ...] = (_Side.path, _Side.header)
        for key in keys if _words(statement) else keys[:1]:
            wanted = key(self._one, statement)
            if sum(key(self._one, item) == wanted for item in own) == 1:
                equal = [item for item in others if key(self._other, item) == wanted]
                if len(equal) == 1:
                    return Found(equal[0])
        return _laid(statement, own, others, self._like)

    def _loops_alike(self, one: ast.stmt, other: ast.stmt) -> float:
        if type(one) is not type(other):
            return 0.0
        held = [self._one.held(one), self._other.held(other)]
        words = [Counter(word for text in side for word in _WORD.findall(text)) for side in held]
        inner = (_dice(*held) + _dice(*words)) / 2
        return inner if inner >= _LOOP else 0.0

    def _like(self, one: ast.stmt, other: ast.stmt) -> float:
        """How like two statements are, in text and place; 0 if they are not the same."""
        text = self._text(one, other)
        if not text:
            return 0.0
        (above, field), (over, name) = next(self._one.target.ancestors(one)), next(self._other.target.ancestors(other))
        outer = [side.encloses(node) for side, node in ((self._one, above), (self._other, over))]
        place = float(all(outer)) if any(outer) else self._text(above, over)
        place = place if field == name else place / 2
        share = _PLACE if _words(one) else _NAMELESS
        found = (1 - share) * text + share * place
        return found if found >= _SAME else 0.0

    def _text(self, one: ast.AST, other: ast.AST) -> float:
        if type(one) is not type(other) or not isinstance(one, ast.stmt) or not isinstance(other, ast.stmt):
            return 0.0
        if self._one.header(one) == self._other.header(other):
            return 1.0
        key = (id(one), id(other))
        if key not in self._texts:
            found = likeness(one, other)
            self._texts[key] = found if found >= _LIKE else 0.0
        return self._texts[key]


Row = Sequence[ast.stmt]


def _laid(statement: ast.stmt, own: Row, others: Row, like: Callable[[ast.stmt, ast.stmt], float]) -> Found:
    """What it is laid beside, where two rows are laid side by side in their order, as alike as can be."""
    table = [[like(one, other) for other in others] for one in own]
    at = next(index for index, item in enumerate(own) if item is statement)
    before = _totals(table[:at], len(others))
    behind = _totals([row[::-1] for row in table[:at:-1]], len(others))[::-1]
    beside = [(before[j] + score + behind[j + 1], j) for j, score in enumerate(table[at]) if score]
    best, place = max(beside, key=lambda item: item[0], default=(0.0, -1))
    if place < 0:
        return Found(None)
    near = [j for total, j in beside if total >= best - _DOUBT]
    alone = max(map(sum, zip(before, behind, strict=True)))
    if len(near) > 1 or alone >= best - _DOUBT:
        return Found(None, tuple(others[j] for j in near))
    return Found(others[place])


def _totals(table: Sequence[Sequence[float]], width: int) -> list[float]:
    """For each beginning of the columns, how alike all rows and it are, laid side by side as well as can be."""
    totals = [0.0] * (width + 1)
    for row in table:
        above, totals = totals, [0.0]
        for j, score in enumerate(row):
            totals.append(max(above[j + 1], totals[j], above[j] + score))
    return totals


def likeness(one: ast.stmt, other: ast.stmt) -> float:
    """How much of two statements is equal, in structure and in words; 0 where they have no name in common."""
    common = said(one, other) and Common.of([one, other], Parts())
    if not common or not common.named:
        return 0.0
    compound = any(suites_of(one)) or any(suites_of(other))
    equal = overlap(one, other, {}, header=compound) + overlap(other, one, {}, header=compound)
    share = equal / (weight(one, header=compound) + weight(other, header=compound))
    return (share + said(one, other)) / 2 + _SUITES * (compound and alike(one, other))


def said(one: ast.stmt, other: ast.stmt) -> float:
    """How many of their names' words two statements have in common; with suites, their headers."""
    words = [_words(one), _words(other)]
    return _dice(*words) if any(words) else 1.0


def _words(node: ast.AST) -> Counter[str]:
    found = _WORD.findall(header(node).partition(" ")[2])
    return Counter(word for word in found if not keyword.iskeyword(word))


def _dice(one: Counter[str], other: Counter[str]) -> float:
    size = sum(one.values()) + sum(other.values())
    return 2 * sum((one & other).values()) / size if size else 1.0

"""Two texts side by side: lines that belong together in one row, and in a changed line what changed.

The rows are data; who shows them escapes them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .changed import Snippet

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
_ALIKE = 0.6  # two lines that share less than this are two lines, not one that was changed

#: A piece of a line, and whether the other side has something else there.
Piece = tuple[str, bool]


@dataclass(frozen=True)
class Side:
    """One line of one side.

    Attributes:
        number: Its line; ``None`` where the text does not say it.
        pieces: Its text.
        marked: It is what the snippet is about.
    """

    number: int | None
    pieces: tuple[Piece, ...]
    marked: bool = False


@dataclass(frozen=True)
class Pair:
    """One row.

    Attributes:
        kind: ``equal``, ``changed``, ``removed``, ``added``, or ``gap`` where lines are left out.
    """

    kind: str
    old: Side | None = None
    new: Side | None = None


def beside(old: Snippet | None, new: Snippet | None) -> tuple[Pair, ...]:
    """Two snippets, without the indentation that all of their lines share; where one is missing, the other as it is."""
    both = [side for side in (old, new) if side is not None]
    lines = [line for side in both for line in side.lines if line.strip()]
    indent = min((len(line) - len(line.lstrip(" ")) for line in lines), default=0)
    found = [_sides(side, indent) for side in both]
    if len(found) < len(("old", "new")):
        return tuple(Pair("equal", side, side) for sides in found for side in sides)
    return tuple(_pairs(*found))


def of_patch(patch: str) -> tuple[Pair, ...]:
    """A unified diff of one file."""
    rows: list[Pair] = []
    old: list[Side] = []
    new: list[Side] = []
    at, to = 0, 0
    inside = False

    def flush() -> None:
        rows.extend(_pairs(old, new))
        old.clear()
        new.clear()

    for line in patch.splitlines():
        found = _HUNK.match(line)
        if found:
            flush()
            rows.extend([Pair("gap")] * inside)
            at, to, inside = int(found[1]), int(found[2]), True
        elif inside and line[:1] == "-":
            old.append(_plain(at, line[1:]))
            at += 1
        elif inside and line[:1] == "+":
            new.append(_plain(to, line[1:]))
            to += 1
        elif inside and line[:1] in {" ", ""}:
            flush()
            rows.append(Pair("equal", _plain(at, line[1:]), _plain(to, line[1:])))
            at, to = at + 1, to + 1
    flush()
    return tuple(rows)


def _plain(number: int, text: str) -> Side:
    return Side(number, ((text, False),))


def _sides(snippet: Snippet, indent: int) -> list[Side]:
    return [
        Side(number, ((line[indent:], False),), number in snippet.marked)
        for number, line in enumerate(snippet.lines, snippet.first)
    ]


def _text(side: Side) -> str:
    return "".join(text for text, _ in side.pieces)


def _pairs(old: Sequence[Side], new: Sequence[Side]) -> Iterator[Pair]:
    texts = [_text(side) for side in old], [_text(side) for side in new]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from (Pair("equal", one, other) for one, other in zip(old[a:b], new[c:d], strict=True))
        else:
            yield from _changed(old[a:b], new[c:d])


def _changed(old: Sequence[Side], new: Sequence[Side]) -> Iterator[Pair]:
    """Lines that stand in each other's place: those that are alike share a row."""
    at = 0
    for side in old:
        ratios = [difflib.SequenceMatcher(None, _text(side), _text(other)).ratio() for other in new[at:]]
        best = max(ratios, default=0.0)
        if best < _ALIKE:
            yield Pair("removed", old=side)
            continue
        stop = at + ratios.index(best)
        yield from (Pair("added", new=other) for other in new[at:stop])
        yield _words(side, new[stop])
        at = stop + 1
    yield from (Pair("added", new=other) for other in new[at:])


def _words(old: Side, new: Side) -> Pair:
    words = _WORD.findall(_text(old)), _WORD.findall(_text(new))
    left: list[Piece] = []
    right: list[Piece] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for pieces, part in ((left, words[0][a:b]), (right, words[1][c:d])):
            text = "".join(part)
            if text:
                pieces.append((text, kind != "equal" and bool(text.strip())))
    return Pair("changed", Side(old.number, tuple(left), old.marked), Side(new.number, tuple(right), new.marked))

"""Find the holes of a pattern or of an edit's text, outside strings and comments.

A scanner of its own, because ``tokenize`` differs between Python versions.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .errors import PatchError, refuse

_HOLE = re.compile(
    r"<\$(?P<op>[A-Z][A-Z0-9_]*|_)>|\$\$\$(?P<list>[A-Z][A-Z0-9_]*|_)(?!\w)|\$(?P<one>[A-Z][A-Z0-9_]*|_)(?!\w)"
)
#: Where something other than plain text can begin.
_NEXT = re.compile(r"[#$<'\"]")
#: The letters in front of a quote that belong to it.
_PREFIX = re.compile(r"(?<!\w)[A-Za-z]{1,2}\Z")


@dataclass(frozen=True)
class Hole:
    """A hole in a text: its span, its kind (``one``, ``list``, ``op``) and its name."""

    start: int
    end: int
    kind: str
    name: str


@lru_cache(maxsize=1024)
def scan(text: str) -> tuple[Hole, ...]:
    """The holes of a text, outside strings and comments.

    Raises:
        PatchError: BP001, for a hole inside an f-string, a ``$`` that is no hole, or a hole that is
            a part of a longer name.
    """
    holes, at = [], 0
    while found := _NEXT.search(text, at):
        at, char = found.start(), found.group()
        if char == "#":
            at = (text.find("\n", at) + 1) or len(text)
        elif char in "'\"":
            quote = char * 3 if text.startswith(char * 3, at) else char
            prefix = _PREFIX.search(text[max(0, at - 3) : at])
            begin = at + len(quote)
            at = string_end(text, begin, quote)
            if prefix and "f" in prefix.group().lower() and _hole_in_braces(text[begin:at]):
                raise bad(text, "a hole inside an f-string", "move the expression out of the f-string")
        elif (match := _HOLE.match(text, at)) and not (char == "$" and _in_word(text, at)):
            if text.startswith(">=", match.end() - 1):
                raise bad(text, f"`{match.group()}=` is no hole", "an operator hole stands for the whole operator")
            kind = match.lastgroup or ""
            holes.append(Hole(at, match.end(), kind, match[kind]))
            at = match.end()
        elif char == "$":
            raise bad(text, f"`{text[at : at + 8]}` is no hole", "write $NAME, $_, $$$NAME or <$OP> in capitals")
        else:
            at += 1
    return tuple(holes)


def _in_word(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_")


def string_end(text: str, at: int, quote: str) -> int:
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    return len(text)


def _hole_in_braces(body: str) -> bool:
    depth, at = 0, 0
    while at < len(body):
        if body[at : at + 2] in ("{{", "}}") and depth == 0:
            at += 2
            continue
        depth += (body[at] == "{") - (body[at] == "}")
        if depth > 0 and body[at] == "$":
            return True
        at += 1
    return False


def bad(text: str, why: str, next_step: str) -> PatchError:
    shown = textwrap.shorten(" ".join(text.split()), 100)
    return refuse("BP001", f"{why} in `{shown}`", next=next_step)


def fill(text: str, holes: Sequence[Hole], put: Callable[[Hole], str]) -> str:
    parts, at = [], 0
    for hole in holes:
        parts += [text[at : hole.start], put(hole)]
        at = hole.end
    return "".join([*parts, text[at:]])

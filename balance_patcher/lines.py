"""Physical lines, offsets and comments of a module's text, as the compiler counts them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from .holes import string_end
from .source import ModuleText

#: Where a comment or a string begins.
_OPENING = re.compile(r"[#'\"]")


def comments_of(text: str) -> list[str]:
    """The comments of a few lines of source, strings left alone."""
    found: list[str] = []
    at = 0
    while "#" in text[at:] and (begin := _OPENING.search(text, at)):
        end = _skip(text, begin.start())
        if begin.group() == "#":
            found.append(text[begin.start() : end].rstrip())
        at = max(end, begin.end())
    return found


def _skip(text: str, at: int) -> int:
    """The end of the string or comment that begins at ``at``; ``at`` itself if none does."""
    if text[at] == "#":
        return min(end for end in (text.find("\n", at), text.find("\r", at), len(text)) if end >= 0)
    quote = next((quote for quote in ("'''", '"""', "'", '"') if text.startswith(quote, at)), None)
    return at if quote is None else string_end(text, at + len(quote), quote)


def parameter_end(text: str, at: int, *, slash: bool) -> int:
    """Where a parameter ends that is read up to ``at``: behind the parentheses of its default, or behind ``/``."""
    ends = [at]  # the last one is behind the parenthesis that closes the header
    while text[at] not in ":-":
        if text[at] == "/" or (text[at] == "," and not slash):
            return at + 1 if text[at] == "/" else ends[-1]
        if text[at] == ")":
            ends.append(at + 1)
        at = max(_skip(text, at), at + 1)
    return ends[-2]


def open_parenthesis(text: str, at: int) -> int:
    """Behind the parenthesis that opens a header's parameters; type parameters stand before it."""
    depth = 0
    while depth or text[at] != "(":
        depth += (text[at] == "[") - (text[at] == "]")
        at = max(_skip(text, at), at + 1)
    return at + 1


def physical_lines(text: str) -> list[str]:
    return ModuleText("", "", "", text).lines


def starts(lines: Sequence[str]) -> list[int]:
    """The character offset of each line."""
    return list(itertools.accumulate(map(len, lines[:-1]), initial=0)) if lines else []


def offset(text: ModuleText, line: int, column: int) -> int:
    """The character offset of a node's position, whose column counts UTF-8 bytes."""
    before = text.lines[line - 1].encode("utf-8", "surrogatepass")[:column]
    return sum(map(len, text.lines[: line - 1])) + len(before.decode("utf-8", "surrogatepass"))

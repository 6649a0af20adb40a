"""A function as lines that differ only where something else is done, and how two of them differ.

Two projects break lines at other lengths and comment in other words. So what is compared has no comments and no
docstring, and is broken by one rule, on both sides.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import difflib
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from balance_patcher.targets import FunctionNode

_WIDTH = 88  # a longer line is broken at its commas, so that one argument more is one line more
_OPENING, _CLOSING = tuple("([{"), tuple(")]}")


def plain_lines(function: FunctionNode) -> list[str]:
    """A function as lines without its formatting: no comments, no docstring, long lines broken at their commas."""
    bare = copy.copy(function)
    documented = ast.get_docstring(function, clean=False) is not None
    bare.body = function.body[documented:] or [ast.Pass()]
    bare.name = "function"  # a copy may have another name
    return [part for line in ast.unparse(bare).splitlines() for part in _folded(line)]


def _folded(line: str) -> list[str]:
    if len(line) <= _WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    first, *rest = _parts(line.lstrip())
    lines = [f"{indent}{first}"]
    for part in rest:
        closing = part[0] in ")]}"
        lines += [f"{indent}{part}"] if closing else _folded(f"{indent}    {part}")
    return lines


def _parts(text: str) -> list[str]:
    """A logical line cut at the commas of its first bracket that has some; else before each ``and`` and ``or``."""
    tokens = list(_tokens(text))
    depth, cuts, comma = 0, [0], False
    for token in tokens:
        closes = token.string in _CLOSING
        depth -= closes
        if closes and depth == 0:
            if comma:
                items = [text[start:end].strip() for start, end in pairwise(cuts)]
                last = text[cuts[-1] : token.start[1]].strip().removesuffix(",")
                return [*items, *([f"{last},"] if last else []), text[token.start[1] :]]
            cuts = [0]
        elif token.string == "," and depth == 1:
            comma = True
            cuts.append(token.end[1])
        elif token.string in _OPENING:
            depth += 1
            cuts += [token.end[1]] if depth == 1 else []
    words = {token.start[1] for token in _outer(tokens) if token.string in {"and", "or"}}
    return [text[start:end].strip() for start, end in pairwise(sorted({0, *words, len(text)}))]


def _outer(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """The tokens that stand in no bracket."""
    depth = 0
    for token in tokens:
        depth += (token.string in _OPENING) - (token.string in _CLOSING)
        if depth == 0:
            yield token


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """The names and operators of one line; of a header without its suite, too."""
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.start[0] == 1 and token.type in {tokenize.OP, tokenize.NAME}:
                yield token


# -- how two differ --------------------------------------------------------------------------


def drift(upstream: Sequence[str], ours: Sequence[str]) -> tuple[int, int, int]:
    """Lines that only the copy has, lines that only upstream has, and in how many places."""
    places = [
        (there, here)
        for kind, a, b, c, d in difflib.SequenceMatcher(None, upstream, ours, autojunk=False).get_opcodes()
        if kind != "equal"
        for there, here in [(b - a, d - c)]
    ]
    return sum(here for _, here in places), sum(there for there, _ in places), len(places)


def unified(a: Sequence[str], b: Sequence[str], before: str, after: str) -> Iterator[str]:
    """A unified diff with the very places that :func:`drift` counts: ``difflib``'s own takes common lines for junk."""
    yield from (f"--- {before}", f"+++ {after}")
    for group in difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(3):
        (_, a1, _, b1, _), (_, _, a2, _, b2) = group[0], group[-1]
        yield f"@@ -{a1 + 1},{a2 - a1} +{b1 + 1},{b2 - b1} @@"
        for kind, i1, i2, j1, j2 in group:
            if kind == "equal":
                yield from (f" {line}" for line in a[i1:i2])
            else:
                yield from (f"-{line}" for line in a[i1:i2])
                yield from (f"+{line}" for line in b[j1:j2])

"""A module's tree in which functions have no bodies yet; one that somebody looks into is parsed by itself.

Of a module with fifty functions an installation looks into six or seven, and to parse the others costs more than all
the rest of it. So their bodies are taken out of the text before it is parsed: of the functions of a module and of its
classes, where the lines alone say where a body begins and ends. Whatever they do not say stays in the text, and a text
that cannot be read like this at all is parsed as a whole.

That a body ends where its lines say so is told from their indentation, and from where strings begin and end. What is
looked into is parsed anew with nothing left out, so no body is ever read wrongly; and where it runs, it is compared
with what runs.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .bound import DEFINITIONS, definitions, walk

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_ENDING = (ast.stmt, ast.ExceptHandler)

#: A function that begins at the margin or four columns from it: its header, to the end of the line, and its body.
_FUNCTION = re.compile(
    r"""
    ^(?P<header>(?P<indent>(?:[ ]{4})?)(?:async[ ]+)?def[ ]+\w+
        (?: \([^\n]*\)                                                    # all of it in one line
          | \([^\n]*\n (?:(?P=indent)[ \t][^\n]*\n|\n)* (?P=indent)\)     # or its parameters stand deeper
        )(?:[ ]*->[^\n]*)?[ ]*:[ ]*(?:\#[^\n]*)?\n)
    (?P<body>(?:(?P=indent)[ \t][^\n]*(?:\n|\Z)|[ \t]*\#[^\n]*(?:\n|\Z)|[ \t]*\n)+)
    """,
    re.VERBOSE | re.MULTILINE,
)
#: What can hold a quote or a line end that is none.
_STRING = re.compile(
    r"""
    \#[^\n]*
    | \"""(?:[^"\\]|\\.|"(?!""))*\"""
    | '''(?:[^'\\]|\\.|'(?!''))*'''
    | "(?:[^"\\\n]|\\.)*"
    | '(?:[^'\\\n]|\\.)*'
    """,
    re.VERBOSE | re.DOTALL,
)


_TRIPLE = ('"""', "'''")
#: What a quote may stand in.
_MAY_HOLD = re.compile(r"[\"'#]")


@dataclass(frozen=True)
class Gap:
    """A function without a body.

    Attributes:
        qualname: ``Class.method`` or ``function``.
        node: Its definition, to be completed.
        first: The number of the line where it begins, its decorators left out.
        last: The number of the last line that may belong to it.
    """

    qualname: str
    node: FunctionNode
    first: int
    last: int


@dataclass(frozen=True)
class Outline:
    """A tree and what is missing in it.

    Attributes:
        tree: The module's; functions in ``gaps`` have a number for a body.
        gaps: What is not parsed yet, by the identity of its node.
    """

    tree: ast.Module
    gaps: dict[int, Gap]

    def fill(self, node: ast.AST, lines: Sequence[str]) -> bool:
        """Parse what is missing of a function; whether it is complete now.

        Args:
            node: A definition of the tree.
            lines: The module's.
        """
        gap = self.gaps.get(id(node))
        if gap is None:
            return True
        found = function_alone(lines[gap.first - 1 : gap.last], gap.qualname, gap.first)
        if found is None:
            return False
        self._complete(gap, found)
        return True

    def fill_from(self, whole: ast.Module) -> bool:
        """Take over all that is missing from the tree of the whole text; whether the two are one tree then."""
        there = {(qualname, node.lineno): node for qualname, node in _functions(whole)}
        for gap in list(self.gaps.values()):
            found = there.get((gap.qualname, gap.node.lineno))
            if type(found) is not type(gap.node):
                return False
            self._complete(gap, found)
        pairs = list(itertools.zip_longest(walk(self.tree), walk(whole)))
        if any(type(ours) is not type(its) for ours, its in pairs):
            return False
        for ours, its in pairs:
            # What functions stand in ends where the last of them does.
            if isinstance(ours, _ENDING) and isinstance(its, _ENDING):
                ours.end_lineno, ours.end_col_offset = its.end_lineno, its.end_col_offset
        return True

    def _complete(self, gap: Gap, found: FunctionNode) -> None:
        gap.node.body = found.body
        gap.node.end_lineno, gap.node.end_col_offset = found.end_lineno, found.end_col_offset
        del self.gaps[id(gap.node)]


def outline_of(text: str, starts: Sequence[int]) -> Outline | None:
    """A module's outline; ``None`` if its lines do not say what belongs to what.

    Args:
        text: The module's text.
        starts: The offset of each of its lines.
    """
    if "\r" in text or "\f" in text:
        return None
    left, ends = _without_bodies(text, starts)
    if not ends:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(left)
    except (SyntaxError, ValueError, RecursionError):
        return None
    gaps = {}
    for qualname, node in _functions(tree):
        last = ends.pop(node.body[0].lineno, None)
        if last is not None:
            gaps[id(node)] = Gap(qualname, node, node.lineno, last)
            node.end_lineno = last
    # One that is not found again stands in something else, which is not complete then.
    return None if ends else Outline(tree, gaps)


def _without_bodies(text: str, starts: Sequence[int]) -> tuple[str, dict[int, int]]:
    """The text with as many lines and fewer bodies; by the first line of each, the last."""
    strings = _long_strings(text)
    begins = [begin for begin, _ in strings]

    def in_string(at: int) -> bool:
        before = bisect.bisect_left(begins, at) - 1
        return before >= 0 and strings[before][1] > at

    parts: list[str] = []
    ends: dict[int, int] = {}
    done = at = 0
    while found := _FUNCTION.search(text, at):
        begin, end = found.span("body")
        at = end
        goes_on = text[begin:end].rstrip().endswith("\\")
        if goes_on or in_string(found.start()) or in_string(end):
            at = found.end("header")
            continue
        first, last = bisect.bisect_right(starts, begin), bisect.bisect_left(starts, end)
        parts += [text[done:begin], found["indent"], " 0\n", "\n" * (last - first)]
        ends[first] = last
        done = end
    parts.append(text[done:])
    return "".join(parts), ends


def _long_strings(text: str) -> list[tuple[int, int]]:
    """Where strings begin and end that may go over several lines, in their order."""
    found: list[tuple[int, int]] = []
    at = 0
    following = {quote: text.find(quote) for quote in _TRIPLE}
    while there := {quote: begin for quote, begin in following.items() if begin >= 0}:
        quote, begin = min(there.items(), key=lambda item: item[1])
        end = text.find(quote, begin + 3)
        line = max(at, text.rfind("\n", 0, begin) + 1)
        if (
            end < 0
            or text[end - 1] == "\\"
            or text[end + 3 : end + 4] == quote[0]
            or _MAY_HOLD.search(text, line, begin)
        ):
            return _all_long_strings(text)
        at = end + 3
        found.append((begin, at))
        following |= {quote: text.find(quote, at) for quote, begin in there.items() if begin < at}
    at = text.find("\\\n")
    while at >= 0:
        if _MAY_HOLD.search(text, text.rfind("\n", 0, at) + 1, at):  # a string, perhaps, that goes on
            return _all_long_strings(text)
        at = text.find("\\\n", at + 1)
    return found


def _all_long_strings(text: str) -> list[tuple[int, int]]:
    """The same of a text in which strings or comments may hold what looks like the beginning of one."""
    return [string.span() for string in _STRING.finditer(text) if "\n" in string.group()]


def _functions(tree: ast.Module) -> Iterator[tuple[str, FunctionNode]]:
    """The functions of a module and of its classes, also under ``if`` and ``try``, with their qualified names."""
    for node in definitions(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", inner)
                for inner in definitions(node)
                if isinstance(inner, DEFINITIONS[:2])
            )
        elif isinstance(node, DEFINITIONS[:2]):
            yield node.name, node


def text_alone(lines: Sequence[str], qualname: str, first: int) -> str:
    """The lines of a function under the bare headers of its classes, with their numbers in the module.

    Args:
        lines: The lines.
        qualname: ``Class.method``.
        first: The number of the first one.
    """
    owners = qualname.split(".")[:-1]
    headers = [f"{' ' * depth}class {name}:\n" for depth, name in enumerate(owners)]
    above = "\n" * (first - 1 - len(headers)) + "".join(headers)
    return above + "".join(lines)


def function_alone(lines: Sequence[str], qualname: str, first: int) -> FunctionNode | None:
    """The tree of a function of its lines; ``None`` if they do not hold one function of that name and nothing else."""
    if first <= qualname.count("."):
        return None  # no room for its classes' headers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body: list[ast.stmt] = ast.parse(text_alone(lines, qualname, first)).body
    except (SyntaxError, ValueError, RecursionError):
        return None
    node: ast.stmt | None = None
    for name in qualname.split("."):
        if len(body) != 1 or getattr(body[0], "name", "") != name:
            return None
        node = body[0]
        body = getattr(node, "body", [])
    return node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None

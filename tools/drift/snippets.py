"""Lines of upstream's text for a reader, with the lines that it is about marked."""

from __future__ import annotations

import ast

from balance_patcher.source import ModuleText

from .changed import Snippet

_AROUND = 12  # lines before and after, for renderings that show the two sides whole


def snippet(text: ModuleText, first: int, last: int | None = None, around: int = _AROUND) -> Snippet:
    """The lines from one to another, and some around them."""
    lines = text.lines
    last = first if last is None else max(first, last)
    start, stop = max(1, first - around), min(len(lines), last + around)
    shown = tuple(line.rstrip("\r\n") for line in lines[start - 1 : stop])
    return Snippet(text.path, start, shown, tuple(range(first, min(last, len(lines)) + 1)))


def of_node(text: ModuleText, node: ast.AST, around: int = _AROUND) -> Snippet:
    """The lines of a node; of a definition, or another long one, its head."""
    first = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or first
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        last = max(first, node.body[0].lineno - 1)
    elif isinstance(body := getattr(node, "body", None), list) and body and last - first > _AROUND:
        last = max(first, body[0].lineno - 1)
    return snippet(text, first, last, around)

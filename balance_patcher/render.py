"""Nodes as text for a person to read.

``astor`` wraps long lines and is preferred by the command line, where its output parses back to the
same tree; else, and always on the install path, the standard library's ``ast.unparse``.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable

from .matching import LIST, ONE, OP, OperatorHole, same

_renderer: Callable[[ast.AST], str] = ast.unparse
_SUITES = ("body", "orelse", "handlers", "cases", "finalbody")


def prefer_astor() -> None:
    """Let ``astor`` render from now on, if it is installed; the command line calls this."""
    global _renderer  # noqa: PLW0603 - one setting for the process
    try:
        import astor
    except Exception:  # noqa: BLE001 - an astor that does not know this Python fails in other ways than ImportError
        return

    def by_astor(node: ast.AST) -> str:
        try:
            text: str = astor.to_source(node).strip()
            body = ast.parse(text).body
        except Exception:  # noqa: BLE001 - astor fails in many ways on syntax newer than itself
            return ast.unparse(node)
        back: ast.AST | None = body[0] if len(body) == 1 else None
        if isinstance(node, ast.expr) and isinstance(back, ast.Expr):
            back = back.value
        return text if back is not None and same(node, back) else ast.unparse(node)

    _renderer = by_astor


def head(node: ast.AST) -> str:
    """The first line of a node's text; of a definition ``def name`` alone, without decorators."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return f"{'class' if isinstance(node, ast.ClassDef) else 'def'} {node.name}"
    return ast.unparse(_header(node)).splitlines()[0]


def _header(node: ast.AST) -> ast.AST:
    """A compound statement without its suites: no first line depends on them, and they may be hundreds of lines."""
    suites = [name for name in _SUITES if isinstance(getattr(node, name, None), list)]
    if not suites or not isinstance(node, ast.stmt):
        return node
    bare = copy.copy(node)
    for name in suites:
        setattr(bare, name, [])
    return bare


def shown(node: ast.AST, width: int = 100) -> str:
    """A node to look at: on one line in backticks where it fits, else rendered over several.

    Of a compound statement the header and the first statement are shown.
    """
    body = getattr(node, "body", None)
    if isinstance(body, list) and not isinstance(node, ast.Module):
        first = f"{head(node)} {head(body[0])}" if body else head(node)
        return f"`{first}`" if len(first) <= width else f"`{head(node)[:width]}…`"
    line = " ".join(part.strip() for part in ast.unparse(node).splitlines())
    return f"`{line}`" if len(line) <= width else "\n" + _renderer(node)


_MARKED = re.compile(rf"< {OP}(?P<op>\w+) >|{LIST}(?P<list>\w+)|{ONE}(?P<one>\w+)")
_PREFIX = {"list": "$$$", "one": "$"}
_ONE_LINE = 90  # so long may a statement with a short suite be on one line


def as_pattern(node: ast.AST, *, header: bool = False) -> str:
    """The text of a pattern's tree, with its holes as a person writes them.

    Args:
        node: A statement whose holes are marked as in a compiled pattern.
        header: Only its header; its suites are empty.
    """
    plain = ast.fix_missing_locations(_Operators().visit(node))
    lines = ast.unparse(plain).split("\n")
    if header:
        lines[-1] = lines[-1].removesuffix(":")
    elif len(lines) == 2 and lines[0].endswith(":") and len(" ".join(lines)) <= _ONE_LINE:  # noqa: PLR2004 - a suite
        lines = [f"{lines[0]} {lines[1].strip()}"]
    return _MARKED.sub(_hole, "\n".join(lines))


def _hole(found: re.Match[str]) -> str:
    kind = found.lastgroup or ""
    return f"<${found[kind]}>" if kind == "op" else _PREFIX[kind] + found[kind]


class _Operators(ast.NodeTransformer):
    """Write ``a <$OP> b`` as the two comparisons that a pattern is parsed from."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if not any(isinstance(op, OperatorHole) for op in node.ops):
            return node
        ops: list[ast.cmpop] = []
        values: list[ast.expr] = []
        for op, value in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, OperatorHole):
                ops += [ast.Lt(), ast.Gt()]
                values += [ast.Name(f"{OP}{op.name}", ast.Load()), value]
            else:
                ops.append(op)
                values.append(value)
        return ast.Compare(node.left, ops, values)

"""One planned edit as a change of the text.

Statement boundaries come from logical lines, the indentation is the anchor's own, and what cannot be delimited
is refused with its id.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .alone import first_line
from .bound import children
from .delta import APART, AddParameter, InsertAfter, InsertBefore, Prologue
from .errors import PatchError, refuse
from .lines import comments_of, offset, open_parenthesis, parameter_end
from .plan import Step, in_order
from .render import head
from .targets import Target, docstring_length

MARK = "  # bp: "
MARKED = re.compile(r".*  # bp: (?P<delta>[\w.+-]+)$")


@dataclass(frozen=True)
class Splice:
    """One change of the text: characters ``start`` to ``end`` become ``text``.

    ``delta`` made it; ``whole`` says that it is made of whole lines; ``depth`` is how deep its suite
    stands: where the end of an inner suite is the end of an outer one too, the inner comes first.
    """

    start: int
    end: int
    text: str
    delta: str
    whole: bool = True
    depth: int = 0


def splices_of(target: Target, step: Step, steps: Sequence[Step]) -> list[Splice]:
    edit = step.edit
    if isinstance(edit, APART):
        return []
    if isinstance(edit, AddParameter):
        return [_parameter(target, step, [other for other in in_order(steps) if isinstance(other.edit, AddParameter)])]
    if isinstance(edit, Prologue):
        body, at = target.node.body, docstring_length(target.node)
        if at < len(body):
            return [_before(target, step, body[at])]
        return [_after(target, step, body[-1])]
    if isinstance(edit, InsertBefore):
        return [_before(target, step, step.statements[0])]
    if isinstance(edit, InsertAfter):
        return [_after(target, step, step.statements[-1])]
    return [_replace(target, step)]


def _before(target: Target, step: Step, statement: ast.stmt) -> Splice:
    lines = target.text.lines
    indent = _indent(target, step, statement)
    _, _, suite, at = target.places[id(statement)]
    if at + 1 < len(suite) and suite[at + 1].lineno <= (statement.end_lineno or 0):
        raise _refusal("BP402", target, step, statement)
    first = first_line(target.text, statement)
    floor = _floor(target, statement)
    under = at > 0 and isinstance(suite[at - 1], _COMPOUND)
    while first - 1 > floor and lines[first - 2].lstrip(" \t\f").startswith("#"):
        if under and _deeper_comment(lines[first - 2], indent):
            break  # it belongs to the suite above
        first -= 1
    start = target.text.starts[first - 1]
    text = _marked(step, indent, _line_end(target, first))
    return Splice(start, start, text, step.delta.name, depth=_depth(target, statement))


def _after(target: Target, step: Step, statement: ast.stmt) -> Splice:
    indent = _indent(target, step, statement)
    last = _logical_end(target, step, statement)
    lines = target.text.lines
    while isinstance(statement, _COMPOUND) and last < len(lines) and _deeper_comment(lines[last], indent):
        last += 1
    text = _marked(step, indent, _line_end(target, last))
    if last == len(lines) and not lines[-1].endswith(("\n", "\r")):
        end = _line_end(target, last)
        text = end + text[: -len(end)]
    start = sum(map(len, lines[:last]))
    return Splice(start, start, text, step.delta.name, depth=_depth(target, statement))


_COMPOUND = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.ClassDef,
    ast.AsyncFor, ast.AsyncWith, ast.AsyncFunctionDef, getattr(ast, "TryStar", ast.Try),
)  # fmt: skip


def _depth(target: Target, statement: ast.stmt) -> int:
    return sum(1 for _ in target.ancestors(statement))


def _deeper_comment(line: str, indent: str) -> bool:
    bare = line.lstrip(" \t\f")
    return bare.startswith("#") and len(line) - len(bare) > len(indent)


def _replace(target: Target, step: Step) -> Splice:
    lines = target.text.lines
    first, last = step.statements[0], step.statements[-1]
    indent = _indent(target, step, first)
    end = _logical_end(target, step, last)
    begin = first_line(target.text, first)
    start = sum(map(len, lines[: begin - 1]))
    stop = sum(map(len, lines[:end]))
    line_end = _line_end(target, begin)
    kept = "".join(f"{indent}{comment}{line_end}" for comment in comments_of("".join(lines[begin - 1 : end])))
    text = kept + _marked(step, indent, line_end)
    if end == len(lines) and not lines[-1].endswith(("\n", "\r")):
        text = text[: -len(line_end)]
    return Splice(start, stop, text, step.delta.name)


def _parameter(target: Target, step: Step, added: Sequence[Step]) -> Splice:
    arguments = target.node.args
    text = target.text.text
    positional = [*arguments.posonlyargs, *arguments.args]
    nodes: list[ast.expr | ast.arg] = [*positional[-1:], *(arguments.defaults[-1:] if positional else [])]
    if nodes:
        last = max(nodes, key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
        at = offset(target.text, last.end_lineno or 0, last.end_col_offset or 0)
        at = parameter_end(text, at, slash=not arguments.args)
        return Splice(at, at, f", {step.text}", step.delta.name, whole=False)
    at = open_parenthesis(text, offset(target.text, target.node.lineno, target.node.col_offset))
    others = any((arguments.vararg, arguments.kwonlyargs, arguments.kwarg))
    before = "" if step is added[0] else ", "
    after = ", " if others and step is added[-1] else ""
    return Splice(at, at, before + step.text + after, step.delta.name, whole=False)


def _marked(step: Step, indent: str, end: str) -> str:
    lines = [line for line in step.text.splitlines() if line.strip()]
    return "".join(f"{indent}{line}{MARK}{step.delta.name}{end}" for line in lines)


def _line_end(target: Target, line: int) -> str:
    for text in (target.text.lines[line - 1], target.text.lines[0]):
        match = re.search(r"(\r\n|\n|\r)$", text)
        if match:
            return match.group()
    return "\n"


def _indent(target: Target, step: Step, statement: ast.stmt) -> str:
    """The literal indentation of a statement's line; refuses a statement that does not start its line."""
    line = first_line(target.text, statement)
    text = target.text.lines[line - 1]
    before = text[: len(text) - len(text.lstrip(" \t\f"))]
    if line == statement.lineno:
        before = text.encode("utf-8", "surrogatepass")[: statement.col_offset].decode("utf-8", "surrogatepass")
    parent, name, suite, at = target.places[id(statement)]
    if before.strip(" \t\f"):
        joined = at > 0 and (suite[at - 1].end_lineno or 0) >= line
        raise _refusal("BP402" if joined else "BP401", target, step, statement)
    continues = _continues(target, statement)
    if continues is not None:
        code = "BP404" if at and ";" not in continues else "BP402" if at else "BP401"
        raise _refusal(code, target, step, statement)
    other = isinstance(parent, ast.If) and name == "orelse" and isinstance(statement, ast.If)
    if other and text[len(before) :].startswith("elif"):
        raise _refusal("BP403", target, step, statement)
    return before


def _continues(target: Target, statement: ast.stmt) -> str | None:
    """The text before a statement, if a backslash joins the statement's line to it."""
    line = first_line(target.text, statement)
    above = "".join(target.text.lines[max(_floor(target, statement), 1) - 1 : line - 1])
    if not above.rstrip("\r\n").endswith("\\"):
        return None
    comments = comments_of(above)
    return None if comments and above.rstrip().endswith(comments[-1]) else above


def _floor(target: Target, statement: ast.stmt) -> int:
    """The last line that belongs to what stands before a statement."""
    parent, _, suite, at = target.places[id(statement)]
    if at > 0:
        return suite[at - 1].end_lineno or 0
    first = first_line(target.text, statement)
    before: list[ast.AST] = [parent]
    for node in before:
        before += [child for child in children(node) if getattr(child, "lineno", 0) < first]
    ends = [node.end_lineno or 0 for node in before if isinstance(node, ast.expr)]
    return max([getattr(parent, "lineno", 0), *(end for end in ends if end < first)])


def _logical_end(target: Target, step: Step, statement: ast.stmt) -> int:
    """The number of the last physical line of a statement's logical line."""
    lines = target.text.lines
    line = statement.end_lineno or statement.lineno
    raw = lines[line - 1].encode("utf-8", "surrogatepass")[statement.end_col_offset or 0 :]
    rest = raw.decode("utf-8", "surrogatepass")
    while True:
        bare = rest.strip()
        if not bare or bare.startswith("#"):
            return line
        if bare.startswith(";"):
            raise _refusal("BP402", target, step, statement)
        if bare == "\\" and line < len(lines):
            line += 1
            rest = lines[line - 1]
            continue
        raise _refusal("BP404", target, step, statement)


_WHY = {
    "BP401": ("stands on its header's line", "anchor the whole statement, or give the suite lines of its own upstream"),
    "BP402": ("shares its line with another statement", "anchor something else, or give it a line of its own upstream"),
    "BP403": ("is an `elif`", "anchor the whole `if` statement, or the suite inside"),
    "BP404": ("cannot be delimited", "report this with the source"),
}


def _refusal(code: str, target: Target, step: Step, statement: ast.stmt) -> PatchError:
    why, next_step = _WHY[code]
    shown = head(statement)
    return refuse(
        code, f"delta {step.delta.name!r}: `{shown}` {why}; nothing was patched.", ("target", target.name),
        ("nearest", f"{target.where(statement)}  `{shown}`"), ("declared", step.delta.declared),
        next=next_step, file=target.text.display, line=statement.lineno,
    )  # fmt: skip

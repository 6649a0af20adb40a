"""Which statement a person points at with ``FILE:LINE``, and which statements of other lanes are the same one.

Nothing is patched by this; what is proposed is confirmed by the matcher.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .bound import suites_of
from .counterparts import Counterparts, likeness, said
from .errors import refuse
from .proposal import Place
from .render import head, shown
from .source import DirSource, Lane, ModuleText
from .targets import SCOPES, Function, Target, docstring_length

_AT = re.compile(r"(?P<file>.+):(?P<line>\d+)")


@dataclass(frozen=True)
class Pointed:
    """The statement at a line.

    Attributes:
        place: It.
        said: What was made of the line, where it is not simply that of the statement.
    """

    place: Place
    said: str = ""


def read_at(text: str) -> tuple[str, int]:
    """``FILE:LINE`` as its two parts.

    Raises:
        PatchError: BP801, if it is not written so.
    """
    found = _AT.fullmatch(text)
    if found is None:
        raise refuse("BP801", f"`{text}` is not FILE:LINE", next="write the file and the line with a colon between")
    return found["file"], int(found["line"])


def checkout_of(file: str, module: str) -> DirSource | None:
    """The tree that a file on disk stands in, if it is the file of that module; ``None`` if there is no such file."""
    path = Path(file).expanduser()
    if not path.is_file():
        return None
    whole = path.absolute()
    for stem in (Path(*module.split(".")).with_suffix(".py"), Path(*module.split("."), "__init__.py")):
        if whole.parts[-len(stem.parts) :] == stem.parts:
            root = whole.parents[len(stem.parts) - 1]
            return DirSource(f"dir:{root}", root)
    return None


def check_file(file: str, lane: Lane, text: ModuleText) -> None:
    """Refuse a file that is not the module's.

    Raises:
        PatchError: BP801, saying which it is.
    """
    parts, wanted = Path(file).parts, Path(text.path).parts
    gone = not Path(file).expanduser().is_file()
    if not (gone and Path(file).is_absolute()) and parts[-len(wanted) :] != wanted and wanted[-len(parts) :] != parts:
        raise refuse(
            "BP801", f"{text.module} is not in {file}", ("lane", lane.name), ("module", text.display),
            next=f"point into {text.path}; its end will do, as {wanted[-1]}:LINE",
        )  # fmt: skip
    if gone and (len(parts) > len(wanted) or Path(file).is_absolute()):
        raise refuse(
            "BP801", f"there is no file {file}", ("module", text.display),
            next=f"give a file that is there, or write {wanted[-1]}:LINE for that of lane {lane.name}",
        )  # fmt: skip


def statement_at(lane: str, target: Target, line: int) -> Pointed:
    """The statement of the target that stands on a line, or around it.

    Raises:
        PatchError: BP801, if the file has no such line; BP802, if it is not in the target; BP803, if no statement
            that an edit could stand beside is there; BP403, if it is an ``elif``.
    """
    node, text = target.node, target.text
    if not 1 <= line <= len(text.lines):
        raise refuse(
            "BP801", f"{text.display} has {len(text.lines)} lines, and no line {line}", ("lane", lane),
            ("target", f"{target.name}   ({target.where(node)})"), next=f"point at {_span(node)}",
        )  # fmt: skip
    if not node.lineno <= line <= (node.end_lineno or 0):
        holder = _function_at(text, line)
        found = f"that is in {holder}" if holder else "that is in no function"
        raise refuse(
            "BP802", f"line {line} is not in {target.qualname}; {found}", ("lane", lane),
            ("target", f"{target.name}   ({target.where(node)})"),
            next=f"point at {_span(node)}" + (f", or make the target {text.module}:{holder}" if holder else ""),
        )  # fmt: skip
    around = [suite[at] for _, _, suite, at in target.places.values() if _spans(suite[at], line)]
    if not around:
        raise _none(lane, target, line)
    begins = [statement for statement in around if statement.lineno == line]
    statement = begins[0] if begins else around[-1]
    if not begins and (line > _head_end(statement) or isinstance(statement, SCOPES)):
        raise _none(lane, target, line)
    parent, field, suite, _ = target.places[id(statement)]
    if isinstance(parent, ast.If) and field == "orelse" and len(suite) == 1 and _word(text, statement) == "elif":
        raise refuse(
            "BP403", f"line {line} is in `el{head(statement)}`", ("lane", lane),
            next="point at the first `if` of the chain, or at a statement in this branch",
        )  # fmt: skip
    if statement is node.body[0] and docstring_length(node):
        raise refuse(
            "BP803", f"line {line} is in the docstring", ("lane", lane),
            next="point at the first statement after it, or declare a Prologue, which needs no anchor",
        )  # fmt: skip
    inside = f"line {line} is inside the statement that begins on line {statement.lineno}"
    return Pointed(Place(lane, target, statement), "" if begins else inside)


def _none(lane: str, target: Target, line: int) -> Exception:
    text = target.text.lines[line - 1].strip()
    statements = [suite[at] for _, _, suite, at in target.places.values()]
    inner = next((s for s in statements if isinstance(s, SCOPES) and _spans(s, line)), None)
    if inner is not None:
        why, follow = f"is in `{head(inner)}`, which is no part of the target", "anchors find no nested function"
    else:
        first = target.node.body[0]
        why = "is in the header of the function" if line < first.lineno and text else f"has no statement: `{text}`"
        why = why if text else "is empty"
        before = [s for s in statements if s.lineno < line]
        after = [s for s in statements if s.lineno > line]
        near = [*before[-1:], *after[:1]]
        follow = "point at " + " or ".join(f"line {s.lineno}  `{head(s)}`" for s in near)
    return refuse(
        "BP803", f"line {line} {why}", ("lane", lane), ("target", f"{target.name}   ({target.where(target.node)})"),
        next=follow,
    )  # fmt: skip


def _spans(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or 0)


def _span(node: ast.AST) -> str:
    return f"a line from {getattr(node, 'lineno', '?')} to {getattr(node, 'end_lineno', '?')}"


def _word(text: ModuleText, statement: ast.stmt) -> str:
    """What a statement begins with in the text: ``elif`` where the tree has an ``if``."""
    line = text.lines[statement.lineno - 1].encode("utf-8", "surrogatepass")[statement.col_offset :]
    return line.decode("utf-8", "replace")[:4]


def _head_end(statement: ast.stmt) -> int:
    """The last line of a statement; of one with suites, of its header."""
    end = statement.end_lineno or 0
    suites = [suite for _, suite in suites_of(statement)]
    if not suites:
        return end
    inner = {id(node) for suite in suites for node in suite}
    own = [node for node in ast.iter_child_nodes(statement) if id(node) not in inner and hasattr(node, "end_lineno")]
    own = [node for node in own if not isinstance(node, (ast.ExceptHandler, ast.match_case))]
    nested = [child for item in ast.iter_child_nodes(statement) if isinstance(item, ast.withitem)
              for child in ast.iter_child_nodes(item)]  # fmt: skip
    ends = [getattr(node, "end_lineno", 0) for node in (*own, *nested)]
    return max([statement.lineno, *ends])


def _function_at(text: ModuleText, line: int) -> str | None:
    """The qualified name of the function or method that a line stands in."""

    def below(scope: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(scope):
            if not hasattr(child, "lineno") or not child.lineno <= line <= (getattr(child, "end_lineno", None) or 0):
                continue
            if isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")
            elif isinstance(child, Function):
                yield prefix + child.name
            else:
                yield from below(child, prefix)

    return next(below(text.tree, ""), None)


# -- the same statement on another lane --------------------------------------------------------


def counterpart(place: Place, lane: str, target: Target) -> Place:
    """The statement of another lane's target that is this one, changed or not.

    Raises:
        PatchError: BP804, naming what comes nearest, or all that it could be.
    """
    found = Counterparts(place.target, target).of(place.statement)
    if found.statement is not None:
        return Place(lane, target, found.statement)
    text = head(place.statement)
    if found.doubtful:
        what, label, others = f"nothing that is `{text}` beyond doubt", "could be", found.doubtful
        follow = f"point at a statement beside it; or leave lane {lane} out, and declare a variant of its own for it"
    else:

        def near(other: ast.stmt) -> tuple[float, float]:
            return likeness(place.statement, other), said(place.statement, other)

        statements = [suite[at] for _, _, suite, at in target.places.values()]
        what, label, others = f"no statement like `{text}`", "nearest", (max(statements, key=near),)
        follow = f"leave lane {lane} out, and declare a variant of its own for it"
    raise refuse(
        "BP804", f"{target.qualname} on lane {lane} has {what}",
        (place.lane, f"{place.where}  {shown(place.statement)}"),
        (label, "\n".join(f"{target.where(other)}  {shown(other)}" for other in others)),
        next=follow, file=target.text.display, line=target.node.lineno,
    )  # fmt: skip

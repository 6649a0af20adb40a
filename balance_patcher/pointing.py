"""Which statement a person points at with ``FILE:LINE``, and which statements of other lanes are the same one.

What corresponds is found from the whole function: the statements that the lanes have in common, in their order, are
laid side by side, and one that was changed is looked for in the gap where it was. So equal statements that stand often
are told apart by what stands around them. Nothing is patched by this; what is proposed is confirmed by the matcher.
"""

from __future__ import annotations

import ast
import difflib
import keyword
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import refuse
from .generalise import Common
from .matching import overlap, weight
from .parts import Parts
from .proposal import Place
from .render import head, shown
from .source import DirSource, Lane, ModuleText
from .statements import alike, header
from .targets import SCOPES, Function, Target, docstring_length, suites_of

_AT = re.compile(r"(?P<file>.+):(?P<line>\d+)")
_LIKE = 0.5  # so much of two statements must be equal for one to be the other, changed
_FAR = 0.75  # the same where it is not in its place
_SUITES, _AROUND = 0.2, 0.1  # what the same kinds of statements in it, and around it, add


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
    if parts[-len(wanted) :] != wanted and wanted[-len(parts) :] != parts:
        raise refuse(
            "BP801", f"{text.module} is not in {file}", ("lane", lane.name), ("module", text.display),
            next=f"point into {text.path}; its end will do, as {wanted[-1]}:LINE",
        )  # fmt: skip
    if len(parts) > len(wanted) and not Path(file).expanduser().is_file():
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

    It is looked for in what became of the statement around it, and else in the whole function.

    Raises:
        PatchError: BP804, naming what comes nearest.
    """
    found = _counterpart(place, target)
    if found is not None:
        return Place(lane, target, found)

    def near(other: ast.stmt) -> tuple[float, float]:
        return _likeness(place, Place(lane, target, other)), _said(place.statement, other)

    nearest = max(_statements(target), key=near)
    raise refuse(
        "BP804", f"{target.qualname} on lane {lane} has no statement like `{head(place.statement)}`",
        (place.lane, f"{place.where}  {shown(place.statement)}"),
        ("nearest", f"{target.where(nearest)}  {shown(nearest)}"),
        next=f"leave lane {lane} out, and declare a variant of its own for it",
        file=target.text.display, line=target.node.lineno,
    )  # fmt: skip


def _statements(target: Target) -> list[ast.stmt]:
    return [suite[at] for _, _, suite, at in target.places.values()]


def _counterpart(place: Place, target: Target) -> ast.stmt | None:
    parent, field, suite, _ = place.target.places[id(place.statement)]
    around: ast.AST | None = target.node
    if isinstance(parent, ast.stmt) and parent is not place.target.node:
        around = _counterpart(Place(place.lane, place.target, parent), target)
    if around is not None:
        inner = [statement for name, other in suites_of(around) if name == field for statement in other]
        found = _pick(place, target, suite, inner, math.inf)
        if found is not None:
            return found
    return _pick(place, target, _statements(place.target), _statements(target), _FAR)


def _pick(
    place: Place, target: Target, own: Sequence[ast.stmt], others: Sequence[ast.stmt], far: float
) -> ast.stmt | None:
    """The one that stands in its place in the same order; else the one that is equal; else the one most like it.

    Args:
        place: The statement.
        target: The function on the other lane.
        own: Statements among which it is.
        others: Those among which its counterpart may be.
        far: How like it one must be that is not in the gap where it was.
    """
    keys = [[header(statement) for statement in statements] for statements in (own, others)]
    blocks = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes()
    at = next(at for at, statement in enumerate(own) if statement is place.statement)
    tag, first, _, start, end = next(block for block in blocks if block[1] <= at < block[2])
    if tag == "equal":
        return others[start + at - first]
    taken = {index for tag, _, _, start, end in blocks if tag == "equal" for index in range(start, end)}
    left = [index for index in range(len(others)) if index not in taken]
    equal = [index for index in left if keys[1][index] == keys[0][at]]
    if len(equal) == 1:
        return others[equal[0]]

    def likeness(index: int) -> tuple[float, int]:
        return _likeness(place, Place("", target, others[index])), -abs(index - start)

    for free, least in ((range(start, end), _LIKE), (left, far)):
        best = max(free, key=likeness, default=None)
        if best is not None and likeness(best)[0] >= least:
            return others[best]
    return None


def _likeness(one: Place, other: Place) -> float:
    """How much of two statements is equal, in structure and in words; 0 where they have no name in common."""
    a, b = one.statement, other.statement
    common = Common.of([a, b], Parts())
    if common is None or not common.named or not _said(a, b):
        return 0.0
    compound = any(suites_of(a)) or any(suites_of(b))
    equal = overlap(a, b, {}, header=compound) + overlap(b, a, {}, header=compound)
    share = equal / (weight(a, header=compound) + weight(b, header=compound))
    kinds = [[type(node) for node, _ in place.target.ancestors(place.statement)] for place in (one, other)]
    return (share + _said(a, b)) / 2 + _SUITES * (compound and alike(a, b)) + _AROUND * (kinds[0] == kinds[1])


def _said(one: ast.stmt, other: ast.stmt) -> float:
    """How many of their names' words two statements have in common; with suites, their headers."""
    found = [re.findall(r"[A-Za-z0-9]+", header(node).partition(" ")[2]) for node in (one, other)]
    words = [Counter(word for word in said if not keyword.iskeyword(word)) for said in found]
    size = sum(sum(count.values()) for count in words)
    return 2 * sum((words[0] & words[1]).values()) / size if size else 1.0

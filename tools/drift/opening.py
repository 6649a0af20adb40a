"""Open a pattern where upstream's new statement differs from it: a hole, or one text more that a hole may be bound to.

What the pattern said literally is still said, by the texts that the new hole allows. Where the delta's own text repeats
what was literal there, it follows the hole; so a renamed attribute is renamed in the edit as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from balance_patcher.delta import Anchor
from balance_patcher.errors import PatchError
from balance_patcher.matching import ONE, OPERATORS, Mismatch, OperatorHole, hole_name, render_bound
from balance_patcher.pattern import Pattern, compile_pattern
from balance_patcher.render import as_pattern

_TIMES = 6  # places in which one statement may differ
_LONGEST = 60  # a text that is longer is not listed
_STEP = re.compile(r"(\w+)(?:\[(\d+)\])?")


@dataclass(frozen=True)
class Opened:
    """A pattern that fits two statements.

    Attributes:
        pattern: Its text.
        allow: What its holes may be bound to.
        renamed: What was literal, by what stands for it now: ``self.running`` by ``self.$RUNNING``.
    """

    pattern: str
    allow: Mapping[str, tuple[str, ...]]
    renamed: Mapping[str, str]


def opened(
    pattern: Pattern,
    allow: Mapping[str, tuple[str, ...]],
    found: ast.AST | Sequence[ast.AST],
    taken: Sequence[str] = (),
) -> Opened | None:
    """The pattern, opened so that it fits a node, or a run of statements; ``None`` where no hole can do that.

    Args:
        pattern: What fits the old statement.
        allow: What its holes may be bound to.
        found: The new statement.
        taken: Names that other holes of the anchor have.
    """
    nodes = tuple(map(_copied, pattern.nodes))
    allowed = dict(allow)
    renamed: dict[str, str] = {}
    for _ in range(_TIMES):
        now = Pattern(pattern.text, nodes, pattern.kind, pattern.holes)
        result = now.match(found, {}, allowed)
        if not isinstance(result, Mismatch):
            return _written(now, allowed, renamed)
        if not _open(now, result.path, found, allowed, renamed, taken):
            return None
    return None


def _written(pattern: Pattern, allow: Mapping[str, tuple[str, ...]], renamed: Mapping[str, str]) -> Opened | None:
    header = pattern.kind == "header"
    try:
        nodes = [_bare(node, header=header) for node in pattern.nodes]
        text = "\n".join(as_pattern(node, header=header) for node in nodes)
        compile_pattern(text)
    except (PatchError, ValueError, AttributeError):
        return None
    return Opened(text, dict(allow), renamed)


def _copied(node: ast.AST) -> ast.AST:
    """A tree of its own; a hole for an operator is no node that the standard library can copy."""
    if isinstance(node, OperatorHole):
        return OperatorHole(node.name)
    fields = {
        name: [_copied(one) if isinstance(one, ast.AST) else one for one in value]
        if isinstance(value, list)
        else _copied(value)
        if isinstance(value, ast.AST)
        else value
        for name, value in ast.iter_fields(node)
    }
    return ast.copy_location(type(node)(**fields), node)


def _bare(node: ast.AST, *, header: bool) -> ast.AST:
    """A node as a statement; of a header, without its suites."""
    if header:
        for name in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(getattr(node, name, None), list):
                setattr(node, name, [])
    return ast.Expr(node) if isinstance(node, ast.expr) else node


def _open(
    pattern: Pattern,
    path: str,
    found: ast.AST | Sequence[ast.AST],
    allow: dict[str, tuple[str, ...]],
    renamed: dict[str, str],
    taken: Sequence[str],
) -> bool:
    """Change the pattern at a path so that the node fits there; whether that could be done."""
    steps = [(match[1], match[2]) for match in _STEP.finditer(path)]
    mine: Any = pattern.nodes[0]
    theirs: Any = found if isinstance(found, ast.AST) else found[0]
    if steps and steps[0][0] == "statements":
        at = int(steps[0][1] or 0)
        if isinstance(found, ast.AST) or at >= len(found):
            return False
        mine, theirs, steps = pattern.nodes[at], found[at], steps[1:]
    if not steps:
        return False
    try:
        for name, index in steps[:-1]:
            mine, theirs = _down(mine, name, index), _down(theirs, name, index)
        name, index = steps[-1]
        old, new = _down(mine, name, index), _down(theirs, name, index)
    except (AttributeError, IndexError, TypeError):
        return False
    hole = _hole(old)
    if hole is not None:
        if hole not in allow:
            return False
        allow[hole] = (*allow[hole], _text(new))
        return True
    if old is None or new is None or isinstance(old, ast.stmt) or isinstance(new, (ast.stmt, list)):
        return False
    if not _written_whole(old, mine if isinstance(old, str) else None):
        return False
    fresh = _fresh(pattern, old, name, allow, taken)
    before = ast.unparse(mine) if isinstance(old, str) and isinstance(mine, ast.expr) else ""
    texts = (_text(old), _text(new))
    put: object = ONE + fresh if isinstance(old, str) else ast.Name(ONE + fresh, ast.Load())
    put = OperatorHole(fresh) if isinstance(old, ast.cmpop) else put
    if not isinstance(old, (str, ast.expr, ast.cmpop)):
        return False
    if isinstance(old, ast.expr) and ONE not in ast.unparse(old):
        renamed[texts[0]] = f"${fresh}"
    if index is None:
        setattr(mine, name, put)
    else:
        getattr(mine, name)[int(index)] = put
    if before and ONE not in before:
        renamed[before] = before[: -len(texts[0])] + f"${fresh}" if before.endswith(texts[0]) else f"${fresh}"
    if all(len(text) <= _LONGEST for text in texts):
        allow[fresh] = texts
    return True


def _written_whole(*nodes: object) -> bool:
    """Whether parts of a pattern can be written by themselves; an operator that is a hole has no text of its own."""
    return not any(
        isinstance(one, OperatorHole) for node in nodes if isinstance(node, ast.expr) for one in ast.walk(node)
    )


def _down(node: Any, name: str, index: str | None) -> Any:
    value = getattr(node, name)
    return value if index is None else value[int(index)]


def _hole(value: object) -> str | None:
    if isinstance(value, OperatorHole):
        return value.name
    if isinstance(value, str):
        return value.removeprefix(ONE) if value.startswith(ONE) else None
    return hole_name(value, ONE) if isinstance(value, ast.AST) else None


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return render_bound(value) if isinstance(value, ast.AST) else repr(value)


def _fresh(
    pattern: Pattern, old: object, field: str, allow: Mapping[str, tuple[str, ...]], taken: Sequence[str]
) -> str:
    """A name for a hole, after what was there."""
    stem = old.upper() if isinstance(old, str) else "OP" if type(old) in OPERATORS else field.rstrip("s").upper()
    stem = re.sub(r"\W", "", stem).strip("_") or "PART"
    used = {*pattern.holes, *allow, *taken}
    return next(name for name in (stem, *(f"{stem}{at}" for at in range(2, 99))) if name not in used)


def renamed_in(text: str, names: Mapping[str, str]) -> str:
    """A text of a delta with what was literal in the pattern put as the hole that stands for it."""
    for old, new in names.items():
        text = re.sub(rf"(?<![\w.$]){re.escape(old)}(?!\w)", new.replace("\\", r"\\"), text)
    return text


def opened_anchor(anchor: Anchor, found: ast.AST | Sequence[ast.AST]) -> tuple[Anchor, Mapping[str, str]] | None:
    """An anchor whose pattern fits another statement too, its levels and neighbours as they were."""
    done = opened(anchor.compiled, anchor.allow, found, sorted(anchor.holes))
    if done is None:
        return None
    try:
        made = Anchor(done.pattern, anchor.inside, anchor.after, anchor.before, done.allow)
    except PatchError:
        return None
    return made, done.renamed

"""Deltas that upstream has made needless: since when, and the lines of the declaration that could go.

Whether they can go now depends on what has to be supported, and a report need not reach back so far: so the
declaration's own condition is always told with them, and whether every column of the report has it. Their lines are
told in any case, and as a patch where what is left has been tried.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from balance_patcher.delta import Delta
from balance_patcher.feature import Feature

from .changed import Absorbed, Transition
from .matrix import Cell, Ref
from .patching import CannotPatchError, delta_call, loaded, unified

Lines = tuple[int, int]


def absorbed(
    feature: Feature, folder: Path | None, refs: Sequence[Ref], row: Sequence[Cell], changes: Sequence[Transition]
) -> Iterator[Absorbed]:
    """The deltas of a feature that are absorbed at the last ref.

    Args:
        feature: The feature.
        folder: Where its declarations stand.
        refs: The columns.
        row: Its cell in each of them.
        changes: What changed, with the commits.
    """
    for delta in feature.deltas:
        cells = [cell.delta(delta.name) for cell in row]
        states = [cell.status if cell is not None else "unreadable" for cell in cells]
        if not states or states[-1] != "absorbed":
            continue
        first = len(states) - 1
        while first and states[first - 1] == "absorbed":
            first -= 1
        ref = refs[first].name
        made = next((one for one in changes if (one.delta, one.after, one.now) == (delta.name, ref, "absorbed")), None)
        file, lines, patch = _lines_of(delta, folder)
        yield Absorbed(
            feature.name, delta.name, ref, first == 0, delta.remove_when, file, lines, patch,
            made.first_bad.commit if made is not None and made.first_bad is not None else None,
        )  # fmt: skip


def _lines_of(delta: Delta, folder: Path | None) -> tuple[str, tuple[Lines, ...], str]:
    """The file, the lines to delete, and the patch that does; empty where they cannot be told."""
    file = delta.declared.partition(":")[0]
    path = folder / file.rpartition("/")[2] if folder is not None else None
    if path is None or not path.is_file():
        return file, (), ""
    old = path.read_text("utf-8")
    tree = ast.parse(old)
    try:
        lines = _joined(sorted(set(_found(tree, delta.name))))
    except CannotPatchError:
        return file, (), ""
    kept = [line for at, line in enumerate(old.split("\n"), 1) if not any(first <= at <= last for first, last in lines)]
    new = "\n".join(kept)
    try:
        module = loaded(path, new)
    except CannotPatchError:
        return file, lines, ""
    left = getattr(module, "FEATURE", None)
    gone = isinstance(left, Feature) and all(one.name != delta.name for one in left.deltas)
    return file, lines, unified(path, old, new) if gone else ""


def _joined(found: Sequence[Lines]) -> tuple[Lines, ...]:
    """Ranges with those that meet made one."""
    made: list[Lines] = []
    for first, last in found:
        if made and first <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(last, made[-1][1])
        else:
            made.append((first, last))
    return tuple(made)


def _found(tree: ast.Module, delta: str) -> Iterator[Lines]:
    """The lines of a declaration, of where it is named, and of what shows it."""
    call = delta_call(tree, delta)
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and statement.value is call:
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
            yield statement.lineno, statement.end_lineno or statement.lineno
    if not names:
        raise CannotPatchError("it is not a statement of its own")
    for node in ast.walk(tree):
        items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else []
        for item in items:
            alone = sum(other.lineno == item.lineno for other in items) == 1 and item.lineno != getattr(
                node, "lineno", 0
            )
            named = alone and isinstance(item, ast.Name) and item.id in names
            about = isinstance(item, ast.Call) and getattr(item.func, "id", "") in {"Example", "Refusal", "Pure"}
            spoken = about and any(getattr(inner, "value", None) == delta for inner in _arguments(item))
            if named or spoken:
                yield item.lineno, item.end_lineno or item.lineno


def _arguments(call: ast.AST) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(call, ast.Call) else []

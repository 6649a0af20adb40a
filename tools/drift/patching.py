"""Write a changed variant into the text of the file that declares it, as a unified diff.

Only what is written out in the declaration can be changed in it. A pattern that is a name of the file is written out in
its place; edits that are a name are left, and if they would have to change, there is no patch.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from balance_patcher.delta import Anchor, Delta, Level, Variant, edit_text
from balance_patcher.skeleton import literal

from .opening import renamed_in

_LINE = 120
_PACKAGE = "balance_patcher.deltas"


class CannotPatchError(Exception):
    """Why a declaration cannot be changed by a machine."""


@dataclass(frozen=True)
class Patched:
    """A changed file: its text, the line that changed first, the diff, and the delta that it declares."""

    file: str
    text: str
    line: int
    patch: str
    delta: Delta


def patched(path: Path, delta: Delta, variant: Variant, anchor: Anchor, renamed: Mapping[str, str]) -> Patched:
    """The file with another anchor for one variant of a delta.

    Args:
        path: The file that declares the delta.
        delta: The delta.
        variant: The variant, as it is declared.
        anchor: The anchor that it shall have.
        renamed: What its edits and exports have to call otherwise.

    Raises:
        CannotPatchError: If the declaration is not written out, or what comes of it is refused.
    """
    old = path.read_text("utf-8")
    call = _variant_call(ast.parse(old), delta.name, variant.name)
    place = next((node for node in ast.walk(call) if _is_call(node, "Anchor")), None)
    if not isinstance(place, ast.Call):
        raise CannotPatchError("its anchor is not written out in the declaration")
    changes: list[tuple[ast.expr, str]] = [(place, _anchor_text(old, place, variant.anchor, anchor))]
    changes += _texts(call, place, renamed)
    done = made(path, old, _replaced(old, changes), delta.name)
    _need_renamed(done.delta, variant.name, renamed)
    return done


def made(path: Path, old: str, new: str, delta: str) -> Patched:
    """A changed text with its diff, once it has been run.

    Raises:
        CannotPatchError: If it is refused.
    """
    pairs = zip(old.split("\n"), new.split("\n"), strict=False)
    first = next((at for at, (a, b) in enumerate(pairs, 1) if a != b), 1)
    return Patched(
        f"{path.parent.name}/{path.name}", new, first, unified(path, old, new), declared_in(path, new, delta)
    )


def unified(path: Path, old: str, new: str) -> str:
    """The change of a file as ``git apply`` takes it at the root of the checkout."""
    file = f"{path.parent.name}/{path.name}"
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"a/{file}", f"b/{file}"))


def loaded(path: Path, text: str) -> ModuleType:
    """The module that a changed text makes; it is run, as an import would run it.

    Raises:
        CannotPatchError: If it is refused.
    """
    module = ModuleType(f"{_PACKAGE}._proposed_{path.stem}")
    module.__file__, module.__package__ = str(path), _PACKAGE
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - as an import would
    except Exception as error:
        said = str(error).split("\n", 1)[0]
        raise CannotPatchError(f"the changed declaration is refused: {said}") from error
    finally:
        sys.modules.pop(module.__name__, None)
    return module


def declared_in(path: Path, text: str, name: str) -> Delta:
    """The delta of that name that a text declares.

    Raises:
        CannotPatchError: If there is none, or the text is refused.
    """
    values = list(vars(loaded(path, text)).values())
    values += [item for value in values if isinstance(value, tuple) for item in value]
    values += [delta for value in values for delta in getattr(value, "deltas", ())]
    found = next((one for one in values if isinstance(one, Delta) and one.name == name), None)
    if found is None:
        raise CannotPatchError(f"{path.name} does not declare {name}")
    return found


# -- where it stands -----------------------------------------------------------------------------


def delta_call(tree: ast.Module, delta: str) -> ast.Call:
    """The ``Delta(…)`` of that name.

    Raises:
        CannotPatchError: If it is not written out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_call(node, "Delta") and _said(node, 0, "name") == delta:
            return node
    raise CannotPatchError("the declaration is not written out in its file")


def _variant_call(tree: ast.Module, delta: str, variant: str) -> ast.Call:
    for node in ast.walk(delta_call(tree, delta)):
        if isinstance(node, ast.Call) and _is_call(node, "Variant") and _said(node, 0, "name") == variant:
            return node
    raise CannotPatchError(f"the variant {variant!r} is not written out in the declaration")


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name


def _said(call: ast.Call, at: int, name: str) -> object:
    node = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    node = node or (call.args[at] if len(call.args) > at else None)
    return node.value if isinstance(node, ast.Constant) else None


# -- what is written -----------------------------------------------------------------------------


def _anchor_text(old: str, call: ast.Call, was: Anchor | None, anchor: Anchor) -> str:
    """The call with what changed written out, and the rest as it stood."""
    given = {"pattern": call.args[0]} if call.args else {}
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    header = old.split("\n")[call.lineno - 1]
    indent = header[: len(header) - len(header.lstrip())]
    parts: list[str] = []
    for name in ("pattern", "inside", "after", "before", "allow"):
        value = getattr(anchor, name)
        if was is not None and value == getattr(was, name) and name in given:
            text = ast.get_source_segment(old, given[name]) or ""
        elif value:
            text = _value(value, f"{indent}    ")
        else:
            continue
        parts.append(text if name == "pattern" else f"{name}={text}")
    line = f"Anchor({', '.join(parts)})"
    if "\n" not in line and len(indent) + len(line) + 1 <= _LINE:
        return line
    inner = ",\n".join(
        textwrap.indent(part, f"{indent}    ") if "\n" not in part else f"{indent}    {part}" for part in parts
    )
    return f"Anchor(\n{inner},\n{indent})"


def _value(value: object, indent: str = "") -> str:
    if isinstance(value, str):
        return textwrap.indent(literal(value), indent).lstrip() if "\n" in value else literal(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(name)}: {_value(texts)}" for name, texts in value.items()) + "}"
    if isinstance(value, Level):
        flags = ("" if value.direct else ", direct=False") + (", outermost=True" if value.outermost else "")
        return f"Level({literal(value.name)}, {literal(value.pattern)}{flags})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_value, value)) + ("," if len(value) == 1 else "") + ")"
    raise CannotPatchError(f"{value!r} cannot be written")


def _texts(call: ast.Call, anchor: ast.Call, renamed: Mapping[str, str]) -> list[tuple[ast.expr, str]]:
    """What the variant calls by its old name outside of its anchor, written anew."""
    inner = {id(node) for node in ast.walk(anchor)}
    strings = [node for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    changes: list[tuple[ast.expr, str]] = []
    for node in strings:
        text = renamed_in(str(node.value), renamed)
        if id(node) not in inner and text != node.value:
            changes.append((node, literal(text)))
    return changes


def _need_renamed(delta: Delta, variant: str, renamed: Mapping[str, str]) -> None:
    """Refuse a change that leaves an edit with a name that the anchor does not have any more."""
    changed = next((one for one in delta.variants if one.name == variant), None)
    texts = [*map(edit_text, changed.edits), *changed.exports.values()] if changed is not None else []
    if any(renamed_in(text, renamed) != text for text in texts):
        raise CannotPatchError("its edits have to change too, and are not written out in the variant")


def _replaced(old: str, changes: list[tuple[ast.expr, str]]) -> str:
    """The text with some nodes written anew."""
    lines = old.split("\n")
    starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
    places = []
    for node, text in changes:
        ends = (node.lineno, node.col_offset), (node.end_lineno or 1, node.end_col_offset or 0)
        # A column of the syntax tree counts bytes.
        first, last = (starts[at - 1] + len(lines[at - 1].encode()[:column].decode()) for at, column in ends)
        places.append((first, last, text))
    for first, last, text in sorted(places, reverse=True):
        old = old[:first] + text + old[last:]
    return old

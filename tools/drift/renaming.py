"""A name that a delta's text uses and that upstream calls otherwise now: which one, and the declaration with it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

from balance_patcher.delta import Delta, Variant, edit_text
from balance_patcher.source import Lane

from .patching import CannotPatchError, Patched, delta_call, made

_LIKE = 0.4  # how like the old name a new one must be, if it is used as often
_MOST = 4  # new names that are tried for each old one


def renames(path: Path, delta: Delta, variant: Variant, good: Lane, bad: Lane) -> Iterator[tuple[Patched, str, str]]:
    """The changed declaration for each likely rename, the likeliest first."""
    old, new = good.module(delta.module), bad.module(delta.module)
    if old is None or new is None:
        return
    was, now = _attributes(old.tree), _attributes(new.tree)
    used = {name for text in map(edit_text, variant.edits) for name in re.findall(r"\.([A-Za-z_]\w*)", text)}
    used |= {name for text in variant.exports.values() for name in re.findall(r"\.([A-Za-z_]\w*)", text)}
    fresh = [name for name in now if name not in was]
    for name in sorted(one for one in used if was[one] and not now[one]):

        def likeness(other: str, name: str = name) -> float:
            return SequenceMatcher(None, name, other).ratio() - abs(was[name] - now[other]) / (was[name] + now[other])

        for other in sorted(fresh, key=likeness, reverse=True)[:_MOST]:
            if SequenceMatcher(None, name, other).ratio() >= _LIKE or was[name] == now[other]:
                done = _changed(path, delta, name, other)
                if done is not None:
                    yield done, name, other


def _attributes(tree: ast.AST) -> Counter[str]:
    """How often each attribute of ``self`` is used in a module."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return Counter(node.attr for node in found if getattr(node.value, "id", "") == "self")


def _changed(path: Path, delta: Delta, name: str, other: str) -> Patched | None:
    """The declaration with an attribute called otherwise, in every text of the delta."""
    text = path.read_text("utf-8")
    try:
        call = delta_call(ast.parse(text), delta.name)
        lines = text.split("\n")
        for at in range(call.lineno - 1, call.end_lineno or call.lineno):
            lines[at] = re.sub(rf"(?<=\.){re.escape(name)}\b", other, lines[at])
        changed = "\n".join(lines)
        return made(path, text, changed, delta.name) if changed != text else None
    except CannotPatchError:
        return None

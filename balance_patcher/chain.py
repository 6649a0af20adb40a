"""The attributes of a class and its bases, as their text sets them; bases are opened only when needed."""

from __future__ import annotations

import ast
import bisect
import difflib
import itertools
import re

from .bound import DEFINITIONS, attributes_set, definitions, stored, walk
from .delta import is_private
from .source import Lane, ModuleText
from .targets import Function, FunctionNode, short

#: What follows the name of what gets a value.
_GIVEN = re.compile(r"\s*(:[^=]*)?([-+*/%@&|^]|//|\*\*|<<|>>)?=(?!=)")


class ClassChain:
    """The attributes of a class and its bases, read from their text; bases are opened only when needed."""

    def __init__(self, lane: Lane, text: ModuleText, owner: ast.ClassDef | None) -> None:
        self.lane = lane
        self._classes: list[tuple[ModuleText, ast.ClassDef]] = [(text, owner)] if owner else []
        self._opened = 0

    @property
    def described(self) -> str:
        return ", ".join(node.name for _, node in self._classes) or "the class"

    def has(self, name: str) -> bool:
        """Whether the class, or a base that this lane holds, sets the attribute; a private one is the class's alone."""
        if is_private(name):
            return any(sets_attribute(text, node, name) for text, node in self._classes[:1])
        # To look into a method costs more than to open a base: first into those that look as if they set it.
        for likely in (True, False):
            at = 0
            while at < len(self._classes):
                text, node = self._classes[at]
                if sets_attribute(text, node, name, likely=likely):
                    return True
                at += 1
                if at == len(self._classes):
                    self._extend()
        return False

    def nearest(self, name: str) -> tuple[str, str]:
        """The row of a failure for an attribute that is not there: what has almost its name."""
        lines = {
            found: line_at(text, node.lineno)
            for text, owner in self._classes
            for node in ast.walk(owner)
            for found in [getattr(node, "attr", None) or getattr(node, "name", None)]
            if isinstance(found, str)
            and (not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store))
            and isinstance(node, (ast.Attribute, *Function))
        }
        near = difflib.get_close_matches(name, lines, 1)
        return "nearest", lines[near[0]] if near else f"nothing in {self.described} comes near"

    def _extend(self) -> None:
        """Open the bases of the classes that were opened last."""
        fresh, self._opened = self._classes[self._opened :], len(self._classes)
        self._classes += [found for text, node in fresh for base in node.bases if (found := self._open(text, base))]

    def _open(self, text: ModuleText, base: ast.expr) -> tuple[ModuleText, ast.ClassDef] | None:
        base = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(base, ast.Name):
            return None
        inner = (node for part in text.parts_with(base.id) for node in walk(part))
        for node in itertools.chain(definitions(text.outline), inner):
            if isinstance(node, ast.ClassDef) and node.name == base.id:
                return text, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        other = self.lane.module(node.module)
                        found = (
                            [n for n in definitions(other.outline) if getattr(n, "name", "") == alias.name]
                            if other
                            else []
                        )
                        if other and found and isinstance(found[0], ast.ClassDef):
                            return other, found[0]
        return None


def sets_attribute(text: ModuleText, node: ast.ClassDef, name: str, *, likely: bool = False) -> bool:
    """Whether a class body defines a name, or a method sets that attribute on its first parameter.

    Args:
        text: The module.
        node: The class.
        name: The attribute.
        likely: Whether to look only into those methods that have it on the left of a ``=``.
    """
    mentioned = text.lines_with(name)
    if not mentioned:
        return False
    if likely:
        mentioned = [at for at in mentioned if _gives(text.lines[at - 1], name)]
    if id(node) not in text.members:
        text.members[id(node)] = _members(node)
    named, methods = text.members[id(node)]
    if name in named:
        return True
    for function in methods:
        at = bisect.bisect_left(mentioned, function.lineno)
        if at < len(mentioned) and mentioned[at] <= (function.end_lineno or 0):
            if id(function) not in text.sets:
                text.fill(function)
                text.sets[id(function)] = _set_on_self(function)
            if name in text.sets[id(function)]:
                return True
    return False


def _gives(line: str, name: str) -> bool:
    """Whether an attribute stands on a line as if it got a value there."""
    at = line.find(f".{name}")
    return at >= 0 and _GIVEN.match(line, at + 1 + len(name)) is not None


def _members(node: ast.ClassDef) -> tuple[frozenset[str], tuple[FunctionNode, ...]]:
    """What a class body defines; and the methods that may set attributes on their first parameter."""
    inner = list(definitions(node))
    body = ast.Module([s for s in node.body if not isinstance(s, DEFINITIONS)], [])
    methods = [
        function
        for function in inner
        if isinstance(function, Function)
        and not any(getattr(d, "id", "") == "staticmethod" for d in function.decorator_list)
    ]
    # Most attributes are set in `__init__`: look there first.
    methods.sort(key=lambda function: function.name != "__init__")
    return frozenset({*stored(body), *(getattr(each, "name", "") for each in inner)}), tuple(methods)


def _set_on_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """The attributes that a method sets on its first parameter; one that is only annotated is not set."""
    positional = [*function.args.posonlyargs, *function.args.args]
    first = positional[0].arg if positional else None
    found = attributes_set(function, nested=True)
    return frozenset(node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == first)


def line_at(text: ModuleText, line: int) -> str:
    """Where a line is, and what stands on it."""
    return f"{short(text.display)}:{line}  `{text.lines[line - 1].strip()}`"

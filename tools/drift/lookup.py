"""What a name in one of upstream's modules means: a class or a function, in this module or in one that it imports.

Only text is read. What cannot be told from it is ``None``, and never guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from balance_patcher.bound import definitions
from balance_patcher.errors import PatchError
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import Function, FunctionNode

_DEEPEST = 6  # re-exports that are followed
_PACKAGE = "vllm"


@dataclass(frozen=True)
class Defined:
    """A class or a function where it is defined; ``owner`` is the class of a method."""

    text: ModuleText
    qualname: str
    node: FunctionNode | ast.ClassDef
    owner: Defined | None = None

    @property
    def name(self) -> str:
        return f"{self.text.module}:{self.qualname}"


def lookup(lane: Lane, text: ModuleText, name: str, depth: int = _DEEPEST) -> Defined | ModuleText | None:
    """What a name means at the top of a module: a definition, or a module that was imported whole."""
    found = _tops(text).get(name)
    if isinstance(found, (*Function, ast.ClassDef)):
        return Defined(text, name, found)
    if found is None or depth == 0:
        return None
    module, member = found
    home = _module(lane, module)
    if not member or home is None:
        return home
    return lookup(lane, home, member, depth - 1) or _module(lane, f"{module}.{member}" if _package(home) else "")


def _package(text: ModuleText) -> bool:
    return text.path.endswith("__init__.py")


def _module(lane: Lane, name: str) -> ModuleText | None:
    """One of upstream's modules; one that cannot be parsed says nothing, and is noted."""
    if name.partition(".")[0] != _PACKAGE:
        return None
    try:
        text = lane.module(name)
        if text is not None:
            _ = text.tree
    except PatchError as error:
        unreadable = getattr(lane, "unreadable", None)
        if unreadable is not None:
            unreadable[name] = error.failures[0].what
        return None
    return text


Top = FunctionNode | ast.ClassDef | tuple[str, str]
_known: WeakKeyDictionary[ast.Module, dict[str, Top]] = WeakKeyDictionary()


def _tops(text: ModuleText) -> dict[str, Top]:
    """What the top of a module defines and imports; kept for as long as its tree is, and no longer."""
    found = _known.get(text.tree)
    if found is not None:
        return found
    found = {}
    for node in _statements(text.tree):
        if isinstance(node, (*Function, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(text, node)
            found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: (alias.name, "") for alias in node.names if alias.asname}
    _known[text.tree] = found
    return found


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module that are run on import, those under ``if`` and ``try`` too."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (*Function, ast.ClassDef, ast.ImportFrom, ast.Import)):
            yield child
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield from _statements(child)


def _absolute(text: ModuleText, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = text.module.split(".")
    kept = parts[: len(parts) - node.level + int(_package(text))]
    return ".".join([*kept, *([node.module] if node.module else [])])


def member(lane: Lane, owner: Defined, name: str) -> Defined | None:
    """A method of a class or of one of its bases."""
    for one in chain(lane, owner):
        for node in definitions(one.node):
            if isinstance(node, Function) and node.name == name:
                return Defined(one.text, f"{one.qualname}.{name}", node, one)
    return None


def chain(lane: Lane, owner: Defined) -> Iterator[Defined]:
    """A class and those of its bases that upstream has, depth first."""
    waiting, seen = [owner], set()
    while waiting:
        one = waiting.pop(0)
        if one.name in seen or not isinstance(one.node, ast.ClassDef):
            continue
        seen.add(one.name)
        yield one
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in one.node.bases]
        found = [lookup(lane, one.text, base.id) for base in bases if isinstance(base, ast.Name)]
        waiting = [base for base in found if isinstance(base, Defined)] + waiting

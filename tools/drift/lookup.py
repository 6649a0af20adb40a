"""What a name in one of upstream's modules means: a class or a function, in this module or in one that it imports.

Only text is read, and what cannot be told from it is ``None``. Where a name has several meanings, the last one counts,
which is right for who wants to see what changes. Who accuses somebody asks with ``sure``: then such a name has none,
and a module that cannot be parsed is raised instead of being noted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from balance_patcher.bound import definitions
from balance_patcher.errors import PatchError
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import Function, FunctionNode, rebindings

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


def lookup(
    lane: Lane, text: ModuleText, name: str, depth: int = _DEEPEST, *, sure: bool = False
) -> Defined | ModuleText | None:
    """What a name means at the top of a module: a definition, or a module that was imported whole.

    Raises:
        PatchError: BP508, if a module cannot be parsed and ``sure`` is wanted.
    """
    tops = _tops(text)
    meanings = tops.get(name) or _behind_stars(lane, tops, name, depth, sure=sure)
    if not meanings or (sure and not _one(text, name, meanings)):
        return None
    found = meanings[-1]
    if isinstance(found, (*Function, ast.ClassDef)):
        return Defined(text, name, found)
    if isinstance(found, Defined) or depth == 0:
        return found if isinstance(found, Defined) else None
    module, member = found
    home = upstream_module(lane, module, sure=sure)
    if not member or home is None:
        return home
    submodule = f"{module}.{member}" if _package(home) else ""
    return lookup(lane, home, member, depth - 1, sure=sure) or upstream_module(lane, submodule, sure=sure)


def _one(text: ModuleText, name: str, meanings: Sequence[Top | Defined]) -> bool:
    """Whether a name means one thing only: it is not bound twice, nor bound to something that was made of it."""
    return all(one == meanings[0] for one in meanings) and not any(rebindings(text.tree, name))


def _behind_stars(lane: Lane, tops: Mapping[str, Sequence[Top]], name: str, depth: int, *, sure: bool) -> list[Defined]:
    """What ``from module import *`` may bring under a name."""
    if name.startswith("_") or depth == 0:
        return []
    modules = [found[0] for found in tops.get("*", ()) if isinstance(found, tuple)]
    homes = [home for module in modules if (home := upstream_module(lane, module, sure=sure)) is not None]
    found = [lookup(lane, home, name, depth - 1, sure=sure) for home in homes]
    return [one for one in found if isinstance(one, Defined)]


def is_nowhere(text: ModuleText, name: str) -> bool:
    """Whether nothing in a module's text brings a name, so that an import of it fails."""
    tops = _tops(text)
    made = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(text.tree))
    return not (made or name in tops or tops.keys() & {"*", "__getattr__"})


def _package(text: ModuleText) -> bool:
    return text.path.endswith("__init__.py")


def upstream_module(lane: Lane, name: str, *, sure: bool = False) -> ModuleText | None:
    """One of upstream's modules; one that cannot be parsed says nothing, and is noted, or with ``sure`` raised.

    Raises:
        PatchError: BP508.
    """
    if name.partition(".")[0] != _PACKAGE:
        return None
    try:
        text = lane.module(name)
        if text is not None:
            _ = text.tree
    except PatchError as error:
        if sure:
            raise
        unreadable = getattr(lane, "unreadable", None)
        if unreadable is not None:
            unreadable[name] = error.failures[0].what
        return None
    return text


Top = FunctionNode | ast.ClassDef | tuple[str, str]
_known: WeakKeyDictionary[ast.Module, dict[str, list[Top]]] = WeakKeyDictionary()


def _tops(text: ModuleText) -> dict[str, list[Top]]:
    """What the top of a module defines and imports, in its order; kept for as long as its tree is, and no longer."""
    found = _known.get(text.tree)
    if found is not None:
        return found
    found = {}
    for node in _statements(text.tree):
        if isinstance(node, (*Function, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(text, node)
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append((module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found.setdefault(alias.asname, []).append((alias.name, ""))
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


def chain(lane: Lane, owner: Defined, *, sure: bool = False) -> Iterator[Defined]:
    """A class and those of its bases that upstream has, depth first.

    Raises:
        PatchError: BP508, if a module cannot be parsed and ``sure`` is wanted.
    """
    waiting, seen = [owner], set()
    while waiting:
        one = waiting.pop(0)
        if one.name in seen or not isinstance(one.node, ast.ClassDef):
            continue
        seen.add(one.name)
        yield one
        waiting = [base for _, base in bases(lane, one, sure=sure) if base is not None] + waiting


def bases(lane: Lane, owner: Defined, *, sure: bool = False) -> Iterator[tuple[str, Defined | None]]:
    """Each base of a class by the name that is written there; ``None`` for one that upstream does not have."""
    for base in getattr(owner.node, "bases", ()):
        plain = base.value if isinstance(base, ast.Subscript) else base
        name = plain.id if isinstance(plain, ast.Name) else ""
        found = lookup(lane, owner.text, name, sure=sure) if name else None
        yield name, found if isinstance(found, Defined) else None

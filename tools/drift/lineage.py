"""What a copy's own text says: what the names of its module mean, and what its class has besides upstream's.

A class of theirs may stand between the copy and upstream's class, in another module of their package. What that one
brings is theirs; and where it cannot be read, nobody knows what is upstream's.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from balance_patcher.bound import definitions
from balance_patcher.errors import PatchError
from balance_patcher.importing import imported
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import FunctionNode, Target

from .guarded import running

#: Bases that bring nothing.
PLAIN = {"ABC", "object", "Protocol", "Generic"}


@dataclass(frozen=True)
class Where:
    """A function of a copy, and what it stands for upstream.

    Attributes:
        text: The module that holds the copy.
        node: The copy.
        owner: Its class.
        upstream: The function that was copied, at the place in question.
        lane: That place.
        own: Where the modules of the copy's own package are read, if it has one.
    """

    text: ModuleText
    node: FunctionNode
    owner: ast.ClassDef | None
    upstream: Target
    lane: Lane
    own: Lane | None = None


class Lineage:
    """What the copy's class has of its own, and of bases that are not upstream's.

    Attributes:
        brings: What the class and those bases bring; ``bases_bring``: the bases alone.
        mixed: It has a base that nobody can read, so that nothing is nowhere.
        led: Such a base comes before upstream's, and may have what upstream's has.
    """

    def __init__(self, where: Where, version: str) -> None:
        self.bases_bring: set[str] = set()
        self.mixed = self.led = self._met = False
        self._where, self._version = where, version
        owner = where.owner
        if owner is not None:
            self._bases(where.text, owner, [owner])
        own = _bring(owner, running(where.text.tree, version)) if owner is not None else set()
        self.brings = own | self.bases_bring

    def _bases(self, text: ModuleText, owner: ast.ClassDef, seen: list[ast.ClassDef]) -> None:
        here = running(text.tree, self._version)
        names = names_in(text, here)
        for base in owner.bases:
            plain = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            module, _, name = names.get(plain.partition(".")[0], "").partition(":")
            if module.partition(".")[0] == "vllm":
                self._met = True
                continue
            found = self._class(module, name or plain.rpartition(".")[2])
            if found is not None and found[1] not in seen:
                home, node = found
                self.bases_bring |= _bring(node, running(home.tree, self._version))
                self._bases(home, node, [*seen, node])
            elif plain not in PLAIN:
                self.mixed = True
                self.led = self.led or not self._met

    def _class(self, module: str, name: str) -> tuple[ModuleText, ast.ClassDef] | None:
        """A class of the copy's own package."""
        try:
            own = self._where.own.module(module) if self._where.own is not None and module else None
            text = self._where.text if module == self._where.text.module else own
            found = [n for n in definitions(text.tree) if getattr(n, "name", "") == name] if text is not None else []
        except PatchError:
            return None
        node = found[0] if len(found) == 1 else None
        return (text, node) if text is not None and isinstance(node, ast.ClassDef) else None


def _bring(owner: ast.ClassDef, here: Collection[int]) -> set[str]:
    """The methods of a class, what its body binds, and the attributes that it sets."""
    found = {getattr(node, "name", "") for node in definitions(owner) if id(node) in here}
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    for statement in owner.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def names_in(text: ModuleText, here: Collection[int]) -> dict[str, str]:
    """What each name of a copy's module means, ``module:name``; a name that means two things is left out."""
    package = text.module.rpartition(".")[0] if not text.path.endswith("__init__.py") else text.module
    found: dict[str, set[str]] = {}
    for node in ast.walk(text.tree):
        if id(node) not in here:
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, origin in imported(node, package):
                found.setdefault(name, set()).add(origin)
    for node in definitions(text.tree):
        name = getattr(node, "name", "")
        if id(node) in here:
            found.setdefault(name, set()).add(f"{text.module}:{name}")
    return {name: min(origins) for name, origins in found.items() if len(origins) == 1}

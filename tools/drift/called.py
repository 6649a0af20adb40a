"""What the calls of a function mean, in one vLLM that is read as text.

A callee is only looked at where the text says what it is: a method of the class or of a base, a method of an attribute
whose class is written down, a function or class that is imported by name. Of every other call nothing is claimed.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from balance_patcher.importing import imported
from balance_patcher.names import ClassChain
from balance_patcher.source import Lane, ModuleText
from balance_patcher.targets import Function, FunctionNode, Target, definitions, own_nodes

#: A callee, with how many arguments are there before the written ones: ``self``, or the class.
Found = tuple[Target, int]


@dataclass(frozen=True)
class Where:
    """A function of a copy, and what it stands for upstream.

    Attributes:
        text: The module that holds the copy.
        node: The copy.
        owner: Its class.
        upstream: The function that was copied, at the place in question.
        lane: That place.
    """

    text: ModuleText
    node: FunctionNode
    owner: ast.ClassDef | None
    upstream: Target
    lane: Lane


@dataclass(frozen=True)
class Gone:
    """A callee that is nowhere: its class is known to its last base, and has nothing of that name."""

    callee: str
    why: str


class Callees:
    """What the calls of one copy mean, at one place."""

    def __init__(self, where: Where, running: Collection[int]) -> None:
        """``running`` has the nodes of the copy's module that run there, by their ids."""
        self._where, self._lane, self._running = where, where.lane, running
        self._own = _names(where.text, running)
        self._names: dict[str, dict[str, str]] = {}

    def of(self, call: ast.Call) -> Found | Gone | None:
        """The callee of a call; ``None`` where the text does not say what it is."""
        where, function = self._where, call.func
        if isinstance(function, ast.Name):
            return self._named(self._own.get(function.id, ""))
        if not isinstance(function, ast.Attribute):
            return None
        holder, name = function.value, function.attr
        if isinstance(holder, ast.Name) and holder.id == _first(where.node) and where.upstream.owner is not None:
            if name in self._brought_by_its_class():
                return None
            return self._method(where.upstream.text, where.upstream.owner, name)
        if is_super(holder) and where.upstream.owner is not None:
            return self._method(where.upstream.text, where.upstream.owner, name)
        if isinstance(holder, ast.Attribute) and isinstance(holder.value, ast.Name):
            if holder.value.id != _first(where.node) or where.upstream.owner is None:
                return None
            made = self._attribute_class(where.upstream.text, where.upstream.owner, holder.attr)
            found = self._method(*made, name) if made else None
            # The object is of a class of theirs where the copy's module has one that brings the method.
            return None if isinstance(found, Gone) and name in _brought(where.text) else found
        if isinstance(holder, ast.Name):
            made = self._class(self._own.get(holder.id, ""))
            return self._method(*made, name, of_class=True) if made else None
        return None

    def _brought_by_its_class(self) -> set[str]:
        owner = self._where.owner
        found = definitions(owner) if owner is not None else ()
        return {getattr(node, "name", "") for node in found if id(node) in self._running}

    def _named(self, origin: str) -> Found | Gone | None:
        """An imported function, or the constructor of an imported class."""
        module, _, name = origin.partition(":")
        text = self._module(module) if name else None
        if text is None:
            return None
        found = [node for node in definitions(text.tree) if getattr(node, "name", "") == name]
        if len(found) == 1 and isinstance(found[0], ast.ClassDef):
            made = self._method(text, found[0], "__init__")
            return made if isinstance(made, tuple) and made[0].owner is found[0] else None
        if len(found) == 1 and isinstance(found[0], Function):
            return Target(text, name, found[0], None), 0
        if found or name in _names(text) or _assigned(text, name):
            return None
        return Gone(origin, f"{module} has no `{name}`")

    def _method(
        self, text: ModuleText, owner: ast.ClassDef, name: str, *, of_class: bool = False
    ) -> Found | Gone | None:
        """A method of a class or of a base."""
        for home, node in self._chain(text, owner):
            methods = [n for n in definitions(node) if isinstance(n, Function) and n.name == name]
            if len(methods) > 1:
                return None  # which of them runs, the text does not say
            if methods:
                bound = _bound(methods[0], of_class=of_class)
                return (Target(home, f"{node.name}.{name}", methods[0], node), bound) if bound is not None else None
        if ClassChain(self._lane, text, owner).has(name) or not self._closed(text, owner):
            return None
        return Gone(f"{text.module}:{owner.name}.{name}", f"{owner.name} has no `{name}`")

    def _chain(self, text: ModuleText, owner: ast.ClassDef) -> Iterator[tuple[ModuleText, ast.ClassDef]]:
        yield text, owner
        for base in owner.bases:
            found = self._base(text, base)
            if found is not None:
                yield from self._chain(*found)

    def _base(self, text: ModuleText, base: ast.expr) -> tuple[ModuleText, ast.ClassDef] | None:
        base = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(base, ast.Name):
            return None
        return self._class(self._names_of(text).get(base.id, ""))

    def _closed(self, text: ModuleText, owner: ast.ClassDef) -> bool:
        """Whether all bases were read, so that what is not there is nowhere, and nothing makes attributes up."""
        for home, node in self._chain(text, owner):
            if any(getattr(n, "name", "") in {"__getattr__", "__getattribute__"} for n in definitions(node)):
                return False
            plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            unknown = [base for base in plain if self._base(home, base) is None]
            if any(getattr(base, "id", "") not in {"ABC", "object", "Protocol", "Generic"} for base in unknown):
                return False
        return True

    def _class(self, origin: str) -> tuple[ModuleText, ast.ClassDef] | None:
        module, _, name = origin.partition(":")
        text = self._module(module) if name else None
        found = [n for n in definitions(text.tree) if getattr(n, "name", "") == name] if text is not None else []
        if text is None or len(found) != 1 or not isinstance(found[0], ast.ClassDef):
            return None
        return text, found[0]

    def _attribute_class(
        self, text: ModuleText, owner: ast.ClassDef, attribute: str
    ) -> tuple[ModuleText, ast.ClassDef] | None:
        """The class of ``self.attribute``, if what ``__init__`` puts there says one class, and only one."""
        for home, node in self._chain(text, owner):
            constructors = [n for n in definitions(node) if isinstance(n, Function) and n.name == "__init__"]
            said = [
                name
                for function in constructors
                for statement in own_nodes(function)
                for name in _classes_said(statement, function, attribute)
            ]
            if said:
                names = self._names_of(home)
                return self._class(names.get(said[0], "")) if len(set(said)) == 1 else None
        return None

    def _module(self, name: str) -> ModuleText | None:
        return self._lane.module(name) if name.partition(".")[0] == "vllm" else None

    def _names_of(self, text: ModuleText) -> dict[str, str]:
        if text.module not in self._names:
            self._names[text.module] = _names(text)
        return self._names[text.module]


def _names(text: ModuleText, running: Collection[int] | None = None) -> dict[str, str]:
    """What each name of a module means, ``module:name``; a name that means two things is left out."""
    package = text.module.rpartition(".")[0] if not text.path.endswith("__init__.py") else text.module
    found: dict[str, set[str]] = {}
    for node in ast.walk(text.tree):
        if running is not None and id(node) not in running:
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, origin in imported(node, package):
                found.setdefault(name, set()).add(origin)
    for node in definitions(text.tree):
        name = getattr(node, "name", "")
        found.setdefault(name, set()).add(f"{text.module}:{name}")
    return {name: min(origins) for name, origins in found.items() if len(origins) == 1}


def _brought(text: ModuleText) -> set[str]:
    """The methods of a module's classes, by their names."""
    classes = [node for node in ast.walk(text.tree) if isinstance(node, ast.ClassDef)]
    return {one.name for owner in classes for one in definitions(owner) if isinstance(one, Function)}


def _assigned(text: ModuleText, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(text.tree))


def _classes_said(statement: ast.AST, function: FunctionNode, attribute: str) -> Iterator[str]:
    """The names of classes that a statement of a constructor says of ``self.attribute``; ``?`` is no class."""
    if isinstance(statement, ast.AnnAssign) and _is_own(statement.target, function, attribute):
        yield _annotated(statement.annotation)
    elif isinstance(statement, ast.Assign) and any(_is_own(t, function, attribute) for t in statement.targets):
        value = statement.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            yield value.func.id
        elif isinstance(value, ast.Name):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            annotations = [a.annotation for a in arguments if a.arg == value.id and a.annotation is not None]
            yield _annotated(annotations[0]) if annotations else "?"
        elif not (isinstance(value, ast.Constant) and value.value is None):
            yield "?"


def _annotated(annotation: ast.expr) -> str:
    """The class that an annotation names, ``None`` beside it left out."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return "?"
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = [side for side in (annotation.left, annotation.right) if not isinstance(side, ast.Constant)]
        return _annotated(sides[0]) if len(sides) == 1 else "?"
    return annotation.id if isinstance(annotation, ast.Name) else "?"


def _is_own(node: ast.expr, function: FunctionNode, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute) and node.attr == attribute
        and isinstance(node.value, ast.Name) and node.value.id == _first(function)
    )  # fmt: skip


def _first(function: FunctionNode) -> str:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else ""


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _bound(method: FunctionNode, *, of_class: bool) -> int | None:
    """How many arguments a method has been given before a call writes any; ``None`` where that cannot be told."""
    kinds = {node.id for node in method.decorator_list if isinstance(node, ast.Name)}
    known = kinds & {"staticmethod", "classmethod"}
    if len(kinds) < len(method.decorator_list) or kinds - {"staticmethod", "classmethod", "abstractmethod"}:
        return None
    if "staticmethod" in known:
        return 0
    return 1 if "classmethod" in known or not of_class else 0

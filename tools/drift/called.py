"""What the calls of a function mean, in one vLLM that is read as text.

A callee is only looked at where the text says what it is: a method of the class or of a base, a method of an attribute
whose class is written down, a function or class that is imported by name. Of every other call nothing is claimed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from balance_patcher.bound import definitions
from balance_patcher.chain import ClassChain
from balance_patcher.source import ModuleText
from balance_patcher.targets import Function, FunctionNode, Target, own_nodes

from .guarded import running
from .lineage import PLAIN, Lineage, Where, names_in
from .lookup import Defined, bases, chain, is_nowhere, lookup, upstream_module

#: A callee, with how many arguments are there before the written ones: ``self``, or the class.
Found = tuple[Target, int]


@dataclass(frozen=True)
class Gone:
    """A callee that is nowhere: its class is known to its last base, and has nothing of that name."""

    callee: str
    why: str


class Callees:
    """What the calls of one copy mean, at one place.

    Args:
        where: The copy and the place.
        version: Of the vLLM that is supposed to stand there.

    Attributes:
        running: The nodes of the copy's module that run there, by their ids.
    """

    def __init__(self, where: Where, version: str) -> None:
        self._where, self._lane = where, where.lane
        self.running = running(where.text.tree, version)
        self._names = names_in(where.text, self.running)
        self._lineage = Lineage(where, version)
        self._attributes: dict[str, Defined | None] = {}
        owner = where.upstream.owner
        name = where.upstream.qualname.rpartition(".")[0]
        self._upstream = Defined(where.upstream.text, name, owner) if owner is not None else None

    def of(self, call: ast.Call) -> Found | Gone | None:
        """The callee of a call; ``None`` where the text does not say what it is.

        Raises:
            PatchError: BP5xx, if a module that is called into cannot be read.
        """
        function = call.func
        if isinstance(function, ast.Name):
            return self._named(self._names.get(function.id, ""))
        if not isinstance(function, ast.Attribute):
            return None
        holder, name = function.value, function.attr
        first = _first(self._where.node)
        if (isinstance(holder, ast.Name) and holder.id == first) or is_super(holder):
            return self._of_its_class(name, above=not isinstance(holder, ast.Name))
        if isinstance(holder, ast.Attribute) and isinstance(holder.value, ast.Name):
            if holder.value.id != first or self._upstream is None:
                return None
            made = self._attribute_class(self._upstream, holder.attr)
            found = self._method(made, name) if made else None
            # The object is of a class of theirs where the copy's module has one that brings the method.
            return None if isinstance(found, Gone) and name in _brought(self._where.text) else found
        if isinstance(holder, ast.Name):
            origin = self._origin(self._names.get(holder.id, ""))
            return self._method(origin, name, of_class=True) if _is_class(origin) else None
        return None

    def _of_its_class(self, name: str, *, above: bool) -> Found | Gone | None:
        """A method of ``self``, or of ``super()``, which is ``above`` the copy's class."""
        own = self._lineage.bases_bring if above else self._lineage.brings
        if self._upstream is None or self._lineage.led or name in own:
            return None
        found = self._method(self._upstream, name)
        return None if isinstance(found, Gone) and self._lineage.mixed else found

    def _named(self, origin: str) -> Found | Gone | None:
        """An imported function, or the constructor of an imported class."""
        module, _, name = origin.partition(":")
        found = self._origin(origin)
        if isinstance(found, Defined):
            if isinstance(found.node, Function):
                return Target(found.text, name, found.node, None), 0
            made = self._method(found, "__init__")
            return made if isinstance(made, tuple) and made[0].owner is found.node else None
        text = upstream_module(self._lane, module, sure=True) if name and found is None else None
        if text is None or not is_nowhere(text, name) or upstream_module(self._lane, f"{module}.{name}"):
            return None
        return Gone(origin, f"{module} has no `{name}`")

    def _origin(self, origin: str) -> Defined | ModuleText | None:
        module, _, name = origin.partition(":")
        text = upstream_module(self._lane, module, sure=True) if name else None
        return lookup(self._lane, text, name, sure=True) if text is not None else None

    def _method(self, owner: Defined, name: str, *, of_class: bool = False) -> Found | Gone | None:
        """A method of a class or of a base."""
        for one in chain(self._lane, owner, sure=True):
            methods = [n for n in definitions(one.node) if isinstance(n, Function) and n.name == name]
            if len(methods) > 1:
                return None  # which of them runs, the text does not say
            if methods and isinstance(one.node, ast.ClassDef):
                bound = _bound(methods[0], of_class=of_class)
                target = Target(one.text, f"{one.qualname}.{name}", methods[0], one.node)
                return (target, bound) if bound is not None else None
        node = owner.node if isinstance(owner.node, ast.ClassDef) else None
        if ClassChain(self._lane, owner.text, node).has(name) or not self._closed(owner):
            return None
        return Gone(f"{owner.name}.{name}", f"{owner.qualname} has no `{name}`")

    def _closed(self, owner: Defined) -> bool:
        """Whether all bases were read, so that what is not there is nowhere, and nothing makes attributes up."""
        for one in chain(self._lane, owner, sure=True):
            if any(getattr(n, "name", "") in {"__getattr__", "__getattribute__"} for n in definitions(one.node)):
                return False
            if any(base is None and name not in PLAIN for name, base in bases(self._lane, one, sure=True)):
                return False
        return True

    def _attribute_class(self, owner: Defined, attribute: str) -> Defined | None:
        """The class of ``self.attribute``, if what ``__init__`` puts there says one class, and only one."""
        if attribute not in self._attributes:
            self._attributes[attribute] = self._said_class(owner, attribute)
        return self._attributes[attribute]

    def _said_class(self, owner: Defined, attribute: str) -> Defined | None:
        for one in chain(self._lane, owner, sure=True):
            constructors = [n for n in definitions(one.node) if isinstance(n, Function) and n.name == "__init__"]
            said = {
                name
                for function in constructors
                for statement in own_nodes(function)
                for name in _classes_said(statement, function, attribute)
            }
            if said:
                found = lookup(self._lane, one.text, min(said), sure=True) if len(said) == 1 else None
                return found if _is_class(found) else None
        return None


def _is_class(found: object) -> TypeGuard[Defined]:
    return isinstance(found, Defined) and isinstance(found.node, ast.ClassDef)


def _brought(text: ModuleText) -> set[str]:
    """The methods of a module's classes, by their names."""
    classes = [node for node in ast.walk(text.tree) if isinstance(node, ast.ClassDef)]
    return {one.name for owner in classes for one in definitions(owner) if isinstance(one, Function)}


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

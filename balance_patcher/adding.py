"""Check what features add to upstream's modules and classes, and make it on vLLM's live objects.

The same rules as for inserted code: a name that is added may not be there yet, and what the text uses must be. Nothing
is bound here: what was made waits for :mod:`balance_patcher.installation`.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from .addition import Addition
from .beneath import attribute
from .bound import definitions
from .chain import ClassChain
from .errors import Failure, refuse
from .origins import MISSING
from .plan import Plan
from .proof import compile_text, place_of
from .scope import known_in
from .source import ModuleText
from .targets import rebindings, short


def adds(plan: Plan) -> tuple[Addition, ...]:
    """What a planned feature adds; nothing where there is nothing to patch either."""
    return plan.feature.adds if any(placement.status == "applied" for placement in plan.placements) else ()


def added_file(addition: Addition) -> str:
    """The name that tracebacks give the text of an addition."""
    return f"<balance_patcher {addition.owner} adds>"


def check_additions(plan: Plan) -> list[Failure]:
    """No such owner (BP104, BP110), a name that is taken (BP301), or one that the text misses (BP302, BP303)."""
    return [failure for addition in adds(plan) for failure in _check(plan, addition)]


def _check(plan: Plan, addition: Addition) -> Iterator[Failure]:
    text = plan.lane.module(addition.module)
    if text is None:
        plan.lane.require_vllm()
        next_step = "find where upstream moved it and change the addition's owner"
        yield Failure("BP110", f"{addition.module} is not in {plan.lane.source.spec}", next_step, _rows(addition))
        return
    scope: ast.AST = text.outline
    if addition.class_name:
        found = [n for n in definitions(scope) if isinstance(n, ast.ClassDef) and n.name == addition.class_name]
        if len([*found, *rebindings(scope, addition.class_name)]) != 1:
            what = f"{addition.module} defines the class {addition.class_name} {len(found)} times, not once"
            next_step = "find what upstream calls it now and change the addition's owner"
            yield Failure("BP104", what, next_step, _rows(addition), text.display)
            return
        yield from _check_class(plan, addition, text, found[0])
    module = known_in(text)
    beside = {name for other in adds(plan) if other.owner == addition.module for name in other.names}
    if not addition.class_name:
        yield from (_there(addition, name, text, 1) for name in addition.names if name in module)
    for name in sorted(_outer(addition) - module - beside - set(addition.names)):
        what = f"{name!r}, which the addition to {addition.owner} uses, is not in the module"
        yield Failure("BP302", what, "find what upstream calls it now", _rows(addition), text.display)


def _check_class(plan: Plan, addition: Addition, text: ModuleText, owner: ast.ClassDef) -> Iterator[Failure]:
    chain = ClassChain(plan.lane, text, owner)
    yield from (_there(addition, name, text, owner.lineno) for name in addition.names if chain.has(name))
    beside = {name for other in adds(plan) if other.owner == addition.owner for name in other.names}
    used = {
        node.attr
        for node in ast.walk(ast.parse(addition.text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for name in sorted(used - beside):
        if not chain.has(name):
            what = f"self.{name}, which the addition to {addition.owner} uses, is set nowhere in {chain.described}"
            rows = (*_rows(addition), chain.nearest(name))
            yield Failure("BP303", what, "find what upstream calls it now", rows, text.display, owner.lineno)


def _there(addition: Addition, name: str, text: ModuleText, line: int) -> Failure:
    return Failure(
        "BP301", f"{name!r}, which is to be added to {addition.owner}, is upstream's ({short(text.display)})",
        "compare it with upstream's, and let the addition go or rename it", _rows(addition), text.display, line,
    )  # fmt: skip


def _rows(addition: Addition) -> tuple[tuple[str, str], ...]:
    return ("target", addition.owner), ("declared", addition.declared)


def _outer(addition: Addition) -> set[str]:
    """The names that an addition reads from its module, builtins left out."""
    import builtins

    found: set[str] = set()
    tables = [symtable.symtable(addition.text, addition.owner, "exec")]
    for table in tables:
        tables += table.get_children()
        found |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return found - set(dir(builtins))


def make_additions(plan: Plan, live: Any) -> tuple[dict[str, object], dict[str, str]]:
    """What a feature adds, by place, and the texts that it was made of, by the name that tracebacks give them.

    Args:
        plan: The placed feature.
        live: Gives the live object ``module:Qual.name``, or the live module ``module:``.

    Raises:
        PatchError: BP301, if somebody has put such a name there in this process.
    """
    made: dict[str, object] = {}
    texts: dict[str, str] = {}
    for addition in adds(plan):
        owner = live(addition.owner if addition.class_name else f"{addition.module}:")
        for name in addition.names:
            there = attribute(owner, name)
            if there is not MISSING:
                raise refuse(
                    "BP301", f"{name!r}, which is to be added to {addition.owner}, is there already: "
                    f"{place_of(there)}", *_rows(addition),
                    next="find out who put it there; let one of the two go, or derive from the class instead",
                )  # fmt: skip
        filename = added_file(addition)
        source = addition.text + "\n"
        namespace: dict[str, object] = {}
        exec(compile_text(source, filename), vars(live(f"{addition.module}:")), namespace)  # noqa: S102 - declared text
        for name, place in zip(addition.names, addition.places, strict=True):
            made[place] = _named(namespace[name], addition)
        texts[filename] = texts.get(filename, "") + source
    return made, texts


def _named(value: object, addition: Addition) -> object:
    """A function that was made here is called what it would be called in the class."""
    function = getattr(value, "__func__", value)
    if addition.class_name and isinstance(function, FunctionType) and function.__module__ == addition.module:
        function.__qualname__ = f"{addition.class_name}.{function.__name__}"
    return value

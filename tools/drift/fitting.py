"""Which calls of somebody's copy fit what they call, in one vLLM that is read as text.

A copy keeps calling as upstream did when it was made. What it calls goes on: a helper loses an argument, or returns
three things where it returned two. Python says so at the first request that comes by; here it is said by name.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from balance_patcher.targets import FunctionNode, Target, own_nodes
from balance_patcher.through import signature_of

from .called import Callees, Gone
from .copied import BadCall
from .guarded import cases
from .lineage import Where


@dataclass(frozen=True)
class Misfits:
    """The calls that do not fit, in the order of the text.

    Attributes:
        calls: Those that are made there.
        guarded: Those that are made on some versions only, where nobody knows which one stands there.
    """

    calls: tuple[BadCall, ...]
    guarded: tuple[BadCall, ...] = ()


def misfits(where: Where, version: str | None = None) -> Misfits:
    """The calls of a copy that do not fit at one place.

    Args:
        where: The copy and the place.
        version: Of the vLLM that stands there, where it is known.

    Raises:
        PatchError: BP5xx, if a module that is called into cannot be read.
    """
    found = [set(_bad(where, case)) for case in cases(where.text.tree, version)]
    always, ever = set.intersection(*found), set.union(*found)
    return Misfits(_sorted(always), _sorted(ever - always))


def _sorted(calls: Collection[BadCall]) -> tuple[BadCall, ...]:
    return tuple(sorted(calls, key=lambda call: (call.line, call.callee)))


def _bad(where: Where, version: str) -> Iterator[BadCall]:
    callees = Callees(where, version)
    taken = _taken_apart(where.node)
    for node in ast.walk(where.node):
        if not isinstance(node, ast.Call) or id(node) not in callees.running:
            continue
        found = callees.of(node)
        if isinstance(found, Gone):
            yield BadCall(node.lineno, _text(node), found.callee, "", found.why)
        elif found is not None:
            target, bound = found
            why = _why_not(node, target, bound) or _wrong_count(taken.get(id(node)), target)
            if why:
                yield BadCall(node.lineno, _text(node), target.name, signature_text(target), why)


def _text(call: ast.Call) -> str:
    return ast.unparse(call)


def _why_not(call: ast.Call, target: Target, bound: int) -> str:
    """Why the arguments of a call do not bind; empty where they do, or where a star hides what they are."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return ""
    if any(keyword.arg is None for keyword in call.keywords):
        return ""
    signature = signature_of(target)
    if any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in signature.parameters.values()) and not call.args:
        return ""
    try:
        signature.bind(*[None] * (bound + len(call.args)), **{k.arg or "": None for k in call.keywords})
    except TypeError as error:
        return str(error)
    return ""


def _taken_apart(function: FunctionNode) -> dict[int, int]:
    """For each call whose result is unpacked, by id: into how many."""
    return {
        id(node.value): len(target.elts)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, (ast.Tuple, ast.List)) and not any(isinstance(e, ast.Starred) for e in target.elts)
    }  # fmt: skip


def _wrong_count(wanted: int | None, target: Target) -> str:
    count = returned_count(target.node) if wanted is not None else None
    if wanted is None or count is None or count == wanted:
        return ""
    return f"it returns a tuple of {count}, and is unpacked into {wanted}"


def returned_count(function: FunctionNode) -> int | None:
    """How many things a function returns as a tuple, if its text says so, and everywhere the same."""
    returned = [node.value for node in own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    tuples = [node for node in returned if isinstance(node, ast.Tuple)]
    counts = {len(node.elts) for node in tuples if not any(isinstance(e, ast.Starred) for e in node.elts)}
    if returned and len(tuples) == len(returned) and len(counts) == 1:
        return min(counts)
    return _annotated_count(function.returns)


def _annotated_count(annotation: ast.expr | None) -> int | None:
    if not isinstance(annotation, ast.Subscript) or getattr(annotation.value, "id", "") not in {"tuple", "Tuple"}:
        return None
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    endless = any(isinstance(part, ast.Constant) and part.value is Ellipsis for part in parts)
    return None if endless else len(parts)


def signature_text(target: Target) -> str:
    """``_mamba_block_aligned_split(self, request, num_new_tokens)``: names and defaults, no annotations."""
    node = target.node
    bare = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0]
    assert isinstance(bare, ast.FunctionDef)  # noqa: S101 - it was just written
    arguments = bare.args
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if one is not None:
            one.annotation = None
    return f"{node.name}({ast.unparse(arguments)})"

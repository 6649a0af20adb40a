"""Why a delta cannot be placed, in words for the person who has to mend it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from .anchors import CHANGED, Match, find_anchor
from .delta import Anchor, Delta, Variant
from .errors import Failure
from .render import head, shown
from .targets import Function, FunctionNode, Target

_ATTRIBUTE = re.compile(r"\.([A-Za-z_]\w*)")  # of a pattern's own, not a hole


def _about(target: Target) -> tuple[tuple[str, str], ...]:
    return (("target", f"{target.name}   ({target.where(target.node)})"),)


def failed(
    delta: Delta, target: Target, code: str, what: str, rows: Sequence[tuple[str, str]], line: int, next_step: str
) -> Failure:
    return Failure(
        code, what, fields=(*_about(target), *rows, ("declared", delta.declared)), next=next_step,
        file=target.text.display, line=line,
    )  # fmt: skip


def not_found(delta: Delta, target: Target) -> Failure:
    what = f"delta {delta.name!r} cannot be placed; nothing was patched."
    anchors = [(variant, variant.anchor) for variant in delta.variants if variant.anchor is not None]
    # A shape that upstream has instead, of which the function has not one name, is nothing to compare with.
    anchors = [pair for pair in anchors if pair[0].status == "applied" or _names_are_there(pair[1], target)] or anchors
    misses = [(variant, miss) for variant, anchor in anchors for miss in find_anchor(target, anchor)[1]]
    ranked = sorted(misses, key=lambda pair: -pair[1].score)
    changed = bool(ranked) and ranked[0][1].score >= CHANGED
    outside = _outside(delta, target, loose=not changed)
    if outside is not None:
        variant, function, node = outside
        rows = [
            ("anchor", f"{variant.anchor}   need 1, found 0"),
            ("nearest", f"{target.where(node)}  {shown(node)}  in `{function.name}`"),
        ]
        return failed(
            delta,
            target,
            "BP116",
            what,
            rows,
            node.lineno,
            f"change the target to {function.name} if the code moved there",
        )
    if ranked:
        variant, miss = ranked[0]
        line = getattr(miss.node, "lineno", target.node.lineno)
        rows = [
            ("anchor", f"{variant.anchor}   need 1, found 0"),
            ("nearest", f"{target.where(miss.node)}  {shown(miss.node)}  {miss.reason}"),
        ]
        code = miss.code
    else:
        line, code = target.node.lineno, "BP101"
        rows = [("anchor", f"{v.anchor}   need 1, found 0") for v in delta.variants if v.anchor]
        rows.append(("nearest", f"{target.where(target.node)}  nothing in {target.qualname} comes near"))
    return failed(delta, target, code, what, rows, line, f"compare with upstream and add a variant to {delta.declared}")


def _names_are_there(anchor: Anchor, target: Target) -> bool:
    there = {node.attr for node in ast.walk(target.node) if isinstance(node, ast.Attribute)}
    names = _ATTRIBUTE.findall(anchor.pattern)
    return not names or not there.isdisjoint(names)


def _outside(delta: Delta, target: Target, *, loose: bool) -> tuple[Variant, FunctionNode, ast.stmt | ast.expr] | None:
    """Another function that holds the anchor; ``loose``: without the levels around it, which may have stayed behind."""
    anchors = [(variant, variant.anchor) for variant in delta.variants if variant.anchor is not None]
    others = [node for node in ast.walk(target.text.tree) if isinstance(node, Function) and node is not target.node]
    for whole in (True, False) if loose else (True,):
        for function in others:
            other = Target(target.text, function.name, function, None)
            for variant, anchor in anchors:
                matches, _ = find_anchor(other, anchor if whole else replace(anchor, inside=()), near=False)
                for match in matches:
                    return variant, function, match.node  # type: ignore[return-value]
    return None


def too_often(delta: Delta, target: Target, variant: Variant, matches: Sequence[Match]) -> Failure:
    lines = [getattr(match.node, "lineno", 0) for match in matches]
    rows = [
        ("anchor", f"{variant.anchor}   need 1, found {len(matches)}"),
        ("nearest", ", ".join(target.where(match.node) for match in matches)),
    ]
    what = f"delta {delta.name!r} cannot be placed; nothing was patched."
    return failed(
        delta, target, "BP102", what, rows, lines[-1], f"make the anchor in {delta.declared} say which one is meant"
    )


def several(delta: Delta, target: Target, names: Sequence[str]) -> Failure:
    what = f"delta {delta.name!r}: {' and '.join(map(repr, names))}; nothing was patched."
    return failed(delta, target, "BP103", what, (), target.node.lineno, "make the variants exclude each other")


def nothing(delta: Delta, target: Target) -> Failure:
    what = f"delta {delta.name!r} leaves {target.qualname} as it is"
    return failed(
        delta, target, "BP111", what, (), target.node.lineno, "declare this shape as absorbed, or mend the edit"
    )


def part_of(delta: Delta, target: Target, statement: ast.stmt) -> Failure:
    what = f"delta {delta.name!r} would replace only a part of a statement"
    rows = [("nearest", f"{target.where(statement)}  `{head(statement)}`")]
    return failed(delta, target, "BP117", what, rows, statement.lineno, "make the anchor match the whole statement")


def beyond(delta: Delta, target: Target, code: str, why: str, node: ast.stmt) -> Failure:
    """What upstream's method has, and the delta's override of it has not."""
    what = f"{why}; delta {delta.name!r} cannot be placed"
    rows = [("nearest", f"{target.where(node)}  `{head(node)}`")]
    return failed(delta, target, code, what, rows, node.lineno, "read upstream's method anew, and change the override")

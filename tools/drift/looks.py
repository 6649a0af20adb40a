"""Look at one feature, or at what one target calls, at one ref: plain data that can be kept and sent.

A look holds what was read for it, by path and id. It is the look at every other ref with those texts.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from balance_patcher.chain import ClassChain
from balance_patcher.check import check_feature
from balance_patcher.errors import Failure, Outcome, PatchError
from balance_patcher.feature import Feature
from balance_patcher.targets import find_target

from .callees import Calls, calls_of
from .columns import NotingLane
from .decoding import decoded
from .matrix import DeltaCell
from .shapes import Shape

Reads = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Fact:
    """Something that must hold besides the anchors: an invariant, a call shape or an attribute.

    Attributes:
        kind: ``invariant``, ``call`` or ``attribute``.
        status: ``holds``, ``broken`` or ``unknown``.
    """

    kind: str
    name: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Look:
    """One feature at one ref."""

    feature: str
    status: str
    reads: Reads
    deltas: tuple[DeltaCell, ...] = ()
    facts: tuple[Fact, ...] = ()
    failures: tuple[Failure, ...] = ()

    def delta(self, name: str) -> DeltaCell | None:
        return next((cell for cell in self.deltas if cell.delta == name), None)


@dataclass(frozen=True)
class CallsLook:
    """What one target calls at one ref; ``why`` says why that, or a part of it, cannot be told."""

    target: str
    reads: Reads
    calls: Calls | None = None
    why: str = ""


def look_at(lane: NotingLane, feature: Feature) -> Look:
    """What ``verify`` says of a feature on a lane; nothing is raised for a lane that cannot be read."""
    try:
        report = check_feature(lane, feature)
    except PatchError as error:
        if error.outcome is not Outcome.UNKNOWN:
            return _failed(lane, feature, error.failures)
        return _dark(lane, feature, error.failures)
    except RecursionError as error:
        surprise = Failure("BP508", f"{type(error).__name__}: {error}", "read the file; it is nested very deeply")
        return _dark(lane, feature, (surprise,))
    cells = tuple(DeltaCell(row.name, row.status, row.variant, row.file, row.line, row.detail) for row in report.deltas)
    facts = [Fact("invariant", row.name, row.status, row.detail) for row in report.invariants]
    facts += [Fact("call", row.call, row.status, row.detail) for row in report.calls]
    facts += [] if report.status == "not-applicable" else _attributes(lane, feature)
    # Invariants that could not be asked because the feature cannot be placed are no darkness of their own.
    status = "failed" if report.status == "unknown" and report.failures else report.status
    return Look(
        feature.name, "unreadable" if status == "unknown" else status, dict(lane.reads), cells, tuple(facts),
        tuple(report.failures),
    )  # fmt: skip


def _failed(lane: NotingLane, feature: Feature, failures: tuple[Failure, ...]) -> Look:
    cells = tuple(DeltaCell(delta.name, "failed") for delta in feature.deltas)
    return Look(feature.name, "failed", dict(lane.reads), cells, (), failures)


def _dark(lane: NotingLane, feature: Feature, failures: tuple[Failure, ...]) -> Look:
    cells = tuple(DeltaCell(delta.name, "unreadable") for delta in feature.deltas)
    return Look(feature.name, "unreadable", dict(lane.reads), cells, (), failures)


def calls_at(lane: NotingLane, target: str) -> CallsLook:
    """What a target calls on a lane."""
    try:
        found = calls_of(lane, target)
    except (PatchError, RecursionError) as error:
        return CallsLook(target, dict(lane.reads), None, str(error).split("\n", 1)[0])
    return CallsLook(target, dict(lane.reads), found, "; ".join(lane.unreadable.values()))


# -- what the runtime class uses -----------------------------------------------------------------


def _attributes(lane: NotingLane, feature: Feature) -> list[Fact]:
    """The attributes of ``self`` that the runtime class reads and does not bring, and whether upstream sets them."""
    runtime = feature.runtime
    if runtime is None:
        return []
    base = find_target(lane, f"{runtime.base}.__init__")
    if isinstance(base, Failure):
        return []
    chain = ClassChain(lane, base.text, base.owner)
    exported = {name for delta in feature.deltas for variant in delta.variants for name in variant.exports}
    names = used_by(runtime.make) - runtime.provides - exported
    return [
        Fact("attribute", name, "holds" if chain.has(name) else "broken", f"{runtime.name} uses self.{name}")
        for name in sorted(names)
    ]


@lru_cache(maxsize=32)
def used_by(make: Callable[..., Any]) -> frozenset[str]:
    """The attributes of ``self`` that the classes in a function read and never set."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(make)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    used: set[str] = set()
    own: set[str] = set()
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                (used if isinstance(node.ctx, ast.Load) else own).add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own.add(node.name)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
                own.add(str(getattr(node.args[1], "value", "")))  # it may be missing
        targets = [t for s in owner.body if isinstance(s, (ast.Assign, ast.AnnAssign)) for t in _targets(s)]
        own |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(name for name in used - own if not name.startswith("__"))


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


# -- as plain data -------------------------------------------------------------------------------


def plain(look: Look | CallsLook) -> dict[str, Any]:
    """A look for JSON."""
    return dataclasses.asdict(look)


def look_of(data: Mapping[str, Any]) -> Look:
    return decoded(Look, data)


def calls_look_of(data: Mapping[str, Any]) -> CallsLook:
    found = data["calls"]
    calls = None
    if found is not None:
        rows = tuple((decoded(Shape, shape), tuple(lines)) for shape, lines in found["callees"])
        calls = Calls(rows, tuple(found["unknown"]))
    return CallsLook(data["target"], data["reads"], calls, data["why"])

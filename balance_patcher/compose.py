"""Make one feature of several, so that all of them share one rewritten function.

A function can be replaced once. Features that edit the same one are planned together, as the deltas of
one composed feature; whether one of them runs in an engine is its own flag there. The early return of a
disabled function belongs to the target: it is taken when none of them is enabled. The order in which
features are given means nothing: the same features make the same text.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from dataclasses import replace

from .delta import APART, AddParameter, Delta, Prologue, Variant
from .errors import refuse
from .feature import Feature, RuntimeClass
from .plan import make_plan
from .source import Lane
from .template import Template

_EARLY_RETURN = re.compile(r"if not self\.(?P<flag>\w+):\n\s+return super\(\)\.\w+\(\$\$\$PARAMETERS\)")


def compose(features: Sequence[Feature]) -> Feature:
    """One feature with the deltas, invariants and call shapes of all; a single one is returned as it is.

    What is composed cannot ask for itself: each of its ``parts`` keeps its own enabling rule.

    Raises:
        PatchError: BP122, if a feature edits a shared function without an early return of its own, and
            would be switched off with the others; BP123, if each of two is declared to come after the other;
            BP002, if their classes extend different ones.
    """
    parts = sorted({feature.name: feature for feature in features}.values(), key=lambda feature: feature.name)
    if len(parts) == 1:
        return parts[0]
    _refuse_contradiction(parts)
    returns = _early_returns(parts)
    deltas: list[Delta] = []
    renamed: dict[str, str] = {}
    for target, owners in returns.items():
        _refuse_unguarded(target, parts, [owner for owner, _ in owners])
        if len(owners) > 1:
            merged = _merged(target, owners)
            deltas.append(merged)
            renamed |= {delta.name: merged.name for _, delta in owners}
    deltas += [_ordered(delta, part, parts) for part in parts for delta in part.deltas if delta.name not in renamed]
    return Feature(
        name="+".join(part.name for part in parts),
        summary=" ".join(part.summary for part in parts),
        deltas=tuple(
            replace(delta, after=tuple(dict.fromkeys(renamed.get(name, name) for name in delta.after)))
            for delta in deltas
        ),
        runtime=_runtime([part.runtime for part in parts if part.runtime is not None]),
        invariants=tuple(invariant for part in parts for invariant in part.invariants),
        call_shapes=tuple(dict.fromkeys(shape for part in parts for shape in part.call_shapes)),
        parts=tuple(parts),
        adds=tuple(addition for part in parts for addition in part.adds),
    )


def at_work(features: Sequence[Feature], lane: Lane) -> list[Feature]:
    """Those that have something to do on a lane, or fail on it; what upstream has absorbed takes no part there."""
    return [feature for feature in features if not feature.may_be_idle or make_plan(lane, feature).idle is None]


def overlapping(features: Sequence[Feature]) -> list[tuple[Feature, ...]]:
    """The features in groups: those that edit a function, or extend a class, in common are in one.

    So are two of which one edits what the other only reads: what it says of that must hold with those edits in.
    """
    groups: list[list[Feature]] = []
    for feature in sorted(features, key=lambda feature: feature.name):
        near = [group for group in groups if any(_meet(feature, member) for member in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(member for group in near for member in group), feature])
    return [tuple(group) for group in groups]


def _meet(one: Feature, other: Feature) -> bool:
    extends = [{feature.runtime.base} if feature.runtime else set() for feature in (one, other)]
    same = {*one.targets, *extends[0]} & {*other.targets, *extends[1]}
    return bool(same or one.read & other.edited or one.edited & other.read)


# -- the order -------------------------------------------------------------------------------


def _ordered(delta: Delta, part: Feature, parts: Sequence[Feature]) -> Delta:
    """A delta that comes after those of the features that its own is declared to come after."""
    before = [d.name for other in parts if other.name in part.after for d in other.deltas if d.target == delta.target]
    return replace(delta, after=tuple(dict.fromkeys([*delta.after, *before])))


def _refuse_contradiction(parts: Sequence[Feature]) -> None:
    """Refuse orders that lead in a circle through several features, each with the line of its declaration."""
    after = {d.name: {*_ordered(d, part, parts).after} for part in parts for d in part.deltas}
    after = {name: waits & after.keys() - {name} for name, waits in after.items()}
    while ready := {name for name, waits in after.items() if not waits}:
        after = {name: waits - ready for name, waits in after.items() if name not in ready}
    if after:
        lines = {delta.name: delta.declared for part in parts for delta in part.deltas}
        named = sorted(name for name in after if any(name in waits for waits in after.values()))
        raise refuse(
            "BP123", f"{' and '.join(map(repr, named))} are declared to come after each other",
            *((name, lines[name]) for name in named), next="take one of the two orders back",
        )  # fmt: skip


# -- the early return ------------------------------------------------------------------------


def _early_returns(parts: Sequence[Feature]) -> dict[str, list[tuple[Feature, Delta]]]:
    """By target, each feature's delta that returns early when the feature is off."""
    found: dict[str, list[tuple[Feature, Delta]]] = {}
    for part in parts:
        for delta in part.deltas:
            if _flag(delta) is not None:
                found.setdefault(delta.target, []).append((part, delta))
    return found


def _flag(delta: Delta) -> str | None:
    """The attribute that a delta's early return tests; ``None`` if it has no such return."""
    for edit in (edit for variant in delta.variants for edit in variant.edits):
        found = _EARLY_RETURN.fullmatch(Template(edit.text).text) if isinstance(edit, Prologue) else None
        if found is not None:
            return found["flag"]
    return None


def _merged(target: str, owners: Sequence[tuple[Feature, Delta]]) -> Delta:
    """One early return for all: taken when no feature on the target is enabled."""
    off = " and ".join(f"not self.{_flag(delta)}" for _, delta in owners)
    edits = [edit for _, delta in owners for variant in delta.variants for edit in variant.edits]
    added = tuple(dict.fromkeys(edit for edit in edits if isinstance(edit, AddParameter)))
    name = target.rpartition(".")[2]
    both = Prologue(f"if {off}:\n    return super().{name}($$$PARAMETERS)")
    return Delta(
        name=f"{'+'.join(feature.name for feature, _ in owners)}.disabled-path",
        target=target,
        why="With none of these features on, upstream's own method runs.",
        upstream=owners[0][1].upstream,
        remove_when="all but one of these features are gone",
        variants=(Variant("early-return", edits=(*added, both)),),
        after=tuple(dict.fromkeys(name for _, delta in owners for name in delta.after)),
        declared=", ".join(delta.declared for _, delta in owners),
    )


def _refuse_unguarded(target: str, parts: Sequence[Feature], guarded: Sequence[Feature]) -> None:
    for part in parts:
        edits = [delta for delta in part.deltas if delta.target == target and _edits_text(delta)]
        if edits and part not in guarded:
            raise refuse(
                "BP122", f"feature {part.name!r} edits {target} and has no early return of its own there, "
                f"so it would be off whenever {' and '.join(repr(other.name) for other in guarded)} is",
                ("declared", edits[0].declared),
                next="give it a delta with the prologue `if not self.FLAG: return super().METHOD($$$PARAMETERS)`",
            )  # fmt: skip


def _edits_text(delta: Delta) -> bool:
    return any(not isinstance(edit, APART) for variant in delta.variants for edit in variant.edits)


# -- the class -------------------------------------------------------------------------------


def _runtime(runtimes: Sequence[RuntimeClass]) -> RuntimeClass | None:
    if len(runtimes) < 2:  # noqa: PLR2004 - two are several
        return runtimes[0] if runtimes else None
    base = runtimes[0].base
    strange = next((runtime for runtime in runtimes if runtime.base != base), None)
    if strange is not None:
        raise refuse(
            "BP002", f"{runtimes[0].name} extends {base}, {strange.name} extends {strange.base}",
            next="compose only features that extend the same class",
        )  # fmt: skip
    for at, one in enumerate(runtimes):
        for other in runtimes[at + 1 :]:
            if common := sorted(one.provides & other.provides):
                raise refuse(
                    "BP002", f"{one.name} and {other.name} both bring {common[0]!r}, and would have one between them",
                    next="rename it in one of the two",
                )  # fmt: skip
    name = f"Patched{base.rpartition(':')[2].rpartition('.')[2]}"

    def make(upstream: type) -> type:
        made = types.new_class(name, tuple(runtime.extend(upstream) for runtime in runtimes))
        made.__module__ = __name__
        made.__doc__ = f"vLLM's class with {' and '.join(runtime.name for runtime in runtimes)}."
        return made

    return RuntimeClass(name, base, make, frozenset().union(*(runtime.provides for runtime in runtimes)), composed=True)

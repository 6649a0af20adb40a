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

from .delta import AddParameter, CallThrough, Delta, Prologue, Variant
from .errors import refuse
from .feature import Feature, RuntimeClass
from .template import Template

_EARLY_RETURN = re.compile(r"if not self\.(?P<flag>\w+):\n\s+return super\(\)\.\w+\(\$\$\$PARAMETERS\)")


def compose(features: Sequence[Feature]) -> Feature:
    """One feature with the deltas, invariants and call shapes of all; a single one is returned as it is.

    What is composed cannot ask for itself: each of its ``parts`` keeps its own enabling rule.

    Raises:
        PatchError: BP122, if a feature edits a shared function without an early return of its own, and
            would be switched off with the others; BP002, if their classes extend different ones.
    """
    parts = sorted({feature.name: feature for feature in features}.values(), key=lambda feature: feature.name)
    if len(parts) == 1:
        return parts[0]
    returns = _early_returns(parts)
    deltas: list[Delta] = []
    renamed: dict[str, str] = {}
    for target, owners in returns.items():
        _refuse_unguarded(target, parts, [owner for owner, _ in owners])
        if len(owners) > 1:
            merged = _merged(target, owners)
            deltas.append(merged)
            renamed |= {delta.name: merged.name for _, delta in owners}
    deltas += [delta for part in parts for delta in part.deltas if delta.name not in renamed]
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


def overlapping(features: Sequence[Feature]) -> list[tuple[Feature, ...]]:
    """The features in groups: those that edit a function, or extend a class, in common are in one."""
    groups: list[tuple[set[str], list[Feature]]] = []
    for feature in sorted(features, key=lambda feature: feature.name):
        touched = {*feature.targets, *([feature.runtime.base] if feature.runtime else [])}
        members = [feature]
        for group in [group for group in groups if group[0] & touched]:
            groups.remove(group)
            touched |= group[0]
            members = [*group[1], *members]
        groups.append((touched, members))
    return [tuple(members) for _, members in groups]


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
    return any(not isinstance(edit, CallThrough) for variant in delta.variants for edit in variant.edits)


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
    name = f"Patched{base.rpartition(':')[2].rpartition('.')[2]}"

    def make(upstream: type) -> type:
        made = types.new_class(name, tuple(runtime.extend(upstream) for runtime in runtimes))
        made.__module__ = __name__
        made.__doc__ = f"vLLM's class with {' and '.join(runtime.name for runtime in runtimes)}."
        return made

    return RuntimeClass(name, base, make, frozenset().union(*(runtime.provides for runtime in runtimes)), composed=True)

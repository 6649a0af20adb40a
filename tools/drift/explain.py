"""What changed for a feature between two columns, each change with its kind, a sentence and a next step.

Two looks say that something changed; what it was is found in the two texts. A change that hurts nobody is told as well:
an anchor that went where another variant of its delta fits is where upstream moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from balance_patcher.anchors import Match, find_anchor
from balance_patcher.delta import Anchor, Delta
from balance_patcher.errors import Failure, PatchError
from balance_patcher.feature import Feature
from balance_patcher.report import names
from balance_patcher.source import Lane
from balance_patcher.targets import Target, find_target

from .anchored import Fate, fate_of
from .changed import Snippet, Transition
from .kinds import Kind
from .looks import Fact, Look
from .matrix import DeltaCell
from .snippets import of_node, snippet

#: What a refusal stands for, where the anchor does not say more.
_KINDS = {
    **dict.fromkeys(("BP104", "BP105", "BP106", "BP110"), Kind.TARGET_GONE),
    **dict.fromkeys(("BP102", "BP103"), Kind.AMBIGUOUS),
    **dict.fromkeys(("BP101", "BP112", "BP113", "BP114", "BP115", "BP116", "BP117"), Kind.GONE),
    **dict.fromkeys(("BP302", "BP303", "BP207"), Kind.ATTRIBUTE_GONE),
}
_OF_THE_ANCHOR = {Kind.AMBIGUOUS, Kind.GONE}


@dataclass(frozen=True)
class Side:
    """One of the two columns: what was seen there, and the lane to look closer; a lane is opened only when asked."""

    ref: str
    look: Look
    lane: Callable[[], Lane]


def delta_state(look: Look, delta: Delta) -> tuple[str, str | None, tuple[str, ...]] | None:
    """What has to be equal for a delta to be as it was; ``None`` where it could not be seen."""
    cell = look.delta(delta.name)
    if cell is None or cell.status == "unreadable":
        return None
    codes = (
        tuple(failure.code for failure in look.failures if _speaks_of(failure, delta))
        if cell.status == "failed"
        else ()
    )
    return cell.status, cell.variant, codes


def fact_state(look: Look, name: str) -> str | None:
    """Whether an invariant holds; ``None`` where it was not asked."""
    found = next((fact for fact in look.facts if fact.name == name), None)
    return None if found is None or found.status == "unknown" else found.status


def explain(feature: Feature, old: Side, new: Side) -> Iterator[Transition]:
    """Everything that changed for a feature; what needs somebody is marked by who knows the columns after it."""
    if new.look.status == "unreadable":
        if old.look.status != "unreadable":
            yield of_dark(feature, old, new)
        return
    for delta in feature.deltas:
        was, now = old.look.delta(delta.name), new.look.delta(delta.name)
        if was is None or now is None or was.status == "unreadable":
            continue
        if delta_state(old.look, delta) != delta_state(new.look, delta):
            yield _of_delta(feature, delta, old, new, was, now)
    yield from _of_facts(feature, old, new)
    told = {failure for failure in new.look.failures if any(_speaks_of(failure, delta) for delta in feature.deltas)}
    told |= {failure for failure in new.look.failures if _kind(failure) is Kind.INVARIANT_BROKEN}
    known = {(failure.code, failure.what) for failure in old.look.failures}
    for failure in new.look.failures:
        if failure not in told and (failure.code, failure.what) not in known and failure.code != "BP207":
            yield _of_failure(feature, old, new, failure)


# -- deltas --------------------------------------------------------------------------------------


def _of_delta(feature: Feature, delta: Delta, old: Side, new: Side, was: DeltaCell, now: DeltaCell) -> Transition:
    failure = next((one for one in new.look.failures if _speaks_of(one, delta)), None)
    base = Transition(
        kind=Kind.VARIANT.label, feature=feature.name, subject=delta.name, delta=delta.name, declared=delta.declared,
        target=delta.target, before=old.ref, after=new.ref, was=was.status, now=now.status, action=False,
        explanation="", next=Kind.VARIANT.next, was_variant=was.variant, now_variant=now.variant,
        failure=failure if now.status == "failed" else None,
    )  # fmt: skip
    if was.status == "failed" and now.status != "failed":
        said = f"{delta.name} is {now.status} again" + (f", by its variant {now.variant!r}" if now.variant else "")
        return _told(base, Kind.MENDED, said, *_places(delta, old, new, was, now))
    found = _anchored(delta, old, new, was.variant)
    fate = found[0] if found is not None else None
    old_text, new_text = found[1:] if found is not None else _places(delta, old, new, was, now)
    if now.status == "failed":
        kind = _kind(failure) if failure is not None else Kind.REFUSED
        if kind in _OF_THE_ANCHOR and fate is not None and fate.kind is not Kind.VARIANT:
            kind = fate.kind
        says_more = fate is not None and kind is fate.kind
        said = fate.said if says_more and fate is not None else _sentence(failure, kind)
        if was.status == "failed":
            said = f"it still fails, for another reason: {said}"
        if kind is Kind.ATTRIBUTE_GONE or not says_more:
            new_text = _at_failure(failure, new) or new_text
        made = _told(base, kind, said, old_text, new_text)
        return replace(made, difference=fate.difference if says_more and fate is not None else None)
    kind = {"absorbed": Kind.ABSORBED, "not-applicable": Kind.NEEDLESS}.get(now.status, Kind.VARIANT)
    note = now.detail or f"variant {now.variant!r}"
    if kind is Kind.VARIANT and was.status != "applied":
        said = f"the delta has something to patch from here on: {note}" if was.status == "not-applicable" else note
    else:
        said = note if kind is not Kind.VARIANT else f"the delta still applies, by its variant {now.variant!r}"
    if fate is not None and fate.kind is not Kind.VARIANT:
        kind = fate.kind if kind is Kind.VARIANT else kind
        said = f"{fate.said}; {said}" if kind is fate.kind else f"{said} ({fate.said})"
    made = _told(base, kind, said, old_text, new_text)
    settled = Kind.VARIANT.next if now.status == "applied" else kind.next
    return replace(made, next=settled, difference=fate.difference if fate is not None else None)


def _told(base: Transition, kind: Kind, said: str, old: Snippet | None, new: Snippet | None) -> Transition:
    return replace(base, kind=kind.label, explanation=said, next=kind.next, old=old, new=new)


def matched(delta: Delta, lane: Lane, variant: str | None) -> tuple[Anchor, Target, Match] | None:
    """Where a variant's anchor stands on a lane, if it is found once."""
    declared = next((one for one in delta.variants if one.name == variant), None)
    anchor = declared.anchor if declared is not None else None
    target = find_target(lane, delta.target)
    if anchor is None or isinstance(target, Failure):
        return None
    found, _ = find_anchor(target, anchor, near=False)
    return (anchor, target, found[0]) if len(found) == 1 else None


def _anchored(delta: Delta, old: Side, new: Side, variant: str | None) -> tuple[Fate, Snippet, Snippet | None] | None:
    """What became of the anchor that was matched, with the lines of both sides."""
    try:
        before = matched(delta, old.lane(), variant)
        target = find_target(new.lane(), delta.target)
    except PatchError:
        return None
    if before is None or isinstance(target, Failure):
        return None
    anchor, from_target, match = before
    fate = fate_of(anchor, from_target, match, target)
    shown = of_node(fate.text, fate.node) if fate.node is not None else _near(target, from_target, match)
    return fate, of_node(from_target.text, match.node), shown


def _near(target: Target, old: Target, match: Match) -> Snippet:
    """Where an anchor would stand that is gone: as deep in its function as it was."""
    depth = getattr(match.node, "lineno", old.node.lineno) - old.node.lineno
    size = max(1, (old.node.end_lineno or 0) - old.node.lineno)
    line = target.node.lineno + depth * ((target.node.end_lineno or 0) - target.node.lineno) // size
    return replace(snippet(target.text, line), marked=())


def _places(
    delta: Delta, old: Side, new: Side, was: DeltaCell, now: DeltaCell
) -> tuple[Snippet | None, Snippet | None]:
    """The lines that the two cells name."""
    return _lines(old, delta, was), _lines(new, delta, now)


def _lines(side: Side, delta: Delta, cell: DeltaCell) -> Snippet | None:
    if cell.line is None:
        return None
    try:
        text = side.lane().module(delta.module)
    except PatchError:
        return None
    return snippet(text, cell.line) if text is not None and cell.line <= len(text.lines) else None


# -- invariants, call shapes and attributes ------------------------------------------------------


def _of_facts(feature: Feature, old: Side, new: Side) -> Iterator[Transition]:
    for fact in new.look.facts:
        was, now = fact_state(old.look, fact.name), fact_state(new.look, fact.name)
        if was is None or now is None or was == now:
            continue
        failure = _failure_of(fact, new.look)
        kind = Kind.INVARIANT_BROKEN
        if fact.kind == "attribute" or (failure is not None and failure.code == "BP207"):
            kind = Kind.ATTRIBUTE_GONE
        said = fact.detail if fact.kind != "attribute" else f"{fact.detail}, and nothing of upstream's sets it any more"
        if now == "holds":
            kind, said = Kind.MENDED, f"it holds again: {fact.name}"
        yield Transition(
            kind=kind.label, feature=feature.name, subject=fact.name, delta=None, declared=feature.declared,
            target=_target_of(feature, fact), before=old.ref, after=new.ref, was=was, now=now, action=False,
            explanation=said, next=kind.next, failure=failure, new=_at_failure(failure, new),
        )  # fmt: skip


def _target_of(feature: Feature, fact: Fact) -> str | None:
    if fact.kind == "attribute":
        return feature.runtime.base if feature.runtime is not None else None
    found = next((one for one in feature.invariants if one.name == fact.name), None)
    return getattr(found, "target", None)


def _failure_of(fact: Fact, look: Look) -> Failure | None:
    return next((one for one in look.failures if fact.detail and one.headline == fact.detail), None)


# -- the rest ------------------------------------------------------------------------------------


def _of_failure(feature: Feature, old: Side, new: Side, failure: Failure) -> Transition:
    kind = _kind(failure)
    target = dict(failure.fields).get("target", "").split(" ", 1)[0] or None
    return Transition(
        kind=kind.label, feature=feature.name, subject=failure.code, delta=None,
        declared=dict(failure.fields).get("declared", feature.declared), target=target, before=old.ref, after=new.ref,
        was=old.look.status, now=new.look.status, action=False, explanation=failure.what, next=kind.next,
        failure=failure, new=_at_failure(failure, new),
    )  # fmt: skip


def reasons(look: Look) -> set[tuple[str, str]]:
    """Why a feature could not be looked at; in which line or object does not matter, those go on."""
    return {(failure.code, re.sub(r":\d+:|\b[0-9a-f]{40}\b", ":", failure.what)) for failure in look.failures}


def of_dark(feature: Feature, old: Side, new: Side) -> Transition:
    """That a feature could not be looked at."""
    failure = new.look.failures[0] if new.look.failures else None
    said = failure.what if failure is not None else Kind.UNREADABLE.value
    return Transition(
        kind=Kind.UNREADABLE.label, feature=feature.name, subject=(failure.file if failure else None) or new.ref,
        delta=None, declared=feature.declared, target=None, before=old.ref, after=new.ref, was=old.look.status,
        now="unreadable", action=False, explanation=said, next=failure.next if failure else Kind.UNREADABLE.next,
        failure=failure,
    )  # fmt: skip


def _kind(failure: Failure) -> Kind:
    if failure.code.startswith("BP2") and failure.code != "BP207":
        return Kind.INVARIANT_BROKEN
    return _KINDS.get(failure.code, Kind.REFUSED)


def _sentence(failure: Failure | None, kind: Kind) -> str:
    if failure is None:
        return kind.value
    nearest = dict(failure.fields).get("nearest", "")
    said = failure.what.removesuffix("; nothing was patched.").removesuffix("; nothing was patched")
    return f"{failure.title}: {said}" + (f" (nearest: {nearest.splitlines()[0]})" if nearest else "")


def _speaks_of(failure: Failure, delta: Delta) -> bool:
    return names(failure, delta.name, delta.declared)


def _at_failure(failure: Failure | None, side: Side) -> Snippet | None:
    if failure is None or failure.file is None or failure.line is None:
        return None
    try:
        text = side.lane().module(failure.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    except PatchError:
        return None
    return snippet(text, failure.line) if text is not None and 0 < failure.line <= len(text.lines) else None

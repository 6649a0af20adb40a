"""For a delta that stopped applying: a change of its declaration that applies before and since, tried on both.

Nothing is believed that was not tried: the changed file is run, and its feature is checked on the last good ref, on the
first bad one, and on the ends. A person decides; a proposal is text.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from balance_patcher.anchors import find_anchor
from balance_patcher.check import check_feature
from balance_patcher.delta import Anchor, Delta, Variant
from balance_patcher.errors import Failure, Outcome, PatchError
from balance_patcher.feature import Feature
from balance_patcher.report import names
from balance_patcher.source import Lane
from balance_patcher.targets import Target, find_target

from .anchored import fate_of
from .candidates import Candidate, Spot, candidates
from .changed import Proposal
from .explain import matched
from .kinds import Kind
from .patching import CannotPatchError, Patched, patched
from .renaming import renames
from .retargeting import retargets

_TRIES = 12  # candidates that are found once on both sides, and whose whole feature is checked then


@dataclass(frozen=True)
class Where:
    """A ref to try a proposal on."""

    ref: str
    lane: Callable[[], Lane]


@dataclass(frozen=True)
class Asked:
    """What a proposal is asked for.

    Attributes:
        feature: The feature, with the ``folder`` of its declarations.
        delta: The delta that does not apply.
        variant: The variant that applied, if it was one.
        good: The last ref on which it did.
        bad: The first one on which it does not.
        others: Refs on which it is tried besides.
        command: What proves it on a ref once it is applied.
    """

    feature: Feature
    folder: Path
    delta: Delta
    variant: str | None
    good: Where
    bad: Where
    others: Sequence[Where]
    command: Callable[[str], str]


def made(asked: Asked) -> dict[str, Any] | str:
    """The same as plain data. No report is lost because a proposal could not be made."""
    try:
        found = propose(asked)
    except Exception as error:  # noqa: BLE001 - it tries what nobody has written
        return f"the search for one failed: {type(error).__name__}: {error}"
    return found if isinstance(found, str) else dataclasses.asdict(found)


def propose(asked: Asked) -> Proposal | str:
    """A proposal, or why there is none."""
    path = asked.folder / asked.delta.declared.rpartition("/")[2].partition(":")[0]
    if not path.is_file():
        return f"{path} is not there"
    variant = next((one for one in asked.delta.variants if one.name == asked.variant), None)
    if variant is None:
        return "no variant of it applied before"
    try:
        target = find_target(asked.bad.lane(), asked.delta.target)
    except PatchError as error:
        return error.failures[0].headline
    if isinstance(target, Failure):
        try:
            return _retargeted(asked, path)
        except CannotPatchError as error:
            return str(error)
    why = "nothing like the old statement is there, or no small change of the anchor fits both"
    tries = 0
    for anchor, renamed, note in _anchors(asked, variant, target):
        if tries == _TRIES:
            break
        tries += 1
        try:
            done = patched(path, asked.delta, variant, anchor, renamed)
        except CannotPatchError as error:
            why = str(error)
            continue
        good, bad = (_holds(asked, done.delta, where) for where in (asked.good, asked.bad))
        if good == "" and bad == "":
            return _made(asked, done, str(anchor.compiled), note)
        why = bad or good
    return _renamed(asked, path, variant) or why


def _made(
    asked: Asked,
    done: Patched,
    pattern: str,
    note: str,
    known: Sequence[Where] = (),
    feature: Feature | None = None,
) -> Proposal:
    wheres = {where.ref: where for where in (*asked.others, asked.good, asked.bad)}
    holds = [ref for ref, where in wheres.items() if where in known or _holds(asked, done.delta, where, feature) == ""]
    fails = tuple(ref for ref in wheres if ref not in holds)
    return Proposal(
        asked.delta.name,
        done.file,
        done.line,
        pattern,
        done.patch,
        tuple(holds),
        fails,
        asked.command(asked.bad.ref),
        note,
    )


def _anchors(asked: Asked, variant: Variant, target: Target) -> Iterator[tuple[Anchor, dict[str, str], str]]:
    """Anchors that are found exactly once on both refs, in the right places."""
    before = matched(asked.delta, asked.good.lane(), variant.name)
    if before is None:
        return
    anchor, old_target, match = before
    fate = fate_of(anchor, old_target, match, target)
    if fate.kind is Kind.GONE or fate.function or not isinstance(fate.node, ast.AST):
        return
    statement = _statement(target, fate.node)
    if statement is None:
        return
    old, new = Spot(old_target, match.statements[0]), Spot(target, statement)
    seen: set[str] = set()
    for one in candidates(variant, old, new):
        if repr(one.anchor) not in seen and _once(one, old) and _once(one, new):
            seen.add(repr(one.anchor))
            yield one.anchor, dict(one.renamed), one.note


def _statement(target: Target, node: ast.AST) -> ast.stmt | None:
    if id(node) in target.places and isinstance(node, ast.stmt):
        return node
    return next((holder[0] for inner, holder in target.expressions if inner is node), None)


def _once(one: Candidate, spot: Spot) -> bool:
    try:
        found, _ = find_anchor(spot.target, one.anchor, near=False)
    except PatchError:
        return False
    return len(found) == 1 and found[0].statements[one.at] is spot.statement


def _with(feature: Feature, delta: Delta) -> Feature:
    return replace(feature, deltas=tuple(delta if one.name == delta.name else one for one in feature.deltas))


def _holds(asked: Asked, delta: Delta, where: Where, feature: Feature | None = None) -> str:
    """Why a changed delta does not hold at a ref; empty where it does, and breaks nothing that held without it.

    ``feature`` is the changed one, where more of it was changed than the delta.
    """
    changed = feature or _with(asked.feature, delta)
    try:
        lane = where.lane()
        report = check_feature(lane, changed)
        before = {_key(failure) for failure in check_feature(lane, asked.feature).failures}
    except PatchError as error:
        return f"{where.ref}: {error.failures[0].headline}"
    cell = next((row for row in report.deltas if row.name == delta.name), None)
    own = [failure for failure in report.failures if _key(failure) not in before or names(failure, delta.name, "")]
    if own or cell is None or cell.status == "failed":
        why = f"a candidate is refused at {where.ref}: {own[0].headline if own else 'it still fails'}"
        said = [
            row.name for row in report.invariants if row.status == "broken" and own and row.detail == own[0].headline
        ]
        return f"{why}; {for_a_person(asked.folder, asked.feature, said[0])}" if said else why
    # Another delta of the feature may be broken, too; then nobody can say more of this one.
    return "" if report.outcome is not Outcome.UNKNOWN or report.failures else f"{where.ref}: could not be checked"


def _key(failure: Failure) -> tuple[str, str]:
    return failure.code, failure.what


def _retargeted(asked: Asked, path: Path) -> Proposal | str:
    """The target as upstream calls it now; the delta may need more than that, which is told then."""
    why = "the target is not there, and nothing like it; a person has to find it"
    for done, feature, target in retargets(path, asked.delta, asked.good.lane(), asked.bad.lane()):
        refused = _holds(asked, done.delta, asked.bad, feature)
        why = f"the target may be {target} now, and that alone does not do: {refused}"
        if refused == "":
            said = f"the target is {target} now; what is older than that has no such target"
            note = f"{said}: check that it is the same function, and look at texts that name it in the class"
            pattern = f"{asked.delta.target} → {target}"
            return _made(asked, done, pattern, note, [asked.bad], feature)
    return why


def _renamed(asked: Asked, path: Path, variant: Variant) -> Proposal | None:
    """A name that the delta's own text uses, as upstream calls it now."""
    for done, was, now in renames(path, asked.delta, variant, asked.good.lane(), asked.bad.lane()):
        if _holds(asked, done.delta, asked.bad) == "":
            note = (
                f"`{was}` is called `{now}` now; where an older vLLM has to be supported, keep both shapes with `given`"
            )
            return _made(asked, done, f"{was} → {now}", note, [asked.bad])
    return None


def for_a_person(folder: Path, feature: Feature, invariant: str) -> str:
    """Why nothing is proposed for an invariant, and where it is declared."""
    file = feature.declared.rpartition("/")[2].partition(":")[0]
    path = folder / file
    lines = path.read_text("utf-8").split("\n") if path.is_file() else []
    line = next((f":{at}" for at, text in enumerate(lines, 1) if f'"{invariant}"' in text), "")
    return (
        f"the invariant `{invariant}` says what has to hold, and a machine cannot know whether less is enough: "
        f"read upstream's change, then change {folder.name}/{file}{line}, or what the delta does"
    )

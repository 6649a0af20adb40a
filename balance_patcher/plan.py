"""Match every delta on the pristine tree and say what would be done where.

Nothing is edited here. A plan either places every delta of a feature or lists every reason why
it cannot, each with the nearest candidate. Deltas are never matched on each other's output.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .anchors import Match, find_anchor
from .delta import (
    APART,
    PARAMETERS,
    AddParameter,
    Delta,
    Edit,
    InsertAfter,
    Override,
    Prologue,
    Replace,
    Variant,
    edit_text,
)
from .elsewhere import part_only, unmet
from .errors import Failure, Outcome, PatchError, refuse
from .feature import Feature
from .matching import Bindings
from .refusals import beyond, failed, not_found, nothing, part_of, several, too_often
from .source import Lane
from .targets import Target, absent, docstring_length, find_target, forwarded, is_there, short
from .template import Template

#: What a method of the feature's class begins with: without any of these features upstream's own runs.
EARLY_RETURN = re.compile(r"if not self\.\w+( and not self\.\w+)*:\n\s+return super\(\)\.\w+\(\$\$\$PARAMETERS\)")


@dataclass(frozen=True)
class Step:
    """One edit, placed.

    Attributes:
        delta: The delta that it belongs to.
        edit: The declaration.
        text: What is put in, holes filled; no indentation.
        statements: What it stands at; empty for edits of the whole function.
    """

    delta: Delta
    edit: Edit
    text: str
    statements: tuple[ast.stmt, ...] = ()
    template: str = ""


@dataclass
class Placement:
    """What became of one delta on one lane.

    ``status`` is ``applied``, ``absorbed``, ``not-applicable`` or ``failed``; ``why`` says why there is nothing to
    patch, where no variant does.
    """

    delta: Delta
    status: str
    variant: Variant | None = None
    target: Target | None = None
    line: int | None = None
    matches: int = 0
    bound: Bindings = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    why: str = ""

    @property
    def outcome(self) -> Outcome:
        if self.status != "failed":
            return Outcome.HOLDS
        return Outcome.worst(failure.outcome for failure in self.failures)


@dataclass
class Plan:
    """Every delta of a feature, placed on one lane."""

    feature: Feature
    lane: Lane
    placements: list[Placement]
    failures: list[Failure] = field(default_factory=list)

    @property
    def all_failures(self) -> list[Failure]:
        return [failure for placement in self.placements for failure in placement.failures] + self.failures

    def placement(self, delta: str) -> Placement:
        return next(placement for placement in self.placements if placement.delta.name == delta)

    @property
    def idle(self) -> str | None:
        """Why this lane needs nothing of the feature, as every delta has recognised; ``None`` where one has not.

        A delta whose target is missing has recognised nothing: the feature cannot be had there.
        """
        variants = [placement.variant for placement in self.placements]
        recognised = [variant for variant in variants if variant is not None and variant.status != "applied"]
        if self.all_failures or len(recognised) < len(variants):
            return None
        return "; ".join(dict.fromkeys(variant.note or f"{variant.name}: {variant.status}" for variant in recognised))

    @property
    def steps(self) -> dict[str, list[Step]]:
        """The edits by target, in declared order."""
        found: dict[str, list[Step]] = {}
        for placement in self.placements:
            if placement.steps:
                found.setdefault(placement.delta.target, []).extend(placement.steps)
        return found

    def target(self, name: str) -> Target:
        return next(p.target for p in self.placements if p.target is not None and p.delta.target == name)


def make_plan(lane: Lane, feature: Feature) -> Plan:
    """Place every delta of a feature on a lane; failures are collected, not raised.

    Raises:
        PatchError: BP5xx, if the lane cannot be read.
    """
    placements = []
    for delta in feature.deltas:
        needless = _needless(lane, delta)
        found = Placement(delta, "not-applicable", why=needless) if needless else None
        placements.append(found or _place(lane, delta, find_target(lane, delta.target)))
    plan = Plan(feature, lane, placements)
    plan.failures += _collisions(plan)
    return plan


# -- deltas ----------------------------------------------------------------------------------


def _needless(lane: Lane, delta: Delta) -> str:
    """Why a lane has nothing to patch for a delta; empty where it has."""
    for older, why in delta.not_with.items():
        if is_there(lane, older):
            return why
    if delta.unless_missing and absent(lane, delta.target):
        return delta.unless_missing
    return ""


def _place(lane: Lane, delta: Delta, target: Target | Failure) -> Placement:
    if isinstance(target, Failure):
        return Placement(delta, "failed", failures=[_name(delta, target)])
    if target.unusable is not None:
        return Placement(
            delta, "failed", target=target, line=target.node.lineno, failures=[_name(delta, target.unusable)]
        )
    found: list[tuple[Variant, Match | None]] = []
    often: list[tuple[Variant, list[Match]]] = []
    partly: list[tuple[Variant, int, list[str]]] = []
    for variant in delta.variants:
        match = None
        if variant.anchor is not None:
            # A variant that does not fit is not a refusal yet: which candidates came near is asked when none does.
            matches, _ = find_anchor(target, variant.anchor, near=False)
            if len(matches) > 1:
                often.append((variant, matches))
            if len(matches) != 1:
                continue
            match = matches[0]
        reasons = unmet(lane, variant)
        if reasons:
            partly.append((variant, getattr(match.node if match else target.node, "lineno", 0), reasons))
        else:
            found.append((variant, match))
    if often:
        return _refused(delta, target, too_often(delta, target, *often[0]), len(often[0][1]))
    if len(found) > 1:
        return _refused(delta, target, several(delta, target, [variant.name for variant, _ in found]), len(found))
    if not found:
        refusal = part_only(delta, target, partly) if partly else not_found(delta, target)
        return _refused(delta, target, refusal, 0)
    variant, match = found[0]
    node = match.node if match else target.node
    placement = Placement(
        delta, variant.status, variant, target, getattr(node, "lineno", None), 1, match.bound if match else {}
    )
    bound = {**placement.bound, PARAMETERS: forwarded(target)}
    try:
        placement.steps = tuple(step for edit in variant.edits if (step := _step(delta, edit, match, bound, target)))
        placement.exports = {name: Template(text).fill(bound) for name, text in variant.exports.items()}
        if variant.edits and not placement.steps:
            raise PatchError(nothing(delta, target))
    except PatchError as error:
        return _refused(delta, target, error.failures[0], 1)
    return placement


def _step(delta: Delta, edit: Edit, match: Match | None, bound: Bindings, target: Target) -> Step | None:
    if isinstance(edit, AddParameter):
        arguments = target.node.args
        taken = {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)}
        return None if edit.name in taken else Step(delta, edit, f"{edit.name}={edit.default}")
    text = Template(edit_text(edit)).fill(bound)
    if isinstance(edit, Override):
        _whole(delta, target, edit, match)
    if isinstance(edit, (Prologue, *APART)):
        return Step(delta, edit, text, (), edit_text(edit))
    if match is None:  # pragma: no cover - refused when the variant is declared
        raise PatchError(nothing(delta, target))
    statements = match.at(edit.at)
    try:
        filled = ast.parse(text)
    except SyntaxError as error:
        raise refuse(
            "BP002", f"with its holes filled, an edit of delta {delta.name!r} is not Python ({error.msg})",
            ("text", text), ("declared", delta.declared), next="put the hole where any expression can stand",
        ) from error  # fmt: skip
    if isinstance(edit, Replace):
        if ast.dump(ast.Module([*statements], [])) == ast.dump(filled):
            raise PatchError(nothing(delta, target))
        only = statements[0]
        if (
            edit.at == "anchor"
            and isinstance(match.node, ast.expr)
            and not (isinstance(only, ast.Expr) and only.value is match.node)
        ):
            raise PatchError(part_of(delta, target, only))
    return Step(delta, edit, text, statements, edit_text(edit))


def _whole(delta: Delta, target: Target, edit: Override, match: Match | None) -> None:
    """An override must lose nothing: neither what upstream's method does besides its anchor, nor its parameters."""
    name = target.qualname
    if match is not None:
        body = target.node.body[docstring_length(target.node) :]
        more = next((statement for statement in body if statement not in match.statements), None)
        if more is not None:
            raise PatchError(beyond(delta, target, "BP114", f"{name} does more than its anchor says", more))
    if forwarded(target) and PARAMETERS not in Template(edit.text).holes:
        why = f"{name} takes parameters, and the override passes none on"
        raise PatchError(beyond(delta, target, "BP120", why, target.node))


def _refused(delta: Delta, target: Target, failure: Failure, matches: int) -> Placement:
    return Placement(delta, "failed", target=target, line=failure.line, matches=matches, failures=[failure])


def _name(delta: Delta, failure: Failure) -> Failure:
    return failure.with_fields(("delta", delta.name), ("declared", delta.declared))


# -- overlaps --------------------------------------------------------------------------------


def _collisions(plan: Plan) -> list[Failure]:
    failures = []
    for name, steps in plan.steps.items():
        target = plan.target(name)
        for at, step in enumerate(steps):
            for other in steps[:at]:
                failure = _collision(target, other, step)
                if failure is not None:
                    failures.append(failure)
    return failures


def _collision(target: Target, one: Step, other: Step) -> Failure | None:
    both = f"{one.delta.name!r} and {other.delta.name!r}"
    rows = [("one", one.delta.declared), ("other", other.delta.declared)]
    line = (one.statements or other.statements or (target.node,))[0].lineno
    if _covers(one, other) or _covers(other, one):
        return failed(
            one.delta, target, "BP119", f"{both} at {short(target.text.display)}:{line}", rows, line,
            "let one delta make both changes, or anchor them at different statements",
        )  # fmt: skip
    if isinstance(one.edit, AddParameter) and isinstance(other.edit, AddParameter) and one.edit.name == other.edit.name:
        return failed(
            one.delta,
            target,
            "BP119",
            f"{both} add the parameter {one.edit.name}",
            rows,
            line,
            "let one of them add it",
        )
    same_point = _point(target, one) is not None and _point(target, one) == _point(target, other)
    if not same_point or one.delta is other.delta:
        return None
    if one.delta.name in other.delta.after or other.delta.name in one.delta.after:
        return None
    return failed(
        one.delta, target, "BP118", f"{both} edit at one point, {short(target.text.display)}:{line}", rows, line,
        f"say in one of them which comes first: after=({one.delta.name!r},)",
    )  # fmt: skip


def _covers(one: Step, other: Step) -> bool:
    """Whether ``one`` replaces a node that ``other`` edits or stands in, or the whole method."""
    if isinstance(one.edit, Override):
        return True
    if not isinstance(one.edit, Replace):
        return False
    inner = {id(node) for statement in one.statements for node in ast.walk(statement)}
    return any(id(statement) in inner for statement in other.statements)


def _point(target: Target, step: Step) -> tuple[int, int] | str | None:
    """The gap between two statements where an insertion stands."""
    if isinstance(step.edit, Prologue):
        return id(target.node.body), docstring_length(target.node)
    if isinstance(step.edit, AddParameter):
        return "parameters"
    if isinstance(step.edit, APART):
        return "around"
    if isinstance(step.edit, Replace) or not step.statements:
        return None
    _, _, suite, at = target.places[id(step.statements[0])]
    return id(suite), at + (len(step.statements) if isinstance(step.edit, InsertAfter) else 0)


def in_order(steps: Sequence[Step]) -> list[Step]:
    """Steps sorted so that each delta comes after those it names; else as they were declared."""
    left = list(steps)
    done: list[Step] = []
    while left:
        waiting = {step.delta.name for step in left}
        ready = next((s for s in left if not (set(s.delta.after) & waiting - {s.delta.name})), left[0])
        left.remove(ready)
        done.append(ready)
    return done

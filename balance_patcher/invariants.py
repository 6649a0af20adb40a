"""What must hold upstream besides the anchors, looked at in the text.

A delta that can be placed may still be wrong: the gather rests on the busy loop calling its hook
once a turn on every rank. Each kind of invariant here is a mechanism; features declare which
function it speaks of. Upstream's own decorators do not matter: the text under them is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .anchors import Match, find_anchor
from .beside import Beside
from .bound import attributes_set, walk
from .delta import Anchor
from .errors import Failure, Outcome, PatchError
from .feature import Agree, AskedOnce, CalledOnce, Feature, Invariant, Ordered, Pure, Sets
from .matching import render_bound, same
from .paths import broken, called_once, conditional, dominates, target_of
from .pattern import compile_pattern
from .plan import Plan
from .render import head
from .rewrite import Rewrite
from .targets import Target, absent, short
from .through import override_of


@dataclass(frozen=True)
class Finding:
    """One invariant on one lane: ``holds``, ``broken`` or ``unknown``, and why."""

    name: str
    status: str
    detail: str
    failures: tuple[Failure, ...] = ()


def check_invariants(plan: Plan, rewrites: dict[str, Rewrite] | None) -> list[Finding]:
    """Every invariant of the plan's feature, in declared order.

    Args:
        plan: The placed feature.
        rewrites: The rewritten modules; ``None`` when the feature could not be placed, which leaves the
            invariants of the rewritten text ``unknown``.
    """
    others = Beside(plan)
    whose = zip(plan.feature.invariants, others.owners, strict=True)
    return [_check(invariant, plan, rewrites, others, owner) for invariant, owner in whose]


def _check(
    invariant: Invariant, plan: Plan, rewrites: dict[str, Rewrite] | None, others: Beside, owner: Feature | None
) -> Finding:
    placed = isinstance(invariant, (Agree, Pure))
    placed |= isinstance(invariant, Ordered) and invariant.target in plan.feature.targets
    if rewrites is None and placed:
        return Finding(invariant.name, "unknown", "the feature could not be placed")
    try:
        detail = _KINDS[type(invariant)](invariant, plan, rewrites or {})
        if rewrites is not None:
            _check_beside(invariant, others, owner)
    except PatchError as error:
        status = "broken" if error.outcome is Outcome.BROKEN else "unknown"
        return Finding(invariant.name, status, error.failures[0].headline, error.failures)
    return Finding(invariant.name, "holds", detail)


def _check_beside(invariant: Invariant, others: Beside, owner: Feature | None) -> None:
    """It holds with the edits of other features in the text, too; else they are named."""
    found = others.of(invariant, owner)
    if found is None or owner is None:
        return
    edited, deltas = found
    try:
        _KINDS[type(invariant)](invariant, edited, {})
    except PatchError as error:
        rows = (("rests on it", owner.name), ("edited by", ", ".join(deltas)))
        raise PatchError(*(failure.with_fields(*rows) for failure in error.failures)) from None


# -- the others ------------------------------------------------------------------------------


def _asked_once(invariant: AskedOnce, plan: Plan, _: dict[str, Rewrite]) -> str:
    if absent(plan.lane, invariant.target):
        return "upstream has no such method"
    target, caller = target_of(plan, invariant.target), target_of(plan, invariant.caller)
    matches, _misses = find_anchor(caller, invariant.call, near=False)
    called = {id(node) for match in matches for node in ast.walk(match.node)}
    name = target.node.name
    # A name in a text may be looked up by it: `getattr(self, "name")`.
    said = [node for part in target.text.parts_with(name) for node in walk(part) if name in _spoken(node)]
    more = next((node for node in said if id(node) not in called), None)
    if len(matches) != 1 or more is not None:
        what = f"{target.qualname} is asked in {len(matches)} places of {caller.qualname}, not one"
        if more is not None:
            what = f"{target.qualname} is spoken of in another place than `{compile_pattern(invariant.call.pattern)}`"
        next_step = "find out what upstream asks it for there; what overrides it would decide that too"
        raise broken("BP208", invariant, target, what, more or target.node, next_step)
    return f"{short(target.text.display)}:{target.node.lineno}, asked in line {matches[0].statements[0].lineno}"


def _spoken(node: ast.AST) -> tuple[object, ...]:
    return tuple(getattr(node, field, None) for field in ("attr", "id", "value"))


def _ordered(invariant: Ordered, plan: Plan, _: dict[str, Rewrite]) -> str:
    target = target_of(plan, invariant.target)
    steps = [
        _the_one(invariant, [target], texts, "BP204", "was found {} times, not once", "read upstream's function anew")
        for texts in (invariant.firsts, (invariant.then,))
    ]
    first, then = (match.statements[0] for match in steps)
    if conditional(first, steps[0].node) or not dominates(target, first, then):
        raise broken(
            "BP204",
            invariant,
            target,
            f"`{head(first)}` is not executed on every path before `{head(then)}`",
            then,
            "read upstream's start-up anew; what the hook uses may not be there yet",
        )
    return f"{short(target.text.display)}:{first.lineno} before {then.lineno}"


def _the_one(
    invariant: Invariant, targets: Sequence[Target], texts: Sequence[str], code: str, count: str, next_step: str
) -> Match:
    """The only match of any of the patterns in the targets; ``count`` says with ``{}`` how many there are otherwise."""
    places = [(target, Anchor(text)) for target in targets for text in texts]
    matches = [match for target, anchor in places for match in find_anchor(target, anchor, near=False)[0]]
    if len(matches) != 1:
        misses = [miss for target, anchor in places for miss in find_anchor(target, anchor)[1]]
        near = max(misses, key=lambda miss: miss.score, default=None)
        what = f"{' or '.join(f'`{compile_pattern(text)}`' for text in texts)} {count.format(len(matches))}"
        raise broken(code, invariant, targets[0], what, near.node if near else targets[0].node, next_step)
    return matches[0]


def _sets(invariant: Sets, plan: Plan, _: dict[str, Rewrite]) -> str:
    target = target_of(plan, invariant.target)
    for node in attributes_set(target.node, nested=False):
        if node.attr == invariant.attribute and isinstance(node.value, ast.Name) and node.value.id == "self":
            return f"{short(target.text.display)}:{node.lineno}"
    raise broken(
        "BP207",
        invariant,
        target,
        f"{target.qualname} does not set self.{invariant.attribute}",
        target.node,
        "find where upstream sets it now",
    )


def _agree(invariant: Agree, plan: Plan, rewrites: dict[str, Rewrite]) -> str:
    if invariant.delta and plan.placement(invariant.delta).status != "applied":
        return f"{invariant.delta} is {plan.placement(invariant.delta).status}"
    module = invariant.target.partition(":")[0]
    result = rewrites.get(module)
    target = result.targets.get(invariant.target) if result else None
    if target is None:
        target = target_of(plan, invariant.target)
    next_step = "place the feature's deltas first; then read this again"
    over = override_of(plan, invariant.target)
    where = [target] if over is None else [target, over]
    bound = [
        _the_one(invariant, where, [text], "BP205", "stands {} times in what would run", next_step)
        for text in (invariant.one, invariant.other)
    ]
    one, other = bound
    for hole in invariant.holes:
        if not same(one.bound[hole], other.bound[hole]):
            values = " and ".join(f"`{render_bound(match.bound[hole])}`" for match in bound)
            raise broken(
                "BP205",
                invariant,
                target,
                f"{hole} differs: {values}",
                other.node,
                "bind it from upstream's own statement instead of repeating it",
            )
    return ", ".join(f"{hole} {render_bound(one.bound[hole])}" for hole in invariant.holes)


def _pure(invariant: Pure, plan: Plan, _: dict[str, Rewrite]) -> str:
    placement = plan.placement(invariant.delta)
    if placement.target is None or invariant.hole not in placement.bound:
        return f"nothing is bound to ${invariant.hole} here"
    value = placement.bound[invariant.hole]
    if not isinstance(value, ast.AST):
        return f"`{render_bound(value)}`"
    for node in ast.walk(value):
        effect = isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))
        foreign = isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in invariant.calls
        )
        if effect or foreign:
            raise broken(
                "BP206",
                invariant,
                placement.target,
                f"`{render_bound(value)}` may do more than count",
                node,
                "find out what upstream does there; the gate would leave it out or do it twice",
            )
    return f"`{render_bound(value)}` only reads"


_KINDS: dict[type, Callable[..., str]] = {
    AskedOnce: _asked_once,
    CalledOnce: called_once,
    Ordered: _ordered,
    Sets: _sets,
    Agree: _agree,
    Pure: _pure,
}

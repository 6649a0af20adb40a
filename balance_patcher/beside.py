"""The text that one feature's invariants read, where other features edit it too.

What is proven of upstream's text alone says nothing of a text that others have been put into: a statement of theirs
may leave the loop before the hook. Their edits are put in here without the feature's own. The early return of another
feature is left out: where it is taken, upstream's own method runs, and that is looked at anyway.
"""

from __future__ import annotations

from dataclasses import replace

from .delta import APART, Prologue
from .feature import AskedOnce, CalledOnce, Feature, Invariant, Ordered, Sets
from .names import owners_of
from .plan import EARLY_RETURN, Plan, Step
from .rewrite import rewrite
from .source import Overlaid
from .template import Template


def owners(feature: Feature) -> list[Feature]:
    """For each invariant of a feature, the one of its parts that declares it."""
    return [part for part in feature.parts for _ in part.invariants] or [feature] * len(feature.invariants)


def beside(plan: Plan, invariant: Invariant, owner: Feature) -> tuple[Plan, list[str]] | None:
    """The plan as an invariant finds it where others edit what it speaks of, and their deltas; ``None`` if none does.

    Args:
        plan: The placed feature.
        invariant: One of its invariants that speaks of a text.
        owner: The part that declares it.
    """
    if not isinstance(invariant, (AskedOnce, CalledOnce, Ordered, Sets)):
        return None
    # A hook may be called, and a method asked, from anywhere in the module.
    whole = isinstance(invariant, (AskedOnce, CalledOnce))
    spoken = {invariant.target, getattr(invariant, "caller", invariant.target)}
    modules = {name.partition(":")[0] for name in spoken}
    placements = []
    for placement in plan.placements:
        target = placement.delta.target
        near = target.partition(":")[0] in modules if whole else target in spoken
        steps = tuple(filter(_stays, placement.steps)) if near and owner.name not in owners_of(placement.delta) else ()
        if steps:
            placements.append(replace(placement, steps=steps))
    if not placements:
        return None
    texts = {name: result.new for name, result in rewrite(replace(plan, placements=placements)).items()}
    names = [placement.delta.name for placement in placements]
    return replace(plan, lane=Overlaid(plan.lane, texts, plan.lane.homes)), names


def _stays(step: Step) -> bool:
    early = isinstance(step.edit, Prologue) and EARLY_RETURN.fullmatch(Template(step.template).text)
    return not isinstance(step.edit, APART) and not early

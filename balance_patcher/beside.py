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
from .plan import EARLY_RETURN, Placement, Plan, Step
from .rewrite import Rewrite, function_in, spliced
from .source import Overlaid
from .targets import find_target
from .template import Template


class Beside:
    """A placed feature as each of its parts finds it: with the edits of the other parts, without its own."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._edited: dict[str, dict[str, Rewrite]] = {}
        parts = plan.feature.parts
        #: For each invariant, by its place, the part that declares it; without parts nobody is beside it.
        self.owners: list[Feature | None] = [part for part in parts for _ in part.invariants]
        self.owners = self.owners or [None] * len(plan.feature.invariants)

    def of(self, invariant: Invariant, owner: Feature | None) -> tuple[Plan, list[str]] | None:
        """The plan as an invariant finds it where others edit what it speaks of, and their deltas; else ``None``."""
        if owner is None or not isinstance(invariant, (AskedOnce, CalledOnce, Ordered, Sets)):
            return None
        spoken = {invariant.target, getattr(invariant, "caller", invariant.target)}
        # A hook may be called, and a method asked, from anywhere in the module.
        modules = {name.partition(":")[0] for name in spoken} if isinstance(invariant, (AskedOnce, CalledOnce)) else ()
        deltas = [placement.delta for placement in self._edits(owner)]
        near = [delta.name for delta in deltas if delta.target in spoken or delta.module in modules]
        # Those two look at the whole module; of the others it need not be parsed anew.
        whole = isinstance(invariant, (AskedOnce, CalledOnce))
        return (self._without(owner, set() if whole else spoken), near) if near else None

    def _edits(self, owner: Feature) -> list[Placement]:
        """What the others edit."""
        found = []
        for placement in self._plan.placements:
            steps = tuple(filter(_stays, placement.steps))
            if steps and owner.name not in owners_of(placement.delta):
                found.append(replace(placement, steps=steps))
        return found

    def _without(self, owner: Feature, spoken: set[str]) -> Plan:
        """The plan as it is with what the others edit.

        Args:
            owner: Whose edits are left out.
            spoken: The functions that are read by themselves.
        """
        edited = replace(self._plan, placements=self._edits(owner))
        if owner.name not in self._edited:
            self._edited[owner.name] = spliced(edited)
        results = self._edited[owner.name]
        lane = Overlaid(self._plan.lane, {name: r.new for name, r in results.items()}, self._plan.lane.homes)
        for name in spoken:
            result = results.get(name.partition(":")[0])
            touched = result is not None and name in edited.steps
            found = function_in(edited, name, result) if result is not None and touched else None
            if found is not None or not touched:
                lane.found[name] = found or find_target(self._plan.lane, name)
        return replace(self._plan, lane=lane)


def _stays(step: Step) -> bool:
    early = isinstance(step.edit, Prologue) and EARLY_RETURN.fullmatch(Template(step.template).text)
    return not isinstance(step.edit, APART) and not early

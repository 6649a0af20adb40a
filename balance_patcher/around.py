"""What the features of one engine core or worker meet: those of its other processes, and those of other engines here.

An engine core and its workers decide on different features, often in different processes, and the engine core does so
first. What one process has to know of the other is who asks for what, which the configuration says in both, and, in a
worker, what the engine core has decided, which the configuration carries.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .decided import carried, running
from .feature import Feature
from .installation import bound_features, in_place
from .registry import features
from .relations import against
from .takeover import left_alone
from .wanted import idle, upstream_has, who_asks


@dataclass(frozen=True)
class Around:
    """What is around the features that are decided in one place.

    Attributes:
        process: What is decided: an ``engine`` or a ``worker``.
        config: Its configuration.
        asked: The features that are decided elsewhere and are asked for, with who asks for each.
        known: Every feature that is known here, by name.
    """

    process: str
    config: Any
    asked: Sequence[tuple[Feature, str]]
    known: Mapping[str, Feature]

    def beside(self, wanted: Sequence[Feature]) -> list[tuple[Feature, str]]:
        """Features that those that are wanted must not exclude, each with what is to be said of it."""
        found = [(feature, f"asked for by {who}") for feature, who in self.asked]
        ours = {feature.name for feature in (*wanted, *(feature for feature, _ in self.asked))}
        found += [(f, "in place in this process, for every engine") for f in in_place() if f.name not in ours]
        one_for_all = [feature for feature in wanted if feature.runtime is None]
        # A configuration that nobody has any more may still be there, in a cycle.
        if any(against(one, other) for one in one_for_all for other in self._elsewhere_on()):
            gc.collect()
        clashing = [f for f in self._elsewhere_on() if any(against(one, f) for one in one_for_all)]
        return found + [(f, "on in another engine of this process") for f in clashing if f.name not in ours]

    def _elsewhere_on(self) -> list[Feature]:
        on = running(but=self.config)
        return [feature for feature in bound_features() if feature.runtime is not None and feature.name in on]

    def there(self, names: Collection[str], *, may_go_without: bool) -> tuple[set[str], dict[str, str]]:
        """Of features that are needed and not decided on here: those that are there, and why others are not.

        Args:
            names: Their names.
            may_go_without: Whether a process that cannot have what it is asked for goes on without it.
        """
        there: set[str] = set()
        off: dict[str, str] = {}
        asked = {feature.name for feature, _ in self.asked}
        for name in names:
            feature = self.known.get(name)
            if feature is not None and _upstream_has(feature):
                there.add(name)
            elif name in asked:
                why = self._not_known(name, may_go_without=may_go_without)
                there |= {name} if why is None else set()
                off |= {name: why} if why is not None else {}
        return there, off

    def _not_known(self, name: str, *, may_go_without: bool) -> str | None:
        """Why a feature that is decided elsewhere is not taken for one that is there."""
        said = carried(self.config, name)
        if self.process == "engine":
            # Each worker looks at it again, when it has decided.
            return "which the workers decide on later, and may go without" if may_go_without else None
        if said is None:
            return "of which the engine core has told nothing"
        return None if said == "on" else "which is off in the engine core"

    def relying(self) -> list[Feature]:
        """Features that are on already, and were decided elsewhere."""
        on = [feature for feature, _ in self.asked if carried(self.config, feature.name) == "on"]
        return on if self.process == "worker" else []


def around(process: str, vllm_config: Any, others: Sequence[Feature], here: Collection[Feature]) -> Around:
    """What is around the features that are decided in one place.

    Args:
        process: What is decided: an ``engine`` or a ``worker``.
        vllm_config: Its configuration.
        others: Features of other distributions that are asked for by name.
        here: Those that are asked for and decided here; only what one side says of the other matters.
    """
    known = {feature.name: feature for feature in (*features(), *others)}
    asked = []
    for feature in known.values():
        if feature.process == process or not any(_speak(feature, one) for one in here):
            continue
        who = _who(feature, vllm_config)
        if who is not None and left_alone(feature.name) is None and carried(vllm_config, feature.name) != "off":
            asked.append((feature, who))
    return Around(process, vllm_config, [(feature, who) for feature, who in asked if not _idle(feature)], known)


def _speak(one: Feature, other: Feature) -> bool:
    """Whether one of two says anything of the other."""
    return other.name in {*one.needs, *one.conflicts} or one.name in {*other.needs, *other.conflicts}


def _idle(feature: Feature) -> bool:
    """Whether it has nothing to do; where that cannot be found out it has, which is told where it is decided."""
    try:
        return idle(feature) is not None
    except Exception:  # noqa: BLE001 - whatever a text that cannot be read makes of itself
        return False


def _upstream_has(feature: Feature) -> bool:
    try:
        return upstream_has(feature)
    except Exception:  # noqa: BLE001 - what cannot be found out is not there
        return False


def _who(feature: Feature, vllm_config: Any) -> str | None:
    """Who asks for it; what cannot be read is told where it is decided."""
    try:
        return who_asks(feature, vllm_config)
    except Exception:  # noqa: BLE001 - a rule may raise anything
        return None

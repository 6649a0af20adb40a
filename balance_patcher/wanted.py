"""Which features are decided for an engine core or a worker, and who asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .build import no_collection
from .byname import asked_by_name
from .feature import Enabling, Feature
from .installation import called, in_place
from .plan import Plan, make_plan
from .registry import features, of_others
from .source import installed_lane
from .takeover import left_alone

#: Who asks for what a host's plugin has installed by itself.
BY_CALL = "install()"
#: Who has asked for what nobody asks for now, and what runs all the same: it is in place, and has no class of its own.
LEFT = "an engine of before"


def decided_in(process: str, others: Sequence[Feature] = ()) -> tuple[Feature, ...]:
    """The features that are decided for an engine core, or for a worker.

    Args:
        process: What it is.
        others: Those of other distributions that are asked for. What is in place already is decided there, too.
    """
    known = {feature.name: feature for feature in (*in_place(), *features(), *others)}
    names = dict.fromkeys(feature.name for feature in (*features(), *others, *in_place()))
    return tuple(known[name] for name in names if known[name].process == process)


def bound_by(name: str) -> str:
    """Who had a feature bound that nobody asks for: a host by its own call, or an engine of before."""
    return BY_CALL if called(name) else LEFT


def asked_for(vllm_config: Any, process: str = "engine") -> tuple[str, ...]:
    """The features that are asked for there, and that no host's own copy is trusted with."""
    rules = {feature.name: rule_of(feature) for feature in features() if feature.process == process}
    by_rule = [name for name, rule in rules.items() if rule.asked(vllm_config) is not None]
    named = asked_by_name(vllm_config)
    elsewhere = {feature.name for feature in (*features(), *of_others(named)[0]) if feature.process != process}
    names = dict.fromkeys([*by_rule, *(name for name in named if name not in elsewhere)])
    return tuple(name for name in names if left_alone(name) is None)


def rule_of(feature: Feature) -> Enabling:
    """When a feature runs; one without a rule has to be asked for by its name."""
    return feature.enabling or Enabling()


def who_asks(feature: Feature, vllm_config: Any) -> str | None:
    """Who asks for a feature. One of another distribution is asked for by its name, whatever its own rule says."""
    named = asked_by_name(vllm_config).get(feature.name)
    return named if named or feature.distribution else rule_of(feature).asked(vllm_config)


def idle(feature: Feature) -> str | None:
    """Why this vLLM leaves a feature nothing to do; nothing is read for one that has something to do everywhere."""
    return _planned(feature).idle if feature.may_be_idle else None


def upstream_has(feature: Feature) -> bool:
    """Whether this vLLM does by itself what a feature does, so that what needs the feature has it."""
    if not feature.may_be_idle:
        return False
    plan = _planned(feature)
    return plan.idle is not None and any(placement.status == "absorbed" for placement in plan.placements)


def _planned(feature: Feature) -> Plan:
    with no_collection():
        return make_plan(installed_lane(), feature)

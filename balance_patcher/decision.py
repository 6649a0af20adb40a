"""Decide, once for each engine, whether a feature runs in it, and install it before weights load.

Off leaves vLLM as it is; on means plan, build, install and read back, or refuse. The decision is
stored, and everything that runs in the engine uses that one. Once the engine is built, it is looked at again,
and only then called on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from . import ranks, reminder
from .answering import answers
from .around import Around, around
from .bindings import Installation
from .build import no_collection
from .byname import asked_by_name, composed_with
from .compose import overlapping
from .errors import Failure, PatchError, refuse
from .feature import Feature
from .installation import bound_features, install_together, installed
from .outcome import LOCK, Decision, decisions, keep, unbind, unmake
from .plan import make_plan
from .readback import effective, told_on
from .registry import broken, features, of_others, suspected
from .relations import excluding, groups_in_turn, lacking
from .source import installed_lane
from .takeover import left_alone
from .wanted import LEFT, bound_by, decided_in, idle, rule_of, who_asks
from .watchdog import threshold

__all__ = ["Decision", "ExcludedError", "decide", "decisions", "stops", "switch", "unmake"]

_logger = logging.getLogger("vllm.balance_patcher")


class ExcludedError(PatchError, ValueError):
    """A feature is asked for together with what excludes it: the configuration is wrong, not the vLLM."""


def switch(name: str, values: tuple[str, ...], default: str) -> str:
    """The value of an environment switch.

    Raises:
        PatchError: BP006, for a value that it does not have.
    """
    value = os.environ.get(name, default).strip().lower() or default
    if value not in values:
        raise refuse("BP006", f"{name}={value}", next=f"set it to one of: {', '.join(values)}")
    return value


def stops() -> bool:
    """Whether an engine that cannot have what it asks for is to stop."""
    return switch("BALANCE_PATCHER_ON_FAILURE", ("stop", "off"), "stop") == "stop"


def decide(engine: Any, vllm_config: Any, process: str = "engine") -> tuple[Decision, ...]:
    """Decide for every feature of this process, install those that are asked for, and store what was decided.

    Runs vLLM's own general plugins first, so that what a host plugin patches is in place.

    Args:
        engine: The engine core that is being built; its data-parallel group exists, its weights do not. Or the worker.
        vllm_config: Its configuration.
        process: What it is, ``engine`` or ``worker``; the features that are decided there are decided.

    Raises:
        PatchError: If a feature is asked for and cannot run; the engine must not start. A ``ValueError`` too,
            where it is the configuration that excludes it.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for failure in broken():
        _logger.error("%s", failure)
    _refuse_if_asked_of_a_broken_file(vllm_config)
    with LOCK:
        before = {feature.name for feature in bound_features()}
        try:
            made, relying = _decide_all(engine, vllm_config, process)
        except BaseException:
            unbind(_bound_since(before), vllm_config)
            raise
        keep(made, vllm_config, process, _bound_since(before))
    for decision in made:
        # What is on is told by `confirm`: nothing is, before the engine is there.
        if not decision.active and not decision.failures:
            _logger.info("%s", decision.reason)
    _warn_of_unplaced([decision.feature for decision in made if decision.source is None])
    try:
        _stop_or_remind(engine, vllm_config, [decision for decision in made if decision.failures])
        if relying:  # the engine core has it on already: no switch helps
            raise PatchError(*relying)
    except PatchError as error:
        unmake(made, vllm_config, error)
        raise
    return made


def _bound_since(before: Collection[str]) -> list[str]:
    return [feature.name for feature in bound_features() if feature.name not in before]


def _refuse_if_asked_of_a_broken_file(vllm_config: Any) -> None:
    """A file of ours that cannot be imported declares nothing; a key that it speaks of may still ask for it."""
    suspects = suspected(_words(getattr(vllm_config, "additional_config", None))) if broken() else ()
    if suspects and stops():
        raise PatchError(*suspects)


def _words(value: Any) -> set[str]:
    """Every key of a configuration, however deep."""
    if not isinstance(value, Mapping):
        return set()
    return {str(key) for key in value}.union(*(_words(inner) for inner in value.values()))


def _stop_or_remind(engine: Any, vllm_config: Any, failed: list[Decision]) -> None:
    """What was asked for cannot be had: the engine stops, or it serves without and says so, over and over."""
    if not failed:
        return
    failures = [failure for decision in failed for failure in decision.failures]
    ranks.leave([decision.feature for decision in failed], engine, vllm_config, stops=stops())
    if stops():
        excluded = all(failure.code == "BP701" for failure in failures)
        raise (ExcludedError if excluded else PatchError)(*failures)
    lines = [f"{d.feature}: still OFF because it cannot run: {d.failures[0].headline}" for d in failed]
    reminder.remind(engine, lambda: _logger.error("%s", "; ".join(lines)))


def _warn_of_unplaced(names: list[str]) -> None:
    """One warning where a feature that nobody asks for could not be had either; it stops nobody.

    Only the places of the deltas are looked up, in the text that is installed: that is cheap, and what breaks first.
    """
    told = []
    # One lane for all of them: it parses each module once.
    lane = cache(installed_lane)
    with no_collection():
        for feature in features():
            if feature.name not in names or feature.enabling is None or left_alone(feature.name) is not None:
                continue
            try:
                failures = make_plan(lane(), feature).all_failures
            except Exception as error:  # noqa: BLE001 - nobody asked for it, so nobody is stopped
                failures = list(_failures(error))
            told += [f"{feature.name}: {failure.headline}" for failure in failures[:1]]
    if told:
        _logger.warning("could not be switched on with this vLLM, and is off: %s", "; ".join(told))


def _decide_all(engine: Any, vllm_config: Any, process: str) -> tuple[tuple[Decision, ...], tuple[Failure, ...]]:
    """One decision for each feature; what is to be on is installed, those that share a function together.

    And what features that are on elsewhere need of those that are off here.
    """
    named = asked_by_name(vllm_config)
    others, lost = of_others(named)
    known = decided_in(process, others)
    found = {feature.name: _asked(feature, engine, vllm_config) for feature in known}
    wanted = [feature for feature in known if isinstance(found[feature.name], str) and found[feature.name] != LEFT]
    if wanted:
        _check_switches(wanted, engine, vllm_config)
    sources = {feature.name: str(found[feature.name]) for feature in wanted}
    here = [feature for feature in known if _source(found[feature.name]) is not None]
    asked = _Asked(engine, vllm_config, wanted, sources, around(process, vllm_config, others, here))
    asked.made |= {name: answer for name, answer in found.items() if isinstance(answer, Decision)}
    asked.made |= {name: _left(name) for name, answer in found.items() if answer == LEFT}
    asked.made |= {name: _off(name, failures, named[name]) for name, failures in lost.items()}
    for name, failures in excluding(wanted, sources, asked.around.beside(wanted)).items():
        _refused(next(feature for feature in wanted if feature.name == name), failures, asked)
    for group in groups_in_turn(overlapping([feature for feature in wanted if feature.name not in asked.made])):
        _switch_on(group, asked)
    for feature in (feature for feature in known if found[feature.name] == LEFT):
        for failure in asked.lacks(feature):
            _logger.warning("%s; %s", asked.made[feature.name].reason, failure.headline)
    relying = [failure for feature in asked.around.relying() for failure in asked.lacks(feature, elsewhere=True)]
    return tuple(asked.made[name] for name in (*(feature.name for feature in known), *lost)), tuple(relying)


def _source(answer: Decision | str) -> str | None:
    """Who asks for a feature, of what was found out about it; an engine of before does not."""
    source = answer.source if isinstance(answer, Decision) else answer
    return None if source == LEFT else source


def _left(name: str) -> Decision:
    """In place for an engine of before: nobody asks for it, and it runs."""
    return Decision(name, active=True, reason=f"{name}: ON, in place in this process since {LEFT}", source=LEFT)


@dataclass
class _Asked:
    """What an engine asks for that can be installed, and what became of it so far."""

    engine: Any
    vllm_config: Any
    wanted: Sequence[Feature]
    sources: Mapping[str, str]
    around: Around
    made: dict[str, Decision] = field(default_factory=dict)

    def lacks(self, feature: Feature, group: Sequence[Feature] = (), *, elsewhere: bool = False) -> tuple[Failure, ...]:
        """Which features one needs and has not.

        Args:
            feature: It.
            group: Those that are to be switched on with it.
            elsewhere: Whether it was decided in another process; what it needs of its own kind was looked at there.
        """
        on = {name for name, decision in self.made.items() if decision.active}
        on |= {other.name for other in group}
        made = {name: decision for name, decision in self.made.items() if decision.source and not decision.active}
        off = {name: f"which is off: {_why(decision)}" for name, decision in made.items()}
        open_ = [name for name in feature.needs if name not in on]
        there, beside = self.around.there(open_, may_go_without=bool(self.wanted) and not stops())
        if elsewhere:
            there |= {name for name in open_ if name not in self.made}
        return lacking(feature, on | there, self.wanted, off | beside)


def _why(decision: Decision) -> str:
    """Why a feature is off, after its name."""
    return decision.failures[0].headline if decision.failures else decision.reason.partition(" because ")[2]


def _check_switches(wanted: Sequence[Feature], engine: Any, vllm_config: Any) -> None:
    """A bad value is told before it is needed, and stops: also the other ranks, because what to do is not known."""
    try:
        stops(), threshold(), composed_with(), answers()
    except PatchError as error:
        for feature in wanted:
            ranks.tell(feature, engine, vllm_config, error.failures[0].headline)
        ranks.leave([feature.name for feature in wanted], engine, vllm_config, stops=True)
        raise


def _asked(feature: Feature, engine: Any, vllm_config: Any) -> Decision | str:
    """Who asks for a feature that can be installed; or the decision that it is off."""
    found = _looked_at(feature, engine, vllm_config)
    if isinstance(found, Decision) and found.source is not None:
        reason = found.failures[0].headline if found.failures else found.reason.partition(": ")[2]
        ranks.tell(feature, engine, vllm_config, reason)
        if not found.failures:  # it goes on, and those that stop for it need not wait for it
            ranks.leave([feature.name], engine, vllm_config, stops=False)
    return found


def _looked_at(feature: Feature, engine: Any, vllm_config: Any) -> Decision | str:
    rule = rule_of(feature)
    try:
        source = who_asks(feature, vllm_config)
    except PatchError as error:
        return _off(feature.name, error.failures, "a value that says neither yes nor no")
    except Exception as error:
        # Whether it is asked for is not known, and what nobody asks for stops nobody.
        _logger.exception("%s: whether it is asked for cannot be read", feature.name)
        reason = f"{feature.name}: OFF because whether it is asked for cannot be read: {type(error).__name__}: {error}"
        return Decision(feature.name, active=False, reason=reason)
    left = left_alone(feature.name)
    if left is not None:
        reason = f"{feature.name}: OFF because {left}"
        return Decision(feature.name, active=False, reason=reason, source=source)
    if source is None and feature.runtime is None and installed(feature.name) is not None:
        return bound_by(feature.name)  # it has no class of its own that could be off: where it is bound it is on
    if source is None:
        reason = f"{feature.name}: OFF because the configuration does not ask for it"
        return Decision(feature.name, active=False, reason=reason)
    try:
        excluded = rule.excluded(engine, vllm_config)
        needless = rule.needless(engine, vllm_config) or idle(feature) if not excluded else None
    except Exception as error:  # noqa: BLE001 - what nobody foresaw must not get past the switch
        return _off(feature.name, _failures(error), source)
    if excluded:
        failures = tuple(
            Failure("BP701", why, f"remove one of the two, or switch {feature.name} off", (("asked for by", source),))
            for why in excluded
        )
        return _off(feature.name, failures, source)
    if needless:
        _logger.warning("%s: %s; the engine runs as upstream's", feature.name, needless)
        return Decision(feature.name, active=False, reason=f"{feature.name}: OFF because {needless}", source=source)
    return source


def _switch_on(group: Sequence[Feature], asked: _Asked) -> None:
    """Install features that share a function; where they cannot be together, each that can is, in their order."""
    for feature in group:
        failures = asked.lacks(feature, group)
        if failures:
            _refused(feature, failures, asked)
            _switch_on([other for other in group if other is not feature], asked)
            return
    if not group:
        return

    def check(bound: Installation, _: object) -> None:
        effective(bound, asked.engine, asked.vllm_config)
        for feature in group:
            ranks.meet(feature, bound, asked.engine, asked.vllm_config)

    try:
        installation = install_together(group, check)
    except ranks.DisagreementError as error:
        # They have met, and none of them runs it. What the ranks need not agree on is had without it.
        for feature in group:
            if ranks.must_agree(feature):
                asked.made[feature.name] = _off(feature.name, error.failures, asked.sources[feature.name])
            else:
                _switch_on([feature], asked)
        return
    except Exception as error:  # noqa: BLE001 - what nobody foresaw must not get past the switch either
        if len(group) == 1:
            _refused(group[0], _failures(error), asked)
            return
        for feature in group:
            _switch_on([feature], asked)
        return
    for feature in group:
        source = asked.sources[feature.name]
        reason = told_on(feature, installation, asked.engine, asked.vllm_config, source, {})
        asked.made[feature.name] = Decision(feature.name, active=True, reason=reason, source=source)


def _refused(feature: Feature, failures: tuple[Failure, ...], asked: _Asked) -> None:
    """It cannot be had here, and the other ranks are told why."""
    asked.made[feature.name] = _off(feature.name, failures, asked.sources[feature.name])
    ranks.tell(feature, asked.engine, asked.vllm_config, failures[0].headline)


def _off(name: str, failures: tuple[Failure, ...], source: str) -> Decision:
    """Asked for, and off; said at once, because where another rank stops for it, this one may be ended."""
    told = "\n".join(str(failure) for failure in failures)
    reason = f"{name}: OFF because it cannot run\n{told}"
    for line in reason.splitlines():
        _logger.error("%s", line)
    return Decision(name, False, reason, failures, source)


def _failures(error: Exception) -> tuple[Failure, ...]:
    if isinstance(error, PatchError):
        return error.failures
    return (Failure("BP599", f"{type(error).__name__}: {error}", "report this with the log"),)

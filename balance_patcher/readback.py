"""Look at an engine core or a worker that has been built: what was decided is what runs in it.

Read from ``__dict__`` and ``__mro__``. A feature is only called on when it was seen.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from . import answering, ranks
from .bindings import Installation, bypassed, holders, overwritten, runs
from .byname import asked_by_name
from .carried import Told, carry, complain, send
from .decided import decided
from .errors import PatchError, refuse
from .feature import Feature
from .installation import LOCK as BINDING
from .installation import bound, installed
from .joining import joins
from .origins import origin_of
from .outcome import made_for
from .registry import of_others
from .takeover import left_alone
from .wanted import LEFT, bound_by, decided_in, rule_of, who_asks

_logger = logging.getLogger("vllm.balance_patcher")


def confirm(engine: Any, vllm_config: Any, process: str = "engine") -> None:
    """Look at an engine that has been built, and say what is on in it: one line for each feature.

    Args:
        engine: The engine core; its scheduler exists. Or the worker; its model runner does not.
        vllm_config: The configuration that was decided on.
        process: What it is, ``engine`` or ``worker``.

    Raises:
        PatchError: BP606 and BP702, if what was installed is not what runs there. No switch helps: ranks
            of which one gathers and another does not would wait for each other.
    """
    others, _ = of_others(asked_by_name(vllm_config))
    active: list[answering.Active] = []
    with BINDING:  # another engine may be binding features anew, with what it asks for
        for feature in decided_in(process, others):
            try:
                _confirm(feature, engine, vllm_config)
                active += _active(feature, engine, vllm_config)
            except PatchError as error:
                if not decided(vllm_config, feature.name) or _source(feature, vllm_config) != LEFT:
                    raise
                _logger.warning("%s: in place since %s: %s", feature.name, LEFT, error.failures[0].headline)
    if process == "engine":
        answering.begin(engine, active)


def _source(feature: Feature, vllm_config: Any) -> str:
    return who_asks(feature, vllm_config) or bound_by(feature.name)


def _confirm(feature: Feature, engine: Any, vllm_config: Any) -> None:
    rule = rule_of(feature)
    installation = installed(feature.name)
    facts = rule.observed(engine) if rule.observed is not None else {}
    if not decided(vllm_config, feature.name):
        _refuse_another(feature, vllm_config, facts)
        _measure_nothing(feature, engine, vllm_config)
        return
    changed = (*overwritten(installation), *bypassed(installation)) if installation is not None else ()
    if changed:
        raise PatchError(*changed)
    if installation is None or facts is None:
        raise refuse(
            "BP702", f"the engine was built, and {feature.name} does not run in it",
            next="find out what replaced its scheduler, or switch the feature off",
        )  # fmt: skip
    effective(installation, engine, vllm_config)
    _as_agreed(feature, engine, facts)
    source = _source(feature, vllm_config)
    _logger.info("%s", told_on(feature, installation, engine, vllm_config, source, facts))
    if rule.started is not None:
        rule.started(engine, ranks.peers(engine, feature.name))
    if feature.measures is not None:
        try:
            taken = feature.measures.taken(engine)
        except Exception as error:  # noqa: BLE001 - figures must not stop an engine
            complain(f"what {feature.name} measures cannot be told", error)
            return
        said = _about({"digest": installation.digest, "source": source, **facts})
        _tell(feature, engine, lambda: {"on": True, "about": said, "figures": taken()})


def _measure_nothing(feature: Feature, engine: Any, vllm_config: Any) -> None:
    """What was asked for and is off is told to the server, with the reason; what nobody asked for is not."""
    made = made_for(vllm_config, feature.process) or ()
    decision = next((one for one in made if one.feature == feature.name and one.source is not None), None)
    if feature.measures is None or decision is None:
        return
    why = decision.failures[0].headline if decision.failures else decision.reason.partition(" because ")[2]
    said = _about({"source": decision.source, "reason": why})
    _tell(feature, engine, lambda: {"on": False, "about": said})


def _about(facts: Mapping[str, object]) -> dict[str, str]:
    return {
        "patcher": vars(sys.modules[__package__])["__version__"],
        **{name: str(value) for name, value in facts.items()},
    }


def _tell(feature: Feature, engine: Any, tell: Callable[[], Told]) -> None:
    carry(engine, feature.name, tell)
    if not joins():  # the server does not know an engine core that joins a group, until it does
        send(engine)


def _active(feature: Feature, engine: Any, vllm_config: Any) -> list[answering.Active]:
    """The feature as `status --pid` is answered of it; none where it is off."""
    installation, rule = installed(feature.name), rule_of(feature)
    if installation is None or not decided(vllm_config, feature.name):
        return []
    facts = (rule.observed(engine) if rule.observed is not None else None) or {}
    line = told_on(feature, installation, engine, vllm_config, _source(feature, vllm_config), facts)
    there = ranks.agreed(engine, feature.name).ranks
    return [answering.Active(feature.name, line, installation.digest, rule.tells, there)]


def _as_agreed(feature: Feature, engine: Any, observed: Mapping[str, object]) -> None:
    """What the ranks have agreed on must be what the engine was built with."""
    mine = ranks.agreed(engine, feature.name).mine
    said = mine.facts if mine is not None else {}
    for name in said.keys() & observed.keys():
        if said[name] != observed[name]:
            raise refuse(
                "BP702",
                f"the ranks agreed on {name}={said[name]} for {feature.name}, and the engine has {observed[name]}",
                next="find out what changed it while the engine was built; all ranks must have the same",
            )


def _refuse_another(feature: Feature, vllm_config: Any, facts: dict[str, object] | None) -> None:
    """What was decided to be off must not run; and what a host's own copy was trusted with must."""
    rule = rule_of(feature)
    if rule.observed is None:
        return
    left = left_alone(feature.name)
    if left is None and facts is not None and bound(feature.name) is not None:
        raise refuse(
            "BP702", f"{feature.name} was decided to be off, and runs in the engine that was built",
            next="build the scheduler with the configuration that the engine core was given, not with a copy of it",
        )  # fmt: skip
    if left is not None and facts is None and who_asks(feature, vllm_config) is not None:
        raise refuse(
            "BP702", f"{feature.name} is asked for and runs nowhere: {left}, and its scheduler has it off",
            next="ask for it as that copy wants it, or let ours stand in for it",
        )  # fmt: skip


def effective(installation: Installation, engine: Any, vllm_config: Any) -> None:
    """Refuse a scheduler class or an engine that would not run what was bound (BP702), read from ``__mro__``."""
    there = [type(engine)]
    if installation.feature.process == "engine":
        there.append(_scheduler_class(vllm_config))
    for binding in installation.bindings:
        owner = binding.owner
        for cls in there if isinstance(owner, type) else ():
            found = list(holders(cls, binding.name, owner.__module__)) if owner in cls.__mro__ else None
            if found is not None and not any(runs(vars(holder)[binding.name], binding.after) for holder in found):
                raise refuse(
                    "BP702",
                    f"{_class_name(cls)} runs {binding.name} of {_class_name(found[0])}, not ours",
                    ("runs", str(origin_of(vars(found[0])[binding.name]))),
                    next="let that class inherit the method, or switch the feature off",
                )
    for base, ours in installation.built.classes.items():
        chosen = _scheduler_class(vllm_config)
        for target in installation.built.functions:
            owner, _, name = target.rpartition(".")
            if owner != base:
                continue
            holder = next((cls for cls in chosen.__mro__ if name in vars(cls)), None)
            if ours not in chosen.__mro__ or holder is not ours:
                raise refuse(
                    "BP702",
                    f"{_class_name(chosen)} runs {name} of {_class_name(holder)}, not of {ours.__name__}",
                    ("runs", str(origin_of(vars(holder)[name])) if holder is not None else "nothing"),
                    next="choose a scheduler class that inherits the method, or switch the feature off",
                )  # fmt: skip


def _scheduler_class(vllm_config: Any) -> type:
    try:
        chosen: type = vllm_config.scheduler_config.get_scheduler_cls()
    except Exception as error:
        asked = getattr(vllm_config.scheduler_config, "scheduler_cls", None)
        raise refuse(
            "BP702", f"the scheduler class {asked!r} cannot be had: {type(error).__name__}: {error}",
            next="mend `scheduler_cls`, or leave it out",
        ) from error  # fmt: skip
    return chosen


def _class_name(cls: type | None) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if cls is not None else "nobody"


def told_on(
    feature: Feature,
    installation: Installation,
    engine: Any,
    vllm_config: Any,
    source: str,
    facts: dict[str, object],
) -> str:
    parallel = vllm_config.parallel_config
    rank, size = getattr(engine, "dp_rank", parallel.data_parallel_rank), parallel.data_parallel_size
    worker = f" worker={getattr(engine, 'rank', '?')}" if feature.process == "worker" else ""
    placed = [p.delta.name.rpartition(".") for p in installation.built.plan.placements if p.status == "applied"]
    applied = [name for owners, _, name in placed if feature.name in owners.split("+")]
    told = "".join(f"{name}={value} " for name, value in facts.items())
    return (
        f"{feature.name}: ON rank {rank}/{size}{worker} host={socket.gethostname()} {told}source={source} "
        f"deltas={','.join(applied)} digest={installation.digest}"
    )

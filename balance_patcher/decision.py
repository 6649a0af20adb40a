"""Decide, once for each engine, whether a feature runs in it, and install it before weights load.

Off leaves vLLM as it is; on means plan, build, install and read back, or refuse. The decision is
stored, and everything that runs in the engine uses that one.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

from .decided import record
from .errors import Failure, PatchError, refuse
from .feature import Feature
from .install import Installation, install, installed, uninstall
from .registry import broken, features

_LOCK = threading.RLock()
_logger = logging.getLogger("vllm.balance_patcher")


@dataclass(frozen=True)
class Decision:
    """What was decided for one feature in one engine, and why.

    Attributes:
        feature: Its name.
        active: Whether it runs in this engine.
        reason: A sentence: who asked for it, or why it is off.
        failures: What stood against it, where it was asked for and could not be had.
    """

    feature: str
    active: bool
    reason: str
    failures: tuple[Failure, ...] = ()


_DECISIONS: list[tuple[Decision, ...]] = []


def decisions() -> list[tuple[Decision, ...]]:
    """Every decision of this process: one tuple for each engine, one decision for each feature."""
    return list(_DECISIONS)


def switch(name: str, values: tuple[str, ...], default: str) -> str:
    """The value of an environment switch.

    Raises:
        PatchError: BP006, for a value that it does not have.
    """
    value = os.environ.get(name, default).strip().lower() or default
    if value not in values:
        raise refuse("BP006", f"{name}={value}", next=f"set it to one of: {', '.join(values)}")
    return value


def decide(engine: Any, vllm_config: Any) -> tuple[Decision, ...]:
    """Decide for every feature, install those that are asked for, and store what was decided.

    Runs vLLM's own general plugins first, so that what a host plugin patches is in place.

    Args:
        engine: The engine core that is being built; its data-parallel group exists, its weights do not.
        vllm_config: Its configuration.

    Raises:
        PatchError: If a feature is asked for and cannot run; the engine must not start.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for failure in broken():
        _logger.error("%s", failure)
    with _LOCK:
        made = tuple(_decide(feature, engine, vllm_config) for feature in features())
        for decision in made:
            record(vllm_config, decision.feature, active=decision.active)
        _DECISIONS.append(made)
    for decision in made:
        for line in decision.reason.splitlines():
            (_logger.error if decision.failures else _logger.info)("%s", line)
    failures = [failure for decision in made for failure in decision.failures]
    if failures and switch("BALANCE_PATCHER_ON_FAILURE", ("stop", "off"), "stop") == "stop":
        raise PatchError(*failures)
    return made


def _decide(feature: Feature, engine: Any, vllm_config: Any) -> Decision:
    rule = feature.enabling
    if rule is None:
        return Decision(feature.name, active=False, reason=f"{feature.name}: OFF because nothing can ask for it")
    source = rule.asked(vllm_config)
    if source is None:
        reason = f"{feature.name}: OFF because the configuration does not ask for it"
        return Decision(feature.name, active=False, reason=reason)
    excluded = rule.excluded(engine, vllm_config)
    if excluded:
        failures = tuple(
            Failure("BP701", why, f"remove one of the two, or switch {feature.name} off", (("asked for by", source),))
            for why in excluded
        )
        return _off(feature, failures)
    needless = rule.needless(engine, vllm_config)
    if needless:
        _logger.warning("%s: %s; the engine runs as upstream's", feature.name, needless)
        return Decision(feature.name, active=False, reason=f"{feature.name}: OFF because {needless}")
    before = installed(feature.name)
    try:
        installation = install(feature)
        _effective(installation, engine, vllm_config)
    except Exception as error:  # noqa: BLE001 - what nobody foresaw must not get past the switch either
        if before is None:
            uninstall(feature.name)
        return _off(feature, _failures(error))
    return Decision(feature.name, active=True, reason=_on(installation, engine, vllm_config, source))


def _off(feature: Feature, failures: tuple[Failure, ...]) -> Decision:
    told = "\n".join(str(failure) for failure in failures)
    return Decision(feature.name, False, f"{feature.name}: OFF because it cannot run\n{told}", failures)


def _failures(error: Exception) -> tuple[Failure, ...]:
    if isinstance(error, PatchError):
        return error.failures
    return (Failure("BP599", f"{type(error).__name__}: {error}", "report this with the log"),)


def _effective(installation: Installation, engine: Any, vllm_config: Any) -> None:
    """Refuse a scheduler class or an engine that would not run what was bound (BP702), read from ``__mro__``."""
    for binding in installation.bindings:
        owner = binding.owner
        if isinstance(owner, type) and owner in type(engine).__mro__:
            holder = next(cls for cls in type(engine).__mro__ if binding.name in vars(cls))
            if vars(holder)[binding.name] is not binding.after:
                raise refuse(
                    "BP702",
                    f"{_class_name(type(engine))} runs {binding.name} of {_class_name(holder)}, not ours",
                    next="let that class call its base's method, or switch the feature off",
                )
    for base, ours in installation.built.classes.items():
        chosen = vllm_config.scheduler_config.get_scheduler_cls()
        for target in installation.built.functions:
            owner, _, name = target.rpartition(".")
            if owner != base:
                continue
            found = next((cls for cls in chosen.__mro__ if name in vars(cls)), None)
            if ours not in chosen.__mro__ or found is not ours:
                where = getattr(sys.modules.get(chosen.__module__), "__file__", None) or chosen.__module__
                raise refuse(
                    "BP702",
                    f"{_class_name(chosen)} runs {name} of {_class_name(found)}, not of {ours.__name__}",
                    ("file", str(where)),
                    next="choose a scheduler class that inherits the method, or switch the feature off",
                )  # fmt: skip


def _class_name(cls: type | None) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if cls is not None else "nobody"


def _on(installation: Installation, engine: Any, vllm_config: Any, source: str) -> str:
    parallel = vllm_config.parallel_config
    rank, size = getattr(engine, "dp_rank", parallel.data_parallel_rank), parallel.data_parallel_size
    applied = [p.delta.name.rpartition(".")[2] for p in installation.built.plan.placements if p.status == "applied"]
    return (
        f"{installation.feature.name}: ON rank {rank}/{size} host={socket.gethostname()} source={source} "
        f"deltas={','.join(applied)} digest={installation.digest}"
    )

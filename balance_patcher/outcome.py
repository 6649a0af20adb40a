"""What came of deciding in this process, for each engine core and each worker; and taking it back.

An engine that was refused, or was not built, leaves nothing behind: it has nothing on, and what was bound for it alone
is put back, so that the next one of this process finds vLLM as it would have been.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .decided import record, running, weakly
from .errors import Failure, PatchError
from .installation import LOCK as BINDING
from .installation import bound, called, uninstall

#: Held while something is decided, or taken back.
LOCK = threading.RLock()
_logger = logging.getLogger("vllm.balance_patcher")


@dataclass(frozen=True)
class Decision:
    """What was decided for one feature in one engine, and why.

    Attributes:
        feature: Its name.
        active: Whether it runs in this engine.
        reason: A sentence: who asked for it, or why it is off.
        failures: What stood against it, where it was asked for and could not be had.
        source: Who asked for it; ``None`` where nobody did.
    """

    feature: str
    active: bool
    reason: str
    failures: tuple[Failure, ...] = ()
    source: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of deciding for one engine core or worker.

    Attributes:
        decisions: One for each feature.
        config: Gives its configuration, while that is there.
        process: What it is, ``engine`` or ``worker``.
        bound: The features that were bound for it, in order.
    """

    decisions: tuple[Decision, ...]
    config: Callable[[], Any]
    process: str
    bound: tuple[str, ...] = ()


_OUTCOMES: list[Outcome] = []


def decisions() -> list[tuple[Decision, ...]]:
    """Every decision of this process: one tuple for each engine, one decision for each feature."""
    return [outcome.decisions for outcome in _OUTCOMES]


def keep(made: tuple[Decision, ...], config: Any, process: str, bound_for_it: Collection[str]) -> None:
    """Store what was decided: for everything that runs under this configuration, and for whoever asks."""
    for decision in made:
        record(config, decision.feature, active=decision.active, refused=bool(decision.failures))
    _OUTCOMES.append(Outcome(made, weakly(config), process, tuple(bound_for_it)))


def made_for(config: Any, process: str) -> tuple[Decision, ...] | None:
    """What was decided last for an engine core, or for a worker, with this configuration; ``None`` for nothing."""
    found = [outcome for outcome in _OUTCOMES if outcome.process == process and outcome.config() is config]
    return found[-1].decisions if found else None


def unmake(made: tuple[Decision, ...], config: Any, error: BaseException) -> None:
    """The engine that was decided on was not built, or was refused: nothing is on in it, nor in workers inside it."""
    why = error.failures[0].headline if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"
    with LOCK:
        mine = next((outcome for outcome in _OUTCOMES if outcome.decisions is made), None)
        if mine is None:
            return
        inside = mine.process == "engine"
        for at, outcome in enumerate(_OUTCOMES):
            if outcome is mine or (inside and outcome.config() is config and outcome.process != "engine"):
                _OUTCOMES[at] = _unmade(outcome, config, why)


def _unmade(outcome: Outcome, config: Any, why: str) -> Outcome:
    again = tuple(
        replace(decision, active=False, reason=f"{decision.feature}: OFF because the engine was not built: {why}")
        if decision.active
        else decision
        for decision in outcome.decisions
    )
    for decision in again:
        record(config, decision.feature, active=False, refused=bool(decision.failures))
    unbind(outcome.bound, config)
    return replace(outcome, decisions=again, bound=())


def unbind(names: Iterable[str], config: Any) -> None:
    """Put back what was bound for one configuration alone; what others rely on, or stands in for a host's, stays."""
    with BINDING:
        for name in reversed(tuple(names)):
            holder = bound(name)
            if holder is None or holder.stands_in or called(name) or name in running(but=config):
                continue
            try:
                uninstall(name)
            except Exception as error:  # noqa: BLE001 - why the engine is none is being raised
                told = error.failures[0].headline if isinstance(error, PatchError) else repr(error)
                _logger.warning("%s stays bound, though the engine that asked for it is none: %s", name, told)

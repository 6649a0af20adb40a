"""What is asked for and nobody decided on: it came too late, or the one who asks did not pass where it is decided."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from . import reminder
from .byname import asked_by_name
from .decision import stops
from .errors import Failure, PatchError
from .outcome import Decision, made_for
from .registry import of_others
from .wanted import asked_for, decided_in, who_asks

_logger = logging.getLogger("vllm.balance_patcher")


def refuse_late(engine: Any, vllm_config: Any, process: str = "engine") -> None:
    """What is asked for since it was decided comes too late: it was decided to be off, and nothing of it runs.

    Args:
        engine: The engine core that has been built, or the worker.
        vllm_config: Its configuration.
        process: What it is, ``engine`` or ``worker``.

    Raises:
        PatchError: BP702, if an engine that cannot have what it is asked for stops; it is reminded of otherwise.
    """
    made = made_for(vllm_config, process)
    _stop_or_remind(engine, _late(made, vllm_config, process) if made is not None else ())


def refuse_undecided(wrapper: Any, process: str = "worker") -> None:
    """A worker that asks for a feature, and of which nothing was decided: its class did not pass vLLM's own.

    Args:
        wrapper: What holds it, and has just made it.
        process: What is decided for it.

    Raises:
        PatchError: BP611, if a worker that cannot have what it is asked for stops; it is reminded of otherwise.
    """
    worker = vars(wrapper).get("worker")
    given = vars(wrapper).get("vllm_config")
    if given is None or any(made_for(c, process) is not None for c in (given, getattr(worker, "vllm_config", given))):
        return
    names = asked_for(given, process)
    cls = type(worker)
    failure = Failure(
        "BP611",
        f"{' and '.join(names)} is asked for by a worker that did not ask us: {cls.__module__}.{cls.__qualname__}",
        "let its constructor call that of vLLM's WorkerBase, with the configuration, before anything else",
    )
    _stop_or_remind(wrapper, (failure,) if names else ())


def _stop_or_remind(engine: Any, failures: tuple[Failure, ...]) -> None:
    if not failures:
        return
    if stops():
        raise PatchError(*failures)
    lines = [f"still OFF: {failure.headline}" for failure in failures]
    for failure in failures:
        _logger.error("%s", failure)
    reminder.remind(engine, lambda: _logger.error("%s", "; ".join(lines)))


def _late(made: Sequence[Decision], vllm_config: Any, process: str) -> tuple[Failure, ...]:
    named = asked_by_name(vllm_config)
    others, lost = of_others(named)
    asked = {name: named[name] for name in lost}
    for feature in decided_in(process, others):
        with suppress(Exception):  # what cannot be read was told when it was decided
            source = who_asks(feature, vllm_config)
            asked |= {feature.name: source} if source is not None else {}
    then = {decision.feature for decision in made if decision.source is not None}
    return tuple(
        Failure(
            "BP702", f"{name} was asked for by {asked[name]} since it was decided, while the engine was built",
            f"ask for {name} before: vLLM's general plugins run right before it is decided",
        )
        for name in asked.keys() - then
    )  # fmt: skip

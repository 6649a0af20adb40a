"""Arm: let every engine core of this process ask for a decision before it is built.

Arming happens early, without a configuration: ``EngineCore.__init__`` is made to call through us, now
or as soon as its module is imported. It is the one place that every launch path passes with the
configuration and before the executor is built.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from . import takeover
from .decision import switch
from .errors import refuse
from .guards import CALL_THROUGH, Guard
from .wanted import asked_for

ENGINE = Guard("vllm.v1.engine.core", "EngineCore", "engine")
# A worker may be in a process of its own, where no engine core is built. This is the one place that all workers
# pass with the configuration, whoever started them: in process, spawned, forked, by Ray, joining an elastic group.
# ``init_worker`` has run vLLM's general plugins just before, so what a host plugin patches is in place and a general
# plugin can still arm; the device, the model runner and the weights come after it.
WORKER = Guard("vllm.v1.worker.worker_base", "WorkerBase", "worker")
# All workers, that is, whose own class calls the constructor of its base. This one they pass whatever it does, right
# after they were made, and also where a general plugin has armed only while they were.
WRAPPER = Guard("vllm.v1.worker.worker_base", "WorkerWrapperBase", "worker", "init_device")
# In a server: what reads the messages of engine cores, and what has vLLM's stat loggers. Nothing is decided there.
CLIENT = Guard("vllm.v1.engine.core_client", "MPClient", "server")
LOGGERS = Guard("vllm.v1.metrics.loggers", "StatLoggerManager", "server")


def _wanted() -> bool:
    """Whether anything of ours is to be armed in this process."""
    return switch("BALANCE_PATCHER", ("auto", "off", "verify"), "auto") == "auto"


def arm() -> None:
    """Make ``EngineCore.__init__`` call through us, now or when its module is imported; twice is once.

    The base of the workers does so too: there what belongs to a worker is decided. And what holds a worker looks
    whether it was. What a server hears engine cores with calls through us to show what features measure.
    The modules of other projects that a feature stands in for are watched for from then on.
    """
    if not _wanted():
        return
    ENGINE.arm()
    WORKER.arm()
    WRAPPER.arm()
    CLIENT.arm()
    LOGGERS.arm()
    takeover.watch()


def arm_late() -> None:
    """Arm, from a general plugin: vLLM runs those in the engine core's constructor already.

    Raises:
        PatchError: BP611, if an engine core that asks for a feature is being built and nobody decided for it:
            it was armed too late, or its constructor was replaced. It must not start without what it asks for.
    """
    arm()
    if not _wanted():
        return
    config = _being_built()
    names = asked_for(config) if config is not None else ()
    if names:
        raise refuse(
            "BP611", f"{' and '.join(names)} is asked for by an engine core that did not ask us",
            next="let the platform plugin of balance_patcher arm (VLLM_PLUGINS filters both by name), and find out who "
            f"replaced {ENGINE.name}.__init__",
        )  # fmt: skip


def _being_built() -> Any:
    """The configuration of an engine core that is being built, on this stack, without our call-through."""
    owner, found = ENGINE.owner, None
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - `inspect.stack` reads every source file
    while frame is not None and owner is not None:
        if frame.f_code is CALL_THROUGH:
            return None
        first, *others = frame.f_locals.values() or (None,)
        if owner in type(first).__mro__:
            found = next((value for value in _passed(others) if _is_configuration(value)), found)
        frame = frame.f_back
    return found


def _passed(values: Sequence[Any]) -> Iterator[Any]:
    """Local values, and what stands in ``*args`` and ``**kwargs`` among them."""
    for value in values:
        yield from value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "scheduler_config") and hasattr(value, "parallel_config")


def stand_in(name: str, *also: str) -> None:
    """Fill a host's module, from that module itself: ``stand_in(__name__)`` is all that it needs.

    This process is armed with it. With ``BALANCE_PATCHER`` not ``auto`` the names are there and nothing is changed.

    Args:
        name: The module's name, which a feature declares that it stands in for.
        *also: Features that are bound with that one, because the module is where the host would have them.

    Raises:
        PatchError: BP003, if no feature does; what stands against the feature on this vLLM.
    """
    arm()
    takeover.stand_in(sys.modules[name], also, change=_wanted())


def armed() -> bool:
    """Whether ``EngineCore.__init__`` calls through us, or will once it is imported."""
    return ENGINE.armed()


def disarm() -> None:
    """Take the call-throughs and the finders out again; the identical ``__init__`` is put back.

    Raises:
        PatchError: BP606, if somebody has wrapped one since; taking ours out would lose theirs.
    """
    takeover.unwatch()
    LOGGERS.disarm()
    CLIENT.disarm()
    WRAPPER.disarm()
    WORKER.disarm()
    ENGINE.disarm()

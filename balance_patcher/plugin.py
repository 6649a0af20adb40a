"""Arm: let every engine core of this process ask for a decision before it is built.

Arming happens early, without a configuration: ``EngineCore.__init__`` is made to call through us, now
or as soon as its module is imported. It is the one place that every launch path passes with the
configuration and before the executor is built.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

from . import takeover
from .decision import asked_for, confirm, decide, switch, unmake
from .errors import refuse
from .finders import WrappedLoader, WrappingFinder, put, take_out
from .workers import arm_workers, disarm_workers

ENGINE_MODULE = "vllm.v1.engine.core"
ENGINE_CLASS = "EngineCore"

_LOCK = threading.RLock()


def _wanted() -> bool:
    """Whether anything of ours is to be armed in this process."""
    return switch("BALANCE_PATCHER", ("auto", "off", "verify"), "auto") == "auto"


def arm() -> None:
    """Make ``EngineCore.__init__`` call through us, now or when its module is imported; twice is once.

    The base of the workers does so too: there what belongs to a worker is decided.
    The modules of other projects that a feature stands in for are watched for from then on.
    """
    if not _wanted():
        return
    with _LOCK:
        module = sys.modules.get(ENGINE_MODULE)
        if module is not None and hasattr(module, ENGINE_CLASS):
            _guard(module)
        else:
            put(_EngineFinder)
        arm_workers()
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
            f"replaced {ENGINE_CLASS}.__init__",
        )  # fmt: skip


def _being_built() -> Any:
    """The configuration of an engine core that is being built, on this stack, without our call-through."""
    owner = getattr(sys.modules.get(ENGINE_MODULE), ENGINE_CLASS, None)
    found = None
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - `inspect.stack` reads every source file
    while frame is not None and owner is not None:
        if frame.f_code is _CALL_THROUGH:
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
    module = sys.modules.get(ENGINE_MODULE)
    if module is not None and hasattr(module, ENGINE_CLASS):
        return _guarded(getattr(module, ENGINE_CLASS)) is not None
    return any(isinstance(finder, _EngineFinder) for finder in sys.meta_path)


def disarm() -> None:
    """Take the call-through and the finders out again; the identical ``__init__`` is put back.

    Raises:
        PatchError: BP606, if somebody has wrapped it since; taking ours out would lose theirs.
    """
    with _LOCK:
        takeover.unwatch()
        disarm_workers()
        take_out(_EngineFinder)
        module = sys.modules.get(ENGINE_MODULE)
        owner = getattr(module, ENGINE_CLASS, None)
        upstream = _guarded(owner) if owner is not None else None
        if owner is not None and upstream is not None:
            if getattr(vars(owner)["__init__"], "__code__", None) is not _CALL_THROUGH:
                what = f"{ENGINE_MODULE}:{ENGINE_CLASS}.__init__ was wrapped since"
                raise refuse("BP606", what, next="take that wrapper out first; disarming now would lose it")
            owner.__init__ = upstream


class _EngineFinder(WrappingFinder):
    """Guards the engine core's module as soon as it has been executed, then leaves."""

    def wanted(self, fullname: str) -> bool:
        return fullname == ENGINE_MODULE

    def wrap(self, fullname: str, loader: Any) -> WrappedLoader:  # noqa: ARG002 - there is one
        return _Guarding(loader)


class _Guarding(WrappedLoader):
    """The engine core's own loader, and the guard after it."""

    def exec_module(self, module: ModuleType) -> None:
        self.execute(module)
        with _LOCK:
            _guard(module)
            take_out(_EngineFinder)


def _guard(module: ModuleType) -> None:
    owner = getattr(module, ENGINE_CLASS)
    if _guarded(owner) is None:
        owner.__init__ = _guarded_init(owner.__init__)


def _guarded(owner: type) -> Any:
    """What our call-through on a class calls, or ``None`` where there is none (also below other wrappers)."""
    from .proof import inner_functions

    found = vars(owner).get("__init__")
    for function in (found, *inner_functions(found)):
        if isinstance(function, FunctionType) and function.__code__ is _CALL_THROUGH:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            return cells["upstream"].cell_contents
    return None


def _guarded_init(upstream: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if not args and "vllm_config" not in kwargs:
            upstream(self, *args, **kwargs)  # it says what it misses
            return
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        made = decide(self, config)
        try:
            upstream(self, *args, **kwargs)
            confirm(self, config)
        except BaseException as error:
            unmake(made, config, error)
            raise

    __init__.__qualname__ = f"{ENGINE_CLASS}.__init__"
    __init__.__doc__ = upstream.__doc__
    __init__.__wrapped__ = upstream  # type: ignore[attr-defined]
    return __init__


_CALL_THROUGH = _guarded_init(object.__init__).__code__

"""Let every worker of this process ask for a decision before it is built, as the engine core does.

A worker may be in a process of its own, where no engine core is built. ``WorkerBase.__init__`` is the one place
that all of them pass with the configuration, whoever started them (in process, spawned, forked, by Ray, joining an
elastic group): ``init_worker`` has run vLLM's general plugins just before, so what a host plugin patches is in
place and a general plugin can still arm; the device, the model runner and the weights come after it.
"""

from __future__ import annotations

import sys
import threading
from types import FunctionType, ModuleType
from typing import Any

from .decision import confirm, decide, unmake
from .errors import refuse
from .finders import WrappedLoader, WrappingFinder, put, take_out
from .proof import inner_functions

WORKER_MODULE = "vllm.v1.worker.worker_base"
WORKER_CLASS = "WorkerBase"
PROCESS = "worker"

_LOCK = threading.RLock()


def arm_workers() -> None:
    """Make ``WorkerBase.__init__`` call through us, now or when its module is imported; twice is once."""
    with _LOCK:
        module = sys.modules.get(WORKER_MODULE)
        if module is not None and hasattr(module, WORKER_CLASS):
            _guard(module)
        else:
            put(_WorkerFinder)


def workers_armed() -> bool:
    """Whether ``WorkerBase.__init__`` calls through us, or will once it is imported."""
    module = sys.modules.get(WORKER_MODULE)
    if module is not None and hasattr(module, WORKER_CLASS):
        return _upstreams(getattr(module, WORKER_CLASS)) is not None
    return any(isinstance(finder, _WorkerFinder) for finder in sys.meta_path)


def disarm_workers() -> None:
    """Take the call-through and the finder out again; the identical ``__init__`` is put back.

    Raises:
        PatchError: BP606, if somebody has wrapped it since; taking ours out would lose theirs.
    """
    with _LOCK:
        take_out(_WorkerFinder)
        owner = getattr(sys.modules.get(WORKER_MODULE), WORKER_CLASS, None)
        upstream = _upstreams(owner) if owner is not None else None
        if owner is not None and upstream is not None:
            if getattr(vars(owner)["__init__"], "__code__", None) is not _CALL_THROUGH:
                what = f"{WORKER_MODULE}:{WORKER_CLASS}.__init__ was wrapped since"
                raise refuse("BP606", what, next="take that wrapper out first; disarming now would lose it")
            owner.__init__ = upstream


class _WorkerFinder(WrappingFinder):
    """Guards the workers' base as soon as its module has been executed, then leaves."""

    def wanted(self, fullname: str) -> bool:
        return fullname == WORKER_MODULE

    def wrap(self, fullname: str, loader: Any) -> WrappedLoader:  # noqa: ARG002 - there is one
        return _Guarding(loader)


class _Guarding(WrappedLoader):
    """That module's own loader, and the guard after it."""

    def exec_module(self, module: ModuleType) -> None:
        self.execute(module)
        with _LOCK:
            _guard(module)
            take_out(_WorkerFinder)


def _guard(module: ModuleType) -> None:
    owner = getattr(module, WORKER_CLASS)
    if _upstreams(owner) is None:
        owner.__init__ = _guarded_init(owner.__init__)


def _upstreams(owner: type) -> Any:
    """What our call-through on the class calls, or ``None`` where there is none (also below other wrappers)."""
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
        made = decide(self, config, PROCESS)
        try:
            upstream(self, *args, **kwargs)
            confirm(self, config, PROCESS)
        except BaseException as error:
            unmake(made, config, error)
            raise

    __init__.__qualname__ = f"{WORKER_CLASS}.__init__"
    __init__.__doc__ = upstream.__doc__
    __init__.__wrapped__ = upstream  # type: ignore[attr-defined]
    return __init__


_CALL_THROUGH = _guarded_init(object.__init__).__code__

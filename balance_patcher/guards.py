"""Constructors of vLLM that call through us: before the object is built it is decided, and after it looked at.

A class is guarded now, or as soon as its module has been executed. Its own ``__init__`` stands in a cell of ours,
and is put back as the identical object.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from .decision import decide, unmake
from .errors import refuse
from .finders import WrappedLoader, WrappingFinder, put, take_out
from .proof import inner_functions
from .readback import confirm

_LOCK = threading.RLock()
_logger = logging.getLogger("vllm.balance_patcher")
_AWAITED: dict[str, Guard] = {}


@dataclass(frozen=True)
class Guard:
    """A class whose constructor gets the configuration, first or by the name ``vllm_config``.

    Attributes:
        module: Its module.
        name: Its name there.
        process: What is decided there, ``engine`` or ``worker``.
    """

    module: str
    name: str
    process: str

    @property
    def owner(self) -> Any:
        """The live class; ``None`` where it is not imported."""
        return getattr(sys.modules.get(self.module), self.name, None)

    def arm(self) -> None:
        """Make ``__init__`` call through us, now or when its module is imported; twice is once."""
        with _LOCK:
            owner = self.owner
            if owner is None:
                _AWAITED[self.module] = self
                put(Finder)
            elif self._upstream(owner) is None:
                owner.__init__ = _through(owner.__init__, self)

    def armed(self) -> bool:
        """Whether ``__init__`` calls through us, or will once it is imported."""
        owner = self.owner
        if owner is None:
            return self.module in _AWAITED and any(isinstance(finder, Finder) for finder in sys.meta_path)
        return self._upstream(owner) is not None

    def disarm(self) -> None:
        """Take the call-through out again, and do not wait for the import; the identical ``__init__`` is put back.

        Raises:
            PatchError: BP606, if somebody has wrapped it since; taking ours out would lose theirs.
        """
        with _LOCK:
            self.awaits_no_more()
            owner = self.owner
            upstream = self._upstream(owner) if owner is not None else None
            if upstream is None:
                return
            if getattr(vars(owner)["__init__"], "__code__", None) is not CALL_THROUGH:
                what = f"{self.module}:{self.name}.__init__ was wrapped since"
                raise refuse("BP606", what, next="take that wrapper out first; disarming now would lose it")
            owner.__init__ = upstream

    def imported(self) -> None:
        """Its module has just been executed. One that has no such class any more stops nobody who imports it."""
        with _LOCK:
            self.awaits_no_more()
            if self.owner is not None:
                self.arm()
                return
        _logger.warning("%s has no %s: nothing of ours is decided there", self.module, self.name)

    def awaits_no_more(self) -> None:
        """Its module is not waited for; with the last one the finder leaves."""
        _AWAITED.pop(self.module, None)
        if not _AWAITED:
            take_out(Finder)

    def _upstream(self, owner: type) -> Any:
        """What our call-through on the class calls, or ``None`` where there is none (also below other wrappers)."""
        found = vars(owner).get("__init__")
        for function in (found, *inner_functions(found)):
            if isinstance(function, FunctionType) and function.__code__ is CALL_THROUGH:
                cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
                return cells["upstream"].cell_contents
        return None


class Finder(WrappingFinder):
    """Guards a class as soon as its module has been executed."""

    def wanted(self, fullname: str) -> bool:
        return fullname in _AWAITED

    def wrap(self, fullname: str, loader: Any) -> WrappedLoader:
        return _Guarding(loader, _AWAITED[fullname])


class _Guarding(WrappedLoader):
    """The module's own loader, and the guard after it."""

    def __init__(self, loader: Any, guard: Guard) -> None:
        super().__init__(loader)
        self._guard = guard

    def exec_module(self, module: ModuleType) -> None:
        self.execute(module)
        self._guard.imported()


def _through(upstream: Any, guard: Guard) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if not args and "vllm_config" not in kwargs:
            upstream(self, *args, **kwargs)  # it says what it misses
            return
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        made = decide(self, config, guard.process)
        try:
            upstream(self, *args, **kwargs)
            confirm(self, config, guard.process)
        except BaseException as error:
            unmake(made, config, error)
            raise

    __init__.__qualname__ = f"{guard.name}.__init__"
    __init__.__doc__ = upstream.__doc__
    __init__.__wrapped__ = upstream  # type: ignore[attr-defined]
    return __init__


#: The code of every call-through; each has a cell of its own.
CALL_THROUGH = _through(object.__init__, Guard("", "", "")).__code__

"""Methods of vLLM that call through us: before an object is built it is decided, and after it looked at.

A class is guarded now, or as soon as its module has been executed. Its own method stands in a cell of ours,
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
from .late import refuse_late, refuse_undecided
from .proof import inner_functions
from .readback import confirm
from .shown import built, given

_LOCK = threading.RLock()
_logger = logging.getLogger("vllm.balance_patcher")
_AWAITED: dict[str, dict[str, Guard]] = {}


@dataclass(frozen=True)
class Guard:
    """A method of a class: its constructor, which gets the configuration first or by the name ``vllm_config``.

    Attributes:
        module: The module of the class.
        name: Its name there.
        process: What is decided there, ``engine`` or ``worker``; or ``server``, where nothing is decided and what it
            hears is shown.
        method: Another one than the constructor: by then it has to have been decided.
    """

    module: str
    name: str
    process: str
    method: str = "__init__"

    @property
    def owner(self) -> Any:
        """The live class; ``None`` where it is not imported."""
        return getattr(sys.modules.get(self.module), self.name, None)

    def arm(self) -> None:
        """Make the method call through us, now or when its module is imported; twice is once."""
        with _LOCK:
            owner = self.owner
            if owner is None:
                _AWAITED.setdefault(self.module, {})[self.name] = self
                put(Finder)
            elif self._upstream(owner) is None and hasattr(owner, self.method):
                kinds = {"server": _shown}
                through = kinds.get(self.process, _through if self.method == "__init__" else _after)
                setattr(owner, self.method, through(getattr(owner, self.method), self))

    def armed(self) -> bool:
        """Whether the method calls through us, or will once it is imported."""
        owner = self.owner
        if owner is None:
            return self.name in _AWAITED.get(self.module, {}) and any(
                isinstance(finder, Finder) for finder in sys.meta_path
            )
        return self._upstream(owner) is not None

    def disarm(self) -> None:
        """Take the call-through out again, and do not wait for the import; the identical method is put back.

        Raises:
            PatchError: BP606, if somebody has wrapped it since; taking ours out would lose theirs.
        """
        with _LOCK:
            self.awaits_no_more()
            owner = self.owner
            upstream = self._upstream(owner) if owner is not None else None
            if upstream is None:
                return
            if getattr(vars(owner)[self.method], "__code__", None) not in _OURS:
                what = f"{self.module}:{self.name}.{self.method} was wrapped since"
                raise refuse("BP606", what, next="take that wrapper out first; disarming now would lose it")
            setattr(owner, self.method, upstream)

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
        _AWAITED.get(self.module, {}).pop(self.name, None)
        if not _AWAITED.get(self.module):
            _AWAITED.pop(self.module, None)
        if not _AWAITED:
            take_out(Finder)

    def _upstream(self, owner: type) -> Any:
        """What our call-through on the class calls, or ``None`` where there is none (also below other wrappers)."""
        found = vars(owner).get(self.method)
        for function in (found, *inner_functions(found)):
            if isinstance(function, FunctionType) and function.__code__ in _OURS:
                cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
                return cells["upstream"].cell_contents
        return None


class Finder(WrappingFinder):
    """Guards a class as soon as its module has been executed."""

    def wanted(self, fullname: str) -> bool:
        return fullname in _AWAITED

    def wrap(self, fullname: str, loader: Any) -> WrappedLoader:
        return _Guarding(loader, tuple(_AWAITED[fullname].values()))


class _Guarding(WrappedLoader):
    """The module's own loader, and the guards after it."""

    def __init__(self, loader: Any, guards: tuple[Guard, ...]) -> None:
        super().__init__(loader)
        self._guards = guards

    def exec_module(self, module: ModuleType) -> None:
        self.execute(module)
        for guard in self._guards:
            guard.imported()


def _through(upstream: Any, guard: Guard) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if not args and "vllm_config" not in kwargs:
            upstream(self, *args, **kwargs)  # it says what it misses
            return
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        made = decide(self, config, guard.process)
        try:
            upstream(self, *args, **kwargs)
            refuse_late(self, config, guard.process)
            confirm(self, config, guard.process)
        except BaseException as error:
            unmake(made, config, error)
            raise

    __init__.__qualname__ = f"{guard.name}.__init__"
    __init__.__doc__ = upstream.__doc__
    __init__.__wrapped__ = upstream  # type: ignore[attr-defined]
    return __init__


def _after(upstream: Any, guard: Guard) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_undecided(self, guard.process)
        return upstream(self, *args, **kwargs)

    method.__name__, method.__qualname__ = guard.method, f"{guard.name}.{guard.method}"
    method.__doc__ = upstream.__doc__
    method.__wrapped__ = upstream  # type: ignore[attr-defined]
    return method


def _shown(upstream: Any, guard: Guard) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        upstream(self, *args, **kwargs)
        built(self, given(upstream, self, args, kwargs))

    __init__.__qualname__ = f"{guard.name}.__init__"
    __init__.__doc__ = upstream.__doc__
    __init__.__wrapped__ = upstream  # type: ignore[attr-defined]
    return __init__


#: The code of every call-through; each has a cell of its own.
CALL_THROUGH = _through(object.__init__, Guard("", "", "")).__code__
_OURS = (CALL_THROUGH, *(kind(object.__init__, Guard("", "", "")).__code__ for kind in (_after, _shown)))

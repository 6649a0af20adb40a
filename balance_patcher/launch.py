"""A process target that arms before vLLM's own runs, for whoever starts engine cores.

A process that is spawned first imports the module of its target. With :func:`run_engine_core` as the
target the child is armed, whatever its plugin entry points are. Where those are found it is not needed:
the platform plugin runs in every child before the engine core is built.

So nothing here is bound by itself. Arming knows no configuration yet, and a bound ``run_engine_core``
would stay bound in engines that are off; and other patches keep what they find there at import as
"upstream's own". Whoever wants it in vLLM's own launchers asks for it with :func:`bind`.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from .errors import refuse
from .plugin import ENGINE, arm
from .proof import place_of, reached

PROCESS_CLASS = "EngineCoreProc"
NAME = "run_engine_core"

_LOCK = threading.RLock()
_BOUND: list[tuple[type, object]] = []


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Arm this process, then run an engine core as ``EngineCoreProc.run_engine_core`` does.

    It is pickled by its own module and name. It must not be dressed with ``functools.wraps``: a child would
    import upstream's function in its place.

    Args:
        *args: Passed on.
        **kwargs: Passed on; ``vllm_config`` among them.

    Raises:
        PatchError: BP603, if upstream's function is not to be found; BP006, for a bad switch.
    """
    arm()
    upstream_run_engine_core()(*args, **kwargs)


def upstream_run_engine_core() -> Callable[..., Any]:
    """vLLM's own ``EngineCoreProc.run_engine_core``, also where ours or somebody else's stands in its place.

    Raises:
        PatchError: BP603, if it cannot be reached from what stands there.
    """
    owner = _owner()
    live = vars(owner).get(NAME)
    for function, _ in reached(next((before for bound, before in _BOUND if bound is owner), live)):
        if _upstreams(function):
            return function
    raise refuse(
        "BP603", f"{PROCESS_CLASS}.{NAME} is {place_of(live)}, and upstream's cannot be reached from it",
        ("target", f"{ENGINE.module}:{PROCESS_CLASS}.{NAME}"),
        next="let what stands there keep upstream's function, or put ours there with balance_patcher.launch.bind()",
    )  # fmt: skip


def bind() -> None:
    """Let vLLM's own launchers of this process use :func:`run_engine_core`; twice is once.

    Raises:
        PatchError: BP602 or BP603, if somebody else's function stands there: a spawned child would not get it.
    """
    with _LOCK:
        owner = _owner()
        before = vars(owner)[NAME]
        if _plain(before) is run_engine_core:
            return
        if _plain(before) is not upstream_run_engine_core():
            raise refuse(
                "BP602", f"{PROCESS_CLASS}.{NAME} by {place_of(_plain(before))}",
                ("target", f"{ENGINE.module}:{PROCESS_CLASS}.{NAME}"),
                next="let that function call balance_patcher.launch.run_engine_core, or bind before it is applied",
            )  # fmt: skip
        _BOUND.append((owner, before))
        setattr(owner, NAME, staticmethod(run_engine_core) if isinstance(before, staticmethod) else run_engine_core)


def unbind() -> None:
    """Put the identical attribute back that :func:`bind` found.

    Raises:
        PatchError: BP606, if somebody has changed it since; taking ours out would lose theirs.
    """
    with _LOCK:
        for owner, before in list(_BOUND):
            live = vars(owner).get(NAME)
            if _plain(live) is not run_engine_core:
                raise refuse(
                    "BP606", f"{ENGINE.module}:{PROCESS_CLASS}.{NAME} is {place_of(_plain(live))}",
                    next="take that out first; unbinding now would lose it",
                )  # fmt: skip
            setattr(owner, NAME, before)
            _BOUND.remove((owner, before))


def bound() -> bool:
    """Whether :func:`bind` has put ours there and it still stands."""
    module = sys.modules.get(ENGINE.module)
    owner = getattr(module, PROCESS_CLASS, None)
    return isinstance(owner, type) and _plain(vars(owner).get(NAME)) is run_engine_core


def _owner() -> type:
    owner: type = getattr(importlib.import_module(ENGINE.module), PROCESS_CLASS)
    return owner


def _plain(attribute: object) -> object:
    return attribute.__func__ if isinstance(attribute, (staticmethod, classmethod)) else attribute


def _upstreams(function: FunctionType) -> bool:
    """Whether a function was defined as ``run_engine_core`` in the engine core's own module."""
    module = sys.modules[ENGINE.module]
    same_file = function.__code__.co_filename == getattr(module, "__file__", None)
    return function.__globals__ is vars(module) and function.__code__.co_name == NAME and same_file

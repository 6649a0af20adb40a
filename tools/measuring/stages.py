"""Split the time of an installation by stage: functions of the product are wrapped here, and nothing in the product.

A stage's time is its own: what another stage takes within it is that one's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

#: What each stage is, as functions of the package; parsing and compiling are Python's own, wherever they are done.
STAGES: Mapping[str, tuple[str, ...]] = {
    "source": ("balance_patcher.source:Lane._read",),
    "parse": ("ast:parse",),
    "proof": ("balance_patcher.build:_prove_all",),
    "plan, match": ("balance_patcher.plan:make_plan",),
    "names": ("balance_patcher.names:check_names", "balance_patcher.adding:check_additions"),
    "rewrite, prove": ("balance_patcher.rewrite:rewrite",),
    "beside, invariants": ("balance_patcher.invariants:check_invariants",),
    "compile": ("builtins:compile",),
    "build": ("balance_patcher.build:build",),
    "bind": ("balance_patcher.steps:_rebase", "balance_patcher.steps:_hook", "balance_patcher.steps:bind"),
    "read-back": ("balance_patcher.bindings:overwritten",),
}
REST = "the rest"

#: Python's own ``compile``, also while it is wrapped, and where it takes its flags.
COMPILE, FLAGS_AT = compile, 3


class Stages:
    """Times of stages while it is entered, in milliseconds.

    Attributes:
        times: By stage; a stage that was not entered has 0.
        missing: Functions that are not where they should be; their time is counted with whatever calls them.
    """

    def __init__(self, stages: Mapping[str, tuple[str, ...]] = STAGES) -> None:
        self._stages = stages
        self.times = dict.fromkeys([*stages, REST], 0.0)
        self.missing: list[str] = []
        self._open: list[float] = []  # of each stage that is entered, what others took within it
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Stages:  # noqa: PYI034 - Self is not in 3.10
        for stage, places in self._stages.items():
            for place in places:
                self._wrap(stage, place)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, before in reversed(self._undo):
            setattr(owner, name, before)
        self._undo.clear()

    def rest(self, whole: float) -> None:
        """What is left of the whole, in milliseconds, is a stage too."""
        self.times[REST] = whole - sum(time for stage, time in self.times.items() if stage != REST)

    def _wrap(self, stage: str, place: str) -> None:
        module, _, qualname = place.partition(":")
        owner: Any = sys.modules.get(module) or __import__(module, fromlist=["_"])
        *outer, name = qualname.split(".")
        for part in outer:
            owner = getattr(owner, part, None)
        found = getattr(owner, name, None)
        if found is None:
            self.missing.append(place)
            return
        timed = self._timed(stage, found)
        self._bind(owner, name, timed)
        if not outer:  # others have imported it by its name
            for other in [m for n, m in sys.modules.items() if n.startswith("balance_patcher.") and m is not owner]:
                for known in [key for key, value in vars(other).items() if value is found]:
                    self._bind(other, known, timed)

    def _bind(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        lazy = inspect.isgeneratorfunction(function)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if function is COMPILE and _parses(*args, **kwargs):
                return function(*args, **kwargs)
            self._open.append(0.0)
            begin = time.perf_counter()
            try:
                result = function(*args, **kwargs)
                return list(result) if lazy else result
            finally:
                took = 1000 * (time.perf_counter() - begin)
                self.times[stage] += took - self._open.pop()
                if self._open:
                    self._open[-1] += took

        return timed


def _parses(*args: Any, flags: int = 0, **_: Any) -> bool:
    """Whether a call of ``compile`` asks for a tree, as ``ast.parse`` does: that is no compiling."""
    return bool((args[FLAGS_AT] if len(args) > FLAGS_AT else flags) & ast.PyCF_ONLY_AST)

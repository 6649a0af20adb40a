"""Stands in an executor's place in a real engine core, writes down what runs there, and ends the engine.

Runs inside vLLM's processes, on the standard library and what vLLM has loaded. The engine core's
constructor makes its executor right after the decision and before anything is loaded: what is there at
that moment is what the engine would run.
"""

from __future__ import annotations

import base64
import json
import marshal
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import util
from pathlib import Path
from typing import Any

from .bindings import holders
from .errors import PatchError
from .inspection import status
from .installation import bound, uninstall
from .origins import attribute_at, origin_of
from .proof import reached
from .registry import all_features
from .states import plain
from .takeover import take_overs

#: The folder that the reports are written to; inherited by the engine cores.
FOLDER = "BALANCE_PATCHER_LIVE_FOLDER"
RANKS = 2
#: How long a rank that has written its report waits for the others, in seconds: one that ends takes them down.
PATIENCE = 60.0
#: How many of the functions that an attribute reaches are written down.
REACH = 20


class Probe:
    """In the executor's place: it writes down what is there, and ends the engine."""

    supports_pp = False

    def __init__(self, vllm_config: Any, *_: Any, **__: Any) -> None:
        engine = sys._getframe(1).f_locals.get("self")  # noqa: SLF001 - the constructor that makes its executor
        write({"reached": True, **observed(engine, vllm_config)})
        raise SystemExit(0)


def observed(engine: Any, vllm_config: Any) -> dict[str, Any]:
    """What the engine core that is being built runs, as JSON has it.

    Args:
        engine: The engine core; its constructor is running.
        vllm_config: Its configuration.
    """
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    found = {
        "rank": getattr(engine, "dp_rank", None),
        "start_method": "spawn" if _spawned() else "fork",
        "engine": _name(type(engine)),
        "scheduler": [_name(cls) for cls in scheduler.__mro__],
        "targets": {
            target: runs(target, (scheduler, type(engine)))
            for feature in all_features()
            for target in feature.targets
        },
        "parts": {feature.name: _parts(feature.name) for feature in all_features()},
        "status": status().as_dict(),
    }  # fmt: skip
    return {**found, "taken_out": {feature.name: taken_out(feature.name) for feature in all_features()}}


def runs(target: str, classes: tuple[type, ...]) -> dict[str, Any]:
    """What an engine of these classes runs for a target: who holds it, and the code that is reached from there.

    Looked up in ``__mro__`` and ``__dict__``, where a class of the target's name is among the bases; else
    where the target stands.
    """
    owner, _, name = target.rpartition(".")
    for cls in classes:
        if owner in [_name(base) for base in cls.__mro__]:
            found = list(holders(cls, name, owner.partition(":")[0]))
            reachable = [step for holder in found for step in _reached(vars(holder)[name])]
            return {"holder": _name(found[0]) if found else None, "reached": reachable}
    there, live = attribute_at(target)
    return {"holder": owner if there else None, "reached": list(_reached(live))}


def _reached(live: object) -> Iterator[dict[str, Any]]:
    """The functions that an attribute runs, the outermost first."""
    for function, _ in islice(reached(live), REACH):
        code = base64.b64encode(marshal.dumps(function.__code__)).decode("ascii")
        yield {"code": code, "origin": str(origin_of(function))}


def _parts(name: str) -> list[str] | None:
    """The features that are bound together with one; ``None`` where it is not bound."""
    here = bound(name)
    return None if here is None else [part.name for part in here.feature.parts] or [here.feature.name]


def taken_out(name: str) -> dict[str, Any] | None:
    """Undo a feature, which this engine needs no more, and say whether the identical objects are back.

    Where a feature stands in for a host's module, the host has built on our classes: then nothing is undone.
    """
    here = bound(name)
    if here is None or any(done.declined is None for done in take_overs()):
        return None
    bindings, rebased = list(here.bindings), list(here.rebased)
    try:
        uninstall(here.feature.name)
    except PatchError as error:
        return {"clean": False, "failures": [failure.as_dict() for failure in error.failures]}
    lost = [b.place for b in bindings if vars(b.owner).get(b.name) is not b.before]
    lost += [_name(cls) for cls, before, _ in rebased if cls.__bases__ != before]
    return {"clean": not lost, "lost": lost, "failures": []}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# -- the reports -----------------------------------------------------------------------------


def write(report: dict[str, Any]) -> None:
    """Write this process's report, once, and wait for those of the other ranks."""
    folder = Path(os.environ[FOLDER])
    file = folder / f"{os.getpid()}.json"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(report), encoding="utf-8")
        part.rename(file)
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("*.json"))) < RANKS and time.monotonic() < until:
        time.sleep(0.05)


def _watch(_: object) -> None:
    util.Finalize(None, _tell_refusal, exitpriority=100)


def _tell_refusal() -> None:
    """What was decided in a process that ends before it came to its executor, where anything was."""
    from .decision import decisions

    folder = os.environ.get(FOLDER)
    if folder and decisions() and not (Path(folder) / f"{os.getpid()}.json").exists():
        made = [[plain(decision) for decision in engine] for engine in decisions()]
        write({"reached": False, "decisions": made})


def _spawned() -> bool:
    return "--multiprocessing-fork" in sys.orig_argv


# A child's end is watched, however it comes. A spawned one imports this for its executor's sake, and runs nothing
# of what was registered for after a fork.
if _spawned():
    _watch(None)
else:
    util.register_after_fork(Probe, _watch)

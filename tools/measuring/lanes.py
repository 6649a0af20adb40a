"""The lanes to measure on, and a part of the bench in the Python of one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from balance_patcher.errors import refuse
from balance_patcher.groups import end
from balance_patcher.lanes import declared_lanes
from tools.quiet import ENVIRONMENT

from .machine import ROOT
from .results import Results, Row

#: Lines of a failed part's log that are shown.
TAIL = 6

#: Seconds that a part has to end by itself when it has said all.
LAST_WORDS = 20.0


@dataclass(frozen=True)
class Lane:
    """A Python that has vLLM.

    Attributes:
        name: What it is called.
        python: The interpreter.
    """

    name: str
    python: Path

    @staticmethod
    def of(text: str, places: Path = ROOT / ".lanes") -> Lane:
        """A lane by its name, or as ``NAME=PYTHON``.

        Raises:
            PatchError: BP512, if there is no such Python.
        """
        name, _, path = text.partition("=")
        python = Path(path) if path else places / name / "bin" / "python"
        if not python.is_file():
            follow = f"python -m tools.lanes {name}, or --lane NAME=PYTHON"
            raise refuse("BP512", f"lane {name!r} has no Python at {python}", next=follow)
        return Lane(name, python.absolute())


def declared() -> list[Lane]:
    """The lanes of pyproject.toml.

    Raises:
        PatchError: BP005, BP512.
    """
    return [Lane.of(spec.name) for spec in declared_lanes(ROOT)]


def run_in(
    lane: Lane, part: str, scale: float, folder: Path, results: Results, tell: Callable[[str], None], limit: float
) -> None:
    """Measure a part in a lane's Python, in a session of its own; nothing of it is left.

    Args:
        lane: Where.
        part: One of ``worker.MODULES``.
        scale: Of the number of rounds.
        folder: Where its log goes.
        results: Gets the rows, or the reason why there are none.
        tell: Is told what it is doing.
        limit: Seconds after which it is taken for hung.
    """
    inside, outside = os.pipe()
    command = [str(lane.python), "-m", "tools.measuring.worker", part, lane.name, str(scale), str(outside)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    cache = str(lane.python.parent.parent / "cache")
    environment = {
        "VLLM_CACHE_ROOT": cache, **os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    path = folder / f"{part}-{lane.name}.log"
    ended = False
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            pass_fds=[outside], start_new_session=True,
        )  # fmt: skip
        os.close(outside)
        watch = threading.Timer(limit, end, [process.pid])
        watch.start()
        try:
            with os.fdopen(inside, encoding="utf-8") as events:
                for line in events:
                    event = json.loads(line)
                    if event["event"] == "row":
                        results.rows.append(Row.of(event["row"]))
                    elif event["event"] == "tell":
                        tell(f"{lane.name}: {event['text']}")
                    elif event["event"] == "versions":
                        results.machine["lanes"][lane.name] = {k: v for k, v in event.items() if k != "event"}
                    ended = ended or event["event"] == "end"
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may have a reason to write down still
                process.wait(LAST_WORDS)
        finally:
            watch.cancel()
            end(process.pid)
            process.wait()
    if not ended:
        lines = path.read_text("utf-8", errors="replace").splitlines()
        results.lost[f"{part} on {lane.name}"] = "\n".join([*lines[-TAIL:], f"see {path}"])

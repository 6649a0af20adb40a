"""Engines that a command starts to look at: each a session of its own, and ended by its group whatever happens.

An engine's driver reads commands, lines of JSON, from its standard input, and what it and its processes have to say
they append to files of its folder. Should the command be killed, its pipes close, and each driver ends its own group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import Failure
from .groups import alive

#: Lines of a failed engine's log that are shown.
TAIL = 12

#: What vLLM looks for when it loads plugins. Ours stand here too, so that a checkout works as an installation
#: does; where both are found, twice is once. The last one is the command's own.
ENTRY_POINTS = """\
[vllm.platform_plugins]
balance_patcher = balance_patcher.entry:platform

[vllm.general_plugins]
balance_patcher = balance_patcher.entry:general
{name} = {plugin}
"""


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


class Driven:
    """One engine: its driver, and the folder where it and its processes write.

    Args:
        mode: What it shows; the name of its folder too.
        root: Where that is.
        driver: The module that drives it.
        settings: For the driver; the folder is added.
        environment: The driver's.

    Attributes:
        code: Of what is told of an engine that fails, with ``next``: what to do then.
    """

    code, next = "BP518", ""

    def __init__(
        self, mode: str, root: Path, driver: str, settings: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        self.mode, self.folder = mode, root / mode
        self.folder.mkdir()
        self._events = Lines(self.folder / "events.jsonl")
        self._ended = False
        command = [sys.executable, "-m", driver, json.dumps({**settings, "folder": str(self.folder)})]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**environment, "TMPDIR": str(self.folder)}, cwd=self.folder, start_new_session=True,
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def tell(self, **command: Any) -> None:
        """Send the driver a command; one that is dead is found by the next look."""
        pipe = self.process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.write(json.dumps(command).encode() + b"\n")
                pipe.flush()

    def failure(self, what: str) -> Failure:
        """What is told of it, with what the log says: the first error in it, and its end."""
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace").rstrip()
        fields = [("log", "\n".join(text.splitlines()[-TAIL:]) or "(empty)")]
        cause = first_error(text)
        if cause:
            fields.insert(0, ("cause", cause))
        return Failure(self.code, what, self.next, tuple(fields))

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


def site(root: Path, name: str, plugin: str) -> None:
    """Write the metadata that makes vLLM load our plugins and the command's own one, and nothing else."""
    info = root / "site" / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS.format(name=name, plugin=plugin), encoding="utf-8")


def python_path(root: Path) -> str:
    """``PYTHONPATH`` with that metadata; the package is found where it is found here."""
    package = Path(__file__).resolve().parents[1]
    path = [str(root / "site"), *([] if package.name in ("site-packages", "dist-packages") else [str(package)])]
    path += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(path)


def end_all(started: Sequence[Driven], *, asked: bool) -> None:
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


def first_error(log: str) -> str | None:
    """The first exception in a log, without vLLM's prefixes: the later ones tend to follow from it."""
    for line in log.splitlines():
        plain = re.sub(r"^(\([^)]*\) )?([A-Z]+ \S+ \S+ \[\S+\] ?)?", "", line)
        if re.match(r"[\w.]*(Error|Exception|Refusal)\b.*", plain) or re.match(r"BP\d{3} ", plain):
            return plain
    return None

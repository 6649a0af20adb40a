"""The check's processes: an engine is a session of its own, ended by its group whatever happens, as the demo's are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from balance_patcher.demo.engines import (
    ENVIRONMENT,
    TAIL,
    Lines,
    end_all,
    first_error,
    interruptible,
    undisturbed,
)
from balance_patcher.errors import Failure, PatchError
from balance_patcher.groups import alive
from balance_patcher.live_engine import TINY_MOE

from .plugin import DEVICE, FOLDER

#: As the demo's: a checkout works as an installation does, and where both are found, twice is once.
ENTRY_POINTS = """\
[vllm.platform_plugins]
balance_patcher = balance_patcher.entry:platform

[vllm.general_plugins]
balance_patcher = balance_patcher.entry:general
balance_patcher_npu = balance_patcher.npu.plugin:register
"""

#: Kernels of an accelerator want sizes that the CPU does not need; still no weights, and nothing is downloaded.
DEVICE_MOE = TINY_MOE | {
    "hidden_size": 512,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "num_experts": 8,
}

#: What is set for the CPU only; elsewhere the owner's own environment holds.
_CPU_ONLY = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
#: The plugins that the owner has chosen are kept, and ours added.
_OWN = ("VLLM_PLUGINS",)
_PLUGINS = ("balance_patcher", "balance_patcher_npu")

#: Seconds after which something is taken for hung: the start, and one burst.
START_LIMIT, LIMIT = 600.0, 300.0


class Engine:
    """One engine: its driver, and what it and its processes have written down.

    Attributes:
        mode: ``unpatched``, ``off`` or ``on``.
        folder: Where its processes write.
        versions: Of what it runs, once it is ready.
        sent: One entry a burst: ``requests``, ``whole``, ``tokens``, ``seconds``.
    """

    def __init__(self, mode: str, root: Path, model: str, device: str) -> None:
        self.mode, self.folder = mode, root / mode
        self.folder.mkdir()
        self.versions: dict[str, str] = {}
        self.sent: list[dict[str, Any]] = []
        self._events = Lines(self.folder / "events.jsonl")
        self._ended = False
        settings = {"model": model, "folder": str(self.folder), "balance": mode == "on", "device": device}
        command = [sys.executable, "-m", "balance_patcher.npu.driver", json.dumps(settings)]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(root, self.folder, mode, device, model), cwd=self.folder,
                start_new_session=True,
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
            PatchError: BP961, if the engine is dead.
        """
        dead = self.process.poll()
        for event in self._events.new():
            if event["event"] == "ready":
                self.versions = event["versions"]
            elif event["event"] == "sent":
                self.sent.append({name: event[name] for name in ("requests", "whole", "tokens", "seconds")})
        if dead is not None and not self._ended:
            raise PatchError(self.failure(f"the engine with balance {self.mode} ended by itself, status {dead}"))

    def wait(self, until: Callable[[Engine], bool], limit: float, what: str) -> None:
        """Look until something holds.

        Raises:
            PatchError: BP961, if the engine dies, or it does not hold in time.
        """
        end = time.monotonic() + limit
        while True:
            self.look()
            if until(self):
                return
            if time.monotonic() > end:
                raise PatchError(self.failure(f"the engine with balance {self.mode} hangs: {what} for {limit:.0f} s"))
            time.sleep(0.05)

    def start(self) -> None:
        """Wait until it can be sent requests."""
        self.wait(lambda one: bool(one.versions), START_LIMIT, "starting")

    def burst(self, requests: int, *, full: bool, phase: str = "") -> dict[str, Any]:
        """Send requests in a phase, and wait for the answers: an entry of ``sent``.

        Raises:
            PatchError: BP961, if the engine dies or hangs, or an answer was cut short.
        """
        wanted = len(self.sent) + 1
        self.tell(send=requests, full=full, phase=phase)
        self.wait(lambda one: len(one.sent) >= wanted, LIMIT, "answering")
        sent = self.sent[-1]
        if sent["whole"] != sent["requests"]:
            what = f"{sent['requests'] - sent['whole']} of {sent['requests']} answers were cut short"
            raise PatchError(self.failure(f"the engine with balance {self.mode}: {what}"))
        return sent

    def written(self) -> dict[str, list[dict[str, Any]]]:
        """What each process has written, by its name; the first entry is on the process."""
        files = sorted([*self.folder.glob("rank-*.jsonl"), *self.folder.glob("worker-*.jsonl")])
        return {file.stem: Lines(file).new() for file in files}

    def failure(self, what: str) -> Failure:
        """BP961, with what the log says: the first error in it, and its end."""
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace").rstrip()
        fields = [("log", "\n".join(text.splitlines()[-TAIL:]) or "(empty)")]
        cause = first_error(text)
        if cause:
            fields.insert(0, ("cause", cause))
        return Failure("BP961", what, "start that vLLM with two data-parallel ranks by itself first", tuple(fields))

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
def engines() -> Iterator[Callable[[str, str, str], Engine]]:
    """What starts an engine of a mode, a model and a device; afterwards all are ended, and the folder removed."""
    root = Path(tempfile.mkdtemp(prefix="balance-npu-"))
    started: list[Engine] = []
    asked = False

    def start(mode: str, model: str, device: str) -> Engine:
        started.append(Engine(mode, root, model or str(root / device), device))
        return started[-1]

    try:
        furnish(root)
        with interruptible():
            yield start
        asked = True
    finally:
        with undisturbed():
            end_all(started, asked=asked)  # type: ignore[arg-type]  # they end alike
            shutil.rmtree(root, ignore_errors=True)


def furnish(root: Path) -> None:
    """Write the models' configurations, and the metadata that makes vLLM load our plugins."""
    for device, model in {"cpu": TINY_MOE, "npu": DEVICE_MOE, "cuda": DEVICE_MOE}.items():
        (root / device).mkdir()
        (root / device / "config.json").write_text(json.dumps(model), encoding="utf-8")
    info = root / "site" / "balance_patcher_npu-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: balance_patcher_npu\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")


def environment(root: Path, folder: Path, mode: str, device: str, model: str) -> dict[str, str]:
    """This process's environment, and what the check sets over it; a model of the owner's own may be fetched."""
    package = Path(__file__).resolve().parents[2]
    path = [str(root / "site"), *([] if package.name in ("site-packages", "dist-packages") else [str(package)])]
    path += [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    left = [*_OWN, *(() if device == "cpu" else _CPU_ONLY)]
    left += [] if Path(model).is_dir() else ["HF_HUB_OFFLINE"]
    return {
        **os.environ, **{name: value for name, value in ENVIRONMENT.items() if name not in left},
        **plugins(os.environ), "BALANCE_PATCHER": "off" if mode == "unpatched" else "auto",
        FOLDER: str(folder), DEVICE: device, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(folder),
    }  # fmt: skip


def plugins(environment: Mapping[str, str]) -> dict[str, str]:
    """The plugins that were chosen and ours; where none were chosen, all are loaded, and nothing is to be set."""
    chosen = environment.get("VLLM_PLUGINS")
    return {} if chosen is None else {"VLLM_PLUGINS": ",".join([*filter(None, chosen.split(",")), *_PLUGINS])}

"""The check's processes: an engine is a session of its own, ended by its group whatever happens, as the demo's are."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from balance_patcher.demo.engines import ENVIRONMENT
from balance_patcher.driven import Driven, Lines, end_all, interruptible, python_path, site, undisturbed
from balance_patcher.errors import PatchError
from balance_patcher.live_engine import TINY_MOE

from .plugin import DEVICE, FOLDER

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


class Engine(Driven):
    """One engine: its driver, and what it and its processes have written down.

    Attributes:
        mode: ``unpatched``, ``off`` or ``on``.
        folder: Where its processes write.
        versions: Of what it runs, once it is ready.
        sent: One entry a burst: ``requests``, ``whole``, ``tokens``, ``seconds``.
    """

    code = "BP961"
    next = "start that vLLM with two data-parallel ranks by itself first"

    def __init__(self, mode: str, root: Path, model: str, device: str) -> None:
        settings = {"model": model, "balance": mode == "on", "device": device}
        own = environment(root, root / mode, mode, device, model)
        super().__init__(mode, root, "balance_patcher.npu.driver", settings, own)
        self.versions: dict[str, str] = {}
        self.sent: list[dict[str, Any]] = []

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
            end_all(started, asked=asked)
            shutil.rmtree(root, ignore_errors=True)


def furnish(root: Path) -> None:
    """Write the models' configurations, and the metadata that makes vLLM load our plugins."""
    for device, model in {"cpu": TINY_MOE, "npu": DEVICE_MOE, "cuda": DEVICE_MOE}.items():
        (root / device).mkdir()
        (root / device / "config.json").write_text(json.dumps(model), encoding="utf-8")
    site(root, "balance_patcher_npu", "balance_patcher.npu.plugin:register")


def environment(root: Path, folder: Path, mode: str, device: str, model: str) -> dict[str, str]:
    """This process's environment, and what the check sets over it; a model of the owner's own may be fetched."""
    left = [*_OWN, *(() if device == "cpu" else _CPU_ONLY)]
    left += [] if Path(model).is_dir() else ["HF_HUB_OFFLINE"]
    return {
        **os.environ, **{name: value for name, value in ENVIRONMENT.items() if name not in left},
        **plugins(os.environ), "BALANCE_PATCHER": "off" if mode == "unpatched" else "auto",
        FOLDER: str(folder), DEVICE: device, "PYTHONPATH": python_path(root),
    }  # fmt: skip


def plugins(environment: Mapping[str, str]) -> dict[str, str]:
    """The plugins that were chosen and ours; where none were chosen, all are loaded, and nothing is to be set."""
    chosen = environment.get("VLLM_PLUGINS")
    return {} if chosen is None else {"VLLM_PLUGINS": ",".join([*filter(None, chosen.split(",")), *_PLUGINS])}

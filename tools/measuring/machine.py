"""What a figure was measured on, without which it says little."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

#: A load of so much more than the bench's own one process means that something else was running.
BUSY = 0.5


def facts() -> dict[str, Any]:
    """The machine and the checkout, before anything is measured."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain")),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load before": load(),
        "lanes": {},
    }


def load() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return round(os.getloadavg()[0], 2)


def busy(machine: dict[str, Any]) -> bool:
    """Whether other work ran when the bench began."""
    return float(machine["load before"]) > BUSY


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()

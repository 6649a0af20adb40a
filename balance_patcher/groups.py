"""Process groups that were started here: whether one lives, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def alive(group: int) -> bool:
    """Whether a process group has a live process; one that has ended and that nobody waits for is none."""
    proc = Path("/proc")
    entries = [entry for entry in proc.iterdir() if entry.name.isdigit()] if (proc / "self").exists() else []
    for entry in entries:
        with contextlib.suppress(OSError):
            state, _, found, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(found) == group and state != "Z":
                return True
    if not entries:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return True
    return False


def end(group: int, patience: float = 10.0) -> None:
    """Kill every process of a group, and wait until none of them lives.

    Args:
        group: Its number. Whoever started its first process still has to wait for that.
        patience: Seconds to wait at most; a process that is in a system call of its own may take a moment.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + patience
    while alive(group) and time.monotonic() < until:
        time.sleep(0.02)

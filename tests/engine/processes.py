"""Processes that a test starts: in a session of their own, with our entry points, and none of them left behind.

A module apart, so that the helpers of several test modules can import it by a plain name; conftest.py puts this
folder on the path.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def plugin_site(folder: Path) -> Path:
    """A folder with the metadata of an installed balance_patcher: the entry points of pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "site" / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return info.parent


def with_another_scheduler(folder: Path, change: Callable[[str], str]) -> Path:
    """A folder for the path, with a copy of this Python's vLLM whose scheduler has another text.

    Only the scheduler's file is written; everything else is a link to the installed one.
    """
    place, copied = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]), folder / "vllm"
    for name in ("v1", "core", "sched", "scheduler.py"):
        copied.mkdir(parents=True)
        for entry in place.iterdir():
            if entry.name not in (name, "__pycache__"):
                (copied / entry.name).symlink_to(entry)
        place, copied = place / name, copied / name
    copied.write_text(change(place.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def surroundings(places: Iterable[Path]) -> dict[str, str]:
    """The environment of engines that are patched by our entry points; ``places`` are what Python finds there."""
    return {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "INFO",
        "BALANCE_PATCHER": "auto",
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    }


def session_of(pid: int) -> int | None:
    """The session of a live process; ``None`` if there is none, or a zombie."""
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(state[3]) if state[0] != "Z" else None


def members(session: int) -> list[int]:
    """The live processes of a session."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if session_of(pid) == session]


def ended(session: int, patience: float) -> list[int]:
    """The processes of a session that are still there after some seconds."""
    until = time.monotonic() + patience
    while (left := members(session)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def end(pids: Iterable[int]) -> None:
    """Kill processes; one that has gone by itself is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reads(folder: Path) -> dict[str, list[dict]]:
    """What the counter of the NPU check has written in a folder, by process."""
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        for file in sorted((folder / "reads").glob("*.jsonl"))
    }


def recorded(folder: Path) -> tuple[list[dict], list[list[dict]]]:
    """What the probe of each rank has written down in a folder: the facts, and one entry a gather."""
    facts, steps = [], []
    for file in sorted(folder.glob("rank-*.jsonl")):
        first, *rest = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        facts.append(first)
        steps.append(rest)
    return facts, steps

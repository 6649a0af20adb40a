"""Real engines in a lane's own Python: one run for each set of settings, shared by the tests that look at it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@dataclass
class Run:
    """What a drive of the engines printed and wrote down.

    Attributes:
        result: The driver's last line; empty if it printed none.
        log: Everything that it and the engine cores printed.
        facts: For each rank, what ran there.
        steps: For each rank, one entry a gather: ``counts``, ``running``, ``waiting``.
        left: Processes of the run that were still there when it had ended.
    """

    code: int
    result: dict
    log: str
    facts: list[dict] = field(default_factory=list)
    steps: list[list[dict]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


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


def members(session: int) -> list[int]:
    """The live processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(state[3]) == session and state[0] != "Z":
                found.append(int(entry.name))
    return found


def drive(folder: Path, settings: dict, environment: dict, bound: int = 400) -> Run:
    """Run ``waves.py`` in a session of its own, and end whatever it leaves behind."""
    environment = {
        **os.environ, "ENGINE_PROBE": str(folder), "VLLM_LOGGING_LEVEL": "INFO", "BALANCE_PATCHER": "auto",
        "ENGINE_ASYNC": str(int(settings.get("asynchronous", False))),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE / "site", plugin_site(folder)))),
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"), **environment,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "waves.py"), json.dumps(settings)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
        try:
            code = process.wait(bound)
        except subprocess.TimeoutExpired:
            code = -1
        patience = time.monotonic() + 10
        while (left := members(process.pid)) and code >= 0 and time.monotonic() < patience:
            time.sleep(0.2)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    text = (folder / "log").read_text(errors="replace")
    results = [json.loads(line) for line in text.splitlines() if line.startswith('{"ok"')]
    run = Run(code, results[-1] if results else {}, text, left=left)
    for file in sorted(folder.glob("rank-*.jsonl")):
        first, *rest = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        run.facts.append(first)
        run.steps.append(rest)
    return run


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Drive the engines with some settings; a second call with the same ones returns the first run."""
    runs: dict[str, Run] = {}

    def get(settings: dict, environment: dict | None = None) -> Run:
        key = json.dumps([settings, environment], sort_keys=True)
        if key not in runs:
            runs[key] = drive(tmp_path_factory.mktemp("engines"), settings, environment or {})
        return runs[key]

    return get

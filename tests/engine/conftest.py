"""Real engines in a lane's own Python: one run for each set of settings, shared by the tests that look at it."""

from __future__ import annotations

import ast
import contextlib
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
RUNS: dict[str, Run] = {}

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
        seconds: How long it took, with the start.
    """

    code: int
    result: dict
    log: str
    facts: list[dict] = field(default_factory=list)
    steps: list[list[dict]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self, what: str) -> list[str]:
        """The lines of the log that hold some text."""
        return [line for line in self.log.splitlines() if what in line]


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


def ended(session: int, patience: float) -> list[int]:
    """The processes of a session that are still there after some seconds."""
    until = time.monotonic() + patience
    while (left := members(session)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def with_another_stop(folder: Path) -> Path:
    """A copy of the lane's vLLM whose admission stop asks a method for its cap: the gate finds no anchor there.

    Only the scheduler's file is written; everything else is a link to the lane's own.
    """
    installed = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    place = installed
    copied = folder / "vllm"
    for name in ("v1", "core", "sched", "scheduler.py"):
        copied.mkdir(parents=True)
        for entry in place.iterdir():
            if entry.name not in (name, "__pycache__"):
                (copied / entry.name).symlink_to(entry)
        place, copied = place / name, copied / name
    text = place.read_text(encoding="utf-8")
    cls = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "Scheduler")
    schedule = next(node for node in cls.body if getattr(node, "name", "") == "schedule")
    (cap,) = [
        node.test.comparators[0]
        for node in ast.walk(schedule)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and isinstance(node.body[0], ast.Break)
        and getattr(node.test.comparators[0], "attr", "").startswith("max_num_")
    ]  # fmt: skip
    lines = text.splitlines(keepends=True)
    line = lines[cap.lineno - 1]
    lines[cap.lineno - 1] = f"{line[: cap.col_offset]}self.admission_cap(){line[cap.end_col_offset :]}"
    method = f"    def admission_cap(self):\n        return {ast.unparse(cap)}\n\n"
    lines.insert(min([schedule.lineno, *(d.lineno for d in schedule.decorator_list)]) - 1, method)
    copied.write_text("".join(lines), encoding="utf-8")
    return folder


def drive(folder: Path, settings: dict, environment: dict, vllm: Path | None = None, bound: int = 900) -> Run:
    """Run ``waves.py`` in a session of its own, and end whatever it leaves behind; ``vllm`` is not the lane's."""
    places = [*([vllm] if vllm else []), ROOT, HERE / "site", HERE.parent / "lane", plugin_site(folder)]
    environment = {
        **os.environ, "ENGINE_PROBE": str(folder), "VLLM_LOGGING_LEVEL": "INFO", "BALANCE_PATCHER": "auto",
        "ENGINE_ASYNC": str(int(settings.get("asynchronous", False))),
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"), **environment,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "waves.py"), json.dumps(settings)]
    started = time.monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
        try:
            code = process.wait(bound)
        except subprocess.TimeoutExpired:
            code = -1
        text = (folder / "log").read_text(errors="replace")
        results = [json.loads(line) for line in text.splitlines() if line.startswith('{"ok"')]
        # Engines that hang are known not to end.
        patience = 0 if code < 0 or (results and results[-1].get("why") == "hang") else 10
        left = ended(process.pid, patience)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert ended(process.pid, 10) == []
    text = (folder / "log").read_text(errors="replace")
    run = Run(code, results[-1] if results else {}, text, left=left, seconds=round(time.monotonic() - started, 1))
    for file in sorted(folder.glob("rank-*.jsonl")):
        first, *rest = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        run.facts.append(first)
        run.steps.append(rest)
    return run


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Drive the engines with some settings; a second call with the same ones returns the first run."""

    def get(settings: dict, environment: dict | None = None, vllm: Path | None = None) -> Run:
        key = json.dumps([settings, environment, str(vllm)], sort_keys=True)
        if key not in RUNS:
            RUNS[key] = drive(tmp_path_factory.mktemp("engines"), settings, environment or {}, vllm)
        return RUNS[key]

    return get


def pytest_terminal_summary(terminalreporter):
    """What each start cost, and how it ended."""
    for key, run in RUNS.items():
        terminalreporter.write_line(f"{run.seconds:6.1f} s  {key}  {json.dumps(run.result)}")


@pytest.fixture(scope="session")
def another_stop(tmp_path_factory):
    return with_another_stop(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory):
    """The tiny model without its experts."""
    config = json.loads((HERE.parent / "lane" / "tiny_moe" / "config.json").read_text())
    for name in [name for name in config if "expert" in name or "moe" in name or "router" in name]:
        del config[name]
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    folder = tmp_path_factory.mktemp("dense")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)

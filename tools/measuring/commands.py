"""The commands of maintainers, as they are typed: ``verify`` of one lane, and the drift report of a hundred commits."""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from balance_patcher.errors import refuse

from .machine import ROOT
from .ratios import middle
from .results import Row, row

VERIFY_LIMIT = 2.0
ROUNDS = 7
COMMITS = 100

#: What was read of releases is kept where the tests keep it.
CACHE = {"BALANCE_PATCHER_CACHE": str(ROOT / ".cache" / "wheels")}


def verify(lanes: Sequence[str], scale: float, tell: Callable[[str], None]) -> list[Row]:
    """Seconds of ``python -m balance_patcher verify LANE``; a first one, which reads the release, is not counted.

    Args:
        lanes: Declared lanes, by name.
        scale: Of the number of rounds.
        tell: Is told what is measured now.

    Raises:
        PatchError: BP960, if a lane cannot be verified.
    """
    rounds = max(2, round(ROUNDS * scale))
    wall: dict[str, list[float]] = {lane: [] for lane in lanes}
    spent: dict[str, list[float]] = {lane: [] for lane in lanes}
    for at in range(1 + rounds):
        for lane in lanes:
            tell(f"{lane}: verify, {at} of {rounds}")
            seconds, processor = _timed([sys.executable, "-m", "balance_patcher", "verify", lane])
            if at:
                wall[lane].append(seconds)
                spent[lane].append(processor)
    start = [_timed([sys.executable, "-m", "balance_patcher", "--help"])[0] for _ in range(3)]
    rows = []
    for lane in lanes:
        processor = middle(spent[lane]).value
        why = f"{processor:.2f} s of processor time; the command alone starts in {min(start):.2f} s"
        rows.append(
            row("verify", lane, "one lane, warm", "s", middle(wall[lane]), limit=VERIFY_LIMIT, spent=processor, why=why)
        )
    return rows


def drift(lanes: Sequence[str], scale: float, tell: Callable[[str], None]) -> list[Row]:  # noqa: ARG001 - as verify
    """Seconds of the drift report on a hundred commits that all change the scheduler; and again, with its index.

    The history goes on from one release, and is made as that of the tests is.

    Args:
        lanes: Not looked at: the report reads git.
        scale: Of the number of commits.
        tell: Is told what is measured now.

    Raises:
        PatchError: BP513, if the tests' packages are not there; BP960, if the report fails.
    """
    if importlib.util.find_spec("pytest") is None:
        raise refuse("BP513", "the history is made by tests/drift, which needs pytest", next="make bench PART=drift")
    os.environ |= CACHE
    sys.path.insert(0, str(ROOT))
    from balance_patcher.source import open_source

    # Imported by name: tests are no part of what is typed.
    made, speed = (importlib.import_module(f"tests.drift.{name}") for name in ("conftest", "test_speed"))

    commits = max(5, int(COMMITS * scale))
    with tempfile.TemporaryDirectory(prefix="balance-bench-") as folder:
        tell("drift report: making the history")
        repo = made.Repo(Path(folder) / "vllm")
        repo.path.mkdir()
        repo.git("init", "-q")
        source = open_source("pypi:vllm==0.29.0")
        for path in made.FILES:
            data = source.read(path)
            if data is not None:
                (repo.path / path).parent.mkdir(parents=True, exist_ok=True)
                (repo.path / path).write_bytes(data)
        repo.commit("Release 0.29.0")
        repo.git("tag", "v0.29.0")
        speed.history(repo, commits, commits)
        words = ["--repo", str(repo.path), "--since", "v0.29.0", "--until", "long", "--format", "json"]
        words += ["--index", str(Path(folder) / "index"), "-o", str(Path(folder) / "report.json")]
        command = [sys.executable, "-m", "tools.drift_report", *words]
        tell(f"drift report: {commits} relevant commits")
        first, processor = _timed(command)
        tell("drift report: again")
        again, _ = _timed(command)
    title = f"{commits} relevant commits"
    return [
        Row("drift", "", title, "s", first, first, first, why=f"{processor:.1f} s of processor time"),
        Row("drift", "", f"{title}, again", "s", again, again, again, why="with what it knows from the first time"),
    ]


def _timed(command: Sequence[str]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    environment = {**os.environ, **CACHE, "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise refuse(
            "BP960", f"`{' '.join(command[1:])}` ended with status {done.returncode}",
            ("said", (done.stderr or done.stdout).strip()[-600:]), next="make that command work first",
        )  # fmt: skip
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

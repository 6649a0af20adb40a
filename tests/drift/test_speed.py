"""A thousand commits with sixty that matter: what they cost, in processor time, so that a busy machine counts less."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.drift.conftest import SCHEDULER, Repo

pytestmark = pytest.mark.timeout(1800)

COMMITS, RELEVANT = 1000, 60
SECONDS, AGAIN = 30, 3  # on a machine with two cores; the work is shared by two processes
MEBIBYTES = 1024


def history(repo: Repo) -> None:
    """The commits, as one stream: every sixteenth or so changes the scheduler's file, the others some other one."""
    text = (repo.path / SCHEDULER).read_text("utf-8")
    parts: list[bytes] = []

    def data(content: str) -> bytes:
        encoded = content.encode()
        return b"data %d\n%b\n" % (len(encoded), encoded)

    matters = {at * COMMITS // RELEVANT for at in range(RELEVANT)}
    for number in range(COMMITS):
        who = b"A. Person <person@example.org> %d +0000\n" % (1772000000 + number)
        parts.append(
            b"commit refs/heads/long\nauthor %bcommitter %b%b" % (who, who, data(f"Commit {number} (#{number})"))
        )
        parts.append(b"from refs/tags/v0.29.0^0\n" if number == 0 else b"")
        path, content = (SCHEDULER, f"{text}\n# {number}\n") if number in matters else ("docs/a.md", str(number))
        parts.append(b"M 100644 inline %b\n%b\n" % (path.encode(), data(content)))
    subprocess.run(["git", "fast-import", "--quiet"], cwd=repo.path, input=b"".join(parts), check=True)


def measured(*words: str) -> tuple[float, float]:
    """Seconds of processor time, and mebibytes of all processes at once, at the most."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "tools.drift_report", *words], cwd=ROOT, env=environment) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime, 3 * used.ru_maxrss / 1024


def test_a_thousand_commits(branch, tmp_path: Path) -> None:
    repo = branch("0.29.0")
    history(repo)
    words = ["--repo", str(repo.path), "--since", "v0.29.0", "--until", "long", "--format", "json", "--processes", "2"]
    words += ["--index", str(tmp_path / "index"), "-o"]
    seconds, memory = measured(*words, str(tmp_path / "first.json"))
    assert seconds < 2 * SECONDS
    assert memory < MEBIBYTES
    again, _ = measured(*words, str(tmp_path / "again.json"))
    assert again < AGAIN
    first, second = (
        (tmp_path / name).read_text("utf-8").partition('"counts"')[0] for name in ("first.json", "again.json")
    )
    assert first == second
    assert f'"commits": {COMMITS},\n    "relevant": {RELEVANT},' in (tmp_path / "first.json").read_text("utf-8")

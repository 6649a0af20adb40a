"""A thousand commits with sixty that matter: what they cost, in processor time, so that a busy machine counts less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.drift.conftest import SCHEDULER, Repo

pytestmark = pytest.mark.timeout(1800)

COMMITS, RELEVANT = 1000, 60
SECONDS, AGAIN = 45, 3  # so that two processes on two free cores are done well under thirty
MEBIBYTES = 768  # of 1024


def history(repo: Repo, commits: int = COMMITS, relevant: int = RELEVANT) -> None:
    """The commits, as one stream: every sixteenth or so changes the scheduler's file, the others some other one."""
    text = (repo.path / SCHEDULER).read_text("utf-8")
    parts: list[bytes] = []

    def data(content: str) -> bytes:
        encoded = content.encode()
        return b"data %d\n%b\n" % (len(encoded), encoded)

    matters = {at * commits // relevant for at in range(relevant)}
    for number in range(commits):
        who = b"A. Person <person@example.org> %d +0000\n" % (1772000000 + number)
        parts.append(
            b"commit refs/heads/long\nauthor %bcommitter %b%b" % (who, who, data(f"Commit {number} (#{number})"))
        )
        parts.append(b"from refs/tags/v0.29.0^0\n" if number == 0 else b"")
        path, content = (SCHEDULER, f"{text}\n# {number}\n") if number in matters else ("docs/a.md", str(number))
        parts.append(b"M 100644 inline %b\n%b\n" % (path.encode(), data(content)))
    subprocess.run(["git", "fast-import", "--quiet"], cwd=repo.path, input=b"".join(parts), check=True)


#: Starts the run from a small process: to the kernel, what the starter had until then is a process's own peak.
_SMALL = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], check=False)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""


def measured(*words: str) -> tuple[float, float]:
    """Seconds of processor time of all processes, and mebibytes: as if each of the three had what the largest had."""
    run = [sys.executable, "-m", "tools.drift_report", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    small = [sys.executable, "-c", _SMALL, *run]
    done = subprocess.run(small, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    status, seconds, largest = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return seconds, 3 * largest / 1024


def test_a_thousand_commits(branch, tmp_path: Path) -> None:
    repo = branch("0.29.0")
    history(repo)
    words = ["--repo", str(repo.path), "--since", "v0.29.0", "--until", "long", "--format", "json", "--processes", "2"]
    words += ["--index", str(tmp_path / "index"), "-o"]
    seconds, memory = measured(*words, str(tmp_path / "first.json"))
    assert seconds < SECONDS
    assert memory < MEBIBYTES
    again, _ = measured(*words, str(tmp_path / "again.json"))
    assert again < AGAIN
    first, second = (
        (tmp_path / name).read_text("utf-8").partition('"counts"')[0] for name in ("first.json", "again.json")
    )
    assert first == second
    assert f'"commits": {COMMITS},\n    "relevant": {RELEVANT},' in (tmp_path / "first.json").read_text("utf-8")

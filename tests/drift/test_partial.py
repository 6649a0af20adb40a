"""Clones that have not everything: what is missing is fetched, or told as missing; never a traceback, never green."""

from __future__ import annotations

import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from balance_patcher.errors import Outcome
from tests.drift.conftest import SCHEDULER, Repo, changes
from tests.drift.test_errors import run
from tools.drift import columns
from tools.drift.formats import FORMATS
from tools.drift.model import Report
from tools.drift.written import from_json

pytestmark = pytest.mark.timeout(1200)

GATE = "balance.admission-gate"


@pytest.fixture(autouse=True)
def _nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has read is as good as what a clone has: here nothing has been read."""
    monkeypatch.setattr(columns, "_texts", OrderedDict())


@pytest.fixture
def hub(branch: Callable[[str], Repo], tmp_path: Path) -> tuple[Path, str]:
    """A server of a history in which a commit renames the cap, and that commit."""
    repo = branch("0.29.0")
    repo.edit("vllm/v1/request.py", lambda text: f"{text}\n# more\n", "Say something")
    bad = repo.edit(SCHEDULER, lambda text: text.replace("max_num_running_reqs", "max_live_reqs"), "Rename it (#3)")
    repo.edit(SCHEDULER, lambda text: f"{text}\n# more\n", "Say it again")
    path = tmp_path / "hub.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(repo.path), str(path)], check=True)
    for setting in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        subprocess.run(["git", "-C", str(path), "config", setting, "true"], check=True)
    return path, bad


def cloned(hub: Path, folder: Path, *how: str) -> Path:
    """A bare clone over git's own protocol."""
    subprocess.run(["git", "clone", "-q", "--bare", *how, hub.as_uri(), str(folder)], check=True, capture_output=True)
    return folder


def blobs(repo: Path) -> int:
    """How many files' texts a repository has."""
    words = ["git", "-C", str(repo), "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split().count("blob")


def reported(repo: Path, capsys, since: str = "v0.29.0") -> tuple[int, Report]:
    words = ("--repo", str(repo), "--since", since, "--features", "balance", "--format", "json")
    status, out, err = run(capsys, *words)
    assert out, err
    return status, from_json(out)


def test_a_clone_without_texts_fetches_those_that_are_looked_at(hub: tuple[Path, str], tmp_path: Path, capsys) -> None:
    path, bad = hub
    clone = cloned(path, tmp_path / "blobless.git", "--filter=blob:none")
    assert blobs(clone) == 0
    status, report = reported(clone, capsys)
    assert status == 1
    (change,) = changes(report, GATE)
    assert change.first_bad is not None
    assert change.first_bad.commit is not None
    assert (change.first_bad.commit.hash, change.first_bad.proven) == (bad, True)
    assert 0 < blobs(clone) < blobs(path) / 2
    # What was fetched stays: no server is needed any more.
    shutil.rmtree(path)
    assert reported(clone, capsys)[0] == 1


def test_a_clone_without_texts_and_without_its_server(hub: tuple[Path, str], tmp_path: Path, capsys) -> None:
    path, _ = hub
    clone = cloned(path, tmp_path / "blobless.git", "--filter=blob:none")
    shutil.rmtree(path)
    status, report = reported(clone, capsys)
    assert (status, report.outcome) == (3, Outcome.UNKNOWN)
    cells = report.row("balance")
    assert {cell.status for cell in cells} == {"unreadable"}
    for cell in cells:
        (failure,) = cell.failures
        assert failure.code == "BP514"
        assert "cannot be read from" in failure.what
        assert failure.next.startswith("git -C ")
    assert report.transitions == ()  # it is so from the first column on, for one reason
    for kind in ("text", "markdown", "github", "html"):
        assert "cannot be read from" in FORMATS[kind](report), kind


def test_a_clone_without_folders(hub: tuple[Path, str], tmp_path: Path, capsys) -> None:
    """Nor trees: they are fetched, too, and told as missing where that cannot be."""
    path, bad = hub
    clone, other = (cloned(path, tmp_path / f"{name}.git", "--filter=tree:0") for name in ("treeless", "alone"))
    status, report = reported(clone, capsys)
    assert status == 1
    (change,) = changes(report, GATE)
    assert change.first_bad.commit.hash == bad
    shutil.rmtree(path)
    words = ("--repo", str(other), "--since", "v0.29.0", "--features", "balance")
    status, out, err = run(capsys, *words)
    assert status == 3
    assert "BP514" in out + err


def test_a_shallow_clone_is_not_taken_for_the_whole_history(hub: tuple[Path, str], tmp_path: Path, capsys) -> None:
    path, bad = hub
    clone = cloned(path, tmp_path / "shallow.git", "--depth", "3")
    status, report = reported(clone, capsys, "HEAD~2")
    assert status == 1
    assert changes(report, GATE)[0].first_bad.commit.hash == bad
    subprocess.run(["git", "-C", str(clone), "fetch", "-q", "--depth", "1", "origin", "tag", "v0.29.0"], check=True)
    status, out, err = run(capsys, "--repo", str(clone), "--since", "v0.29.0")
    assert (status, out) == (3, "")
    assert err.startswith("BP920 ")
    # Without texts as well: this is how a job checks out.
    both = cloned(path, tmp_path / "both.git", "--depth", "3", "--filter=blob:none")
    status, report = reported(both, capsys, "HEAD~2")
    assert (status, changes(report, GATE)[0].first_bad.commit.hash) == (1, bad)

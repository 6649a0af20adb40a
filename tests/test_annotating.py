"""Where an annotation is put: GitHub looks for the file from the root of what the job checked out."""

from __future__ import annotations

from pathlib import Path

import pytest

from balance_patcher.annotating import command
from tests.conftest import ROOT


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's root, with a file two folders down, in the upper one of which we are."""
    (tmp_path / "ours" / "deltas").mkdir(parents=True)
    (tmp_path / "ours" / "deltas" / "gate.py").write_text("")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path / "ours")
    return tmp_path


def file(place: str) -> str:
    """The file that a command names."""
    return command("error", place, "t", "x").partition("file=")[2].partition(",")[0]


def test_a_file_of_the_job_is_named_from_its_root(workspace: Path) -> None:
    assert command("error", "deltas/gate.py:12", "a title", "said\nso") == (
        "::error file=ours/deltas/gate.py,line=12,title=a title::said%0Aso"
    )
    assert file(f"{workspace}/ours/deltas/gate.py:12") == "ours/deltas/gate.py"
    assert file("../ours/deltas/gate.py:12") == "ours/deltas/gate.py"


def test_a_file_of_the_project_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(ROOT.parent))
    assert file("deltas/balance.py:41") == f"{ROOT.name}/deltas/balance.py"
    assert file("balance_patcher/deltas/balance.py:41") == f"{ROOT.name}/deltas/balance.py"  # and not the link to it


def test_the_current_folder_comes_first(workspace: Path) -> None:
    (workspace / "ours" / "deltas" / "balance.py").write_text("")
    assert file("deltas/balance.py:41") == "ours/deltas/balance.py"


@pytest.mark.parametrize("place", ["deltas/balance.py:41", "/nowhere/gate.py:3", "vllm/v1/made/up.py:3", ":", ":3"])
def test_what_does_not_lie_in_the_job_is_named_as_ever(workspace: Path, place: str) -> None:
    assert file(place) == place.rpartition(":")[0]


def test_without_a_job_a_file_is_named_as_ever(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for set_ in (lambda: monkeypatch.setenv("GITHUB_WORKSPACE", ""), lambda: monkeypatch.delenv("GITHUB_WORKSPACE")):
        set_()
        assert file("deltas/gate.py:12") == "deltas/gate.py"


def test_a_root_that_is_a_link(workspace: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    link = tmp_path_factory.mktemp("links") / "root"
    link.symlink_to(workspace)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(link))
    assert file("deltas/gate.py:12") == "ours/deltas/gate.py"

"""A package that is missing: what to install, and from where."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from balance_patcher import extras
from balance_patcher.errors import PatchError
from balance_patcher.extras import command_for, require

ROOT = Path(__file__).resolve().parents[1]


def test_what_is_there_is_imported() -> None:
    assert require("json") is json


def test_what_is_not_names_the_extra() -> None:
    with pytest.raises(PatchError, match=r"BP513 .*is not installed") as caught:
        require("no_such_module_here", "plots")
    assert caught.value.failures[0].next == command_for("plots")


def test_what_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "is_broken_here.py").write_text("raise ImportError('no such symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PatchError, match="is installed but cannot be imported") as caught:
        require("is_broken_here")
    assert "no such symbol" in str(caught.value)


def test_a_checkout_is_installed_from_itself() -> None:
    assert shlex.split(command_for("cli")) == ["pip", "install", "-e", f"{ROOT}[cli]"]


class TestInstalled:
    """A copy in site-packages: there is no checkout around it."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages" / "balance_patcher" / "extras.py"))

    def told(self, monkeypatch: pytest.MonkeyPatch, text: str | None) -> list[str]:
        class Distribution:
            def read_text(self, name: str) -> str | None:
                assert name == "direct_url.json"
                return text

        monkeypatch.setattr(metadata, "distribution", lambda _: Distribution())
        return shlex.split(command_for("cli"))

    def test_from_a_repository(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: dict[str, Any] = {
            "url": "https://git.example/patcher", "vcs_info": {"vcs": "git", "commit_id": "abc"},
        }  # fmt: skip
        wanted = "balance_patcher[cli] @ git+https://git.example/patcher@abc"
        assert self.told(monkeypatch, json.dumps(told)) == ["pip", "install", wanted]

    def test_from_a_folder_or_a_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = {"url": "file:///opt/patcher", "dir_info": {}}
        assert self.told(monkeypatch, json.dumps(told))[2] == "balance_patcher[cli] @ file:///opt/patcher"

    @pytest.mark.parametrize("text", [None, "{}", "no JSON", "[]", '{"vcs_info": {"vcs": "git"}}'])
    def test_where_that_is_not_known(self, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
        assert self.told(monkeypatch, text)[2] == "balance_patcher[cli]"

    def test_where_it_only_lies_on_the_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> None:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "distribution", missing)
        assert command_for("cli") == "pip install 'balance_patcher[cli]'"

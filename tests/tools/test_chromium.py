"""The browser for the page's tests: the one on PATH, the one that was fetched, or a line that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import chromium


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without a browser and without apt."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(chromium, "FOLDER", tmp_path / "chromium")
    return tmp_path


def program(file: Path, status: int = 0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\nexit {status}\n")
    file.chmod(0o755)
    return file


def test_the_one_on_path_comes_first(nothing: Path) -> None:
    program(nothing / "chromium" / "run")
    assert chromium.browser() == nothing / "chromium" / "run"
    program(nothing / "bin" / "chromium")
    assert chromium.browser() == nothing / "bin" / "chromium"


def test_where_none_can_be_had_it_is_said_and_nothing_fails(nothing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chromium.browser() is None
    chromium.main()
    said = capsys.readouterr()
    assert said.out == ""
    assert "no Chromium, so the page is not looked at in a browser: apt-get and dpkg-deb are not here" in said.err


def test_what_apt_says_is_handed_on(nothing: Path) -> None:
    program(nothing / "bin" / "dpkg-deb")
    apt = program(nothing / "bin" / "apt-get")
    apt.write_text("#!/bin/sh\necho 'E: no such host' >&2\nexit 100\n")
    with pytest.raises(chromium.MissingError, match="apt-get: E: no such host"):
        chromium.fetch(nothing / "chromium")


def test_a_browser_that_does_not_start_is_none(nothing: Path) -> None:
    broken = program(nothing / "root" / "usr" / "lib" / "chromium" / chromium.PACKAGE, status=127)
    with pytest.raises(chromium.MissingError, match="exit status 127"):
        chromium._starter(nothing, nothing / "root", broken)
    assert not (nothing / "run").exists()

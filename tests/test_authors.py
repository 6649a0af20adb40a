"""The guide for authors works, step by step: with its own commands, on the released sources that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from balance_patcher.byname import operators
from tests.authors import FILE, GUIDE, block, blocks, commands, edit
from tests.conftest import ROOT
from tests.distributions import put_project

Done = subprocess.CompletedProcess[str]


def call(folder: Path, command: list[str], *more: Path) -> Done:
    """One command of the guide, in the author's folder, with the checkout's package and what else is on the path."""
    assert command[0] == "python"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *more))), "COLUMNS": "300"}
    return subprocess.run(
        [sys.executable, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The author's folder after the first two steps."""
    made = tmp_path_factory.mktemp("author")
    (made / "pyproject.toml").write_text(block("1.", "toml"))
    command, _ = commands("2.")
    done = call(made, command)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == block("2.", "text")
    return made


def test_where_lanes_differ_the_anchor_is_the_one_that_is_shown(folder: Path) -> None:
    _, command = commands("2.")
    done = call(folder, command)
    assert done.returncode == 0
    assert block("2.", "text", 1) in done.stdout


def test_what_is_written_is_sound_as_it_is(folder: Path) -> None:
    (command,) = commands("3.")
    done = call(folder, command)
    assert done.returncode == 0, done.stdout
    assert "All deltas hold on 2 lanes." in done.stdout


@pytest.fixture(scope="module")
def filled_in(folder: Path) -> Path:
    edit(folder, "4.")
    return folder


def test_no_todo_is_left_and_it_is_sound(filled_in: Path) -> None:
    (command,) = commands("4.")
    done = call(filled_in, command)
    assert done.returncode == 0, done.stdout
    text = (filled_in / FILE).read_text()
    assert "todo" not in text.lower()
    assert ruff(filled_in / FILE) == ""


def test_what_is_added_is_what_the_guide_shows(filled_in: Path) -> None:
    (command,) = commands("5.")
    done = call(filled_in, command)
    changed = [
        line for line in done.stdout.splitlines(keepends=True) if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert "".join(changed) == block("5.", "text")


@pytest.fixture(scope="module")
def shared(filled_in: Path) -> Path:
    before, _ = commands("7.")
    done = call(filled_in, before)
    assert done.returncode == 1
    assert block("7.", "text").strip() in done.stdout
    edit(filled_in, "7.")
    return filled_in


def test_with_a_flag_of_its_own_it_shares_the_function(shared: Path) -> None:
    _, after = commands("7.")
    done = call(shared, after)
    assert done.returncode == 0, done.stdout
    assert ruff(shared / FILE) == ""


def test_in_the_checkout_it_is_found_and_its_examples_are_tests(shared: Path, tmp_path: Path) -> None:
    for name in ("balance_patcher", "deltas", "tests"):
        left_out = shutil.ignore_patterns("__pycache__", "engine", "lane", "model", "test_[!d]*", "test_demo.py")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(shared / FILE, tmp_path)
    edit(tmp_path, "8.")
    assert ruff(tmp_path / FILE) == ""
    move, test = commands("8.")
    assert move[0] == "mv"
    shutil.move(tmp_path / move[1], tmp_path / move[2])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *test[1:], "-p", "no:cacheprovider", "-v", "-k", "say_preempted"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


def test_as_a_distribution_it_is_found_and_its_examples_are_run(shared: Path, tmp_path: Path) -> None:
    """As an installer leaves what the guide's own `pyproject.toml` describes."""
    project, site, elsewhere = (tmp_path / name for name in ("project", "site", "elsewhere"))
    project.mkdir(), site.mkdir(), elsewhere.mkdir()
    shutil.copy(shared / FILE, project)
    edit(project, "8.")
    (project / "pyproject.toml").write_text(block("1.", "toml") + "\n" + block("9.", "toml"))
    (elsewhere / "pyproject.toml").write_text(block("1.", "toml"))
    install, verify, _ = commands("9.")
    assert install == ["python", "-m", "pip", "install", "."]
    put_project(site, project)
    done = call(elsewhere, verify, site)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^  say_preempted.schedule +applied ", done.stdout, re.MULTILINE)
    (site / FILE).write_text((site / FILE).read_text().replace('code="BP104"', 'code="BP105"'))
    done = call(elsewhere, verify, site)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("BP808 example does not hold: REFUSES, item ") == 2
    assert "is refused with BP104, and BP105 is declared" in done.stdout


def test_what_asks_for_it_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, (setting, *_) = commands("9.")
    monkeypatch.setenv(*setting.split("="))
    assert operators() == ("say_preempted",)


def test_a_lane_with_nothing_like_it_says_what_the_guide_shows(folder: Path) -> None:
    (command,) = commands("When a lane")
    done = call(folder, command)
    assert done.returncode == 1
    assert done.stderr.startswith(block("When a lane", "text"))


def test_the_commands_of_the_readme_do_the_first_steps(folder: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Write a delta\n")[2]
    lines = text.partition("```console\n")[2].partition("```")[0].splitlines()
    made, checked = (call(folder, line.removeprefix("$ ").split()) for line in lines)
    assert (made.returncode, checked.returncode) == (0, 0)
    assert "toy.schedule  applied" in checked.stdout


def test_no_block_is_left_out() -> None:
    """Every block of the guide is used above, or in the lane tests: the Python blocks of the sixth step."""
    kinds = [language for part in GUIDE.split("\n## ")[1:] for language, _ in blocks(part.splitlines()[0])]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "toml": 2, "console": 11, "text": 5, "diff": 4, "python": 2,
    }  # fmt: skip


def ruff(file: Path) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--diff", "--config", ROOT / "pyproject.toml", file]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout

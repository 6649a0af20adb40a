"""The README's workflows, run as they stand there: the step for vllm-ascend's CI, and the nightly report.

Only what reaches out is stood in for: vLLM's repository is on this disk, and `pip` is not called.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.drift.conftest import Repo

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def step() -> str:
    """The script of the step."""
    (found,) = re.findall(r"- name: What moving to another vLLM does.*?\n  run: \|\n(.*?)```", README, re.DOTALL)
    return textwrap.dedent(found)


@pytest.fixture
def job(upstream: Repo, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The folder that the job stands in, and its environment: a pull request that moves the pin to 0.33.0."""
    hub = tmp_path / "hub.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(upstream.path), str(hub)], check=True)
    for setting in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        subprocess.run(["git", "-C", str(hub), "config", setting, "true"], check=True)
    ours = Repo(tmp_path / "ours")
    (ours.path / ".github").mkdir(parents=True)
    ours.git("init", "-q")
    pin = ours.path / ".github" / "vllm-main-verified.commit"
    (ours.path / ".github" / "vllm-release-tag.commit").write_text("v0.23.0\n")
    pin.write_text(upstream.git("rev-parse", "v0.32.0") + "\n")
    ours.commit("Pin 0.32.0")
    work = tmp_path / "work"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ours.path}", str(work)], check=True)
    (work / ".github" / "vllm-main-verified.commit").write_text(upstream.git("rev-parse", "v0.33.0") + "\n")
    subprocess.run(
        ["git", "clone", "-q", "--depth", "1", "--no-tags", f"file://{hub}", str(work / "vllm-empty")], check=True
    )
    checkout = work / "balance_patcher"
    for name in ("balance_patcher", "tools", "deltas"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "pip").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/pip\n')
    (programs / "pip").chmod(0o755)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')  # a link would leave its venv
    (programs / "python").chmod(0o755)
    environment = {
        **os.environ, "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]), "GITHUB_BASE_REF": "main",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PYTHONPATH": str(checkout),
    }  # fmt: skip
    return work, environment


def test_the_step_says_what_the_move_does(job: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    work, environment = job
    tags = subprocess.run(["git", "-C", str(work / "vllm-empty"), "tag"], capture_output=True, text=True, check=True)
    assert tags.stdout == ""
    done = subprocess.run(
        ["bash", "-e", "-c", step()], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert re.match(r"balance: 9/9 apply on [0-9a-f]{10}\.\.[0-9a-f]{10}, no edit needed\n", summary), summary
    assert len(summary.splitlines()) <= 60
    assert "`KVCacheManager.get_computed_blocks` gained the parameter `max_cache_hit_length`" in summary
    assert done.stdout.splitlines()[-1].startswith("::notice title=drift report::balance: 9/9 apply on ")
    assert (tmp_path / "pip").read_text() == "install --quiet ./balance_patcher[tools]\n"


def test_one_commit_of_history_is_not_taken_for_all_of_it(job: tuple[Path, dict[str, str]]) -> None:
    work, environment = job
    shallow = re.sub(r"git -C vllm-empty fetch.*\n", "", step())
    assert shallow != step()
    done = subprocess.run(
        ["bash", "-e", "-c", shallow], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, (done.stdout, done.stderr)


# -- the nightly report ----------------------------------------------------------------------


def nightly() -> list[tuple[str, str]]:
    """The commands of the nightly workflow, each with the folder that it is run in."""
    (found,) = re.findall(r"```yaml\n# the drift report nightly.*?\n(.*?)```", README, re.DOTALL)
    steps = re.split(r"\n      - ", found)
    assert 'fetch-depth: 0, filter: "blob:none"' in found
    assert steps[-1].startswith("if: always()\n")  # the page is kept whatever the report says
    folder = re.compile(r"working-directory: (\S+)")
    commands = [(match[1], step) for step in steps if (match := re.search(r"(?:^|\n\s*)run: (.*)", step))]
    return [(where[1] if (where := folder.search(step)) else ".", command) for command, step in commands]


def night(job: tuple[Path, dict[str, str]], upstream: Repo, tmp_path: Path) -> tuple[int, str]:
    """The exit status of the workflow's last command, and its page."""
    work, environment = job
    (work / ".github" / "vllm-main-verified.commit").write_text(upstream.git("rev-parse", "v0.32.0") + "\n")
    hub = (tmp_path / "hub.git").as_uri()
    # As the action checks out: the whole history, and the texts of its last commit only.
    subprocess.run(["git", "clone", "-q", "--filter=blob:none", hub, str(work / "vllm")], check=True)
    status = 0
    for folder, command in nightly():
        assert status == 0
        words = ["bash", "-e", "-c", command]
        done = subprocess.run(words, cwd=work / folder, env=environment, capture_output=True, text=True, check=False)
        status = done.returncode
        assert "Traceback" not in done.stderr
    return status, (work / "balance_patcher" / "drift.html").read_text(encoding="utf-8")


def test_the_nightly_report_is_a_page(job: tuple[Path, dict[str, str]], upstream: Repo, tmp_path: Path) -> None:
    assert [folder for folder, _ in nightly()] == [".", "balance_patcher"]
    status, page = night(job, upstream, tmp_path)
    assert status == 0
    assert "balance: 9/9 apply on " in page
    assert "Release 0.33.0 (#" in page
    assert (tmp_path / "pip").read_text() == "install --quiet ./balance_patcher[tools]\n"
    assert list((job[0] / "balance_patcher" / ".cache" / "drift").iterdir())  # what the cache action keeps


def test_the_night_in_which_the_gate_broke_ends_red_and_has_its_page(
    job: tuple[Path, dict[str, str]], upstream: Repo, tmp_path: Path
) -> None:
    main = Repo(tmp_path / "main")
    subprocess.run(["git", "clone", "-q", str(tmp_path / "hub.git"), str(main.path)], check=True)
    bad = main.edit(
        "vllm/v1/core/sched/scheduler.py", lambda text: text.replace("max_num_active_reqs", "max_live_reqs"), "So (#7)"
    )
    main.git("push", "-q", "origin", "HEAD")
    status, page = night(job, upstream, tmp_path)
    assert status == 1
    assert re.search(rf"ACTION: edit deltas/balance\.py:\d+ \(anchor changed in {bad[:10]}, vllm#7\)", page)

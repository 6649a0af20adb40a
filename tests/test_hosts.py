"""``verify --vllm-ascend``: what each released wheel of vllm-ascend holds, beside its vLLM, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balance_patcher import cli
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.hosts import HostReport, check_hosts, host_source
from balance_patcher.registry import find_feature
from balance_patcher.source import LaneSpec, open_source

Releases = Callable[[str], Path]
Capture = pytest.CaptureFixture[str]
FILE = "vllm_ascend/patch/platform/patch_balance_schedule.py"
PAIRS = {"0.23.0": "0.23.0", "0.24.0rc1": "0.24.0", "0.25.1rc1": "0.25.1", "0.26.0rc1": "0.26.0"}


def report(release_dir: Releases, version: str) -> HostReport:
    lane = LaneSpec("lane", f"dir:{release_dir(PAIRS[version])}")
    (found,) = check_hosts(f"pypi:vllm-ascend=={version}", [lane], [find_feature("balance")])
    return found


@pytest.mark.parametrize("version", ["0.23.0", "0.24.0rc1", "0.25.1rc1"])
def test_the_releases_that_are_taken_over_are_covered(release_dir: Releases, version: str) -> None:
    found = report(release_dir, version)
    assert found.outcome is Outcome.HOLDS
    assert found.coverage is not None
    assert found.coverage.covered
    covered = found.coverage.by().keys()
    assert {"balance.disabled-path", "balance.admission-gate", "balance.empty-queue-guard", "balance.gather"} <= covered


def test_the_oldest_needs_the_feature_for_prefill_nodes_and_the_others_do_not(release_dir: Releases) -> None:
    needed = {}
    for version in PAIRS:
        coverage = report(release_dir, version).coverage
        assert coverage is not None
        needed[version] = sorted(coverage.features())
    assert needed == {
        "0.23.0": ["balance", "prefill_preemption"], "0.24.0rc1": ["balance"], "0.25.1rc1": ["balance"],
        "0.26.0rc1": ["balance"],
    }  # fmt: skip


def test_the_newest_is_declined_by_name(release_dir: Releases) -> None:
    found = report(release_dir, "0.26.0rc1")
    assert found.outcome is Outcome.BROKEN
    assert found.coverage is not None
    texts = [finding.text for finding in found.coverage.uncovered]
    assert "class BalanceScheduler(KVDeliveryScheduler)" in texts
    assert "if not self._use_consumer_partial_group_hits and self.has_mamba_layers" in texts
    assert not [finding for finding in found.coverage.uncovered if not finding.line]


@pytest.mark.parametrize("version", ["0.24.0rc1", "0.25.1rc1", "0.23.0"])
@pytest.mark.parametrize(
    "statement",
    ["self.running.append(request)", "token_budget -= num_new_tokens", "self.kv_cache_manager.new_step_starts()"],
)
def test_one_statement_more_anywhere_in_a_released_copy_is_noticed(
    release_dir: Releases, tmp_path: Path, version: str, statement: str
) -> None:
    data = open_source(f"pypi:vllm-ascend=={version}").read(FILE)
    assert data is not None
    text = data.decode()
    before, found, after = text.partition(f"{statement}\n")
    assert found
    indent = before.rpartition("\n")[2]
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(f"{before}{found}{indent}self.something_new = 1\n{after}")
    lane = LaneSpec("lane", f"dir:{release_dir(PAIRS[version])}")
    (changed,) = check_hosts(f"dir:{tmp_path}", [lane], [find_feature("balance")])
    assert changed.coverage is not None
    assert [finding.text for finding in changed.coverage.uncovered] == ["self.something_new = 1"]


def test_every_name_of_a_release_that_is_taken_over_is_declared_by_the_stand_in(release_dir: Releases) -> None:
    """What the module is filled with is looked at on a lane; here, that nothing was left out of that."""
    filled = (Path(__file__).parent.parent / "deltas" / "balance_ascend.py").read_text()
    for version in ("0.23.0", "0.24.0rc1", "0.25.1rc1"):
        coverage = report(release_dir, version).coverage
        assert coverage is not None
        names = [f.text.split(" = ")[0] for f in coverage.findings if not f.place and f.by == "stand-in"]
        plain = [name for name in names if name.isidentifier()]
        assert plain
        assert [name for name in plain if f'"{name}":' not in filled] == []


# -- the command


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that holds a patch module with one thing that nobody knows."""
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text("import os\n\nos.getpid()\n")
    return tmp_path


def test_the_command_names_every_line_that_is_not_covered(
    checkout: Path, release_dir: Releases, capsys: Capture
) -> None:
    assert run("verify", f"lane=dir:{release_dir('0.24.0')}", "--vllm-ascend", str(checkout)) == 1
    told = capsys.readouterr().out
    assert "lane lane  vLLM 0.24.0" in told
    assert "not covered: 1; its own copy runs, and left to it: balance" in told
    assert "patch_balance_schedule.py:3  `os.getpid()`" in told


def test_the_command_as_json(checkout: Path, release_dir: Releases, capsys: Capture) -> None:
    lane = f"lane=dir:{release_dir('0.24.0')}"
    assert run("verify", lane, "--vllm-ascend", f"dir:{checkout}", "--format", "json") == 1
    (host,) = json.loads(capsys.readouterr().out)["hosts"]
    wanted: dict[str, Any] = {"lane": "lane", "vllm": "0.24.0", "feature": "balance", "covered": False}
    assert {key: host[key] for key in wanted} == wanted
    assert host["outcome"] == "broken"
    (finding,) = host["findings"]["not covered"]
    assert finding["line"] == 3
    assert finding["text"] == "os.getpid()"


def test_what_is_covered_ends_with_zero(release_dir: Releases, capsys: Capture) -> None:
    lane = f"lane=dir:{release_dir('0.24.0')}"
    assert run("verify", lane, "--vllm-ascend", "pypi:vllm-ascend==0.24.0rc1") == 0
    assert "everything is covered: balance stands in for it" in capsys.readouterr().out


def test_a_lane_that_cannot_be_read_is_could_not(checkout: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run("verify", f"lane=dir:{tmp_path / 'gone'}", "--vllm-ascend", str(checkout)) == 3
    assert "BP514" in capsys.readouterr().out


def test_a_release_without_that_module_is_named(tmp_path: Path, release_dir: Releases, capsys: Capture) -> None:
    assert run("verify", f"lane=dir:{release_dir('0.24.0')}", "--vllm-ascend", str(tmp_path)) == 1
    assert "BP110" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--format", "junit"], ["--report", "json:x"], ["--expect", "v0.24.0"]])
def test_other_options_do_not_go_with_it(checkout: Path, more: list[str], capsys: Capture) -> None:
    assert run("verify", f"lane=dir:{checkout}", "--vllm-ascend", str(checkout), *more) == 2
    assert "BP007" in capsys.readouterr().err


def test_a_wheel_and_a_folder_are_known_by_their_path(tmp_path: Path) -> None:
    assert host_source(str(tmp_path)) == f"dir:{tmp_path}"
    assert host_source(str(tmp_path / "a.whl")) == f"wheel:{tmp_path / 'a.whl'}"
    assert host_source("git:.@main") == "git:.@main"
    with pytest.raises(PatchError, match="BP004"):
        host_source(str(tmp_path / "gone"))


def test_a_feature_that_stands_in_for_nothing_is_refused() -> None:
    with pytest.raises(PatchError, match="BP003"):
        check_hosts(".", [], [find_feature("prefill_preemption")])

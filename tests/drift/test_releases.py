"""Twelve releases of history: each known break of upstream's is told at its release, and nothing needs an edit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from balance_patcher.errors import Outcome, PatchError
from tests.conftest import ROOT
from tests.drift.conftest import TOLD, Repo, changes
from tools.drift import releases as of_releases
from tools.drift.changed import CalleeChange
from tools.drift.model import Report
from tools.drift.releases import range_of
from tools.drift.text import as_text
from tools.drift.written import from_json, to_json
from tools.drift_report import main

pytestmark = pytest.mark.timeout(1200)  # the first one reads twelve releases, and looks at all of them

GATE, GUARD = "balance.admission-gate", "balance.empty-queue-guard"
CALLED = "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks"
MAMBA = "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split"


def test_the_matrix_has_a_column_for_each_release(releases: Report) -> None:
    assert [ref.name for ref in releases.refs] == [f"v{version}" for version in TOLD]
    assert [cell.status for cell in releases.row("balance")] == ["applied"] * 12
    assert [cell.status for cell in releases.row("defer_preemption")] == [
        "not-applicable", *["applied"] * 7, *["absorbed"] * 4
    ]  # fmt: skip
    # Nothing of 0.25.1 touches what is read; its tag is a column all the same.
    assert (releases.counts.commits, releases.counts.relevant) == (11, 10)


def test_nothing_needs_an_edit(releases: Report) -> None:
    assert releases.outcome is Outcome.HOLDS
    assert releases.actions == ()
    assert releases.verdicts == (
        "balance: 9/9 apply on v0.23.0..v0.33.0, no edit needed",
        "defer_preemption: 2/2 apply on v0.23.0..v0.33.0, no edit needed",
    )


def test_the_anchors_go_at_their_releases(releases: Report) -> None:
    gate = {change.after: change for change in changes(releases, GATE)}
    assert sorted(gate) == ["v0.25.0", "v0.31.0"]
    assert (gate["v0.25.0"].kind, gate["v0.25.0"].now_variant) == ("changed", "running cap, counted")
    cap = gate["v0.31.0"]
    assert (cap.kind, cap.was, cap.now, cap.now_variant) == ("changed", "applied", "applied", "active cap, counted")
    assert cap.difference is not None
    assert (cap.difference.wanted, cap.difference.found) == ("max_num_running_reqs", "max_num_active_reqs")

    (guard,) = changes(releases, GUARD)
    assert (guard.after, guard.kind, guard.was, guard.now) == ("v0.31.0", "absorbed-upstream", "applied", "absorbed")
    assert "nothing in Scheduler.schedule is like `assert request_queue is not None`" in guard.explanation
    (select,) = [one for one in releases.callees if one.callee.endswith("._select_waiting_queue_for_scheduling")]
    assert (select.after, select.what) == ("v0.31.0", "gone")


def test_each_change_has_its_commit_and_the_proof(releases: Report) -> None:
    for change in releases.transitions:
        found = change.first_bad
        assert found is not None
        assert found.commit is not None
        assert found.commit.subject.startswith(f"Release {change.after.removeprefix('v')} (#")
        assert found.commit.pull == TOLD.index(change.after.removeprefix("v")) + 1
        assert found.proven, change.explanation
        assert found.parent_status.startswith(change.was)


def test_the_retry_is_absorbed_at_its_release(releases: Report) -> None:
    for name in ("defer_preemption.disabled-path", "defer_preemption.retry"):
        told = [(change.after, change.kind) for change in changes(releases, name)]
        assert told == [("v0.24.0", "variant"), ("v0.30.0", "absorbed-upstream")]


def callee(report: Report, name: str) -> dict[str, CalleeChange]:
    found = [change for change in report.callees if change.callee == name and change.what != "body"]
    return {change.after: change for change in found if change.target.endswith("Scheduler.schedule")}


def test_changed_callees_are_told_at_their_releases(releases: Report) -> None:
    arity = callee(releases, CALLED)["v0.26.0"]
    assert (arity.what, arity.was, arity.now, arity.rank) == ("return", "a tuple of 2", "a tuple of 3", 1)
    lost = callee(releases, MAMBA)["v0.26.0"]
    assert lost.what == "parameters"
    assert "lost the parameter `num_uncached_common_prefix_tokens`" in lost.explanation
    assert all(change.first_bad and change.first_bad.proven for change in (arity, lost))


def test_what_matters_most_to_a_copy_comes_first(releases: Report) -> None:
    ranks = [change.rank for change in releases.callees]
    assert ranks == sorted(ranks)
    assert releases.callees[0].callee == CALLED


def test_absorbed_deltas_come_with_the_lines_to_delete(releases: Report, upstream: Repo, look, tmp_path: Path) -> None:
    (guard, *others) = releases.absorbed
    assert (guard.delta, guard.since, guard.deletable) == (GUARD, "v0.31.0", False)
    assert {one.delta for one in others} == {"defer_preemption.disabled-path", "defer_preemption.retry"}
    declared = ROOT / "deltas" / "balance.py"
    text = declared.read_text("utf-8").split("\n")
    deleted = [line for first, last in guard.lines for line in text[first - 1 : last]]
    assert deleted[0] == "EMPTY_QUEUE_GUARD = Delta("
    assert "        EMPTY_QUEUE_GUARD," in deleted

    (tmp_path / "deltas").mkdir()
    copy = Path(shutil.copy(declared, tmp_path / "deltas"))
    subprocess.run(["git", "apply", "-"], input=guard.patch, text=True, cwd=tmp_path, check=True)
    numbers = {number for first, last in guard.lines for number in range(first, last + 1)}
    assert copy.read_text("utf-8").split("\n") == [line for at, line in enumerate(text, 1) if at not in numbers]

    later = look(upstream, "v0.31.0", "v0.33.0")
    assert [one.deletable for one in later.absorbed] == [True]


def test_it_survives_json_and_can_be_read(releases: Report) -> None:
    assert from_json(to_json(releases)) == releases
    text = as_text(releases)
    assert text.startswith("balance: 9/9 apply")
    assert "BP901 changed: balance.admission-gate  (balance, v0.30.0 -> v0.31.0)" in text
    assert "KVCacheManager.get_computed_blocks returns a tuple of 3; it returned a tuple of 2" in text
    assert not [line for line in text.split("\n") if line.rstrip() != line]


def test_tags_alone_find_the_same_commits(releases: Report, upstream: Repo, look) -> None:
    few = look(upstream, "v0.23.0", "v0.33.0", "balance", tags=True)
    own = [change for change in releases.transitions if change.feature == "balance"]
    assert [(one.subject, one.kind, one.first_bad) for one in few.transitions] == [
        (one.subject, one.kind, one.first_bad) for one in own
    ]


def test_a_delta_since_a_release_needs_no_repository(capsys) -> None:
    words = ["--delta", GATE, "--since", "v0.32.0", "--until", "0.33.0", "--no-index", "--processes", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--format", "json"])
    assert ended.value.code in {0, None}
    report = from_json(capsys.readouterr().out)
    assert (report.mode, report.refs[0].name, report.refs[-1].name) == ("releases", "0.32.0", "0.33.0")
    assert [delta.name for feature in report.features for delta in feature.deltas] == [GATE]


def test_from_a_release_to_the_newest_final_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        @staticmethod
        def versions(_: str) -> list[str]:
            return ["0.9.0", "0.10.0", "0.11.0", "0.12.0rc1"]

    monkeypatch.setattr(of_releases, "finder", Known)
    assert range_of("v0.9.0", None) == "0.9.0..0.11.0"
    assert range_of("v0.11.0", None) == "0.11.0"
    assert range_of("0.9.0", "v0.10.0") == "0.9.0..0.10.0"
    with pytest.raises(PatchError) as refused:
        range_of("deadbeef", None)
    assert "needs --repo" in str(refused.value)

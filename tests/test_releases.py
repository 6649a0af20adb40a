"""The eighteen releases whose shape is known: what every delta becomes on each of them, exactly."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from balance_patcher.check import check_lane
from balance_patcher.errors import Outcome
from balance_patcher.plan import Plan, make_plan
from balance_patcher.registry import features, find_feature
from balance_patcher.report import FeatureReport, LaneReport
from balance_patcher.source import Lane, LaneSpec

RUNNING, ACTIVE = "max_num_running_reqs", "max_num_active_reqs"
COUNTED = "len(self.running) + self.num_waiting_for_streaming_input"


@dataclass(frozen=True)
class Row:
    """One release: where its own stop stands, what it compares, and what becomes of the deltas."""

    version: str
    stop: int
    variant: str
    operator: str
    cap: str
    count: str
    forwards: str
    guard: str
    blocks: bool
    defer: str


def rows() -> Iterator[Row]:
    """The table; the lines are those of the `if` of upstream's own admission stop."""
    stops = {
        "0.18.0": 558,
        "0.19.0": 568,
        "0.20.0": 572,
        "0.21.0": 530,
        "0.22.0": 549,
        "0.22.1": 549,
        "0.23.0": 567,
        "0.24.0": 630,
        "0.25.0": 644,
        "0.25.1": 644,
        "0.26.0": 673,
        "0.27.1": 691,
        "0.28.0": 757,
        "0.29.0": 784,
        "0.30.0": 864,
        "0.31.0": 893,
        "0.32.0": 923,
        "0.33.0": 1073,
    }
    for version, stop in stops.items():
        minor = int(version.split(".")[1])
        plain, active = minor < 25, minor > 30
        yield Row(
            version,
            stop,
            "running cap" if plain else "active cap, counted" if active else "running cap, counted",
            "==" if plain else ">=",
            ACTIVE if active else RUNNING,
            "len(self.running)" if plain else COUNTED,
            "nothing" if minor < 24 else "throttle_prefills",
            "absorbed" if active else "applied",
            minor < 27,
            "not-applicable" if minor < 24 else "absorbed" if minor > 29 else "applied",
        )


ROWS = tuple(rows())
each_release = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.version)


@pytest.fixture(scope="session")
def looked_at(release_dir: Callable[[str], Path]) -> Callable[[str], tuple[LaneReport, Lane, Plan]]:
    """What `verify` says of a release, the lane, and the plan; each release is looked at once."""
    known: dict[str, tuple[LaneReport, Lane, Plan]] = {}

    def get(version: str) -> tuple[LaneReport, Lane, Plan]:
        if version not in known:
            report, lane = check_lane(LaneSpec(version, f"dir:{release_dir(version)}"), features())
            assert lane is not None
            known[version] = report, lane, make_plan(lane, find_feature("balance"))
        return known[version]

    return get


Looked = Callable[[str], tuple[LaneReport, Lane, Plan]]


def balance(report: LaneReport) -> FeatureReport:
    return next(feature for feature in report.features if feature.name == "balance")


def test_the_table_has_every_known_release() -> None:
    from tests.conftest import RELEASES

    assert tuple(row.version for row in ROWS) == RELEASES


@each_release
def test_every_delta_has_the_status_that_is_known(row: Row, looked_at: Looked) -> None:
    report, _, _ = looked_at(row.version)
    assert report.all_failures == []
    assert report.outcome is Outcome.HOLDS
    assert report.vllm_version == row.version
    deltas = {delta.name: delta for delta in balance(report).deltas}
    assert {name: delta.status for name, delta in deltas.items()} == {
        "balance.disabled-path": "applied",
        "balance.admission-gate": "applied",
        "balance.admission-seam": "not-applicable",
        "balance.empty-queue-guard": row.guard,
        "balance.gather": "applied",
        "balance.scaling": "applied",
        "balance.scaling-held": "not-applicable" if row.blocks else "applied",
        "balance.scaling-standby": "applied" if row.blocks else "not-applicable",
        "balance.scaling-given-up": "applied",
    }
    (defer,) = [feature for feature in report.features if feature.name == "defer_preemption"]
    assert {delta.name: delta.status for delta in defer.deltas} == {
        "defer_preemption.disabled-path": row.defer,
        "defer_preemption.retry": row.defer,
    }
    assert defer.status == row.defer
    (prefill,) = [feature for feature in report.features if feature.name == "prefill_preemption"]
    assert {delta.status for delta in prefill.deltas} == {"applied"}
    assert {(delta.matches, bool(delta.line and delta.file)) for delta in defer.deltas} == {(1, True)}
    placed = [delta for delta in deltas.values() if delta.status != "not-applicable"]
    assert {delta.matches for delta in placed} == {1}
    assert all(delta.line and delta.file for delta in placed)
    seam, other = (delta for delta in deltas.values() if delta.status == "not-applicable")
    assert seam.detail.startswith("upstream's stop stands in the loop itself")
    assert other.detail.startswith("until 0.26" if row.blocks else ("from 0.29", "0.27.1 and 0.28"))
    assert f"forwards {row.forwards}" in deltas["balance.disabled-path"].detail
    adds = "adds throttle_prefills=False" in deltas["balance.disabled-path"].detail
    assert adds == (row.forwards == "nothing")


@each_release
def test_the_gate_stands_at_upstreams_own_stop(row: Row, looked_at: Looked) -> None:
    report, _, plan = looked_at(row.version)
    gate = next(delta for delta in balance(report).deltas if delta.name == "balance.admission-gate")
    assert (gate.line, gate.variant) == (row.stop, row.variant)
    assert gate.detail.startswith("OP " if row.operator == "==" else "COUNT num_running, OP ")
    assert f"OP {row.operator}" in gate.detail
    assert f"CAP {row.cap}" in gate.detail
    placement = plan.placement("balance.admission-gate")
    flag = next(step.text for step in placement.steps if step.text.startswith("balance_flag"))
    counts = "max(t.item() for t in self.balance_queue)"
    assert flag == f"balance_flag = self._balance_enabled and {counts} {row.operator} self.{row.cap}"


@each_release
def test_the_gather_sends_what_the_stop_counts(row: Row, looked_at: Looked) -> None:
    _, _, plan = looked_at(row.version)
    exports = plan.placement("balance.admission-gate").exports
    assert exports["_balance_cap"] == f"self.{row.cap}"
    assert ast.unparse(ast.parse(exports["_balance_count"], mode="eval")) == row.count


@each_release
def test_every_invariant_and_call_shape_holds_and_the_deltas_come_out_again(row: Row, looked_at: Looked) -> None:
    report, _, _ = looked_at(row.version)
    feature = balance(report)
    assert len(feature.invariants) == len(find_feature("balance").invariants) > 0
    assert {item.name: item.status for item in feature.invariants if item.status != "holds"} == {}
    assert [(call.call, call.status) for call in feature.calls] == [
        ("schedule()", "holds"),
        ("schedule(True)", "holds"),
        ("schedule(throttle_prefills=True)", "holds"),
    ]
    assert feature.reversible is True


@each_release
def test_no_name_of_ours_occurs_upstream(row: Row, looked_at: Looked) -> None:
    _, lane, _ = looked_at(row.version)
    text = lane.module("vllm.v1.core.sched.scheduler")
    assert text is not None
    names = {n.id for n in ast.walk(text.tree) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(text.tree) if isinstance(n, ast.Attribute)}
    assert not {name for name in names if name.lstrip("_").startswith("balance")}


def test_strict_speaks_of_absorbed_deltas_only(release_dir: Callable[[str], Path]) -> None:
    absorbed = {}
    for version in ("0.29.0", "0.30.0", "0.31.0"):
        report, _ = check_lane(LaneSpec(version, f"dir:{release_dir(version)}"), features(), strict=True)
        assert {failure.code for failure in report.all_failures} <= {"BP121"}
        absorbed[version] = [failure.what.split("'")[1] for failure in report.all_failures]
    retry = ["defer_preemption.disabled-path", "defer_preemption.retry"]
    assert absorbed == {"0.29.0": [], "0.30.0": retry, "0.31.0": ["balance.empty-queue-guard", *retry]}

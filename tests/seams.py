"""Trees with upstream's seam in, and what they must show."""

from __future__ import annotations

from pathlib import Path

from balance_patcher.check import check_lane
from balance_patcher.deltas.balance_seam import NAME
from balance_patcher.errors import Outcome
from balance_patcher.registry import features
from balance_patcher.source import DirSource, Lane, LaneSpec

SCHEDULER = Path("vllm/v1/core/sched/scheduler.py")
CALL = f"self.{NAME}()"
MARK = "# the mutant"


def lane_of(folder: Path) -> Lane:
    return Lane(folder.name, DirSource(f"dir:{folder}", folder))


def through_the_seam(folder: Path) -> dict[str, str]:
    """The statuses of balance's deltas on a tree that verifies through the seam."""
    report, _ = check_lane(LaneSpec("seam", f"dir:{folder}"), features())
    assert report.all_failures == []
    assert report.outcome is Outcome.HOLDS
    (balance,) = [feature for feature in report.features if feature.name == "balance"]
    deltas = {delta.name: delta for delta in balance.deltas}
    assert (deltas["balance.admission-gate"].status, deltas["balance.admission-gate"].variant) == (
        "absorbed", "upstream's seam",
    )  # fmt: skip
    assert deltas["balance.admission-seam"].status == "applied"
    assert {item.status for item in balance.invariants} == {"holds"}
    return {name: delta.status for name, delta in deltas.items()}

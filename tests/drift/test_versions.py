"""Releases as columns, without git: each is judged, and the same breaks are told."""

from __future__ import annotations

import pytest

from balance_patcher.errors import Outcome, PatchError
from balance_patcher.index import Finder
from tests.drift.conftest import changes
from tools.drift import releases as module
from tools.drift.choice import choose
from tools.drift.releases import released
from tools.drift.runs import Options, run_releases

pytestmark = pytest.mark.timeout(1200)


def test_releases_are_columns(index) -> None:
    found = run_releases("0.33.0,0.30.0,0.31.0", choose(["balance"], [], []), index, Options(processes=1)).report
    assert [(ref.name, ref.kind, ref.judged) for ref in found.refs] == [
        (version, "release", True) for version in ("0.30.0", "0.31.0", "0.33.0")
    ]
    assert found.outcome is Outcome.HOLDS
    (guard,) = changes(found, "balance.empty-queue-guard")
    assert (guard.before, guard.after, guard.kind) == ("0.30.0", "0.31.0", "absorbed-upstream")
    assert guard.first_bad is not None
    assert (guard.first_bad.commit, guard.first_bad.parent, guard.first_bad.proven) == (None, "0.30.0", True)


def test_a_range_has_the_final_releases_between(monkeypatch) -> None:
    class Known(Finder):
        def __init__(self) -> None:
            pass

        def versions(self, dist: str) -> list[str]:
            return ["0.9.0", "0.10.0rc1", "0.10.0", "0.11.0", "0.11.0.dev1", "0.12.0"]

        def find(self, dist: str, version: str):
            raise PatchError(module._bad(version, "not there").failures[0])

    monkeypatch.setattr(module, "finder", Known)
    assert released("0.9.0..0.11.0") == ["0.9.0", "0.10.0", "0.11.0"]
    assert released("0.10.0rc1..0.10.0") == ["0.10.0rc1", "0.10.0"]
    with pytest.raises(PatchError, match="not there"):
        released("0.9.1..0.11.0")

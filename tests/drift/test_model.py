"""The report itself: it survives JSON, and says what an exit status needs."""

from __future__ import annotations

import json

import pytest

from balance_patcher.errors import Outcome
from tests.drift.examples import EXAMPLE, GREEN
from tools.drift.kinds import Kind
from tools.drift.model import Report
from tools.drift.written import from_json, to_json


@pytest.mark.parametrize("report", [EXAMPLE, GREEN])
def test_a_report_survives_json(report: Report) -> None:
    again = from_json(to_json(report))
    assert again == report
    assert type(again.cells[0].deltas) is tuple


def test_json_says_the_verdict() -> None:
    assert json.loads(to_json(EXAMPLE))["outcome"] == "broken"
    assert json.loads(to_json(GREEN))["verdicts"] == list(GREEN.verdicts)


@pytest.mark.parametrize("text", ["[]", '{"schema": 0}'])
def test_another_schema_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schema 1"):
        from_json(text)


def test_the_verdict() -> None:
    assert GREEN.outcome is Outcome.HOLDS
    assert GREEN.verdicts == (
        "gate: 2/2 apply on 1.0.0..1.1.0, no edit needed",
        "retry: 1/1 apply on 1.0.0..1.1.0, no edit needed",
    )
    assert EXAMPLE.outcome is Outcome.BROKEN
    assert EXAMPLE.verdicts[0] == "ACTION: edit deltas/gate.py:12 (anchor changed in 2222222222, vllm#4242)"


def test_what_could_not_be_read_is_never_green() -> None:
    from dataclasses import replace

    cells = tuple(cell for cell in EXAMPLE.cells if cell.feature == "retry")
    report = replace(EXAMPLE, cells=cells, copies=(), transitions=())
    assert report.outcome is Outcome.UNKNOWN
    assert replace(GREEN, cells=()).outcome is Outcome.UNKNOWN


def test_every_kind_has_its_own_id_and_label() -> None:
    assert len({kind.id for kind in Kind}) == len({kind.label for kind in Kind}) == len(Kind)
    assert all(Kind.of(kind.label) is kind and kind.next for kind in Kind)

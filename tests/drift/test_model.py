"""The report itself: it survives JSON, and says what an exit status needs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from balance_patcher.errors import Outcome
from tests.drift.examples import BROKEN, END, EXAMPLE, GREEN, REFS
from tools.drift.formats import FORMATS
from tools.drift.kinds import Kind
from tools.drift.matrix import Ref
from tools.drift.model import Counts, Report
from tools.drift.text import as_text
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


def test_what_one_commit_broke_in_one_function_is_one_action() -> None:
    stop, _, _, invariant, _ = EXAMPLE.transitions
    guard = replace(stop, subject="gate.guard", delta="gate.guard", declared="deltas/gate.py:30", kind="moved")
    elsewhere = replace(guard, target="vllm.made.up:other", declared="deltas/gate.py:50")
    later = replace(guard, first_bad=invariant.first_bad, declared="deltas/gate.py:60")
    broken = replace(EXAMPLE, transitions=(stop, elsewhere, guard, later, invariant))
    assert [line for line in broken.verdicts if line.startswith("ACTION: edit deltas")] == [
        f"{EXAMPLE.verdicts[0]}, and with it deltas/gate.py:30 (gate.guard moved)",
        "ACTION: edit deltas/gate.py:50 (anchor moved in 2222222222, vllm#4242)",
        "ACTION: edit deltas/gate.py:60 (anchor moved in 4444444444)",
        "ACTION: edit deltas/gate.py:12 (the loop asks once a turn invariant-broken in 4444444444)",
    ]


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (EXAMPLE, ""),
        (replace(EXAMPLE, counts=Counts(commits=0)), "the range is empty: no commit lies between its ends"),
        (
            replace(EXAMPLE, counts=Counts(commits=1)),
            "nothing can have changed: 1 commit, none of which touches what is read",
        ),
        (
            replace(EXAMPLE, counts=Counts(commits=20)),
            "nothing can have changed: 20 commits, none of which touches what is read",
        ),
        (GREEN, ""),
        (replace(GREEN, refs=GREEN.refs[:1]), "one release has nothing to be compared with"),
    ],
)
def test_an_empty_range_says_that_it_is_empty_and_why(report: Report, said: str) -> None:
    assert report.empty == said
    for name in ("text", "markdown", "github", "html"):
        assert (said[1:] in FORMATS[name](report)) or not said, name
    assert FORMATS["markdown"](report).startswith("\n".join(report.verdicts[:1])) or not said


def test_the_column_in_which_a_text_can_be_read_again_is_shown() -> None:
    quiet = replace(EXAMPLE, transitions=EXAMPLE.transitions[-1:], callees=())
    again = replace(END, hash="7" * 40)
    refs = (*REFS[:-1], Ref(again.short, "commit", judged=False, commit=again), REFS[-1])
    cells = (*EXAMPLE.cells, *(replace(cell, ref=again.short) for cell in EXAMPLE.cells if cell.ref == "main"))
    report = replace(quiet, refs=refs, cells=cells)
    assert [ref.name for ref in report.shown] == ["v1.0.0", "v1.1.0", BROKEN.short, again.short, "main"]
    assert "retry        ++?==" in as_text(report)


def test_what_could_not_be_read_is_never_green() -> None:
    cells = tuple(cell for cell in EXAMPLE.cells if cell.feature == "retry")
    report = replace(EXAMPLE, cells=cells, copies=(), transitions=())
    assert report.outcome is Outcome.UNKNOWN
    assert replace(GREEN, cells=()).outcome is Outcome.UNKNOWN


def test_every_kind_has_its_own_id_and_label() -> None:
    assert len({kind.id for kind in Kind}) == len({kind.label for kind in Kind}) == len(Kind)
    assert all(Kind.of(kind.label) is kind and kind.next for kind in Kind)

"""The text for a terminal: the verdict first, and everything that a reader needs to act."""

from __future__ import annotations

from dataclasses import replace

from tests.drift.examples import EXAMPLE, GREEN, RENAME
from tools.drift.formats import FORMATS
from tools.drift.model import Counts
from tools.drift.text import as_text


def test_the_verdict_comes_first_and_the_action_is_whole() -> None:
    text = as_text(EXAMPLE)
    first, *_ = text.split("\n")
    assert first == "ACTION: edit deltas/gate.py:12 (anchor changed in 2222222222, vllm#4242)"
    for said in (
        "ACTION  BP901 changed: gate.stop  (gate, v1.0.0 -> 2222222222)",
        "differs at test.comparators[0].attr: `limit` → `bound`",
        "  >     24              if count == self.bound:",
        '    +            Anchor("if $N == self.bound: break"),',
        "  prove     python -m balance_patcher verify --feature gate git:vllm@main",
        "BP908 callee-changed: what matters most to a copy comes first",
        "Blocks.take returns a tuple of 3, and returned a tuple of 2",
        "  delete    deltas/gate.py, lines 30-48, 60: when this is true: the oldest vLLM is 1.1.0",
        "  delete    deltas/retry.py, lines 9-40: all refs here have it; when this is true: vllm#4141 has landed",
        "line 140: a, b = self.blocks.take(3)",
        "not proven: 3333333333 before it has: holds",
    ):  # fmt: skip
        assert said in text, said
    assert all(len(line) <= 130 for line in text.split("\n"))


def test_the_matrix_has_a_letter_for_each_column() -> None:
    text = as_text(EXAMPLE)
    assert "gate         +XXX?X" in text
    assert "retry        +++=?=" in text


def test_a_long_subject_is_cut() -> None:
    subject = "So " + "very " * 200 + "long"
    commit = replace(RENAME, subject=subject)
    refs = tuple(replace(ref, commit=commit) if ref.commit is RENAME else ref for ref in EXAMPLE.refs)
    first = replace(EXAMPLE.transitions[0], first_bad=replace(EXAMPLE.transitions[0].first_bad, commit=commit))
    callee = replace(EXAMPLE.callees[0], first_bad=first.first_bad)
    text = as_text(replace(EXAMPLE, refs=refs, transitions=(first,), callees=(callee,)))
    assert text.count(f"{subject[:61]}…") == 3  # a column, the change and the callee
    assert subject[:63] not in text


def test_one_is_no_plural() -> None:
    text = as_text(replace(EXAMPLE, counts=Counts(commits=1, relevant=1, blobs=1, judged=1)))
    assert "1 commit, 1 of them touches a file that is read\n1 look at 1 text, 0 more remembered" in text
    assert "400 commits, 5 of them touch a file that is read\n10 looks at 9 texts, 2 more" in as_text(EXAMPLE)


def test_green_is_short() -> None:
    assert len(as_text(GREEN).split("\n")) < 20
    assert {"text", "json"} <= set(FORMATS)

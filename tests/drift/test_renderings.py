"""The report as markdown for a pull request and as annotations: snapshots, the sixty lines, and hostile text.

``UPDATE_SNAPSHOTS=1`` writes the snapshots anew; what changed is then read as any change is.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from balance_patcher.errors import Failure
from tests.drift.examples import ABSORBED, CALLEES, COPIES, EXAMPLE, GREEN, RENAME, TRANSITIONS
from tools.drift.annotations import as_github
from tools.drift.changed import Snippet
from tools.drift.copied import Copy
from tools.drift.formats import FORMATS
from tools.drift.markdown import LIMIT, as_markdown
from tools.drift.model import Report

SNAPSHOTS = Path(__file__).parent / "snapshots"
HOSTILE = "fix `x` @everyone <img src=x onerror=alert(1)> ``` #1 [a](b)\n::error::no"


@pytest.mark.parametrize("name", ["example", "green"])
@pytest.mark.parametrize("kind", ["markdown", "github"])
def test_the_snapshot(name: str, kind: str) -> None:
    report = {"example": EXAMPLE, "green": GREEN}[name]
    text = f"{FORMATS[kind](report)}\n"
    file = SNAPSHOTS / f"{name}.{ {'markdown': 'md', 'github': 'txt'}[kind] }"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


# -- markdown --------------------------------------------------------------------------------


def test_the_verdict_comes_first() -> None:
    assert as_markdown(GREEN) == "\n".join(GREEN.verdicts)
    assert as_markdown(EXAMPLE).splitlines()[0] == (
        "ACTION: edit deltas/gate.py:12 (anchor changed in 2222222222, vllm#4242)"
    )


def many(breaks: int, callees: int = 0, copies: int = 0, lines: int = 1) -> Report:
    change = TRANSITIONS[0]
    assert change.proposal is not None
    proposal = replace(change.proposal, patch=change.proposal.patch + " more\n" * lines)
    return replace(
        EXAMPLE,
        transitions=(replace(change, proposal=proposal),) * breaks,
        callees=CALLEES[:1] * callees,
        absorbed=ABSORBED * callees,
        copies=COPIES[:1] * copies,
    )


@pytest.mark.parametrize("breaks", [1, 2, 3, 5, 12, 80])
@pytest.mark.parametrize("others", [0, 1, 20])
@pytest.mark.parametrize("lines", [1, 30, 200])
def test_it_has_at_most_sixty_lines_and_no_open_block(breaks: int, others: int, lines: int) -> None:
    text = as_markdown(many(breaks, others, others, lines))
    assert len(text.splitlines()) <= LIMIT
    assert text.startswith("ACTION: edit deltas/gate.py:12 ")
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0


def test_what_does_not_fit_goes_in_order_and_is_said() -> None:
    full = as_markdown(many(1))
    assert "say(" in full
    assert "```diff\n--- a/deltas/gate.py" in full
    shorter = as_markdown(many(2))
    assert shorter.count("--- a/deltas/gate.py") == 2
    one = as_markdown(many(3))
    assert one.count("--- a/deltas/gate.py") == 1
    assert one.count("A proposal for deltas/gate.py is in the full report.") == 2
    assert "lines more: `--format html`" in as_markdown(many(40))
    assert "- and 58 more" in as_markdown(many(0, copies=70, callees=1))


def test_the_patch_is_whole_so_that_it_applies() -> None:
    proposal = TRANSITIONS[0].proposal
    assert proposal is not None
    assert f"```diff\n{proposal.patch}```\n" in as_markdown(EXAMPLE)


def test_at_most_six_lines_stand_around_what_changed() -> None:
    lines = tuple(f"line {number}" for number in range(1, 41))
    change = replace(
        TRANSITIONS[0],
        old=Snippet("f.py", 1, lines, (20,)),
        new=Snippet("f.py", 1, (*lines[:19], "line new", *lines[20:]), (20,)),
        proposal=None,
    )
    text = as_markdown(replace(EXAMPLE, transitions=(change,), callees=(), absorbed=(), copies=()))
    block = text.partition("```diff\n")[2].partition("```")[0].splitlines()[1:]
    assert block == [
        *(f" line {number}" for number in range(14, 20)),
        "-line 20",
        "+line new",
        *(f" line {number}" for number in range(21, 27)),
    ]


def test_a_copy_that_does_not_fit_at_the_judged_ref_is_told_call_by_call() -> None:
    (copy,) = COPIES
    misfit = copy.cells[2]
    copy = replace(copy, cells=(*copy.cells[:-1], replace(misfit, ref="main")))
    text = as_markdown(replace(EXAMPLE, copies=(copy,)))
    assert "nearest is `v1.0.0`; 1 call no longer fits\n" in text
    assert "- line 140: `a, b = self.blocks.take(3)`: it returns a tuple of 3, and is unpacked into 2" in text


@pytest.mark.parametrize("status", ["gone", "unreadable"])
def test_a_copy_that_cannot_be_compared_says_why(status: str) -> None:
    (copy,) = COPIES
    cell = replace(copy.cells[-1], status=status, why="it is not there")
    text = as_markdown(replace(EXAMPLE, copies=(Copy(copy.file, 1, "f", copy.target, (cell,)),)))
    assert f"- `f`, somebody/patch.py:1: {status} at `main`: `it is not there`" in text


def test_what_could_not_be_checked_is_said() -> None:
    failure = Failure("BP506", "no ref `nightly`", "fetch it")
    assert "Could not check: BP506 git ref not found: no ref `nightly`" in as_markdown(
        replace(GREEN, failures=(failure,))
    )
    nothing = replace(GREEN, cells=(), features=())
    assert as_markdown(nothing) == "Could not check: nothing was looked at."


def outside_code(text: str) -> str:
    """What GitHub reads as markup: the text without its code blocks and code spans."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", text)


def hostile() -> Report:
    change = TRANSITIONS[0]
    found = change.first_bad
    assert found is not None
    assert found.commit is not None
    commit = replace(RENAME, subject=HOSTILE, author=HOSTILE)
    snippet = Snippet("f.py", 1, ("before", "```", "@everyone <b>", "after"), (2,))
    change = replace(
        change, first_bad=replace(found, commit=commit), old=snippet, new=replace(snippet, lines=("~~~", "````", "x")),
        explanation=f"it is not {HOSTILE}",
    )  # fmt: skip
    callee = replace(CALLEES[0], callee=f"m:{HOSTILE}", explanation=HOSTILE)
    (copy,) = COPIES
    calls = replace(copy.cells[2].calls[0], call=HOSTILE, why="<b> @everyone")
    cell = replace(copy.cells[2], ref="main", calls=(calls,))
    return replace(EXAMPLE, transitions=(change,), callees=(callee,), copies=(replace(copy, cells=(cell,)),))


def test_nothing_of_upstreams_is_markup_or_a_mention() -> None:
    left = outside_code(as_markdown(hostile()))
    assert "@everyone" not in left
    assert not re.search(r"#1\b", left)
    assert not re.search(r"(?<!\\)<(img|b)\b", left)
    assert not re.search(r"(?<!\\)\[a\]\(b\)", left)
    assert not re.search(r"^::", as_markdown(hostile()), re.MULTILINE)


def test_callees_that_only_do_something_else_are_counted() -> None:
    quiet = replace(CALLEES[0], what="body", rank=7)
    text = as_markdown(replace(EXAMPLE, callees=(quiet, quiet, CALLEES[1])))
    assert "- `Planner.split` lost the parameter c, in " in text
    assert "- 2 that are called as they were, and do something else" in text
    assert "Blocks.take" not in text


# -- annotations -----------------------------------------------------------------------------


def test_each_finding_is_one_line_on_the_line_that_declares_it() -> None:
    lines = as_github(EXAMPLE).splitlines()
    assert all(re.match(r"::(error|warning|notice) ", line) for line in lines)
    assert lines[0].startswith("::error file=deltas/gate.py,line=12,title=BP901 anchor changed (gate.stop)::")
    assert [line.partition(" ")[0] for line in as_github(GREEN).splitlines()] == ["::notice"]


def test_an_annotation_is_put_where_github_looks_for_it(tmp_path, monkeypatch) -> None:
    """The declaring file and the copy are named from the root of the job, wherever the report was made."""
    for name in ("ours/deltas/gate.py", "ours/somebody/patch.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path / "ours")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    (copy,) = COPIES
    said = as_github(replace(EXAMPLE, copies=(replace(copy, cells=(replace(copy.cells[2], ref="main"),)),)))
    assert said.startswith("::error file=ours/deltas/gate.py,line=12,title=BP901 ")
    assert "::error file=ours/somebody/patch.py,line=140,title=BP908 " in said


def test_hostile_text_starts_no_command_of_its_own() -> None:
    text = as_github(hostile())
    assert len(text.splitlines()) == len(
        as_github(replace(EXAMPLE, transitions=TRANSITIONS[:1], callees=CALLEES[:1])).splitlines()
    )
    assert all(line.startswith("::") for line in text.splitlines())
    assert "%0A::error::no" in text


def test_a_body_that_changed_is_no_annotation() -> None:
    quiet = replace(CALLEES[0], rank=5, what="body")
    assert "BP908" not in as_github(replace(EXAMPLE, callees=(quiet,), copies=()))


def test_what_cannot_be_checked_is_an_error_where_it_is() -> None:
    failure = Failure("BP506", "no ref", "fetch it", file="pins/a.commit", line=1)
    said = as_github(replace(GREEN, failures=(failure,)))
    assert "::error file=pins/a.commit,line=1,title=BP506 git ref not found::BP506 git ref not found: no ref%0A" in said
    assert said.splitlines()[-1].startswith("::error title=drift report::")


def test_a_misfit_of_a_copy_stands_on_its_call() -> None:
    (copy,) = COPIES
    cell = replace(copy.cells[2], ref="main")
    said = as_github(replace(EXAMPLE, copies=(replace(copy, cells=(cell,)),)))
    assert "::error file=somebody/patch.py,line=140,title=BP908 callee changed (TheirPlanner.plan)::a, b = " in said
    gone = replace(cell, status="gone", calls=(), why="it is not there")
    said = as_github(replace(EXAMPLE, copies=(replace(copy, cells=(gone,)),)))
    assert "::error file=somebody/patch.py,line=100,title=BP904 target is gone (TheirPlanner.plan)::main: it is" in said

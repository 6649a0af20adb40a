"""The renderings of a report, on reports that are made up: what is bad is seen in each of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from xml.etree import ElementTree as Xml

import pytest
from rich.console import Console

from balance_patcher.errors import Failure, Outcome
from balance_patcher.pins import Pin
from balance_patcher.renderings import as_github, as_json, as_junit, as_markdown
from balance_patcher.report import CallReport, DeltaReport, FeatureReport, InvariantReport, LaneReport, Report
from balance_patcher.terminal import as_text, print_report

BROKEN = Failure(
    "BP113",
    "delta 'f.gate' cannot be placed",
    "look, then decide",
    (("target", "m:C.f"), ("nearest", "core.py:3  `if a: 100%`\nand more"), ("declared", "deltas/f.py:41")),
    "/src/core.py",
    3,
)
ELSEWHERE = Failure("BP201", "a path: one, two", "read it", (), "/src/core.py", 9)
NOWHERE = Failure("BP501", "the index cannot be reached", "try again")


def feature(*failures: Failure, status: str = "applied", reversible: bool | None = True) -> FeatureReport:
    return FeatureReport(
        "f",
        [DeltaReport("f.gate", "m:C.f", status, "a | b", "/src/core.py", 3, 1, "OP ==", "deltas/f.py:41")],
        [InvariantReport("order", "holds", "3 before 4")],
        [CallReport("f()", "holds", "")],
        reversible,
        list(failures),
    )


def lane(name: str = "main", *features: FeatureReport, failures: tuple[Failure, ...] = ()) -> LaneReport:
    return LaneReport(name, f"dir:/{name}", "0.32.0", "5df63a720", None, list(features), list(failures))


GOOD = lane("good", feature())
BAD = lane("bad", feature(BROKEN, ELSEWHERE, status="failed", reversible=None))
DARK = lane("dark", failures=(NOWHERE,))
ODD = lane("odd", failures=(Failure("BP004", "`odd` is no source", "write a source"),))
DIFFERENT = Failure("BP510", "it is version 2", "point it at v1")
OTHER = lane("other", feature(), failures=(DIFFERENT,))


# -- the verdict -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "outcome", "verdict"),
    [
        ([GOOD], Outcome.HOLDS, "All deltas hold on 1 lane."),
        ([GOOD, GOOD], Outcome.HOLDS, "All deltas hold on 2 lanes."),
        ([GOOD, BAD], Outcome.BROKEN, "Broken: bad (1 of 2 lanes)."),
        ([GOOD, DARK], Outcome.UNKNOWN, "Could not check: dark (1 of 2 lanes)."),
        ([DARK, BAD, GOOD], Outcome.BROKEN, "Broken: bad. Could not check: dark (of 3 lanes)."),
        ([BAD], Outcome.BROKEN, "Broken: bad (1 of 1 lane)."),
        (
            [ODD, BAD, BAD, DARK],
            Outcome.USAGE,
            "Wrong usage: odd. Broken: bad, bad. Could not check: dark (of 4 lanes).",
        ),
        ([], Outcome.UNKNOWN, "Could not check: there is no lane."),
        ([OTHER], Outcome.UNKNOWN, "Not the pinned one: other (1 of 1 lane)."),
        (
            [lane("both", feature(BROKEN), failures=(DIFFERENT,)), lane("two", failures=(DIFFERENT, NOWHERE))],
            Outcome.BROKEN,
            "Broken: both. Not the pinned one: both, two. Could not check: two (of 2 lanes).",
        ),
    ],
)
def test_the_verdict_names_what_is_not_green(lanes: list[LaneReport], outcome: Outcome, verdict: str) -> None:
    report = Report(lanes)
    assert (report.outcome, report.verdict) == (outcome, verdict)


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (Report([]), Outcome.UNKNOWN),
        (Report([LaneReport("x", "y")]), Outcome.UNKNOWN),
        (Report([lane("x", feature(reversible=False))]), Outcome.BROKEN),
        (Report([lane("x", feature(reversible=None))]), Outcome.UNKNOWN),
        (Report([lane("x", FeatureReport("f", [], [InvariantReport("i", "unknown", "")], [], True))]), Outcome.UNKNOWN),
        (Report([lane("x", FeatureReport("f", [], [], [CallReport("c", "unknown", "")], True))]), Outcome.UNKNOWN),
        (Report([lane("x", feature(), failures=(NOWHERE,))]), Outcome.UNKNOWN),
        (Report([lane("x", feature(), failures=(Failure("BP004", "w", "n"),))]), Outcome.USAGE),
    ],
)
def test_what_was_not_checked_is_never_green(report: Report, outcome: Outcome) -> None:
    assert report.outcome is outcome


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (("applied", "absorbed"), "applied"),
        (("absorbed", "not-applicable"), "absorbed"),
        (("not-applicable",), "not-applicable"),
        ((), "unknown"),
    ],
)
def test_a_feature_is_what_the_best_of_its_deltas_is(statuses: tuple[str, ...], status: str) -> None:
    deltas = [DeltaReport(f"f.{s}", "m:f", s, None, None, None, 1, "", "d:1") for s in statuses]
    assert FeatureReport("f", deltas, reversible=True).status == status


# -- json ------------------------------------------------------------------------------------


def test_json_has_every_key_of_its_schema() -> None:
    BAD.pin = Pin("v1", "different", "it is v2")
    try:
        result = json.loads(as_json(Report([GOOD, BAD, DARK])))
    finally:
        BAD.pin = None
    assert {"schema", "exit_code", "lanes"} <= set(result)
    assert (result["schema"], result["exit_code"]) == (1, 1)
    assert all(
        {"name", "source", "vllm_version", "commit", "pin", "status", "features"} <= set(item)
        for item in result["lanes"]
    )
    found = result["lanes"][1]
    assert found["pin"] == {"wanted": "v1", "status": "different", "detail": "it is v2"}
    assert {"name", "status", "deltas", "invariants"} <= set(found["features"][0])
    (delta,) = found["features"][0]["deltas"]
    assert {"name", "target", "status", "variant", "file", "line", "matches", "detail"} <= set(delta)
    assert set(found["features"][0]["invariants"][0]) == {"name", "status", "detail"}
    assert [item["status"] for item in result["lanes"]] == ["ok", "failed", "unknown"]
    assert [item["code"] for item in found["features"][0]["failures"]] == ["BP113", "BP201"]


# -- github ----------------------------------------------------------------------------------


def test_an_annotation_stands_on_the_declaring_line_else_on_the_file() -> None:
    lines = as_github(Report([BAD, DARK])).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("::error file=deltas/f.py,line=41,title=BP113 ")
    assert lines[1].startswith("::error file=/src/core.py,line=9,title=BP201 ")
    assert lines[2].startswith("::error title=BP501 ")


def test_an_annotation_is_put_where_github_looks_for_it(tmp_path, monkeypatch) -> None:
    """The file is named from the root of the job, and not from the folder that `verify` was started in."""
    (tmp_path / "ours" / "deltas").mkdir(parents=True)
    (tmp_path / "ours" / "deltas" / "f.py").write_text("")
    monkeypatch.chdir(tmp_path / "ours")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    assert as_github(Report([BAD])).startswith("::error file=ours/deltas/f.py,line=41,title=BP113 ")


def test_an_annotation_is_one_line_and_escaped() -> None:
    (line, _) = as_github(Report([BAD])).splitlines()
    _, properties, message = line.split("::", 2)
    assert "100%25" in message
    assert "%0A  next      look, then decide" in message
    named = lane("a:b,c", feature(BROKEN))
    assert "title=BP113 anchor does something else (a%3Ab%2Cc)::" in as_github(Report([named]))
    assert properties.count("file=") == 1


def test_a_green_lane_is_a_notice_and_a_dark_one_an_error() -> None:
    lines = as_github(Report([GOOD, LaneReport("empty", "dir:/e")])).splitlines()
    assert lines[0].startswith("::notice title=good::vLLM 0.32.0 is ok. f: f.gate applied")
    assert lines[1].startswith("::error title=empty::")


def test_a_notice_says_what_the_pin_rests_on() -> None:
    pinned = lane("p", feature())
    pinned.pin = Pin("v1", "proven", "git object abc")
    assert as_github(Report([pinned])).endswith("; pin v1 proven, git object abc")


# -- markdown --------------------------------------------------------------------------------


def test_markdown_has_the_verdict_first_then_one_table_then_every_failure() -> None:
    lines = as_markdown(Report([GOOD, BAD, DARK])).splitlines()
    assert lines[0] == "**Broken: bad. Could not check: dark (of 3 lanes).**"
    table = [line for line in lines if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in table} == {8}
    assert any("a \\| b" in line for line in table)
    assert any("core.py:3" in line for line in table)
    assert "good: f applied, invariants 1/1, call shapes 1/1, takes out clean." in lines
    text = "\n".join(lines)
    for failure in (BROKEN, ELSEWHERE, NOWHERE):
        assert f"```\n{failure}\n```" in text


# -- junit -----------------------------------------------------------------------------------


def test_junit_counts_what_it_holds() -> None:
    root = Xml.fromstring(as_junit(Report([GOOD, BAD, DARK])))  # noqa: S314 - our own text
    assert [suite.get("name") for suite in root] == ["good", "bad", "dark"]
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.get("tests", "")) == len(cases)
        assert int(suite.get("failures", "")) == sum(case.find("failure") is not None for case in cases)
        assert int(suite.get("errors", "")) == sum(case.find("error") is not None for case in cases)
        assert int(suite.get("skipped", "")) == sum(case.find("skipped") is not None for case in cases)
    good, bad, dark = root
    assert (good.get("failures"), good.get("errors")) == ("0", "0")
    assert (bad.get("failures"), bad.get("errors"), bad.get("skipped")) == ("2", "0", "1")
    assert (dark.get("failures"), dark.get("errors")) == ("0", "1")


def cases(*failures: Failure, **options: object) -> dict[str, tuple[str, str, str]]:
    """Kind, message and text of each case of one lane, by its name."""
    root = Xml.fromstring(as_junit(Report([lane("x", feature(*failures, **options))])))  # noqa: S314 - our own text
    found = {}
    for case in root.iter("testcase"):
        assert len(case) <= 1
        kind = case[0] if len(case) else None
        said = ("", "", "") if kind is None else (kind.tag, kind.get("message", ""), kind.text or "")
        assert case.get("name") not in found
        found[case.get("name", "")] = said
    return found


def test_a_finding_stands_once_and_on_its_own_case() -> None:
    broken = Failure("BP204", "not before", "read", (("invariant", "order"),))
    shape = Failure("BP120", "`f()`: missing an argument", "add it")
    found = cases(BROKEN, broken, shape, status="failed")
    assert list(found) == ["f.gate", "order", "f()", "f takes out clean"]
    for name, failure in (("f.gate", BROKEN), ("order", broken), ("f()", shape)):
        assert found[name] == ("failure", failure.headline, str(failure))
    assert found["f takes out clean"] == ("", "", "")


def test_what_has_no_case_of_its_own_gets_one_whose_name_does_not_change() -> None:
    other = Failure("BP501", "no answer after 3.1 s", "try again")
    found = cases(ELSEWHERE, NOWHERE, other, BROKEN, BROKEN.with_fields(("also", "x")))
    assert [name for name, (kind, _, _) in found.items() if kind] == [
        "f.gate",
        "f.gate (2)",
        "BP201 hook not called on every path",
        "BP501 package index cannot be reached",
        "BP501 package index cannot be reached (2)",
    ]
    assert [found[name][0] for name in found if name.startswith("BP")] == ["failure", "error", "error"]


def test_a_finding_about_two_deltas_is_counted_once() -> None:
    both = Failure("BP118", "'f.gate' and 'f.other' edit at one point", "say which", (("declared", "deltas/f.py:41"),))
    made = feature(both, status="failed")
    made.deltas.append(DeltaReport("f.other", "m:C.f", "failed", None, None, None, 1, "", "deltas/f.py:50"))
    root = Xml.fromstring(as_junit(Report([lane("x", made)])))  # noqa: S314 - our own text
    assert root[0].get("failures") == "1"
    other = next(case for case in root.iter("testcase") if case.get("name") == "f.other")
    assert other[0].tag == "skipped"
    assert other[0].get("message", "").startswith("BP118 ")


@pytest.mark.parametrize(
    ("reversible", "kind", "said"),
    [(True, "", ""), (False, "failure", "does not give upstream's text back"), (None, "skipped", "not be rewritten")],
)
def test_taking_out_gives_the_real_reason(reversible: object, kind: str, said: str) -> None:
    found = cases(BROKEN, reversible=reversible)["f takes out clean"]
    assert found[0] == kind
    assert said in found[1]


def test_what_was_not_checked_is_skipped_but_never_a_green_suite() -> None:
    made = feature(reversible=None)
    made.invariants[0] = InvariantReport("order", "unknown", "the feature could not be placed")
    root = Xml.fromstring(as_junit(Report([lane("x", made)])))  # noqa: S314 - our own text
    order = next(case for case in root.iter("testcase") if case.get("name") == "order")
    assert (order[0].tag, order[0].get("message")) == ("skipped", "the feature could not be placed")
    assert root[0].get("errors") == "1"


def test_junit_can_be_read_whatever_stands_in_a_failure() -> None:
    odd = Failure("BP113", "a \x00 b \x1b[31m <&> \ud800", "next\x08", (("nearest", "x\x0cy ]]>"),))
    root = Xml.fromstring(as_junit(Report([lane("od\x07d", feature(odd))])).encode("utf-8", "strict"))  # noqa: S314 - our own text
    text = "".join(root.itertext())
    assert "<&>" in text
    assert "]]>" in text


# -- text ------------------------------------------------------------------------------------


def test_text_has_every_failure_and_the_verdict_last() -> None:
    text = as_text(Report([GOOD, BAD, DARK]))
    for name, failure in (("bad", BROKEN), ("bad", ELSEWHERE), ("dark", NOWHERE)):
        assert f"{name}: {failure}" in text
    assert text.rstrip().endswith("Broken: bad. Could not check: dark (of 3 lanes).")


def test_text_shows_a_pin_and_the_counts() -> None:
    pinned = lane("p", feature())
    pinned.pin = Pin("v1", "proven", "git object abc")
    text = as_text(Report([pinned]))
    assert "pin v1" in text
    assert "git object abc" in text
    assert "invariants 1/1, call shapes 1/1, takes out clean" in " ".join(text.split())


@pytest.mark.parametrize("name", ["dir:/tmp/[old]/vllm", "dir:/tmp/[/old]", "x[red]y"])
def test_brackets_are_no_markup(name: str) -> None:
    odd = lane(name, feature())
    odd.features[0].deltas[0].detail = "VALUE self.counts[rank]"
    text = as_text(Report([odd]))
    assert name in text
    assert "self.counts[rank]" in " ".join(text.split())


@pytest.mark.parametrize("render", [as_json, as_github, as_markdown, as_junit, as_text])
def test_every_rendering_has_the_id_and_the_next_step_of_every_failure(render: Callable[[Report], str]) -> None:
    text = render(Report([GOOD, BAD, DARK]))
    for failure in (BROKEN, ELSEWHERE, NOWHERE):
        assert failure.code in text
        assert failure.next in text


@pytest.mark.parametrize("render", [as_markdown, as_text])
def test_what_was_not_checked_is_counted(render: Callable[[Report], str]) -> None:
    made = feature(BROKEN, reversible=None)
    made.invariants += [InvariantReport("a", "unknown", ""), InvariantReport("b", "broken", "")]
    assert "invariants 1/3 (1 not checked), call shapes 1/1, not rewritten" in render(Report([lane("x", made)]))


def on_a_terminal(report: Report, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    print_report(report, console)
    return console.file.getvalue().splitlines()


def test_a_terminal_of_80_columns_is_enough() -> None:
    long = "VALUE len(self.running) + self.num_waiting_for_streaming_input, CAP max_num_active_reqs"
    made = feature(BROKEN, ELSEWHERE)
    made.deltas[0] = DeltaReport(
        "balance.empty-queue-guard",
        "m:f",
        "applied",
        "after the synchronisation",
        "/x/scheduler.py",
        1234,
        2,
        long,
        "d:1",
    )
    lines = on_a_terminal(Report([lane("pypi:vllm==0.32.0", made)]), 80)
    assert max(map(len, lines)) <= 80
    assert "  balance.empty-queue-guard  applied  scheduler.py:1234  2" in lines
    assert "      after the synchronisation; VALUE len(self.running) +" in lines
    assert as_text(Report([lane("x", made)])).count(long) == 1  # elsewhere a line is as long as it is


def test_a_command_is_not_broken() -> None:
    command = "git -C " + "/deep" * 20 + " fetch --depth 1 origin tag v1"
    lines = on_a_terminal(Report([lane("x", failures=(Failure("BP509", "w " * 60, command),))]), 80)
    assert f"  next      {command}" in lines


def test_a_lane_has_its_heading_and_a_table_only_with_rows() -> None:
    lines = as_text(Report([GOOD, DARK])).splitlines()
    assert lines[:4] == [
        "good  vLLM 0.32.0  dir:/good",
        "  delta   status   variant  where      matches",
        "  f.gate  applied  a | b    core.py:3  1",
        "      OP ==",
    ]
    assert "dark  vLLM 0.32.0  dir:/dark  unknown" in lines
    assert sum("  variant  " in line for line in lines) == 1


def test_a_commit_of_a_pin_is_shortened() -> None:
    pinned = lane("p", feature())
    pinned.pin = Pin("0123456789" * 4, "proven", "commit " + "0123456789" * 4)
    assert "pin 012345678901: proven, commit 012345678901\n" in as_text(Report([pinned]))

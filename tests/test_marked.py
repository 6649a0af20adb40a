"""Where several features share a function, a diff says of each changed line whose it is."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from balance_patcher.build import compile_plan
from balance_patcher.compose import compose
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.feature import Feature, RuntimeClass
from balance_patcher.marked import sign_of
from balance_patcher.plan import make_plan
from balance_patcher.source import Lane
from balance_patcher.terminal import show_features

STEP, SYNC = "pkg.engine:Engine.step", "pkg.engine:Engine.sync"
ENGINE = """
class Engine:
    def __init__(self):
        self.a = self.b = self.done = None

    def step(self):
        x = 1
        # what is done first
        x += 1
        x += 2
        x += 3
        x += 4
        x += 5
        x += 6
        x += 7
        x += 8
        return x

    def sync(self):
        return self.done
"""


def delta(name: str, target: str, *edits: Edit, anchor: str | None = None, after: tuple[str, ...] = ()) -> Delta:
    variant = Variant("only", Anchor(anchor) if anchor else None, edits)
    return Delta(name, target, "why", "upstream", "never", (variant,), after=after)


def feature(name: str, *deltas: Delta, parameter: bool = False) -> Feature:
    early = Prologue(f"if not self.{name}:\n    return super().step($$$PARAMETERS)")
    added = (AddParameter("y", "2"),) if parameter else ()
    runtime = RuntimeClass(f"{name}Engine", "pkg.engine:Engine", lambda base: type(name, (base,), {}))
    return Feature(name, name, (delta(f"{name}.early", STEP, *added, early), *deltas), runtime)


A = feature(
    "a",
    delta("a.first", STEP, Replace("if self.a:\n    self.done = 10"), anchor="x += 1"),
    delta("a.sync", SYNC, CallThrough("self.done = 'a'"), after=("b.sync",)),
    parameter=True,
)
B = feature(
    "b",
    delta("b.last", STEP, InsertAfter("if self.b:\n    self.done = 1"), anchor="x += 8"),
    delta("b.sync", SYNC, CallThrough("self.done = 'b'")),
)


@pytest.fixture
def lane(text_lane: Callable[..., Lane]) -> Lane:
    return text_lane({"pkg/engine.py": ENGINE, "pkg/__init__.py": ""})


def shown(lane: Lane, *features: Feature, only: str = STEP, terminal: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system="standard" if terminal else None)
    show_features(lane, [compose(features)], only, console, "diff")
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def changed(lines: list[str]) -> list[tuple[str, str]]:
    """Names and line of every changed line; between the two stand two spaces or more."""
    return [(line.partition("  ")[0], line.partition("  ")[2].lstrip()) for line in lines if sign_of(line)]


def test_each_changed_line_stands_behind_the_name_of_its_feature(lane: Lane) -> None:
    assert changed(shown(lane, A, B)) == [
        ("a", "-    def step(self):"),
        ("a", "+    def step(self, y=2):"),
        ("a+b", "+        if not self.a and not self.b:  # bp: a+b.disabled-path"),
        ("a+b", "+            return super().step()  # bp: a+b.disabled-path"),
        ("a", "-        x += 1"),
        ("a", "+        if self.a:  # bp: a.first"),
        ("a", "+            self.done = 10  # bp: a.first"),
        ("b", "+        if self.b:  # bp: b.last"),
        ("b", "+            self.done = 1  # bp: b.last"),
    ]


def test_without_the_marks_it_is_the_plain_diff(lane: Lane) -> None:
    from difflib import unified_diff

    plan = make_plan(lane, compose([A, B]))
    result = compile_plan(plan)[0]["pkg.engine"]
    plain = unified_diff(result.original.lines, result.text.splitlines(keepends=True), n=3)
    marked = shown(lane, A, B)
    column = marked[0].index("--- a/")
    assert [line[column:] for line in marked[2:]] == [line.rstrip() for line in plain][2:]


def test_one_feature_alone_gives_a_diff_that_can_be_applied(lane: Lane) -> None:
    lines = shown(lane, B)
    assert lines[0] == "--- a/pkg/engine.py"
    assert "+        if self.b:  # bp: b.last" in lines


def test_what_is_called_through_by_both_is_marked_too(lane: Lane) -> None:
    marks = {line.strip(): names for names, line in changed(shown(lane, A, B, only=SYNC))}
    assert marks["+            self.done = 'b'  # bp: b.sync"] == "b"
    assert marks["+            self.done = 'a'  # bp: a.sync"] == "a"
    assert marks["+    class Engine:"] in ("a b", "b a")


def test_on_a_terminal_what_comes_and_what_goes_have_colours(lane: Lane) -> None:
    lines = shown(lane, A, B, terminal=True)
    assert any("\x1b[32m" in line and "# bp: b.last" in line for line in lines)
    assert any("\x1b[31m" in line and "def step(self):" in line for line in lines)
    assert not any("\x1b[3" in line and "@@" in line for line in lines)

"""What a feature rests on, where another feature edits it: it holds with those edits in, or both are named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from balance_patcher import installation
from balance_patcher.build import build, compile_plan
from balance_patcher.check import check_lane
from balance_patcher.compose import compose, overlapping
from balance_patcher.delta import (
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Level,
    Prologue,
    Replace,
    There,
    Variant,
)
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.feature import AskedOnce, CalledOnce, Feature, Invariant, Ordered, RuntimeClass, Sets
from balance_patcher.invariants import check_invariants
from balance_patcher.plan import make_plan
from balance_patcher.source import DirSource, Lane, LaneSpec

MODULE = "turns.engine"
LOOP, HOOK = f"{MODULE}:Engine.run", f"{MODULE}:Engine.hook"

ENGINE = """
class Engine:
    def __init__(self):
        self.left, self.log, self.on = 3, [], True

    def run(self):
        while self.left:
            self.left -= 1
            self.work()
            if self.stops():
                break
            self.hook()
        return self.log

    def work(self):
        self.log.append("work")

    def hook(self):
        self.log.append("hook")

    def stops(self):
        return self.left < 0
"""
LINES = ENGINE.replace("            if self.stops():\n                break\n", "")
LINES = LINES.replace("        return self.log\n", "")


def delta(name: str, *edits: Edit, anchor: str | Anchor = "", on: str = LOOP, **more: Any) -> Delta:
    found = Anchor(anchor) if isinstance(anchor, str) and anchor else anchor or None
    given = more.pop("given", ())
    return Delta(name, on, "why", "upstream", "never", (Variant("only", found, edits, given=given),), **more)


def resting(*invariants: Invariant, name: str = "m") -> Feature:
    """A feature that edits another function and rests on what it is given."""
    return Feature(name, name, (delta(f"{name}.x", CallThrough("self.log"), on=HOOK),), invariants=invariants)


def editing(*edits: Edit, anchor: str | Anchor = "", name: str = "z", on: str = LOOP) -> Feature:
    return Feature(name, name, (delta(f"{name}.x", *edits, anchor=anchor, on=on),))


ONCE = CalledOnce("the hook is called", LOOP, "self.hook($$$_)", idle="if not self.on: continue")
FIRST = Ordered("work comes first", LOOP, first="self.work()", then="self.hook()")
WRITES = Sets("it counts", LOOP, "left")
STOPPED = AskedOnce(
    "it is asked there", f"{MODULE}:Engine.stops", LOOP,
    Anchor("if self.stops(): break", inside=(Level("loop", "while $_"),)),
)  # fmt: skip

BREAKING = [
    (ONCE, InsertBefore("if not self.left:\n    continue"), "self.hook()", "BP201", LINES),
    (ONCE, InsertAfter("self.hook()"), "self.hook()", "BP202", LINES),
    (ONCE, Replace("self.log.append(0)"), "self.hook()", "BP201", LINES),
    (ONCE, Prologue("if not self.left:\n    return"), "", "BP203", LINES),
    (FIRST, Replace("if self.left:\n    self.work()"), "self.work()", "BP204", ENGINE),
    (FIRST, InsertBefore("self.hook()"), "self.work()", "BP204", ENGINE),
    (STOPPED, InsertBefore("if self.stops():\n    self.log"), "self.work()", "BP208", ENGINE),
]


@pytest.fixture
def lane(text_lane: Callable[..., Lane]) -> Callable[[str], Lane]:
    def make(text: str) -> Lane:
        return text_lane({"turns/engine.py": text, "turns/__init__.py": "", "vllm/__init__.py": ""})

    return make


def findings(lane: Lane, *features: Feature) -> list[Any]:
    plan = make_plan(lane, compose(features))
    return check_invariants(plan, compile_plan(plan)[0])


@pytest.mark.parametrize(("invariant", "edit", "anchor", "code", "text"), BREAKING)
@pytest.mark.parametrize("name", ["a", "z"])
def test_an_edit_that_breaks_it_is_refused_with_both(
    invariant: Invariant, edit: Edit, anchor: str, code: str, text: str, name: str, lane: Callable[[str], Lane]
) -> None:
    one, other = resting(invariant), editing(edit, anchor=anchor, name=name)
    assert [finding.status for finding in findings(lane(text), one)] == ["holds"]
    (finding,) = findings(lane(text), one, other)
    assert finding.status == "broken"
    (failure,) = finding.failures
    assert failure.code == code
    assert dict(failure.fields)["rests on it"] == "m"
    assert dict(failure.fields)["edited by"] == f"{name}.x"
    assert overlapping([one, other]) == [tuple(sorted((one, other), key=lambda feature: feature.name))]


@pytest.mark.parametrize("invariant", [ONCE, FIRST, WRITES])
@pytest.mark.parametrize(
    ("edit", "anchor"), [(InsertBefore("self.log.append(1)"), "self.work()"), (CallThrough("self.log.append(1)"), "")]
)
def test_one_that_does_not_is_let_through(
    invariant: Invariant, edit: Edit, anchor: str, lane: Callable[[str], Lane]
) -> None:
    features = resting(invariant), editing(edit, anchor=anchor)
    assert [finding.status for finding in findings(lane(LINES), *features)] == ["holds"]


def test_an_edit_of_another_function_of_the_module_may_break_it(lane: Callable[[str], Lane]) -> None:
    edit = editing(InsertAfter("self.hook()"), anchor="self.log.append('work')", on=f"{MODULE}:Engine.work")
    (finding,) = findings(lane(LINES), resting(ONCE), edit)
    assert [failure.code for failure in finding.failures] == ["BP202"]


def test_its_own_edits_are_its_own(lane: Callable[[str], Lane]) -> None:
    one = Feature(
        "m", "m", (delta("m.x", InsertBefore("if not self.left:\n    continue"), anchor="self.hook()"),),
        invariants=(ONCE,),
    )  # fmt: skip
    assert [finding.status for finding in findings(lane(LINES), one)] == ["holds"]
    other = editing(InsertBefore("self.log.append(1)"), anchor="self.work()")
    assert [finding.status for finding in findings(lane(LINES), one, other)] == ["holds"]


def test_each_is_judged_without_its_own(lane: Callable[[str], Lane]) -> None:
    """Of two that rest on one function each is told of the other's edit alone."""
    skips = InsertBefore("if not self.left:\n    continue")
    one = Feature("m", "m", (delta("m.x", skips, anchor="self.hook()"),), invariants=(ONCE,))
    other = Feature("n", "n", (delta("n.x", InsertBefore("print(1)"), anchor="self.work()"),), invariants=(ONCE,))
    assert [finding.status for finding in findings(lane(LINES), one, other)] == ["holds", "broken"]


def test_an_early_return_of_anothers_class_leads_to_upstreams_own(lane: Callable[[str], Lane]) -> None:
    early = Prologue("if not self._z:\n    return super().run($$$PARAMETERS)")
    runtime = RuntimeClass("Z", f"{MODULE}:Engine", lambda base: type("Z", (base,), {"_z": True}), frozenset({"_z"}))
    other = Feature("z", "z", (delta("z.off", early),), runtime)
    assert [finding.status for finding in findings(lane(LINES), resting(ONCE), other)] == ["holds"]


# -- who is in one group ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "reading",
    [
        resting(ONCE), resting(FIRST), resting(WRITES), resting(STOPPED),
        Feature("m", "m", (delta("m.x", CallThrough("self.log"), on=HOOK, given=(There(LOOP, "self.work()"),)),)),
    ],
    ids=["called once", "ordered", "sets", "asked once", "there"],
)  # fmt: skip
def test_what_reads_and_what_edits_are_in_one_group(reading: Feature) -> None:
    edits, calls = editing(Prologue("self.log"), name="e"), editing(CallThrough("self.log"), name="e")
    assert len(overlapping([reading, edits])) == len(overlapping([edits, reading])) == 1
    assert len(overlapping([reading, calls])) == 2


# -- for real --------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "turns").mkdir()
    (tmp_path / "turns/__init__.py").write_text("")
    (tmp_path / "turns/engine.py").write_text(LINES)
    importlib.invalidate_caches()
    lane = Lane("live", DirSource(f"dir:{tmp_path}", tmp_path))
    monkeypatch.setattr(installation, "build", lambda feature: build(feature, lane))
    yield importlib.import_module(MODULE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "turns"]:
        del sys.modules[name]


@pytest.mark.parametrize("order", ["ma", "am", "mz", "zm"])
def test_the_outcome_is_the_same_in_every_order_and_by_every_name(order: str, live: Any) -> None:
    before = dict(vars(live.Engine))
    for name in order:
        edit = editing(InsertBefore("self.log.append(self.left)"), anchor="self.work()", name=name)
        installation.install(resting(ONCE) if name == "m" else edit)
    engine = live.Engine()
    engine.run()
    assert engine.log == [2, "work", "hook", 1, "work", "hook", 0, "work", "hook"]
    for name in order:
        installation.uninstall(name)
    assert dict(vars(live.Engine)) == before


@pytest.mark.parametrize("order", ["ma", "am", "mz", "zm"])
def test_the_second_is_refused_in_every_order(order: str, live: Any) -> None:
    made = {
        name: editing(InsertBefore("if not self.left:\n    continue"), anchor="self.hook()", name=name) for name in "az"
    }
    made["m"] = resting(ONCE)
    installation.install(made[order[0]])
    with pytest.raises(PatchError) as caught:
        installation.install(made[order[1]])
    assert [failure.code for failure in caught.value.failures] == ["BP201"]
    assert installation.installed(order[1]) is None
    assert installation.installed(order[0]) is not None
    installation.uninstall(order[0])


def test_the_check_of_a_lane_says_it(lane: Callable[[str], Lane], tmp_path: Path) -> None:
    lane(LINES)
    skips = editing(InsertBefore("if not self.left:\n    continue"), anchor="self.hook()")
    report, _ = check_lane(LaneSpec("x", f"dir:{tmp_path}"), [resting(ONCE), skips])
    assert [feature.status for feature in report.features] == ["applied", "applied"]
    (failure,) = report.failures
    assert failure.code == "BP201"
    assert dict(failure.fields)["together"] == "'m' and 'z'"
    assert report.outcome is Outcome.BROKEN

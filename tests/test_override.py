"""A method of the feature's own over upstream's, and the invariants that it rests on, on small synthetic modules."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from balance_patcher.build import build, compile_plan
from balance_patcher.check import check_lane
from balance_patcher.compose import compose
from balance_patcher.delta import Anchor, CallThrough, Delta, Edit, InsertBefore, Level, Override, Prologue, Variant
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.feature import Agree, AskedOnce, Feature, Invariant, Ordered, RuntimeClass
from balance_patcher.invariants import Finding, check_invariants
from balance_patcher.plan import make_plan
from balance_patcher.source import DirSource, Lane, LaneSpec

MODULE = "pool.pump"
STOPS = f"{MODULE}:Pump.stops"
RUN = f"{MODULE}:Pump.run"

PUMP = '''
class Pump:
    def __init__(self):
        self.level, self.cap, self.frozen, self.steps = 0, 3, False, 0

    def run(self):
        if self.cap:
            while True:
                if self.stops():
                    break
                self.level += 1
        return self.level

    def stops(self) -> bool:
        """Whether it is full."""
        level = self.level
        return level >= self.cap

    def rest(self, step=1, *, times=2):
        return step * times
'''

GATE = Override(
    """
    if super().stops():
        return True
    return self._on and self.level <$OP> self.$CAP - 1
    """
)
ANCHOR = Anchor("$LEVEL = $VALUE\nreturn $LEVEL <$OP> self.$CAP")


def delta(name: str, *edits: Edit, target: str = STOPS, anchor: Anchor | None = ANCHOR, **more: Any) -> Delta:
    variant = Variant("only", anchor, edits=edits, exports=more.pop("exports", {}))
    return Delta(name, target, "why", "upstream", "never", (variant,), **more)


def pump(upstream: type) -> type:
    return type("OurPump", (upstream,), {"_on": True})


OURS = RuntimeClass("OurPump", f"{MODULE}:Pump", pump, frozenset({"_on"}))
STOP = delta("f.stop", GATE, exports={"_count": "$VALUE", "_cap": "self.$CAP"})


def feature(*deltas: Delta, runtime: RuntimeClass | None = OURS, invariants: tuple[Invariant, ...] = ()) -> Feature:
    return Feature("f", "s", deltas, runtime, invariants)


MakeLane = Callable[..., Lane]


def refused(make: MakeLane, text: str, *deltas: Delta) -> list[str]:
    lane = make({"vllm/__init__.py": "", "pool/pump.py": text})
    with pytest.raises(PatchError) as caught:
        compile_plan(make_plan(lane, feature(*deltas)))
    assert all(failure.next for failure in caught.value.failures)
    return [failure.code for failure in caught.value.failures]


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Build a feature against a package of its own that is imported for real."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(found: Feature, text: str = PUMP) -> Any:
        (tmp_path / "pool").mkdir()
        (tmp_path / "pool/__init__.py").write_text("")
        (tmp_path / "pool/pump.py").write_text(text)
        importlib.invalidate_caches()
        return build(found, Lane("live", DirSource(f"dir:{tmp_path}", tmp_path)))

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "pool"]:
        del sys.modules[name]


# -- what runs -------------------------------------------------------------------------------


def test_it_stands_on_our_class_and_super_is_upstreams(live: Callable[..., Any]) -> None:
    built = live(feature(STOP))
    ours = built.classes[f"{MODULE}:Pump"]
    upstream = sys.modules[MODULE].Pump  # type: ignore[attr-defined]
    assert vars(ours)["stops"] is built.functions[STOPS]
    assert vars(upstream)["stops"] is built.originals[STOPS]
    assert (upstream().run(), ours().run()) == (3, 2)
    one = ours()
    one._on = False
    assert one.run() == 3
    one.level = 3
    assert (one.stops(), one._count(), one._cap()) == (True, 3, 3)
    assert built.rewrites == {}


def test_what_runs_can_be_seen(live: Callable[..., Any]) -> None:
    ours = live(feature(STOP)).classes[f"{MODULE}:Pump"]
    shown = inspect.getsource(ours.stops)
    assert ours.stops.__code__.co_filename == f"<balance_patcher {STOPS}>"
    assert "return self._on and self.level >= self.cap - 1  # bp: f.stop" in shown
    assert (ours.stops.__qualname__, ours.stops.__doc__) == ("OurPump.stops", "Whether it is full.")


def test_a_class_below_ours_reaches_it_and_upstreams(live: Callable[..., Any]) -> None:
    ours = live(feature(STOP)).classes[f"{MODULE}:Pump"]

    class Below(ours):  # type: ignore[misc, valid-type]
        def stops(self) -> bool:
            self.steps += 1
            return bool(super().stops())

    one = Below()
    assert (one.run(), one.steps) == (2, 3)


def test_parameters_and_defaults_are_passed_on(live: Callable[..., Any]) -> None:
    rest = Override("return 10 * super().rest($$$PARAMETERS)")
    built = live(feature(delta("f.rest", rest, target=f"{MODULE}:Pump.rest", anchor=None)))
    ours = built.classes[f"{MODULE}:Pump"]()
    assert (ours.rest(), ours.rest(3), ours.rest(step=3, times=1)) == (20, 60, 30)


def test_another_feature_on_the_same_class_shares_it(live: Callable[..., Any]) -> None:
    other = Feature(
        "g", "s", (delta("g.run", InsertBefore("self.steps += 1"), target=RUN, anchor=Anchor("self.level += 1")),),
        RuntimeClass("Counting", f"{MODULE}:Pump", lambda upstream: type("Counting", (upstream,), {})),
    )  # fmt: skip
    ours = live(compose([other, feature(STOP)])).classes[f"{MODULE}:Pump"]
    one = ours()
    assert (one.run(), one.steps, [cls.__name__ for cls in ours.__mro__[:3]]) == (
        2,
        2,
        ["PatchedPump", "OurPump", "Counting"],
    )


def test_the_check_of_a_lane_says_that_it_is_applied(text_lane: MakeLane, tmp_path: Path) -> None:
    text_lane({"vllm/__init__.py": "", "pool/pump.py": PUMP})
    report, _ = check_lane(LaneSpec("x", f"dir:{tmp_path}"), [feature(STOP)])
    assert report.outcome is Outcome.HOLDS
    (shown,) = report.features[0].deltas
    assert (shown.status, shown.line, shown.detail) == ("applied", 16, "LEVEL level, VALUE self.level, OP >=, CAP cap")


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("        level = self.level\n", "        self.steps += 1\n        level = self.level\n", "BP114"),
        ("return level >= self.cap\n", "return level >= self.cap\n        return False\n", "BP114"),
        ("def stops(self)", "def stops(self, more=1)", "BP120"),
        ("def stops(self)", "def stops(self, /, *more)", "BP120"),
        ("def stops(self)", "def stops(self, *, more)", "BP120"),
        ("def stops(self)", "def stops(self, **more)", "BP120"),
        ("def stops(self)", "def stops()", "BP302"),
        ("return level >= ", "return level > (yield) - ", "BP109"),
        ("def stops", "async def stops", "BP108"),
        ("    def stops", "    @staticmethod\n    def stops", "BP107"),
        ("return level >= self", "return level >= self.run() + self", "BP101"),
    ],
)
def test_upstreams_method_has_to_be_what_its_anchor_says(old: str, new: str, code: str, text_lane: MakeLane) -> None:
    assert PUMP.count(old) == 1
    assert refused(text_lane, PUMP.replace(old, new), STOP) == [code]


def test_a_refusal_names_the_statement_that_is_more(text_lane: MakeLane) -> None:
    text = PUMP.replace("        level = self.level\n", "        self.steps += 1\n        level = self.level\n")
    plan = make_plan(text_lane({"vllm/__init__.py": "", "pool/pump.py": text}), feature(STOP))
    (failure,) = plan.all_failures
    assert failure.what == "Pump.stops does more than its anchor says; delta 'f.stop' cannot be placed"
    assert ("nearest", "pump.py:16  `self.steps += 1`") in failure.fields


@pytest.mark.parametrize("after", [(), ("f.stop",)])
@pytest.mark.parametrize(
    "edit", [GATE, CallThrough("self.steps"), Prologue("self.steps = 1"), InsertBefore("self.steps = 1")]
)
def test_nothing_else_edits_what_is_overridden(edit: Edit, after: tuple[str, ...], text_lane: MakeLane) -> None:
    anchor = None if isinstance(edit, (CallThrough, Prologue)) else ANCHOR
    assert refused(text_lane, PUMP, STOP, delta("f.other", edit, anchor=anchor, after=after)) == ["BP119"]


def test_a_name_of_upstreams_body_is_not_there(text_lane: MakeLane) -> None:
    for edit in (Override("return level"), CallThrough("print(level)")):
        assert refused(text_lane, PUMP, delta("f.local", edit, anchor=None)) == ["BP302"]


def test_an_attribute_that_upstream_has_not_is_refused(text_lane: MakeLane) -> None:
    assert refused(text_lane, PUMP, delta("f.no", Override("return self.nothing"), anchor=None)) == ["BP303"]


@pytest.mark.parametrize("runtime", [None, replace(OURS, base=f"{MODULE}:Other")], ids=["no class", "another class"])
def test_it_needs_a_class_to_stand_on(runtime: RuntimeClass | None) -> None:
    with pytest.raises(PatchError, match=r"BP002 .*'f.stop' overrides pool.pump:Pump.stops, which no class"):
        feature(STOP, runtime=runtime)


# -- asked once ------------------------------------------------------------------------------

LOOP = (Level("open", "if $_", outermost=True), Level("loop", "while $_"))
ONCE = AskedOnce("once", STOPS, RUN, Anchor("if self.stops(): break", inside=LOOP))


def found_of(make: MakeLane, text: str, invariant: Invariant, *deltas: Delta) -> Finding:
    lane = make({"vllm/__init__.py": "", "pool/pump.py": text})
    plan = make_plan(lane, feature(*deltas, invariants=(invariant,)))
    (found,) = check_invariants(plan, compile_plan(plan)[0])
    return found


def test_a_method_that_is_asked_in_the_loop_alone_holds(text_lane: MakeLane) -> None:
    found = found_of(text_lane, PUMP, ONCE, STOP)
    assert (found.status, found.detail) == ("holds", "pump.py:14, asked in line 9")


REST = delta("f.rest", Override("return super().rest($$$PARAMETERS)"), target=f"{MODULE}:Pump.rest", anchor=None)


def test_where_upstream_has_no_such_method_nobody_asks_it(text_lane: MakeLane) -> None:
    text = PUMP.replace("def stops", "def ends").replace("self.stops()", "self.level")
    found = found_of(text_lane, text, ONCE, REST)
    assert (found.status, found.detail) == ("holds", "upstream has no such method")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("def stops", "def ends", "BP104"),
        ("if self.stops():", "if self.level == self.cap:", "BP208"),
        ("if self.stops():", "if not self.stops():", "BP208"),
        ("self.level += 1", "self.level += self.stops()", "BP208"),
        ("self.level += 1", "if self.stops():\n                    break", "BP208"),
        ("return step * times", "return self.stops()", "BP208"),
        ("return step * times", "return getattr(self, 'stops')()", "BP208"),
        ("return step * times", "return Pump.stops(self)", "BP208"),
        ("while True:", "while not self.stops():", "BP208"),
        ("        if self.cap:\n", "        for _ in '1':\n", "BP208"),
        ("    def rest", "    ends = stops\n\n    def rest", "BP208"),
    ],
)
def test_a_method_that_is_asked_elsewhere_is_told(old: str, new: str, code: str, text_lane: MakeLane) -> None:
    assert PUMP.count(old) == 1
    found = found_of(text_lane, PUMP.replace(old, new), ONCE, REST)
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", [code])


def test_the_other_place_is_named(text_lane: MakeLane) -> None:
    found = found_of(text_lane, PUMP.replace("return step * times", "return self.stops()"), ONCE, REST)
    (failure,) = found.failures
    assert ("nearest", "pump.py:20  `self.stops`") in failure.fields
    assert failure.what == "Pump.stops is spoken of in another place than `if self.stops(): break`"


# -- the others that know of an override -----------------------------------------------------

ORDER = Ordered("order", RUN, first=("if $A <$OP> self.cap: break", "if self.stops(): break"), then="self.level += $_")
INLINE = "                if self.level >= self.cap:\n                    break\n"
ASKS = "                if self.stops():\n                    break\n"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (PUMP, "holds", ""),
        (PUMP.replace(ASKS, INLINE), "holds", ""),
        (PUMP.replace(ASKS, ASKS + INLINE), "broken", "was found 2 times, not once"),
        (PUMP.replace(ASKS, "                pass\n"), "broken", "was found 0 times, not once"),
        (PUMP.replace(ASKS, "").replace("+= 1\n", "+= 1\n" + ASKS), "broken", "is not executed on every path before"),
    ],
)
def test_one_of_several_shapes_comes_first(text: str, status: str, said: str, text_lane: MakeLane) -> None:
    found = found_of(text_lane, text, ORDER, REST)
    assert found.status == status
    for failure in found.failures:
        assert failure.code == "BP204"
        assert said in failure.what
        if "found" in said:
            assert "`if $A <$OP> self.cap: break` or `if self.stops(): break`" in failure.what


AGREE = Agree(
    "agree", STOPS, one="self.level <$OP> self.$CAP - 1", other="return $_ <$OP> self.$CAP", holes=("OP", "CAP"),
    delta="f.stop",
)  # fmt: skip


def test_upstreams_method_and_its_override_are_compared(text_lane: MakeLane) -> None:
    assert found_of(text_lane, PUMP, AGREE, STOP).detail == "OP >=, CAP cap"
    by_hand = delta("f.stop", Override("return super().stops() or self.level > self.cap - 1"))
    found = found_of(text_lane, PUMP, AGREE, by_hand)
    assert (found.status, [failure.code for failure in found.failures]) == ("broken", ["BP205"])
    assert "OP differs: `>` and `>=`" in found.failures[0].what


def test_nothing_is_compared_where_the_delta_is_not_applied(text_lane: MakeLane) -> None:
    there = Variant("there", ANCHOR, status="absorbed")
    absorbed = replace(STOP, variants=(there,))
    found = found_of(text_lane, PUMP, AGREE, absorbed, REST)
    assert (found.status, found.detail) == ("holds", "f.stop is absorbed")


def test_an_invariant_of_an_unknown_delta_is_a_wrong_declaration() -> None:
    with pytest.raises(PatchError, match=r"BP002 .*'agree' speaks of the unknown delta 'f.stop'"):
        feature(REST, invariants=(AGREE,))


# -- the nearest candidate -------------------------------------------------------------------


def test_a_shape_whose_names_are_nowhere_is_nothing_to_compare_with(text_lane: MakeLane) -> None:
    """Where upstream has a stop of the loop's own, that is shown, and not what looks more like the other shape."""
    looks_like = "                if not self.level:\n                    break\n"
    text = PUMP.replace(ASKS, looks_like + INLINE.replace("break", "continue"))
    own = Variant("own", Anchor("if $A <$OP> self.cap: break", inside=LOOP), edits=(InsertBefore("self.steps += 1"),))
    asked = Variant("asked", Anchor("if self.stops(): break", inside=LOOP), status="absorbed")
    loop = Delta("f.loop", RUN, "why", "upstream", "never", (own, asked))
    (failure,) = make_plan(text_lane({"vllm/__init__.py": "", "pool/pump.py": text}), feature(loop)).all_failures
    assert failure.code == "BP113"
    assert "`if self.level >= self.cap: continue`" in dict(failure.fields)["nearest"]

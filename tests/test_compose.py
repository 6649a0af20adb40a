"""Several features as one: the same text in every order, one early return, and refusals by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from balance_patcher.build import compile_plan
from balance_patcher.check import check_lane
from balance_patcher.compose import at_work, compose, overlapping
from balance_patcher.delta import Anchor, CallThrough, Delta, InsertAfter, Prologue, Variant
from balance_patcher.errors import Outcome, PatchError
from balance_patcher.feature import Feature, RuntimeClass
from balance_patcher.invariants import check_invariants
from balance_patcher.plan import make_plan
from balance_patcher.registry import find_feature
from balance_patcher.rewrite import take_out
from balance_patcher.source import DirSource, Lane, LaneSpec
from tests.conftest import RELEASES

TARGET = "pkg.engine:Engine.step"
ENGINE = """
class Engine:
    def __init__(self):
        self.one = self.two = self.three = False
        self.done = None

    def first(self): ...
    def second(self): ...
    def third(self): ...

    def step(self):
        self.first()
        self.second()
        return self.third()
"""


def early(flag: str) -> Prologue:
    return Prologue(f"if not self.{flag}:\n    return super().step($$$PARAMETERS)")


def delta(name: str, *edits, anchor: str | None = None, target: str = TARGET, after: tuple[str, ...] = ()) -> Delta:
    variant = Variant("only", Anchor(anchor) if anchor else None, edits=edits)
    return Delta(name, target, "why", "upstream", "never", (variant,), after)


def feature(flag: str, statement: str, *, guarded: bool = True) -> Feature:
    deltas = [delta(f"{flag}.edit", InsertAfter(f"if self.{flag}:\n    self.done = '{flag}'"), anchor=statement)]
    if guarded:
        deltas.insert(0, delta(f"{flag}.disabled-path", early(flag)))
    deltas[-1] = replace(deltas[-1], after=(f"{flag}.disabled-path",))
    runtime = RuntimeClass(f"{flag.title()}Engine", "pkg.engine:Engine", lambda base: type(flag, (base,), {}))
    return Feature(flag, flag, tuple(deltas), runtime=runtime)


ONE, TWO, THREE = feature("one", "self.first()"), feature("two", "self.second()"), feature("three", "self.first()")


def text_of(composed: Feature, lane: Lane) -> str:
    rewrites, _ = compile_plan(make_plan(lane, composed))
    return rewrites["pkg.engine"].text


@pytest.fixture
def lane(text_lane: Callable[..., Lane]) -> Lane:
    return text_lane({"pkg/engine.py": ENGINE, "pkg/__init__.py": ""})


class TestOne:
    def test_a_single_feature_is_itself(self) -> None:
        assert compose([ONE]) is ONE
        assert compose([ONE, ONE]) is ONE


class TestText:
    def test_every_order_makes_the_same_text(self, lane: Lane) -> None:
        texts = {text_of(compose(order), lane) for order in itertools.permutations([ONE, TWO])}
        assert len(texts) == 1

    def test_the_early_return_is_one_and_waits_for_all(self, lane: Lane) -> None:
        text = text_of(compose([ONE, TWO]), lane)
        assert text.count("return super().step()") == 1
        assert "if not self.one and not self.two:  # bp: one+two.disabled-path\n" in text

    def test_every_other_line_names_its_own_feature(self, lane: Lane) -> None:
        text = text_of(compose([TWO, ONE]), lane)
        assert "self.done = 'one'  # bp: one.edit\n" in text
        assert "self.done = 'two'  # bp: two.edit\n" in text

    def test_what_runs_when_is_each_features_flag(self, lane: Lane) -> None:
        namespace: dict = {}
        exec(text_of(compose([ONE, TWO]), lane).replace("return self.third()", ""), namespace)  # noqa: S102
        for one, two in itertools.product([False, True], repeat=2):
            base = type("Base", (), {"step": lambda self: "upstream"})
            made = type("Made", (base,), {"first": lambda self: None, "second": lambda self: None})
            engine = made()
            engine.one, engine.two, engine.done = one, two, None
            step = namespace["Engine"].step
            cell = step.__closure__[0]
            cell.cell_contents = made
            got = step(engine)
            assert (got, engine.done) == (("upstream", None) if not (one or two) else (None, "two" if two else "one"))

    def test_it_comes_out_again(self, lane: Lane) -> None:
        rewrites, _ = compile_plan(make_plan(lane, compose([ONE, TWO])))
        result = rewrites["pkg.engine"]
        assert take_out(result) == result.original.text


class TestRefused:
    def test_two_edits_at_one_point_without_an_order(self, lane: Lane) -> None:
        with pytest.raises(PatchError) as caught:
            text_of(compose([ONE, THREE]), lane)
        (failure,) = caught.value.failures
        assert failure.code == "BP118"
        assert "'one.edit'" in failure.what
        assert "'three.edit'" in failure.what

    def test_with_an_order_they_stand_in_it(self, lane: Lane) -> None:
        later = replace(ONE, deltas=(ONE.deltas[0], replace(ONE.deltas[1], after=("three.edit",))))
        text = text_of(compose([later, THREE]), lane)
        assert text.index("'three'") < text.index("'one'")

    def test_a_feature_that_the_others_would_switch_off(self) -> None:
        with pytest.raises(PatchError) as caught:
            compose([ONE, feature("two", "self.second()", guarded=False)])
        (failure,) = caught.value.failures
        assert failure.code == "BP122"
        assert "'two'" in failure.what
        assert "'one'" in failure.what
        assert dict(failure.fields)["declared"].startswith("tests/test_compose.py:")

    def test_a_call_through_needs_no_early_return(self, lane: Lane) -> None:
        through = Feature("two", "two", (delta("two.after", CallThrough("if self.two:\n    self.second()")),))
        composed = compose([ONE, through])
        _, compiled = compile_plan(make_plan(lane, composed))
        assert [item.through for item in compiled] == [False, True]

    def test_classes_that_extend_different_ones(self) -> None:
        other = replace(TWO, runtime=replace(TWO.runtime, base="pkg.engine:Motor"))
        with pytest.raises(PatchError, match=r"OneEngine extends .* TwoEngine extends"):
            compose([ONE, other])


class TestIdle:
    """A feature that finds nothing to do on a lane takes no part there."""

    def idle(self, status: str) -> Feature:
        variant = Variant("known", Anchor("self.first()"), status=status, note="upstream does it")
        return Feature("idle", "idle", (Delta("idle.x", TARGET, "why", "upstream", "never", (variant,)),))

    @pytest.mark.parametrize("status", ["absorbed", "not-applicable"])
    def test_what_upstream_has_or_does_not_need_is_left_out(self, lane: Lane, status: str) -> None:
        assert make_plan(lane, self.idle(status)).idle == "upstream does it"
        assert at_work([self.idle(status), ONE], lane) == [ONE]

    def test_one_that_cannot_be_placed_is_not_idle(self, lane: Lane) -> None:
        lost = feature("lost", "self.nowhere()")
        assert make_plan(lane, lost).idle is None
        assert at_work([lost], lane) == [lost]

    def test_one_whose_function_is_missing_is_not_idle_but_cannot_be_had(self, lane: Lane) -> None:
        gone = replace(delta("gone.x", early("one"), target="pkg.engine:Engine.stop"), unless_missing="until now")
        plan = make_plan(lane, Feature("gone", "gone", (gone,)))
        assert [placement.status for placement in plan.placements] == ["not-applicable"]
        assert plan.idle is None

    def test_one_with_a_single_edit_is_not_idle(self, lane: Lane) -> None:
        half = replace(self.idle("absorbed"), deltas=(*self.idle("absorbed").deltas, delta("idle.y", early("one"))))
        assert make_plan(lane, half).idle is None


class TestClass:
    class Upstream:
        def __init__(self) -> None:
            self.order = ["upstream"]

    def test_it_joins_the_classes_and_each_extends_upstreams(self) -> None:
        made = compose([TWO, ONE]).runtime.make(self.Upstream)
        assert [base.__name__ for base in made.__bases__] == ["one", "two"]
        assert all(base.__bases__ == (self.Upstream,) for base in made.__bases__)
        assert made().order == ["upstream"]

    def test_a_class_that_does_not_extend_upstreams_is_refused(self) -> None:
        stray = replace(TWO, runtime=replace(TWO.runtime, make=lambda base: type("stray", (), {})))
        with pytest.raises(PatchError, match="TwoEngine: its first base is not"):
            compose([ONE, stray]).runtime.make(self.Upstream)

    def test_what_each_brings_is_brought(self) -> None:
        one = replace(ONE, runtime=replace(ONE.runtime, provides=frozenset({"a"})))
        two = replace(TWO, runtime=replace(TWO.runtime, provides=frozenset({"b"})))
        assert compose([one, two]).runtime.provides == {"a", "b"}


class TestGroups:
    def test_features_that_share_a_function_or_a_class_are_in_one_group(self) -> None:
        other = Feature("far", "far", (delta("far.edit", InsertAfter("pass\nx = 1"), anchor="y()", target="m:f"),))
        groups = overlapping([TWO, other, ONE])
        assert [[feature.name for feature in group] for group in groups] == [["far"], ["one", "two"]]

    def test_a_third_can_join_two_groups(self) -> None:
        def on(name: str, *targets: str) -> Feature:
            return Feature(
                name, name,
                tuple(delta(f"{name}.{at}", CallThrough("self.x()"), target=t) for at, t in enumerate(targets)),
            )  # fmt: skip

        groups = overlapping([on("a", "m:f"), on("b", "m:g"), on("c", "m:f", "m:g")])
        assert [sorted(feature.name for feature in group) for group in groups] == [["a", "b", "c"]]


SCHEDULER_FEATURES = ("balance", "defer_preemption", "prefill_preemption")


@pytest.mark.parametrize("version", RELEASES)
def test_the_scheduler_features_compose_on_every_release(version: str, release_dir: Callable[[str], Path]) -> None:
    folder = release_dir(version)
    lane = Lane(version, DirSource(f"dir:{folder}", folder))
    chosen = at_work([find_feature(name) for name in SCHEDULER_FEATURES], lane)
    fences = "0.24.0" <= version < "0.30.0"
    assert [feature.name for feature in chosen] == [n for n in SCHEDULER_FEATURES if fences or n != "defer_preemption"]
    made = [compose(order) for order in itertools.permutations(chosen)]
    composed = made[0]
    assert all(other.deltas == composed.deltas and other.parts == composed.parts for other in made)
    plan = make_plan(lane, composed)
    rewrites, _ = compile_plan(plan)
    assert [finding.status for finding in check_invariants(plan, rewrites)] == ["holds"] * len(composed.invariants)
    for result in rewrites.values():
        assert take_out(result) == result.original.text
    lines = [line for result in rewrites.values() for line in result.text.splitlines()]
    marked = {line.partition("# bp: ")[2].partition(".")[0] for line in lines} - {""}
    assert marked == {"+".join(feature.name for feature in chosen), *(feature.name for feature in chosen)}


def test_all_orders_of_all_of_them_make_one_text(release_dir: Callable[[str], Path]) -> None:
    folder = release_dir("0.29.0")
    lane = Lane("0.29.0", DirSource(f"dir:{folder}", folder))
    orders = itertools.permutations(find_feature(name) for name in SCHEDULER_FEATURES)
    assert len({text_on(lane, list(order)) for order in orders}) == 1


@pytest.mark.parametrize("pair", list(itertools.combinations(SCHEDULER_FEATURES, 2)), ids="+".join)
def test_two_of_them_make_one_text_in_either_order(pair: tuple[str, str], release_dir: Callable[[str], Path]) -> None:
    folder = release_dir("0.29.0")
    lane = Lane("0.29.0", DirSource(f"dir:{folder}", folder))
    one, other = (find_feature(name) for name in pair)
    texts = [text_on(lane, order) for order in ([one, other], [other, one])]
    assert texts[0] == texts[1]
    assert text_on(lane, [one]) != texts[0] != text_on(lane, [other])


def text_on(lane: Lane, order: list[Feature]) -> str:
    return compile_plan(make_plan(lane, compose(order)))[0]["vllm.v1.core.sched.scheduler"].text


class TestVerify:
    def lane(self, folder: Path) -> LaneSpec:
        (folder / "pkg").mkdir()
        (folder / "pkg" / "engine.py").write_text(ENGINE)
        return LaneSpec("made", f"dir:{folder}")

    def test_features_that_cannot_share_a_function_are_a_finding_of_the_lane(self, tmp_path: Path) -> None:
        report, _ = check_lane(self.lane(tmp_path), [ONE, TWO, THREE])
        assert [feature.status for feature in report.features] == ["applied"] * 3
        assert {failure.code for failure in report.failures} >= {"BP118"}
        (clash,) = [failure for failure in report.failures if failure.code == "BP118"]
        assert dict(clash.fields)["together"] == "'one' and 'three' and 'two'"
        assert report.outcome is Outcome.BROKEN

    def test_a_broken_feature_does_not_take_the_sound_ones_down(self, tmp_path: Path) -> None:
        lost = feature("lost", "self.nowhere()")
        report, _ = check_lane(self.lane(tmp_path), [ONE, TWO, lost])
        assert [feature.status for feature in report.features] == ["applied", "applied", "failed"]
        assert not [failure for failure in report.failures if "together" in dict(failure.fields)]


class TestNamesOfSeveral:
    """One flag or one local name of two features would be one between them."""

    def test_a_local_name_of_another_feature_is_not_known(self, lane: Lane) -> None:
        reads = delta("two.edit", InsertAfter("if self.two:\n    self.done = seen"), anchor="self.second()")
        binds = delta("one.edit", InsertAfter("seen = self.one"), anchor="self.first()")
        one = replace(ONE, deltas=(ONE.deltas[0], binds))
        two = replace(TWO, deltas=(TWO.deltas[0], reads))
        with pytest.raises(PatchError, match=r"BP302.*'seen'"):
            compile_plan(make_plan(lane, compose([one, two])))
        compile_plan(make_plan(lane, replace(one, deltas=(*one.deltas, replace(reads, name="one.more")))))

    def test_two_that_bind_one_name_are_refused_with_both(self, lane: Lane) -> None:
        made = [
            replace(
                feature, deltas=(feature.deltas[0], delta(f"{feature.name}.edit", InsertAfter("seen = 1"), anchor=at))
            )
            for feature, at in ((ONE, "self.first()"), (TWO, "self.second()"))
        ]
        with pytest.raises(PatchError, match=r"BP301.*'seen' is put in by 'one\.edit' and by 'two\.edit'"):
            compile_plan(make_plan(lane, compose(made)))

    def test_two_classes_that_bring_one_name_are_refused(self) -> None:
        def bringing(feature: Feature) -> Feature:
            assert feature.runtime is not None
            return replace(feature, runtime=replace(feature.runtime, provides=frozenset({"_flag", feature.name})))

        with pytest.raises(PatchError, match=r"BP002.*OneEngine and TwoEngine both bring '_flag'"):
            compose([bringing(ONE), bringing(TWO)])

"""What features say of each other: needs, exclusions, orders, and who asks for one by its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from balance_patcher import byname
from balance_patcher.build import compile_plan
from balance_patcher.check import check_lane
from balance_patcher.compose import compose
from balance_patcher.delta import Anchor, Delta, InsertAfter, Prologue, Variant
from balance_patcher.errors import PatchError
from balance_patcher.feature import Feature, RuntimeClass
from balance_patcher.plan import make_plan
from balance_patcher.relations import compatible, excluding, groups_in_turn, lacking, needed_first
from balance_patcher.source import Lane, LaneSpec

TARGET = "pkg.engine:Engine.step"
ENGINE = """
class Engine:
    def __init__(self):
        self.a = self.b = self.c = self.done = None

    def first(self): ...
    def second(self): ...

    def step(self):
        self.first()
        self.second()
"""


def feature(name: str, anchor: str = "self.first()", **said) -> Feature:
    off = Variant("only", edits=(Prologue(f"if not self.{name}:\n    return super().step($$$PARAMETERS)"),))
    on = Variant("only", Anchor(anchor), edits=(InsertAfter(f"if self.{name}:\n    self.done = '{name}'"),))
    deltas = (
        Delta(f"{name}.disabled-path", TARGET, "why", "upstream", "never", (off,)),
        Delta(f"{name}.edit", TARGET, "why", "upstream", "never", (on,), after=(f"{name}.disabled-path",)),
    )
    runtime = RuntimeClass(f"{name}Engine", "pkg.engine:Engine", lambda base: type(name, (base,), {}))
    return Feature(name, name, deltas, runtime=runtime, **said)


def text_of(lane: Lane, *features: Feature) -> str:
    rewrites, _ = compile_plan(make_plan(lane, compose(features)))
    return rewrites["pkg.engine"].text


@pytest.fixture
def lane(text_lane: Callable[..., Lane]) -> Lane:
    return text_lane({"pkg/engine.py": ENGINE, "pkg/__init__.py": ""})


class TestDeclared:
    @pytest.mark.parametrize(
        "said",
        [
            {"needs": ("b",)},
            {"needs": {"b": " "}},
            {"conflicts": "b"},
            {"needs": {"a": "itself"}},
            {"after": ("a",)},
            {"after": "b"},
            {"needs": {"b": "why"}, "conflicts": {"b": "why not"}},
        ],
        ids=str,
    )
    def test_what_makes_no_sense_is_refused_where_it_is_declared(self, said: dict) -> None:
        with pytest.raises(PatchError, match="BP002") as caught:
            feature("a", **said)
        assert dict(caught.value.failures[0].fields)["declared"].startswith("tests/test_relations.py:")


class TestOrder:
    def test_a_feature_may_come_after_another_as_a_whole(self, lane: Lane) -> None:
        texts = {text_of(lane, *order) for order in itertools.permutations([feature("a", after=("b",)), feature("b")])}
        (text,) = texts
        assert text.index("self.done = 'b'") < text.index("self.done = 'a'")

    def test_the_other_order_makes_the_other_text(self, lane: Lane) -> None:
        text = text_of(lane, feature("a"), feature("b", after=("a",)))
        assert text.index("self.done = 'a'") < text.index("self.done = 'b'")

    def test_without_one_both_are_named_with_file_and_line(self, lane: Lane) -> None:
        one, other = feature("a"), feature("b")
        with pytest.raises(PatchError) as caught:
            text_of(lane, one, other)
        (failure,) = caught.value.failures
        assert failure.code == "BP118"
        assert "'a.edit' and 'b.edit' edit at one point, engine.py:10" in failure.what
        rows = dict(failure.fields)
        assert (rows["one"], rows["other"]) == (one.deltas[1].declared, other.deltas[1].declared)

    def test_all_permutations_of_three_make_one_text(self, lane: Lane) -> None:
        features = [feature("a", after=("b",)), feature("b", after=("c",)), feature("c")]
        features[0] = replace(features[0], after=("b", "c"))
        texts = {text_of(lane, *order) for order in itertools.permutations(features)}
        assert len(texts) == 1

    def test_two_that_come_after_each_other_are_refused_by_name_and_line(self, lane: Lane) -> None:
        one, other = feature("a", after=("b",)), feature("b", after=("a",))
        with pytest.raises(PatchError) as caught:
            compose([one, other])
        (failure,) = caught.value.failures
        assert failure.code == "BP123"
        assert "'a.edit'" in failure.what
        assert "'b.edit'" in failure.what
        assert dict(failure.fields)["a.edit"] == one.deltas[1].declared


class TestNeeds:
    A = feature("a", needs={"b": "it counts what b sends"})
    B = feature("b", "self.second()")

    def test_what_is_there_is_not_lacking(self) -> None:
        assert lacking(self.A, {"b"}, [self.A, self.B]) == ()

    def test_what_nobody_asks_for_is_named_with_the_reason(self) -> None:
        (failure,) = lacking(self.A, set(), [self.A])
        assert failure.code == "BP708"
        assert failure.what == "'a' needs 'b', which nobody asks for: it counts what b sends"
        assert dict(failure.fields)["declared"] == self.A.declared

    def test_what_is_asked_for_and_cannot_run_is_told_apart(self) -> None:
        (failure,) = lacking(self.A, set(), [self.A, self.B])
        assert "'b', which is asked for and cannot run" in failure.what

    def test_two_that_need_each_other_should_be_one(self) -> None:
        (failure,) = lacking(self.A, set(), [self.A, replace(self.B, needs={"a": "why"})])
        assert "the two need each other" in failure.what

    def test_what_is_needed_comes_first_whatever_its_name(self) -> None:
        assert [f.name for f in needed_first([self.A, self.B])] == ["b", "a"]
        far = feature("z")
        groups = groups_in_turn([[self.A, far], [self.B]])
        assert [[f.name for f in group] for group in groups] == [["b"], ["a", "z"]]

    def test_those_that_need_each_other_end_the_search(self) -> None:
        both = [self.A, replace(self.B, needs={"a": "why"})]
        assert len(needed_first(both)) == 2
        assert len(list(groups_in_turn([[both[0]], [both[1]]]))) == 2


class TestConflicts:
    @pytest.mark.parametrize("turned", [False, True])
    def test_both_are_named_with_the_lines_and_who_asks_whoever_declares_it(self, *, turned: bool) -> None:
        one = feature("a", conflicts={} if turned else {"b": "two clocks"})
        other = feature("b", conflicts={"a": "two clocks"} if turned else {})
        found = excluding([one, other, feature("c")], {"a": "one place", "b": "another"})
        assert found.keys() == {"a", "b"}
        ((failure,),) = {tuple(failures) for failures in found.values()}
        assert failure.what == "'a' and 'b' are both asked for: two clocks"
        assert dict(failure.fields) == {
            "one": f"'a', declared {one.declared}, asked for by one place",
            "other": f"'b', declared {other.declared}, asked for by another",
        }

    def test_one_alone_excludes_nobody(self) -> None:
        assert excluding([feature("a", conflicts={"b": "why"}), feature("c")], {}) == {}

    def test_verify_looks_at_what_may_run_together_only(self, tmp_path: Path) -> None:
        (tmp_path / "pkg").mkdir()
        (tmp_path / "pkg" / "engine.py").write_text(ENGINE)
        spec = LaneSpec("made", f"dir:{tmp_path}")
        clash = [feature("a"), feature("b"), feature("c", "self.second()")]
        report, _ = check_lane(spec, clash)
        assert "BP118" in {failure.code for failure in report.failures}
        clash[0] = feature("a", conflicts={"b": "they edit at one point"})
        report, _ = check_lane(spec, clash)
        assert report.failures == []

    def test_the_largest_sets_that_may_run_together(self) -> None:
        features = [feature("a", conflicts={"b": "why"}), feature("b"), feature("c", conflicts={"b": "why"})]
        sets = {tuple(f.name for f in found) for found in compatible(features)}
        assert sets == {("a", "c"), ("b",)}


class TestByName:
    @pytest.fixture(autouse=True)
    def nobody(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv(byname.FEATURES, raising=False)
        monkeypatch.delenv(byname.COMPOSE, raising=False)
        yield
        byname._HOSTS.clear()

    def config(self, extra: object = None) -> SimpleNamespace:
        return SimpleNamespace(additional_config={"balance_patcher": extra} if extra is not None else None)

    def test_nobody_asks_for_anything(self) -> None:
        assert byname.asked_by_name(self.config()) == {}
        assert byname.asked_by_name(object()) == {}

    def test_the_operator_the_configuration_and_a_hosts_plugin_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import balance_patcher

        monkeypatch.setenv(byname.FEATURES, " a, b,a ")
        balance_patcher.ask("c", by="their platform")
        assert byname.asked_by_name(self.config({"features": ["b", "d"]})) == {
            "a": "BALANCE_PATCHER_FEATURES",
            "b": "additional_config.balance_patcher.features",
            "c": "the plugin of their platform",
            "d": "additional_config.balance_patcher.features",
        }

    @pytest.mark.parametrize(
        "extra",
        [True, ["a"], {"feature": ["a"]}, *({"features": names} for names in ("a", {"a": True}, [1], [""]))],
        ids=str,
    )
    def test_what_is_no_list_of_names_is_refused(self, extra: object) -> None:
        with pytest.raises(PatchError, match=r"BP006.*balance_patcher"):
            byname.asked_by_name(self.config(extra))

    def test_a_name_between_two_commas_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(byname.FEATURES, "a,,b")
        with pytest.raises(PatchError, match=r"BP006.*BALANCE_PATCHER_FEATURES=a,,b"):
            byname.asked_by_name(self.config())

    @pytest.mark.parametrize("value", ["schedule", "their.patch.schedule", "their:", "a:b c"])
    def test_a_function_is_named_with_its_module(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(byname.COMPOSE, value)
        with pytest.raises(PatchError, match="BP006"):
            byname.composed_with()
        monkeypatch.setenv(byname.COMPOSE, "their.patch:schedule, a:B.<locals>.c,")
        assert byname.composed_with() == {"their.patch:schedule", "a:B.<locals>.c"}

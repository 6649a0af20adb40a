"""Several features and one method: both run, or both are named; and what is live is not hidden.

Every test writes a package of its own into a folder, imports it for real, and builds or installs against it.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from balance_patcher import installation
from balance_patcher.addition import Addition
from balance_patcher.bindings import holders
from balance_patcher.build import Built, build
from balance_patcher.compose import compose
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    Edit,
    InsertAfter,
    InsertBefore,
    Override,
    Prologue,
    Variant,
)
from balance_patcher.errors import Failure, PatchError
from balance_patcher.feature import Feature, RuntimeClass
from balance_patcher.origins import attribute_at, genuine
from balance_patcher.source import DirSource, Lane

MODULE = "pumps.engine"
PUMP = f"{MODULE}:Pump"

ENGINE = '''
from contextlib import suppress

class Base:
    def drain(self):
        return "drained"

class Pump(Base):
    def __init__(self):
        self.log = []

    def run(self):
        self.log.append("upstream")
        return 1

    def reset(self, hard=False, *rest, times=1):
        """Start again."""
        self.log.append(("reset", hard, *rest, times))
        return True

    def loose(*parts):
        return parts[1:]

class Fast(Pump):
    pass
'''


def delta(name: str, *edits: Edit, on: str = f"{PUMP}.reset", anchor: str = "", **more: Any) -> Delta:
    variant = Variant("only", Anchor(anchor) if anchor else None, edits, more.pop("exports", {}))
    return Delta(name, on, "why", "upstream", "never", (variant,), **more)


def carrier(name: str, **own: Any) -> RuntimeClass:
    """A class with a flag, and what it is given: each value gets the class."""

    def make(upstream: type) -> type:
        made = type(name.title(), (upstream,), {f"_{name}": True})
        for key, value in own.items():
            setattr(made, key, value(made) if callable(value) else value)
        return made

    return RuntimeClass(name.title(), PUMP, make, frozenset({f"_{name}"}))


def guard(name: str, exports: Mapping[str, str] | None = None, **own: Any) -> Feature:
    """A feature that edits ``run``, and whose class has methods of its own."""
    edit = delta(
        f"{name}.edit", InsertBefore(f"if self._{name}:\n    self.log.append({name!r})"), on=f"{PUMP}.run",
        anchor="return 1", after=tuple(f"{other}.edit" for other in ("a", "p", "q", "z") if other < name),
        exports=exports or {},
    )  # fmt: skip
    early = delta(
        f"{name}.early", Prologue(f"if not self._{name}:\n    return super().run($$$PARAMETERS)"), on=f"{PUMP}.run"
    )
    return Feature(name, name, (early, edit), carrier(name, **own))


def going_on(name: str) -> Callable[[type], Any]:
    """A ``reset`` that goes on to the next."""

    def own(made: type) -> Any:
        def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.log.append(f"{name} guards")
            return super(made, self).reset(*args, **kwargs)  # type: ignore[misc]

        return reset

    return own


def ending(name: str) -> Callable[[type], Any]:
    """A ``reset`` that answers itself."""

    def own(_: type) -> Any:
        def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
            return name

        return reset

    return own


def through(name: str, text: str = "self.log.append('after')", on: str = f"{PUMP}.reset") -> Feature:
    return Feature(name, name, (delta(f"{name}.x", CallThrough(text), on=on),))


Make = Callable[..., Built]


class World:
    """The package, imported, and what is built against it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.module: Any = importlib.import_module(MODULE)

    def build(self, *features: Feature) -> Built:
        return build(compose(features), self.lane)

    def made(self, *features: Feature) -> Any:
        return self.build(*features).classes[PUMP]()

    def refused(self, *features: Feature) -> list[Failure]:
        with pytest.raises(PatchError) as caught:
            self.build(*features)
        assert all(failure.next for failure in caught.value.failures)
        return list(caught.value.failures)


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pumps").mkdir()
    (tmp_path / "pumps/__init__.py").write_text("")
    (tmp_path / "pumps/engine.py").write_text(ENGINE)
    importlib.invalidate_caches()
    made = World(Lane("live", DirSource(f"dir:{tmp_path}", tmp_path)))
    monkeypatch.setattr(installation, "build", lambda feature: build(feature, made.lane))
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "pumps"]:
        del sys.modules[name]


# -- both run --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["pa", "pz"], ids=["before", "after"])
def test_a_call_through_and_the_method_of_another_features_class_both_run(names: str, world: World) -> None:
    one, other = names
    pump = world.made(guard(one, reset=going_on(one)), through(other))
    assert pump.reset(True, 1, 2, times=3) is True
    assert pump.log == [f"{one} guards", ("reset", True, 1, 2, 3), "after"]


def test_so_they_do_where_both_have_a_class(world: World) -> None:
    calls = delta("z.x", CallThrough("self.log.append('after')"))
    other = Feature("z", "z", (calls,), carrier("z"))
    pump = world.made(guard("p", reset=going_on("p")), other)
    assert (pump.reset(), pump.log) == (True, ["p guards", ("reset", False, 1), "after"])


def test_a_method_that_does_not_go_on_runs_and_is_called_through(world: World) -> None:
    pump = world.made(guard("p", reset=ending("p")), through("z"))
    assert (pump.reset(), pump.log) == ("p", ["after"])


def test_a_constructor_of_a_class_runs_under_a_call_through_of_it(world: World) -> None:
    def init(made: type) -> Any:
        def __init__(self: Any) -> None:  # noqa: N807 - it is one
            super(made, self).__init__()
            self.log.append("p's")

        return __init__

    assert world.made(guard("p", __init__=init), through("z", on=f"{PUMP}.__init__")).log == ["p's", "after"]


def test_what_is_called_through_can_be_seen(world: World) -> None:
    built = world.build(guard("p", reset=going_on("p")), through("z"))
    assert "balance_result = super().reset(hard, *rest, times=times)" in built.texts[f"<balance_patcher {PUMP}.reset>"]
    assert vars(built.classes[PUMP])["reset"] is built.functions[f"{PUMP}.reset"]
    assert [cls.__name__ for cls in built.classes[PUMP].__mro__[:3]] == ["PatchedPump", "P", "Pump"]


def test_a_class_without_the_method_stays_as_it_is(world: World) -> None:
    built = world.build(guard("p"), through("z"))
    assert [cls.__name__ for cls in built.classes[PUMP].__mro__[:2]] == ["P", "Pump"]
    pump = built.classes[PUMP]()
    assert (pump.reset(), pump.log) == (True, [("reset", False, 1), "after"])


def test_a_line_that_cannot_stand_where_it_is_put_is_told_of_its_delta(world: World) -> None:
    (failure,) = world.refused(Feature("z", "z", (delta("z.x", InsertBefore("break"), anchor="return True"),)))
    assert failure.code == "BP305"
    assert "'break' outside loop" in failure.what
    assert failure.what.endswith("a line of delta 'z.x'")
    assert failure.next == "change its text: it cannot stand at that place"


def test_what_is_edited_too_is_called_as_it_is_edited(world: World) -> None:
    edits = delta("e.x", InsertBefore("self.log.append('edited')"), anchor="return True")
    pump = world.made(guard("p"), through("z"), Feature("e", "e", (edits,)))
    assert (pump.reset(), pump.log) == (True, [("reset", False, 1), "edited", "after"])


def test_without_a_class_upstreams_function_is_called(world: World) -> None:
    built = world.build(through("z"))
    assert "balance_patcher_upstream(self, hard, *rest, times=times)" in built.texts[f"<balance_patcher {PUMP}.reset>"]


def test_two_methods_that_go_on_run_both(world: World) -> None:
    pump = world.made(guard("p", reset=going_on("p")), guard("q", reset=going_on("q")))
    assert (pump.reset(), pump.log) == (True, ["p guards", "q guards", ("reset", False, 1)])


ON = [
    "return super().reset($$$PARAMETERS)",
    "if not super().reset($$$PARAMETERS):\n    return False\nreturn self._z",
    "return super().reset($$$PARAMETERS) and self._z",
    "if self._z:\n    return super().reset($$$PARAMETERS)\nelse:\n    kept = super().reset($$$PARAMETERS)\nreturn kept",
    "if not self._z:\n    raise RuntimeError\nreturn super().reset($$$PARAMETERS)",
    "with self.lock:\n    return super().reset($$$PARAMETERS)",
    "return super().reset($$$PARAMETERS) if self._z else not super().reset($$$PARAMETERS)",
    "for one in self.log:\n    if one:\n        break\nreturn super().reset($$$PARAMETERS)",
    "try:\n    kept = super().reset($$$PARAMETERS)\nexcept KeyError:\n    raise\nelse:\n    self._z\nreturn kept",
    "try:\n    return self._z\nfinally:\n    super().reset($$$PARAMETERS)",
]
OFF = [
    "if self._z:\n    return True\nreturn super().reset($$$PARAMETERS)",
    "if self._z:\n    return super().reset($$$PARAMETERS)",
    "return self._z and super().reset($$$PARAMETERS)",
    "return super().reset($$$PARAMETERS) if self._z else True",
    "return [super().reset($$$PARAMETERS) for one in self.log]",
    "return lambda: super().reset($$$PARAMETERS)",
    "def later():\n    return super().reset($$$PARAMETERS)\nreturn later",
    "while self._z:\n    return super().reset($$$PARAMETERS)\nreturn True",
    "for one in self.log:\n    super().reset($$$PARAMETERS)\nreturn True",
    "try:\n    return super().reset($$$PARAMETERS)\nexcept ValueError:\n    return True",
    "with suppress(KeyError):\n    return super().reset($$$PARAMETERS)\nreturn True",
    "try:\n    self._z = 1\nexcept KeyError:\n    return super().reset($$$PARAMETERS)\nelse:\n    return self._z",
    "return 0 < len(self.log) < super().reset($$$PARAMETERS)",
    "return super().drain($$$PARAMETERS)",
    "return super().reset($$$PARAMETERS)\n".replace("super().reset", "self.reset"),
]


def overriding(text: str) -> Feature:
    held = text.replace("self.lock", "self._z")
    return Feature("z", "z", (delta("z.x", Override(held)),), carrier("z"))


@pytest.mark.parametrize("text", ON)
def test_an_override_that_goes_on_in_every_way_is_let_through(text: str, world: World) -> None:
    built = world.build(guard("p", reset=going_on("p")), overriding(text))
    assert vars(built.classes[PUMP])["reset"] is built.functions[f"{PUMP}.reset"]


@pytest.mark.parametrize("text", OFF)
def test_one_that_may_not_is_refused_with_both(text: str, world: World) -> None:
    (failure,) = world.refused(guard("p", reset=going_on("p")), overriding(text))
    assert failure.code == "BP130"
    assert failure.what.startswith("delta 'z.x' does not call super().reset(…) in every way through it")
    assert "the class of 'p' has reset too" in failure.what


# -- or both are named -----------------------------------------------------------------------

SPLICED = [
    ("z.x", (InsertBefore("self.log.append('z')"),), "return True"),
    ("z.x", (InsertAfter("self.log.append('z')"),), "self.log.append($_)"),
    ("z.x", (Prologue("self.log.append('z')"),), ""),
    ("z.x", (AddParameter("more", "None"), Prologue("self.log.append(more)")), ""),
]


@pytest.mark.parametrize(("name", "edits", "anchor"), SPLICED, ids=["before", "after", "prologue", "parameter"])
@pytest.mark.parametrize("runtime", [carrier("z"), None], ids=["with a class", "without"])
def test_an_edit_of_upstreams_method_cannot_stand_over_another_features(
    name: str,
    edits: tuple[Edit, ...],
    anchor: str,
    runtime: RuntimeClass | None,
    world: World,
) -> None:
    other = Feature("z", "z", (delta(name, *edits, anchor=anchor),), runtime)
    failures = world.refused(guard("p", reset=going_on("p")), other)
    assert {failure.code for failure in failures} == {"BP130"}
    what = "delta 'z.x' edits upstream's reset, which has no super() to go on to, and the class of 'p' has reset too"
    assert failures[0].what == f"{what}: one of the two would never run"
    rows = dict(failures[0].fields)
    assert rows["target"] == f"{PUMP}.reset"
    assert "going_on.<locals>.own.<locals>.reset" in rows["method"]


@pytest.mark.parametrize("edit", [CallThrough("self.log.append('z')"), Override("return super().reset($$$PARAMETERS)")])
def test_a_feature_gives_a_method_once(edit: Edit, world: World) -> None:
    twice = guard("p", reset=going_on("p"))
    twice = Feature("p", "p", (*twice.deltas, delta("p.reset", edit)), twice.runtime)
    for features in ([twice], [twice, guard("q")]):
        (failure,) = world.refused(*features)
        assert failure.code == "BP130"
        assert "delta 'p.reset' and its own feature's class both give reset" in failure.what


@pytest.mark.parametrize("name", ["a", "q"])
def test_an_override_and_an_edit_are_named_and_no_early_return_asked_for(name: str, world: World) -> None:
    early = delta("p.off", Prologue("if not self._p:\n    return super().reset($$$PARAMETERS)"))
    edit = delta("p.edit", InsertBefore("self.log.append(1)"), anchor="return True")
    over = Feature(name, name, (delta(f"{name}.x", Override("return super().reset($$$PARAMETERS)")),), carrier(name))
    failures = world.refused(Feature("p", "p", (early, edit), carrier("p")), over)
    assert {failure.code for failure in failures} == {"BP119"}
    assert all(f"'{name}.x'" in failure.what for failure in failures)


@pytest.mark.parametrize("names", ["pq", "qp"])
def test_two_methods_of_which_one_ends_are_refused_in_either_order(names: str, world: World) -> None:
    goes, ends = names
    failures = world.refused(guard(goes, reset=going_on(goes)), guard(ends, reset=ending(ends)))
    assert [failure.code for failure in failures] == ["BP130"]
    assert failures[0].what == (
        f"the classes of 'p' and 'q' both have reset, and that of {ends!r} does not go on with super(): "
        "one of the two would never run"
    )


def test_a_method_of_theirs_alone_is_one_name_of_two(world: World) -> None:
    helper = lambda _: lambda self: 1  # noqa: E731
    (failure,) = world.refused(guard("p", _note=helper), guard("q", _note=helper))
    assert failure.code == "BP130"
    assert "both have _note, and they do not go on with super()" in failure.what


def test_a_value_of_both_is_one_of_two(world: World) -> None:
    (failure,) = world.refused(guard("p", _seen=None), guard("q", _seen=None))
    assert failure.code == "BP130"
    assert "'p' and 'q' both have _seen" in failure.what


def test_a_property_that_goes_on_is_a_method(world: World) -> None:
    def level(step: int) -> Callable[[type], Any]:
        return lambda made: property(lambda self: step + getattr(super(made, self), "level", 0))

    (failure,) = world.refused(guard("p", level=level(1)), guard("q", level=level(2)))
    assert "level" in failure.what  # by `getattr` it cannot be told


def test_a_method_without_a_self_cannot_go_on(world: World) -> None:
    own = lambda made: lambda *parts: super(made, parts[0]).loose(*parts[1:])  # noqa: E731
    other = through("z", text="print(parts)", on=f"{PUMP}.loose")
    (failure,) = world.refused(guard("p", loose=own), other)
    assert "delta 'z.x' has nothing to call super() with" in failure.what
    assert world.made(guard("p"), through("z", text="repr(parts)", on=f"{PUMP}.loose")).loose(1, 2) == (1, 2)


# -- what is exported ------------------------------------------------------------------------


def test_what_two_export_is_refused_with_both(world: World) -> None:
    failures = world.refused(guard("p", {"_held": "self.log"}), guard("q", {"_held": "self.log"}))
    assert {failure.code for failure in failures} == {"BP301"}
    assert [failure.what for failure in failures] == [
        "'_held', which delta 'p.edit' exports, feature 'q' brings too",
        "'_held', which delta 'q.edit' exports, feature 'p' brings too",
    ]
    assert dict(failures[0].fields)["the other"].startswith("tests/test_one_method.py:")


def test_what_one_exports_and_another_provides_is_refused(world: World) -> None:
    (failure,) = world.refused(guard("p", {"_q": "self.log"}), guard("q"))
    assert (failure.code, failure.what) == ("BP301", "'_q', which delta 'p.edit' exports, feature 'q' brings too")


@pytest.mark.parametrize("others", [(), ("q",)], ids=["alone", "with another"])
def test_what_is_exported_hides_no_method_of_a_class(others: tuple[str, ...], world: World) -> None:
    one = guard("p", {"_held": "self.log"}, _held=lambda made: lambda self: 0)
    (failure,) = world.refused(one, *map(guard, others))
    assert failure.code == "BP130"
    assert "delta 'p.edit' exports _held, and the class of 'p' has _held too" in failure.what


def test_exports_of_two_names_are_there(world: World) -> None:
    pump = world.made(guard("p", {"_held": "self.log"}), guard("q", {"_kept": "self.log"}))
    assert pump._held() is pump._kept() is pump.log


# -- what is live and not in the text --------------------------------------------------------


def backport(self: Any) -> str:
    return "theirs"


@pytest.mark.parametrize("where", ["Pump", "Base"])
@pytest.mark.parametrize(
    "feature",
    [
        guard("p", _can_drain=lambda made: lambda self: "ours"),
        guard("p", {"_can_drain": "self.log"}),
        Feature(
            "p", "p", guard("p").deltas, RuntimeClass("P", PUMP, carrier("p").make, frozenset({"_p", "_can_drain"}))
        ),
    ],
    ids=["a method", "an export", "an attribute"],
)
def test_a_name_that_somebody_has_put_there_is_not_hidden(where: str, feature: Feature, world: World) -> None:
    getattr(world.module, where)._can_drain = backport
    (failure,) = world.refused(feature)
    assert failure.code == "BP301"
    named = f"'_can_drain', which P brings, is on the live {where} and not in its text: tests.test_one_method.backport"
    assert failure.what.startswith(named)
    assert dict(failure.fields)["declared"].startswith("tests/test_one_method.py:")


def test_so_it_is_for_each_of_several(world: World) -> None:
    world.module.Pump._can_drain = backport
    (failure,) = world.refused(guard("p"), guard("q", _can_drain=lambda made: lambda self: "ours"))
    assert failure.code == "BP301"


def test_what_is_in_the_text_may_be_overridden(world: World) -> None:
    drain = lambda made: lambda self: f"ours, {super(made, self).drain()}"  # noqa: E731
    assert world.made(guard("p", drain=drain)).drain() == "ours, drained"


def test_what_others_put_there_under_a_name_of_their_own_is_left_alone(world: World) -> None:
    world.module.Pump._can_drain = backport
    assert world.made(guard("p"))._can_drain() == "theirs"


# -- in place, whatever else is bound --------------------------------------------------------


IN_PLACE = {
    "call-through": through("x"),
    "edit": Feature("x", "x", (delta("x.x", InsertBefore("self.log.append('after')"), anchor="return True"),)),
    "addition": Feature(
        "x", "x", (delta("x.x", CallThrough("self.log.append('after')")),),
        adds=(Addition(PUMP, "def more(self):\n    return len(self.log)", why="why"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("own", [{}, {"reset": going_on("p")}], ids=["another method", "a method that goes on"])
@pytest.mark.parametrize("order", ["px", "xp"])
def test_either_order_binds_the_same_and_undoes_it(kind: str, own: dict[str, Any], order: str, world: World) -> None:
    features = {"p": guard("p", **own), "x": IN_PLACE[kind]}
    upstream, before = world.module.Pump, dict(vars(world.module.Pump))
    bases = world.module.Fast.__bases__
    for name in order:
        installation.install(features[name])
    assert "reset" in {name for name in vars(upstream) if vars(upstream)[name] is not before.get(name)}
    for cls in (world.module.Pump, world.module.Fast):
        pump = cls()
        assert pump.reset() is True
        assert pump.log == [*["p guards"] * bool(own), ("reset", False, 1), "after"]
        assert not hasattr(pump, "more") or pump.more() == len(pump.log)
    for undone in itertools.permutations(order):
        for name in undone:
            installation.uninstall(name)
        assert world.module.Pump is upstream
        assert dict(vars(upstream)) == before
        assert world.module.Fast.__bases__ == bases
        for name in undone:
            installation.install(features[name])
    for name in order:
        installation.uninstall(name)


@pytest.mark.parametrize("order", ["px", "xp"])
def test_a_method_that_ends_would_hide_what_is_edited_in_place(order: str, world: World) -> None:
    features = {"p": guard("p", reset=ending("p")), "x": IN_PLACE["call-through"]}
    before = dict(vars(world.module.Pump))
    installation.install(features[order[0]])
    with pytest.raises(PatchError) as caught:
        installation.install(features[order[1]])
    (failure,) = caught.value.failures
    assert failure.code == "BP130"
    assert failure.what.endswith("does not go on to it: one of the two would never run")
    assert installation.installed(order[1]) is None
    installation.uninstall(order[0])
    assert dict(vars(world.module.Pump)) == before


@pytest.mark.parametrize("order", ["px", "xp", "pax", "xap"])
def test_what_is_bound_anew_is_not_in_its_own_way(order: str, world: World) -> None:
    """They share ``run``, so that they are one in the end: the old call-through in place is gone then."""
    calls = delta("x.run", CallThrough("self.log"), on=f"{PUMP}.run", after=("p.edit", "a.edit"))
    features = {
        "p": guard("p", reset=ending("p")), "a": guard("a"), "x": Feature("x", "x", (*through("x").deltas, calls)),
    }  # fmt: skip
    before = dict(vars(world.module.Pump))
    for name in order:
        installation.install(features[name])
    pump = world.module.Fast()
    assert (pump.reset(), pump.log) == ("p", ["after"])
    for name in order:
        installation.uninstall(name)
    assert dict(vars(world.module.Pump)) == before


@pytest.mark.parametrize("order", ["px", "xp"])
def test_what_is_in_place_is_seen_where_it_is(order: str, world: World) -> None:
    features = {"p": guard("p", reset=going_on("p")), "x": IN_PLACE["edit"]}
    for name in order:
        installation.install(features[name])
    there, live = attribute_at(f"{PUMP}.reset")
    assert (there, live) == (True, vars(world.module.Pump)["reset"])
    upstream = genuine(world.module.Pump)
    there, live = attribute_at(f"{PUMP}.loose")
    assert (there, live) == (True, vars(upstream)["loose"])
    assert [cls.__name__ for cls in holders(world.module.Fast, "reset", MODULE)] == ["P", "Pump"]
    for name in order:
        installation.uninstall(name)


def test_a_class_of_somebody_elses_is_not_believed_to_go_on(world: World) -> None:
    class Theirs(world.module.Pump):  # type: ignore[misc, name-defined]
        def reset(self) -> Any:
            return super().reset()

    assert [cls.__name__ for cls in holders(Theirs, "reset", MODULE)] == ["Theirs"]


# -- every mixture, under every name ---------------------------------------------------------


def mixed(kind: str, name: str, others: str) -> Feature:
    """A feature that leaves its mark when ``reset`` runs and it is on; at one point they come in the order of names."""
    mark = f"if self._{name}:\n    self.log.append('{name}')"
    after = tuple(f"{other}.x" for other in others if other < name)
    if kind == "edit":
        early = delta(f"{name}.off", Prologue(f"if not self._{name}:\n    return super().reset($$$PARAMETERS)"))
        edit = delta(f"{name}.x", InsertBefore(mark), anchor="return True", after=(f"{name}.off", *after))
        return Feature(name, name, (early, edit), carrier(name))
    if kind == "method":
        edit = delta(f"{name}.x", CallThrough("self.log"), on=f"{PUMP}.run", after=after)

        def own(made: type) -> Any:
            def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
                if getattr(self, f"_{name}"):
                    self.log.append(name)
                return super(made, self).reset(*args, **kwargs)  # type: ignore[misc]

            return reset

        return Feature(name, name, (edit,), carrier(name, reset=own))
    edits: dict[str, Edit] = {
        "through": CallThrough(mark),
        "first": CallThrough(mark, first=True),
        "override": Override(f"kept = super().reset($$$PARAMETERS)\n{mark}\nreturn kept"),
    }
    return Feature(name, name, (delta(f"{name}.x", edits[kind], after=after),), carrier(name))


def outcome(world: World, kinds: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """What is refused; or who has left a mark, for each choice of those that are on."""
    features = [mixed(kind, name, "abc") for kind, name in zip(kinds, names, strict=True)]
    try:
        built = world.build(*features)
    except PatchError as error:
        return frozenset(failure.code for failure in error.failures)
    seen = []
    for flags in itertools.product([False, True], repeat=len(names)):
        pump = built.classes[PUMP]()
        vars(pump).update({f"_{name}": on for name, on in zip(names, flags, strict=True)})
        assert pump.reset(1, 2, times=3) is True
        assert pump.log.count(("reset", 1, 2, 3)) == 1
        marks = [pump.log.count(name) for name in names]
        assert marks == list(map(int, flags)), (kinds, names, flags, pump.log)
        seen.append(tuple(marks))
    return tuple(seen)


KINDS = ("edit", "first", "method", "override", "through")
MIXTURES = [
    kinds
    for size in (2, 3)
    for kinds in itertools.combinations_with_replacement(KINDS, size)
    if kinds.count("edit") < 3
]


@pytest.mark.parametrize("kinds", MIXTURES, ids="+".join)
def test_a_mixture_runs_whole_or_is_refused_whatever_its_names_are(kinds: tuple[str, ...], world: World) -> None:
    """Each that is on has left its mark once, and upstream's method has run once; or all orders are refused alike."""
    found = {outcome(world, kinds, names) for names in itertools.permutations("abc"[: len(kinds)])}
    assert len(found) == 1
    alone = kinds.count("override") == 1 and set(kinds) <= {"override", "method"}
    if "override" in kinds and not alone:
        assert found == {frozenset({"BP119"})} or found == {frozenset({"BP119", "BP130"})}
    elif "edit" in kinds and "method" in kinds:
        assert found == {frozenset({"BP130"})}
    else:
        assert len(next(iter(found))) == 2 ** len(kinds)

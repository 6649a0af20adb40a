"""Somebody else's function on a target: refused by name, and edited like upstream's where an operator asks for it."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from balance_patcher.bindings import bypassed, overwritten
from balance_patcher.build import build
from balance_patcher.delta import AddParameter, Anchor, CallThrough, Delta, InsertAfter, Prologue, Variant
from balance_patcher.errors import PatchError
from balance_patcher.feature import CallShape, Feature, Ordered, RuntimeClass
from balance_patcher.installation import install, uninstall
from balance_patcher.source import DirSource, Lane

NUMBERS = itertools.count()

UPSTREAM = """
class Base:
    def step(self, x=1):
        return ["base"]

class Engine(Base):
    def __init__(self):
        self.log, self.cap, self.on = [], 3, False

    def step(self, x=1):
        self.log.append("upstream")
        budget = self.cap
        return budget

    def sync(self, x):
        self.log.append("upstream sync")
        return x
"""

THEIRS = '''
from __future__ import annotations
import functools

FACTOR = 10

def step(self, x: Wish = 1):
    """Theirs."""
    self.log.append("theirs")  # a comment of theirs
    budget = self.cap
    def scaled(value: Wish):  # as its `__future__` import has it, nobody looks for that name
        return value * FACTOR
    return scaled(budget)

class Patches:
    def step(self, x=1):
        self.log.append("theirs in a class")
        budget = self.cap
        return budget * FACTOR

def sync(self, x):
    self.log.append("their sync")
    return -x

def another(self, x=1):
    return "nothing that an anchor finds"

def renamed(self, x=1):
    budget = self.limit
    return budget

def wrap(function):
    @functools.wraps(function)
    def around(self, *args, **kwargs):
        self.log.append("around")
        return function(self, *args, **kwargs)
    return around

def narrow(function):
    def around(self):
        return function(self, 1)
    return around

def demanding(self, x, must):
    budget = self.cap
    return budget

class Between:
    """Calls on, and does something of its own; nobody can ask for it by a name."""
    def __init__(self, function):
        self.function = function
    def __call__(self, *args):
        return self.function(*args)

def made(self):
    def step(self, x=1):
        budget = self.cap
        return budget
    return step
'''


class World:
    """Upstream's package and theirs, imported, with a feature for upstream's."""

    def __init__(self, root: Path, number: int) -> None:
        self.up, self.their = f"up_{number}", f"their_{number}"
        for package, text in ((self.up, UPSTREAM), (self.their, THEIRS)):
            (root / package).mkdir()
            (root / package / "__init__.py").write_text("")
            (root / package / "engine.py").write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        self.lane = Lane("live", DirSource(f"dir:{root}", root))
        self.file = root / self.their / "engine.py"

    @property
    def upstream(self) -> ModuleType:
        return importlib.import_module(f"{self.up}.engine")

    @property
    def theirs(self) -> ModuleType:
        return importlib.import_module(f"{self.their}.engine")

    def name(self, qualname: str) -> str:
        return f"{self.their}.engine:{qualname}"

    def feature(self, anchor: str = "budget = self.cap", *, invariants: bool = False) -> Feature:
        target = f"{self.up}.engine:Engine.step"
        early = (AddParameter("y", "2"), Prologue("if not self.on:\n    return super().step($$$PARAMETERS)"))
        edit = (InsertAfter("if self.on:\n    self.log.append('ours')"),)
        deltas = (
            Delta("made.early", target, "why", "up", "never", (Variant("only", edits=early),)),
            Delta("made.edit", target, "why", "up", "never", (Variant("only", Anchor(anchor), edits=edit),)),
        )
        runtime = RuntimeClass("Ours", f"{self.up}.engine:Engine", lambda base: type("Ours", (base,), {}))
        rules = (Ordered("budget before the end", target, "budget = self.cap", "return $_"),) if invariants else ()
        return Feature("made", "made for a test", deltas, runtime, rules)

    def hook(self) -> Feature:
        then = Variant("only", edits=(CallThrough("self.log.append('ours')"),))
        return Feature("hook", "a hook", (Delta("hook.sync", self.sync, "why", "up", "never", (then,)),))

    @property
    def sync(self) -> str:
        return f"{self.up}.engine:Engine.sync"

    def engine(self, feature: Feature, *, on: bool):
        made = next(iter(build(feature, self.lane).classes.values()))()
        made.on = on
        return made


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = World(tmp_path, next(NUMBERS))
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in (made.up, made.their)]:
        del sys.modules[name]


@pytest.fixture
def ask(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *names: monkeypatch.setenv("BALANCE_PATCHER_COMPOSE", ",".join(map(world.name, names)))


def only(caught: pytest.ExceptionInfo[PatchError]):
    (failure,) = caught.value.failures
    return failure


class TestRefused:
    def test_a_replacement_is_named_with_how_to_keep_it(self, world: World) -> None:
        world.upstream.Engine.step = world.theirs.step
        with pytest.raises(PatchError) as caught:
            build(world.feature(), world.lane)
        failure = only(caught)
        assert failure.code == "BP603"
        assert f"{world.their}.engine.step ({world.file}:7)" in failure.what
        assert failure.next.endswith(f"or ask for both: BALANCE_PATCHER_COMPOSE={world.name('step')}")

    def test_a_wrapper_is_named_with_how_to_keep_it(self, world: World) -> None:
        world.upstream.Engine.sync = world.theirs.wrap(world.upstream.Engine.sync)
        with pytest.raises(PatchError) as caught:
            build(world.hook(), world.lane)
        failure = only(caught)
        assert failure.code == "BP602"
        assert f"({world.file}:" in failure.what
        assert f"BALANCE_PATCHER_COMPOSE={world.name('wrap.<locals>.around')}" in failure.next

    def test_asking_for_another_is_not_asking_for_this_one(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.step = world.theirs.step
        ask("another", "Patches.step")
        with pytest.raises(PatchError, match="BP603"):
            build(world.feature(), world.lane)

    def test_a_later_replacement_is_not_the_one_that_was_asked_for(
        self, world: World, ask: Callable[..., None]
    ) -> None:
        ask("step")
        world.upstream.Engine.step = world.theirs.Patches.step
        with pytest.raises(PatchError, match=r"BP603.*Patches\.step"):
            build(world.feature(), world.lane)


class TestComposed:
    @pytest.mark.parametrize(("theirs", "said"), [("step", "theirs"), ("Patches.step", "theirs in a class")])
    def test_their_text_is_edited_and_theirs_and_ours_run(
        self, theirs: str, said: str, world: World, ask: Callable[..., None]
    ) -> None:
        live = world.theirs
        for part in theirs.split("."):
            live = getattr(live, part)
        world.upstream.Engine.step = live
        ask(theirs)
        engine = world.engine(world.feature(invariants=True), on=True)
        assert (engine.step(), engine.log) == (30, [said, "ours"])

    def test_off_it_is_theirs_alone(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.step = world.theirs.step
        ask("step")
        engine = world.engine(world.feature(), on=False)
        assert (engine.step(), engine.log) == (30, ["theirs"])

    def test_it_is_shown_as_it_runs_on_their_globals(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.step = world.theirs.step
        ask("step")
        engine = world.engine(world.feature(), on=True)
        source = inspect.getsource(type(engine).step)
        assert "# a comment of theirs" in source
        assert "self.log.append('ours')  # bp: made.edit" in source
        world.theirs.FACTOR = 100
        assert engine.step() == 300
        assert type(engine).step.__annotations__ == {"x": "Wish"}

    def test_a_parameter_is_added_to_theirs_and_theirs_are_passed_on(
        self, world: World, ask: Callable[..., None]
    ) -> None:
        world.upstream.Engine.step = world.theirs.step
        ask("step")
        engine = world.engine(world.feature(), on=False)
        assert engine.step(5, y=6) == 30
        assert str(inspect.signature(engine.step)).endswith("x: 'Wish' = 1, y=2)")

    def test_a_function_that_stands_in_no_file_but_is_shown_counts(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = 'def step(self, x=1):\n    self.log.append("shown")\n    budget = self.cap\n    return budget\n'
        namespace = {"__name__": "made_up"}
        exec(compile(text, "<made up>", "exec", dont_inherit=True), namespace)  # noqa: S102
        lines = text.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, "<made up>", (len(text), None, lines, "<made up>"))
        world.upstream.Engine.step = namespace["step"]
        monkeypatch.setenv("BALANCE_PATCHER_COMPOSE", "made_up:step")
        engine = world.engine(world.feature(), on=True)
        assert (engine.step(), engine.log) == (3, ["shown", "ours"])

    @pytest.mark.parametrize("theirs", ["replaced", "wrapped", "both"])
    def test_what_is_only_called_through_calls_theirs_once(
        self, theirs: str, world: World, ask: Callable[..., None]
    ) -> None:
        names = {"replaced": ["sync"], "wrapped": ["wrap.<locals>.around"], "both": ["wrap.<locals>.around", "sync"]}
        if theirs != "wrapped":
            world.upstream.Engine.sync = world.theirs.sync
        if theirs != "replaced":
            world.upstream.Engine.sync = world.theirs.wrap(world.upstream.Engine.sync)
        ask(*names[theirs])
        sync = build(world.hook(), world.lane).functions[world.sync]
        engine = world.upstream.Engine()
        assert sync(engine, 4) == (4 if theirs == "wrapped" else -4)
        said = {"replaced": ["their sync"], "wrapped": ["around", "upstream sync"], "both": ["around", "their sync"]}
        assert engine.log == [*said[theirs], "ours"]

    def test_installed_and_taken_out_theirs_is_there_again(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.sync = world.theirs.sync
        ask("sync")
        found = install_from(world, world.hook())
        assert vars(world.upstream.Engine)["sync"] is found.built.functions[world.sync]
        uninstall("hook")
        assert vars(world.upstream.Engine)["sync"] is world.theirs.sync


def install_from(world: World, feature: Feature):
    """``install`` against the world's own text."""
    from balance_patcher import installation

    real = installation.build
    installation.build = lambda chosen: build(chosen, world.lane)
    try:
        return install(feature)
    finally:
        installation.build = real


class TestNotComposable:
    @pytest.mark.parametrize(("theirs", "code"), [("another", "BP116"), ("renamed", "BP116")])
    def test_the_anchors_have_to_hold_in_theirs(
        self, theirs: str, code: str, world: World, ask: Callable[..., None]
    ) -> None:
        world.upstream.Engine.step = getattr(world.theirs, theirs)
        ask(theirs)
        with pytest.raises(PatchError) as caught:
            build(world.feature(), world.lane)
        failure = next(failure for failure in caught.value.failures if failure.code == code)
        assert failure.file == str(world.file)
        assert world.name(theirs) in dict(failure.fields)["target"]

    def test_an_attribute_that_upstreams_class_lacks_is_found_missing_in_theirs_too(
        self, world: World, ask: Callable[..., None]
    ) -> None:
        world.upstream.Engine.step = world.theirs.step
        ask("step")
        feature = world.feature()
        edit = feature.deltas[1].variants[0]
        wrong = replace(edit, edits=(InsertAfter("self.lgo.append('ours')"),))
        feature = replace(feature, deltas=(feature.deltas[0], replace(feature.deltas[1], variants=(wrong,))))
        with pytest.raises(PatchError, match=r"BP303.*self\.lgo"):
            build(feature, world.lane)

    def test_the_invariants_have_to_hold_in_theirs(self, world: World, ask: Callable[..., None]) -> None:
        early = "    if x:\n        return 0\n    #"
        world.file.write_text(world.file.read_text().replace('    self.log.append("theirs")  #', early, 1))
        world.upstream.Engine.step = world.theirs.step
        ask("step")
        with pytest.raises(PatchError, match="BP204"):
            build(world.feature(invariants=True), world.lane)
        build(world.feature(), world.lane)

    def test_their_text_has_to_be_what_runs(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.step = world.theirs.step
        world.file.write_text(world.file.read_text().replace("value * FACTOR", "value + FACTOR"))
        ask("step")
        with pytest.raises(PatchError, match="BP601"):
            build(world.feature(), world.lane)

    def test_so_has_that_of_a_wrapper(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.sync = world.theirs.wrap(world.upstream.Engine.sync)
        world.file.write_text(world.file.read_text().replace('"around"', '"elsewhere"'))
        ask("wrap.<locals>.around")
        with pytest.raises(PatchError, match=r"BP612.*was not compiled from the text of its file"):
            build(world.hook(), world.lane)

    def test_without_a_text_it_is_refused(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.step = world.theirs.step
        world.file.unlink()
        ask("step")
        with pytest.raises(PatchError, match=r"BP612.*cannot be read"):
            build(world.feature(), world.lane)

    def test_a_wrapper_has_no_place_for_an_edit(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.step = world.theirs.wrap(world.upstream.Engine.step)
        ask("wrap.<locals>.around")
        with pytest.raises(PatchError, match=r"BP612.*is made inside another function") as caught:
            build(world.feature(), world.lane)
        assert "apply it after balance_patcher" in str(caught.value)

    def test_a_wrapper_that_stands_in_the_module_has_none_either(self, world: World, ask: Callable[..., None]) -> None:
        around = functools.wraps(world.upstream.Engine.step)(world.theirs.step)
        around.__module__, around.__qualname__ = world.theirs.__name__, "step"
        world.upstream.Engine.step = around
        ask("step")
        with pytest.raises(PatchError, match=r"BP612.*is a wrapper, and has no place for our edits") as caught:
            build(world.feature(), world.lane)
        assert "apply it after balance_patcher" in str(caught.value)

    def test_one_that_is_called_in_another_way_is_refused(self, world: World, ask: Callable[..., None]) -> None:
        world.upstream.Engine.sync = world.theirs.narrow(world.upstream.Engine.sync)
        ask("narrow.<locals>.around")
        with pytest.raises(PatchError, match=r"BP612.*cannot be called as Engine\.sync is"):
            build(world.hook(), world.lane)

    def test_one_that_is_edited_has_to_be_called_in_the_ways_that_are_declared(
        self, world: World, ask: Callable[..., None]
    ) -> None:
        feature = world.feature()
        target = feature.targets[0]
        feature = replace(feature, call_shapes=tuple(CallShape(target, given) for given in ("x=1", "y=1", "1, 1")))
        world.upstream.Engine.step = world.theirs.step
        ask("step")
        build(feature, world.lane)
        world.upstream.Engine.step = world.theirs.demanding
        ask("demanding")
        with pytest.raises(PatchError, match=r"BP612.*demanding.* cannot be called as .*Engine\.step\(x=1\) is"):
            build(feature, world.lane)

    def test_an_object_in_between_is_nothing_that_was_asked_for(self, world: World, ask: Callable[..., None]) -> None:
        engine = world.upstream.Engine
        engine.sync = world.theirs.wrap(world.theirs.Between(engine.sync))
        ask("wrap.<locals>.around")
        with pytest.raises(PatchError, match="BP602"):
            build(world.hook(), world.lane)

    def test_of_two_wrappers_both_have_to_be_asked_for(self, world: World, ask: Callable[..., None]) -> None:
        engine = world.upstream.Engine
        engine.sync = world.theirs.narrow(world.theirs.wrap(engine.sync))
        ask("wrap.<locals>.around")
        with pytest.raises(PatchError, match="BP602"):
            build(world.hook(), world.lane)


class TestLater:
    def test_what_is_put_on_upstreams_class_behind_ours_is_noticed(self, world: World) -> None:
        upstream = world.upstream.Engine
        found = install_from(world, world.feature())
        try:
            assert list(bypassed(found)) == []
            upstream.step = world.theirs.step
            assert list(overwritten(found)) == []
            (failure,) = bypassed(found)
            assert failure.code == "BP606"
            assert f"{world.up}.engine:Engine.step is {world.their}.engine.step ({world.file}:7)" in failure.what
        finally:
            uninstall("made")
        assert world.upstream.Engine is upstream
        assert vars(upstream)["step"] is world.theirs.step

    def test_what_is_put_on_our_class_is_noticed(self, world: World) -> None:
        found = install_from(world, world.feature())
        try:
            world.upstream.Engine.step = world.theirs.step
            (failure,) = overwritten(found)
            assert f"({world.file}:7)" in failure.what
        finally:
            world.upstream.Engine.step = found.built.functions[f"{world.up}.engine:Engine.step"]
            uninstall("made")

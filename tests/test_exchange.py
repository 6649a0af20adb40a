"""Features that join what is bound, or leave it, while an engine runs: it never finds upstream's function meanwhile."""

from __future__ import annotations

import gc
import linecache
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from balance_patcher import bindings, installation, readback, steps
from balance_patcher.errors import PatchError
from balance_patcher.installation import bound, install, install_together, installed, uninstall
from balance_patcher.registry import find_feature
from tests import world as worlds
from tests.world import World

FEATURES = """
one = with_class("one", "first = 1")
two = with_class("two", "second = 2")
place = in_place("place", "add")
beside = in_place("beside", "add", after=("place",))
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with worlds.world(tmp_path, monkeypatch, FEATURES) as made:
        yield made


@contextmanager
def looking(at: Callable[[str], None]) -> Iterator[None]:
    """Look before and after features are built, and before and after each step of binding them."""

    def around(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            at(f"before {name}")
            result = real(*args, **kwargs)
            at(f"after {name}")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((installation, "build"), *((steps, name) for name in ("_rebase", "_change", "put"))):
            patch.setattr(module, name, around(name, getattr(module, name)))
        yield


def calling(ours: Any) -> Callable[..., Any]:
    def theirs(*args: Any) -> Any:
        return ours(*args)

    return theirs


@pytest.mark.parametrize("change", ["join", "leave", "fail"])
def test_a_step_of_an_engine_that_runs_has_what_it_asked_for_at_every_moment(change: str, world: World) -> None:
    engine = world.engine("one", "place", *(["two", "beside"] if change == "leave" else []))
    engine.scheduler._two = False
    seen: list[str] = []

    def look(where: str) -> None:
        engine.scheduler.log.clear()
        engine.requests.clear()
        engine.add("r")
        assert engine.scheduler.schedule() == ["upstream", "one"], where
        assert engine.requests[:2] == ["r", "place"], where
        seen.append(where)

    def stop(*_: Any) -> None:
        raise RuntimeError("no")

    with looking(look):
        if change == "join":
            install("two")
            install("beside")
        elif change == "leave":
            uninstall("two")
            uninstall("beside")
        else:
            for name in ("two", "beside"):
                with pytest.raises(RuntimeError, match="no"):
                    install_together([find_feature(name)], stop)
    assert seen.count("before build") == 2
    assert seen.count("after _rebase") == 1
    assert seen.count("after _change") >= 2
    assert ("after put" in seen) is (change == "fail")


class TestExchange:
    def test_an_object_of_our_class_of_before_goes_on_as_it_is(self, world: World) -> None:
        install("one")
        scheduler = world.scheduler.Scheduler(world.config())
        scheduler._one = True
        mine = type(scheduler)
        both = install("two")
        assert scheduler.schedule() == ["upstream", "one"]
        assert mine.__mro__ == (mine, world.scheduler.Derived.__mro__[-2], object)
        assert not list(bindings.overwritten(both))
        assert world.scheduler.Derived.__bases__ == (world.scheduler.Scheduler,)

    def test_again_and_again_it_is_put_back_exactly(self, world: World) -> None:
        upstream = world.scheduler.Scheduler, vars(world.core.EngineCore)["add"]
        for _ in range(3):
            for name in ("one", "place", "two", "beside"):
                install(name)
            for name in ("one", "beside", "place", "two"):
                uninstall(name)
        assert (world.scheduler.Scheduler, vars(world.core.EngineCore)["add"]) == upstream
        assert world.scheduler.Derived.__bases__ == (upstream[0],)

    def test_what_cannot_join_leaves_the_identical_objects(self, world: World) -> None:
        installation_of_one = install("one")
        held = world.scheduler.Scheduler, world.scheduler.Derived.__bases__

        def stop(*_: Any) -> None:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            install_together([find_feature("two")], stop)
        assert (world.scheduler.Scheduler, world.scheduler.Derived.__bases__) == held
        assert installed("one") is installation_of_one
        assert bound("two") is None
        shown = "".join(linecache.getlines("<balance_patcher vllm.v1.core.sched.scheduler>"))
        assert shown == installation_of_one.built.texts["<balance_patcher vllm.v1.core.sched.scheduler>"]

    def test_a_class_that_is_derived_while_it_is_bound_anew_is_not_lost(self, world: World) -> None:
        install("one")
        derived: list[type] = []

        def derive(*_: Any) -> None:
            derived.append(type("Late", (world.scheduler.Scheduler,), {}))
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            install_together([find_feature("two")], derive)
        assert derived[0].__bases__ == (world.scheduler.Scheduler,)
        assert derived[0](world.config()).schedule() == ["upstream"]
        derived.clear()
        gc.collect()

    @pytest.mark.parametrize("name", ["two", "beside"])
    def test_what_somebody_has_wrapped_is_not_bound_anew(self, name: str, world: World) -> None:
        install("one")
        install("place")
        holder, attribute = {
            "two": (world.scheduler.Scheduler, "schedule"), "beside": (world.core.EngineCore, "add"),
        }[name]  # fmt: skip
        ours = vars(holder)[attribute]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, attribute, calling(ours))
            with pytest.raises(PatchError, match="BP606"):
                install(name)
        assert vars(holder)[attribute] is ours
        assert bound(name) is None


def test_an_engine_is_not_confirmed_while_another_is_bound_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    config = world.config("one")
    engine = world.engine(config=config)
    real, waited, threads = installation.build, [], []

    def build(*args: Any) -> Any:
        thread = threading.Thread(target=readback.confirm, args=(engine, config))
        threads.append(thread)
        thread.start()
        thread.join(0.3)
        waited.append(thread.is_alive())
        return real(*args)

    monkeypatch.setattr(installation, "build", build)
    install("two")
    threads[0].join(60)
    assert waited == [True]
    assert not threads[0].is_alive()

"""Engines and workers of one process, one after the other and inside each other: what each has on, and leaves."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import balance_patcher
from balance_patcher import around, decision, guards, plugin
from balance_patcher.decided import carried, decided, record
from balance_patcher.errors import PatchError
from balance_patcher.installation import bound, install, installed
from balance_patcher.registry import find_feature
from tests import world as worlds
from tests.world import World

FEATURES = """
one = with_class("one", "first = 1")
two = with_class("two", "second = 2")
cen = in_place("cen", "add", conflicts={"wrk": "they share a clock"})
apart = in_place("apart", "drop", conflicts={"cen": "they count the same"})
shy = in_place("shy", "add", conflicts={"one": "it counts what one holds back"})
wrk = in_place("wrk", "execute", enabling=IN_WORKERS)
relies = in_place("relies", "drop", needs={"one": "it counts what one holds back"})
helper = in_place("helper", "execute", enabling=IN_WORKERS, needs={"one": "it looks at what one does"})
helped = in_place("helped", "drop", needs={"wrk": "it reads what wrk counts"})
slack = in_place("slack", "execute", enabling=NOTHING_TO_DO)
hungry = in_place("hungry", "drop", needs={"slack": "it reads what slack counts"})
has = idle("has", "absorbed")
hasnt = idle("hasnt", "not-applicable")
above = in_place("above", "add", needs={"has": "it relies on what has does"})
beyond = in_place("beyond", "add", needs={"hasnt": "it relies on what hasnt does"})
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with worlds.world(tmp_path, monkeypatch, FEATURES) as made:
        yield made


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be had is gone without."""
    monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What our logger has said so far, with the level."""
    caplog.set_level(logging.INFO, "vllm.balance_patcher")
    return lambda: [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def last(feature: str) -> decision.Decision:
    found = [made for outcome in decision.decisions() for made in outcome if made.feature == feature]
    return found[-1]


def test_the_world_runs_what_is_asked_for(world: World) -> None:
    engine = world.engine("one", "cen", executor=world.started)
    engine.add("r")
    assert engine.requests == ["r", "cen"]
    assert engine.scheduler.schedule() == ["upstream", "one"]


class TestWorkerOfItsOwn:
    """A worker whose class does not call the constructor of vLLM's own: nothing is decided there."""

    @pytest.fixture
    def own(self, world: World) -> type:
        class Own(world.workers.WorkerBase):  # type: ignore[name-defined,misc]
            def __init__(self, vllm_config: Any) -> None:
                self.vllm_config, self.done = vllm_config, []

        return Own

    def test_asked_for_it_is_refused_before_its_device(self, world: World, own: type) -> None:
        with pytest.raises(PatchError, match=r"BP611.*wrk is asked for by a worker that did not ask us: .*Own"):
            world.started(world.config("wrk"), own)

    def test_in_an_engine_core_it_stops_that(self, world: World, own: type) -> None:
        with pytest.raises(PatchError, match="BP611"):
            world.engine("wrk", executor=lambda config: world.started(config, own))

    def test_what_nobody_brings_is_asked_for_too(self, world: World, own: type) -> None:
        with pytest.raises(PatchError, match=r"BP611.*gone"):
            world.started(world.config("gone"), own)

    def test_not_asked_for_it_stops_nobody(self, world: World, own: type) -> None:
        assert world.started(world.config("one"), own).done == ["device"]

    def test_an_operator_may_have_it_serve_without(
        self, world: World, own: type, serving: None, lines: Callable[[], list[str]]
    ) -> None:
        assert world.started(world.config("wrk"), own).done == ["device"]
        assert any(line.startswith("ERROR BP611") for line in lines())

    def test_one_that_passes_is_not_stopped_with_a_copy_of_the_configuration_either(self, world: World) -> None:
        class Copying(world.workers.WorkerBase):  # type: ignore[name-defined,misc]
            def __init__(self, vllm_config: Any) -> None:
                super().__init__(copy.copy(vllm_config))

        for cls in (world.workers.WorkerBase, Copying):
            worker = world.started(world.config("wrk"), cls)
            worker.execute("step")
            assert worker.done == ["device", "step", "wrk"]

    def test_armed_only_while_it_is_made_it_is_noticed(
        self, world: World, own: type, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plugin.disarm()
        monkeypatch.setattr(world.workers, "load_general_plugins", plugin.arm_late)
        with pytest.raises(PatchError, match="BP611"):
            world.started(world.config("wrk"), own)

    def test_the_identical_method_is_put_back(self, world: World) -> None:
        ours = vars(world.workers.WorkerWrapperBase)["init_device"]
        assert ours.__code__ in guards._OURS
        plugin.arm()
        assert vars(world.workers.WorkerWrapperBase)["init_device"] is ours
        plugin.disarm()
        assert vars(world.workers.WorkerWrapperBase)["init_device"] is ours.__wrapped__


class TestConflicts:
    def test_of_an_engine_with_its_worker_both_are_refused_and_named(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP709.*'cen' and 'wrk' are both asked for: they share a clock"):
            world.engine("cen", "wrk", executor=world.started)
        assert bound("cen") is bound("wrk") is None

    def test_so_it_is_in_a_worker_that_no_engine_core_is_built_for(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP709.*'wrk' and 'cen' are both asked for"):
            world.worker("cen", "wrk")

    def test_served_without_neither_runs(self, world: World, serving: None) -> None:
        engine = world.engine("cen", "wrk", executor=world.started)
        assert bound("cen") is bound("wrk") is None
        assert (engine.executor.done, last("wrk").failures[0].code) == (["device"], "BP709")

    def test_what_has_nothing_to_do_in_the_engine_core_is_no_conflict_in_its_worker(self, world: World) -> None:
        config = world.config("cen", "wrk")
        record(config, "cen", active=False)
        world.worker(config=config)
        assert installed("wrk") is not None

    def test_with_what_is_in_place_for_an_engine_of_before_it_is_refused_and_that_runs_on(self, world: World) -> None:
        first = world.engine("cen")
        with pytest.raises(PatchError, match=r"BP709.*'apart' and 'cen' would run side by side: they count the same"):
            world.engine("apart")
        assert bound("apart") is None
        first.add("r")
        assert first.requests == ["r", "cen"]

    def test_what_would_be_in_place_is_refused_where_another_engine_has_what_it_excludes(self, world: World) -> None:
        first = world.engine("one")
        with pytest.raises(PatchError, match=r"BP709.*'shy' and 'one' would run side by side"):
            world.engine("shy")
        assert first.scheduler.schedule() == ["upstream", "one"]

    def test_an_engine_that_is_gone_excludes_nothing(self, world: World) -> None:
        engine = world.engine("one")
        engine.itself = engine  # a cycle, as real ones have
        engine.vllm_config.engine = engine
        del engine
        world.engine("shy")
        assert installed("shy") is not None

    def test_one_with_a_class_is_off_in_an_engine_that_does_not_ask_and_excludes_nothing_there(
        self, world: World
    ) -> None:
        world.engine("one", "two")
        engine = world.engine("two")
        assert engine.scheduler.schedule() == ["upstream", "two"]


class TestWhatAnEngineLeaves:
    def test_what_is_in_place_for_an_engine_of_before_is_told(
        self, world: World, lines: Callable[[], list[str]]
    ) -> None:
        world.engine("cen")
        engine = world.engine()
        engine.add("r")
        assert engine.requests == ["r", "cen"]
        assert last("cen").active
        assert lines()[-1].startswith("INFO cen: ON rank 0/1 ")
        assert " source=an engine of before " in lines()[-1]

    def test_what_a_host_installs_by_a_call_is_told_as_its_own(
        self, world: World, lines: Callable[[], list[str]]
    ) -> None:
        world.engine("cen")
        install("cen")
        world.engine()
        assert " source=install() " in lines()[-1]
        balance_patcher.uninstall("cen")
        world.engine("cen")
        world.engine()
        assert " source=an engine of before " in lines()[-1]

    @pytest.mark.parametrize("names", [("cen", "gone"), ("one", "gone"), ("one", "two", "cen", "gone")])
    def test_one_that_is_refused_leaves_nothing_bound(self, names: tuple[str, ...], world: World) -> None:
        plugin.disarm()
        before = world.state()
        plugin.arm()
        with pytest.raises(PatchError, match="BP003"):
            world.engine(*names)
        assert [bound(name) for name in names] == [None] * len(names)
        plugin.disarm()
        assert world.state() == before

    def test_what_nobody_foresaw_while_it_is_decided_leaves_nothing_either(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(decision, "told_on", broken)
            with pytest.raises(KeyboardInterrupt):
                world.engine("cen")
        assert bound("cen") is None

    def test_one_that_is_not_built_leaves_nothing_bound_nor_do_workers_inside_it(self, world: World) -> None:
        def fail(config: Any) -> None:
            world.started(config)
            assert installed("wrk") is not None
            raise OSError("no memory")

        with pytest.raises(OSError, match="no memory"):
            world.engine("one", "wrk", executor=fail)
        assert bound("one") is bound("wrk") is None
        assert not last("wrk").active
        engine = world.engine(executor=world.started)
        engine.executor.execute("step")
        assert engine.executor.done == ["device", "step"]

    def test_what_another_engine_relies_on_stays(self, world: World) -> None:
        first = world.engine("one", "cen")
        with pytest.raises(PatchError, match="BP003"):
            world.engine("one", "two", "cen", "gone")
        assert bound("two") is None
        first.add("r")
        assert (first.requests, first.scheduler.schedule()) == (["r", "cen"], ["upstream", "one"])

    def test_what_a_host_has_installed_stays(self, world: World) -> None:
        install("cen")
        with pytest.raises(PatchError, match="BP003"):
            world.engine("cen", "gone")
        assert installed("cen") is not None

    def test_what_was_bound_for_it_stays_where_another_has_come_to_rely_on_it(self, world: World) -> None:
        others = []

        def fail(_: Any) -> None:
            others.append(world.engine("cen", "one"))
            raise OSError("no memory")

        with pytest.raises(OSError, match="no memory"):
            world.engine("one", "two", "cen", executor=fail)
        others[0].add("r")
        assert (others[0].requests, others[0].scheduler.schedule()) == (["r", "cen"], ["upstream", "one"])
        assert bound("two") is None

    def test_and_where_a_host_has_installed_it_by_a_call_since(self, world: World) -> None:
        def fail(_: Any) -> None:
            install("cen")
            raise OSError("no memory")

        with pytest.raises(OSError, match="no memory"):
            world.engine("cen", executor=fail)
        assert installed("cen") is not None

    def test_what_somebody_has_wrapped_stays_and_is_told(
        self, world: World, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:

            def fail(_: Any) -> None:
                ours = world.core.EngineCore.add
                patch.setattr(world.core.EngineCore, "add", lambda self, request, *_: ours(self, request))
                raise OSError("no memory")

            with pytest.raises(OSError, match="no memory"):
                world.engine("cen", executor=fail)
        assert any(line.startswith("WARNING cen stays bound") and "BP606" in line for line in lines())


class TestAskedLate:
    def ask(self, _: Any) -> None:
        balance_patcher.ask("one", by="a host")

    def test_after_the_decision_the_engine_stops_and_says_so(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP702.*one was asked for by the plugin of a host since it was decided"):
            world.engine(executor=self.ask)

    def test_so_it_does_for_what_nobody_brings(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP702.*gone was asked for"):
            world.engine(executor=lambda _: balance_patcher.ask("gone", by="a host"))

    def test_served_without_it_is_told(self, world: World, serving: None, lines: Callable[[], list[str]]) -> None:
        engine = world.engine(executor=self.ask)
        assert engine.scheduler.schedule() == ["upstream"]
        assert any(line.startswith("ERROR BP702") for line in lines())

    def test_what_was_asked_for_before_may_be_asked_for_again(self, world: World) -> None:
        engine = world.engine("one", executor=self.ask)
        assert engine.scheduler.schedule() == ["upstream", "one"]

    def test_what_was_refused_before_is_not_told_as_late(self, world: World, serving: None) -> None:
        world.engine("gone", executor=lambda _: balance_patcher.ask("gone", by="a host"))

    def test_what_is_decided_elsewhere_is_not_late_here(self, world: World) -> None:
        world.engine(executor=lambda _: balance_patcher.ask("wrk", by="a host"))


class TestNeeds:
    def test_what_is_left_in_place_without_what_it_needs_stops_no_engine_that_asks_for_nothing(
        self, world: World, lines: Callable[[], list[str]]
    ) -> None:
        world.engine("relies", "one")
        world.engine()
        assert last("relies").active
        (line,) = [line for line in lines() if line.startswith("WARNING relies")]
        assert "BP708 a needed feature is missing: 'relies' needs 'one'" in line

    def test_asked_for_it_stops_that_still(self, world: World) -> None:
        world.engine("relies", "one")
        with pytest.raises(PatchError, match=r"BP708.*'relies' needs 'one', which nobody asks for"):
            world.engine("relies")

    def test_a_worker_has_what_the_engine_core_has_on(self, world: World) -> None:
        engine = world.engine("one", "helper", executor=world.started)
        engine.executor.execute("step")
        assert engine.executor.done == ["device", "step", "helper"]

    def test_in_another_process_the_configuration_says_so(self, world: World) -> None:
        config = world.config("one", "helper")
        decision.decide(object(), config)
        sent = copy.copy(config)
        assert (carried(sent, "one"), decided(sent, "one")) == ("on", None)
        worker = world.worker(config=sent)
        worker.execute("step")
        assert worker.done == ["step", "helper"]

    def test_a_worker_that_is_told_nothing_cannot_have_it(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP708.*'helper' needs 'one', of which the engine core has told nothing"):
            world.worker("one", "helper")

    def test_nor_where_nobody_asks_for_it(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP708.*'helper' needs 'one', which nobody asks for"):
            world.engine("helper", executor=world.started)

    def test_nor_where_the_engine_core_goes_without(self, world: World, serving: None, monkeypatch) -> None:
        monkeypatch.setattr(world.scheduler.Scheduler, "schedule", lambda self: self.log)
        engine = world.engine("one", "helper", executor=world.started)
        assert engine.executor.done == ["device"]
        (failure,) = last("helper").failures
        assert "'helper' needs 'one', which is off in the engine core: " in failure.what

    def test_an_engine_core_has_what_its_workers_are_asked_for(self, world: World) -> None:
        engine = world.engine("helped", "wrk", executor=world.started)
        assert last("helped").active
        engine.executor.execute("step")
        assert engine.executor.done == ["device", "step", "wrk"]

    def test_a_worker_that_cannot_have_it_stops_the_engine_core_that_relies_on_it(self, world: World) -> None:
        def fail(config: Any) -> Any:
            real, world.workers.WorkerBase.execute = world.workers.WorkerBase.execute, lambda *_: None
            try:
                return world.started(config)
            finally:
                world.workers.WorkerBase.execute = real

        with pytest.raises(PatchError, match=r"BP603.*WorkerBase\.execute is not upstream's"):
            world.engine("helped", "wrk", executor=fail)
        assert bound("helped") is None

    def test_one_that_has_nothing_to_do_in_the_worker_is_not_there_for_the_engine_core(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP708.*'hungry' needs 'slack', which is off: there is nothing to count"):
            world.engine("hungry", "slack", executor=world.started)
        assert bound("hungry") is None

    def test_where_workers_may_go_without_an_engine_core_does_not_rely_on_them(
        self, world: World, serving: None
    ) -> None:
        world.engine("helped", "wrk", executor=world.started)
        (failure,) = last("helped").failures
        assert "'helped' needs 'wrk', which the workers decide on later, and may go without" in failure.what

    @pytest.mark.parametrize("asked", [False, True])
    def test_what_upstream_does_by_itself_is_there_whoever_asks(
        self, world: World, monkeypatch: pytest.MonkeyPatch, *, asked: bool
    ) -> None:
        if not asked:  # then it has to be one of ours, others' are not even imported
            has = find_feature("has")
            monkeypatch.setattr(around, "features", lambda: (has,))
        engine = world.engine("above", *(["has"] if asked else []))
        engine.add("r")
        assert engine.requests == ["r", "above"]

    def test_one_of_others_that_nobody_asks_for_is_not(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP708.*'above' needs 'has', which nobody asks for"):
            world.engine("above")

    def test_what_there_is_nothing_for_is_not(self, world: World) -> None:
        with pytest.raises(PatchError, match=r"BP708.*'beyond' needs 'hasnt', which is off: upstream: not-applicable"):
            world.engine("beyond", "hasnt")

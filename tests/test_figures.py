"""What the gate did, in figures: when a step is frozen, what is told of it, and what a server makes of it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from balance_patcher import carried, shown
from balance_patcher.carried import FIELD, attach, carry, extended, read
from balance_patcher.deltas import balance_sight
from balance_patcher.deltas.balance_sight import PATIENCE, QUIET, Sight, balance_line
from balance_patcher.errors import PatchError
from balance_patcher.feature import Enabling
from balance_patcher.measures import Measures, Metric, Timed
from balance_patcher.shown import Shown
from tests import test_relations

CAP = 4


@pytest.fixture(autouse=True)
def nobody_has_complained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "_complained", set())


# -- counting ---------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Count(int):
    """As the tensors of the queue are read."""

    def item(self) -> int:
        return int(self)


def counts(numbers: Sequence[int]) -> list[Count]:
    return [Count(number) for number in numbers]


class Rank:
    """A rank of two, as its scheduler and the gather call its figures."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sight = Sight(self.clock)
        self.sight.names = {0: "rank 0 (host=a pid=7)"}
        self._balance_counts = counts([0, 0])
        self.waiting = 0

    def get_request_counts(self) -> tuple[int, int]:
        return 0, self.waiting

    def _balance_cap(self) -> int:
        return CAP

    def step(
        self,
        after: tuple[int, int],
        *,
        waiting: int = 0,
        seconds: float = 1.0,
        gather: float = 0.25,
        looked: bool = True,
    ) -> None:
        """A step that takes some seconds; the counts after it, ours being the second."""
        self.sight.looked = looked
        self.waiting = waiting
        self.clock.now += seconds - gather
        self.sight.enters(self)
        self.clock.now += gather
        self._balance_counts = counts(after)
        self.sight.leaves(after[1])


@pytest.fixture
def rank(caplog: pytest.LogCaptureFixture) -> Rank:
    caplog.set_level(logging.INFO, "vllm.balance_patcher")
    return Rank()


class TestFrozenSteps:
    def test_a_step_by_counts_at_the_cap_is_frozen_while_requests_wait_and_there_is_room(self, rank: Rank) -> None:
        rank.step((CAP, 1))
        rank.step((CAP, 1), waiting=3, seconds=2.0)
        rank.step((2, 1), waiting=2, seconds=4.0)
        rank.step((2, 3), seconds=8.0)
        taken = rank.sight.taken()
        assert taken["frozen_steps"] == 2
        assert taken["frozen_seconds"] == 6.0

    @pytest.mark.parametrize(
        ("counts", "waiting", "looked"),
        [
            ((CAP - 1, 1), 3, True),
            ((CAP, 1), 0, True),
            ((CAP, CAP), 3, True),
            ((1, CAP), 3, True),
            ((CAP, 1), 3, False),
        ],
        ids=["below the cap", "nothing waits", "no room", "its own cap", "the gate was not reached"],
    )
    def test_another_is_not(self, rank: Rank, counts: tuple[int, int], waiting: int, *, looked: bool) -> None:
        rank.step(counts)
        rank.step(counts, waiting=waiting, looked=looked)
        taken = rank.sight.taken()
        assert (taken["frozen_steps"], taken["frozen_seconds"]) == (0, 0.0)
        assert taken["requests_waiting_while_frozen"] == 0

    def test_what_waits_is_what_waits_now(self, rank: Rank) -> None:
        rank.step((CAP, 1))
        rank.step((CAP, 1), waiting=3)
        rank.step((CAP, 1), waiting=2)
        assert rank.sight.taken()["requests_waiting_while_frozen"] == 2
        rank.step((CAP, 1), waiting=0)
        assert rank.sight.taken()["requests_waiting_while_frozen"] == 0

    def test_what_was_taken_is_not_told_again(self, rank: Rank) -> None:
        rank.step((CAP, 1))
        rank.step((CAP, 1), waiting=3)
        rank.sight.watch = SimpleNamespace(stalls=2)
        assert rank.sight.taken()["stalls"] == 2
        again = rank.sight.taken()
        assert (again["frozen_steps"], again["frozen_seconds"], again["stalls"]) == (0, 0.0, 0)
        assert again["gather_seconds"] == []

    def test_the_gather_is_timed_by_itself(self, rank: Rank) -> None:
        rank.step((0, 0), gather=0.25)
        rank.step((0, 0), gather=0.5)
        assert rank.sight.taken()["gather_seconds"] == [0.25, 0.5]

    def test_while_all_rest_no_time_is_frozen(self, rank: Rank) -> None:
        rank.step((CAP, 1))
        rank.step((0, 0), waiting=1, seconds=1.0)
        rank.sight.rests()
        rank._balance_counts = counts([0, 0])
        rank.clock.now += 1000
        rank.step((CAP, 1), waiting=2)
        rank.step((CAP, 1), waiting=2, seconds=1.0)
        assert rank.sight.taken()["frozen_seconds"] == 2.0

    def test_a_group_of_another_size_is_no_harm(self, rank: Rank) -> None:
        rank.step((CAP, 1))
        rank._balance_counts = counts([0, 0, 0])
        rank.step((1, 1), waiting=2)
        assert rank.sight.taken()["frozen_steps"] == 0


class TestTheLongFreeze:
    def lines(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records]

    def freeze(self, rank: Rank, seconds: float) -> None:
        rank.step((CAP, 1))
        rank.step((CAP, 1), waiting=7, seconds=seconds / 2)
        rank.step((CAP, 1), waiting=7, seconds=seconds / 2)

    def test_it_is_said_once_with_the_rank_at_its_cap_and_once_when_it_ends(
        self, rank: Rank, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.freeze(rank, PATIENCE)
        rank.step((CAP, 1), waiting=7, seconds=PATIENCE)
        rank.step((CAP, 1), waiting=7, seconds=PATIENCE)
        told = "balance: admission has been frozen for 30 s here, and 7 request(s) wait; at the cap of 4: "
        assert self.lines(caplog) == [f"{told}rank 0 (host=a pid=7)"]
        rank.step((1, 1), waiting=0)
        rank.step((1, 1), waiting=0)
        assert self.lines(caplog)[1:] == ["balance: admission is not frozen any more here, after 91.0 s"]

    def test_a_shorter_one_is_not(self, rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
        self.freeze(rank, PATIENCE - 1)
        rank.step((1, 1), waiting=0)
        assert self.lines(caplog) == []

    def test_a_step_that_admits_begins_another(self, rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
        self.freeze(rank, PATIENCE - 1)
        rank.step((1, 2), waiting=0)
        self.freeze(rank, PATIENCE - 1)
        assert self.lines(caplog) == []
        rank.step((1, 2), waiting=7, seconds=2)
        assert len(self.lines(caplog)) == 1

    def test_rest_ends_it(self, rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
        self.freeze(rank, PATIENCE)
        rank.sight.rests()
        assert self.lines(caplog)[1:] == ["balance: admission is not frozen any more here, after 30.0 s"]

    def test_a_rank_of_which_nothing_is_known_has_its_number(
        self, rank: Rank, caplog: pytest.LogCaptureFixture
    ) -> None:
        rank.sight.names = {}
        self.freeze(rank, PATIENCE)
        assert self.lines(caplog)[0].endswith("at the cap of 4: rank 0")


class TestWhoSends:
    @pytest.fixture
    def sent(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        sent: list[Any] = []
        monkeypatch.setattr(balance_sight, "send", sent.append)
        rank.sight.engine = lambda: "engine"
        return sent

    def test_a_rank_whose_figures_nobody_takes_sends_them(self, rank: Rank, sent: list[Any]) -> None:
        rank.step((0, 0), seconds=QUIET / 2)
        assert sent == []
        rank.step((0, 0), seconds=QUIET / 2)
        assert sent == ["engine"]
        rank.step((0, 0), seconds=QUIET / 2)
        assert sent == ["engine"]

    def test_one_whose_figures_are_taken_does_not(self, rank: Rank, sent: list[Any]) -> None:
        for _ in range(5):
            rank.step((0, 0), seconds=QUIET - 1)
            rank.sight.taken()
        assert sent == []

    def test_at_rest_it_does(self, rank: Rank, sent: list[Any]) -> None:
        rank.step((0, 0), seconds=1)
        rank.sight.rests()
        assert sent == ["engine"]

    def test_an_engine_that_is_gone_is_no_harm(self, rank: Rank, sent: list[Any]) -> None:
        rank.sight.engine = lambda: None
        rank.sight.rests()
        assert sent == []


class TestTheLine:
    def test_all_engines_are_one_line(self) -> None:
        line = balance_line({
            0: {"gather_seconds": Timed(100, 0.2, 0.01), "frozen_steps": 0, "frozen_seconds": 0.0},
            1: {
                "gather_seconds": Timed(100, 0.1, 0.02), "frozen_steps": 40, "frozen_seconds": 2.5,
                "requests_waiting_while_frozen": 3, "stalls": 1,
            },
        })  # fmt: skip
        assert line == (
            "on in 2 engines; frozen 40 of 200 steps (20.0 %, most of them in engine 1), 2.5 s; waiting while frozen: "
            "3 reqs; gather 1.50 ms on average, 20.0 ms at most; stalls: 1"
        )

    def test_one_engine_is_not_compared(self) -> None:
        line = balance_line({0: {"gather_seconds": Timed(4, 0.004, 0.001), "frozen_steps": 1, "frozen_seconds": 1.0}})
        assert line.startswith("on in 1 engine; frozen 1 of 4 steps (25.0 %), 1.0 s; ")

    def test_without_a_step_there_is_none(self) -> None:
        assert balance_line({0: {"gather_seconds": Timed(), "frozen_steps": 0}}) == ""


# -- the way to the server --------------------------------------------------------------------


@dataclass
class Stats:
    running: int = 0
    more: dict[str, int] = field(default_factory=dict)


class Scheduler:
    made = 0

    def make_stats(self, running: int = 0, *, log: bool = True) -> Stats | None:
        self.made += 1
        return Stats(running) if log else None


def carrying(tell: Any, scheduler: Any = None) -> SimpleNamespace:
    engine = SimpleNamespace(scheduler=scheduler or Scheduler())
    carry(engine, "balance", tell)
    return engine


class TestCarrying:
    def test_the_object_that_was_made_carries_what_is_told(self) -> None:
        engine = carrying(lambda: {"on": True})
        stats = engine.scheduler.make_stats(3)
        assert isinstance(stats, Stats)
        assert (stats.running, read(stats)) == (3, {"balance": {"on": True}})
        assert engine.scheduler.made == 1

    def test_each_asks_anew(self) -> None:
        numbers = iter((1, 2))
        engine = carrying(lambda: {"figures": next(numbers)})
        told = [read(engine.scheduler.make_stats()) for _ in range(2)]
        assert told == [{"balance": {"figures": 1}}, {"balance": {"figures": 2}}]

    def test_where_statistics_are_off_nothing_is_taken(self) -> None:
        engine = carrying(lambda: pytest.fail("taken, and lost"))
        assert engine.scheduler.make_stats(log=False) is None

    def test_two_features_are_carried_by_one_object(self) -> None:
        engine = carrying(lambda: {"on": True})
        carry(engine, "other", lambda: {"on": False})
        assert read(engine.scheduler.make_stats()) == {"balance": {"on": True}, "other": {"on": False}}

    def test_the_class_is_left_alone_and_a_later_patch_of_it_is_called(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = vars(Scheduler)["make_stats"]
        engine = carrying(lambda: {"on": True})
        assert vars(Scheduler)["make_stats"] is before
        monkeypatch.setattr(Scheduler, "make_stats", lambda self: Stats(77))
        assert engine.scheduler.make_stats().running == 77

    def test_what_stood_on_the_object_is_called(self) -> None:
        scheduler: Any = Scheduler()
        scheduler.make_stats = lambda: Stats(5)
        stats = carrying(lambda: {"on": True}, scheduler).scheduler.make_stats()
        assert (stats.running, read(stats)) == (5, {"balance": {"on": True}})

    def test_the_scheduler_goes_with_its_engine(self) -> None:
        engine = carrying(lambda: {"on": True})
        gone = weakref.ref(engine.scheduler)
        gc.disable()
        try:
            del engine
            assert gone() is None
        finally:
            gc.enable()

    def test_an_error_is_said_once_and_the_statistics_go_their_way(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = carrying(lambda: {"on": 1 // 0})
        for _ in range(3):
            stats = engine.scheduler.make_stats(4)
            assert type(stats) is Stats
            assert stats.running == 4
        (record,) = caplog.records
        assert record.getMessage().startswith("what the features measure cannot be sent to the server: ZeroDivisionEr")

    def test_statistics_of_another_kind_are_left_as_they_are(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler: Any = Scheduler()
        scheduler.make_stats = lambda: {"running": 1}
        assert carrying(lambda: {"on": True}, scheduler).scheduler.make_stats() == {"running": 1}
        assert "builtins.dict is no dataclass" in caplog.text

    def test_an_engine_without_them_is_left_alone(self) -> None:
        carry(SimpleNamespace(), "balance", dict)
        carry(SimpleNamespace(scheduler=SimpleNamespace()), "balance", dict)

    def test_a_class_is_extended_once(self) -> None:
        stats = Stats()
        attach(stats, {})
        attach(stats, {"balance": {}})
        assert type(stats) is extended(Stats) is extended(extended(Stats))
        assert getattr(stats, FIELD) == {"balance": {}}

    def test_without_a_queue_nothing_is_made(self) -> None:
        engine = carrying(lambda: {"on": True})
        carried.send(engine)
        assert engine.scheduler.made == 0


# -- in the server ----------------------------------------------------------------------------


class Series:
    def __init__(self) -> None:
        self.value: float | None = None
        self.seen: list[float] = []

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, value: float) -> None:
        self.value = (self.value or 0) + value

    def observe(self, value: float) -> None:
        self.seen.append(value)


class Prometheus:
    """As much of vLLM's logger as is used: the classes of its metrics."""

    def __init__(self) -> None:
        self.made: dict[str, dict[str, Any]] = {}
        self.series: dict[tuple[str, ...], Series] = {}
        self._gauge_cls = self._counter_cls = self._histogram_cls = self._metric

    def _metric(self, name: str, **settings: Any) -> SimpleNamespace:
        assert name not in self.made
        self.made[name] = settings

        def labels(*values: str) -> Series:
            assert len(values) == len(settings["labelnames"])
            return self.series.setdefault((name, *values), Series())

        return SimpleNamespace(labels=labels)


ON = {"on": True, "about": {"digest": "d", "patcher": "1", "cap": "4", "source": "s"}, "figures": {}}


@pytest.fixture
def prometheus() -> Prometheus:
    return Prometheus()


@pytest.fixture
def page(prometheus: Prometheus) -> Shown:
    return Shown("balance", balance_sight.MEASURES, prometheus, "model")


class TestShowing:
    def test_before_anybody_has_spoken_there_is_nothing(self, page: Shown, prometheus: Prometheus) -> None:
        assert prometheus.made == {}
        assert page.line() == ""

    def test_an_engine_that_speaks_is_on_and_has_all_figures(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(1, ON)
        assert set(prometheus.made) == {
            f"vllm:balance_{name}"
            for name in (
                "enabled", "info", "frozen_steps", "frozen_seconds", "stalls", "gather_seconds",
                "requests_waiting_while_frozen",
            )
        }  # fmt: skip
        assert prometheus.series["vllm:balance_enabled", "model", "1"].value == 1
        assert prometheus.series["vllm:balance_info", "model", "1", "d", "1", "4", "s", ""].value == 1
        assert all(settings["labelnames"][:2] == ["model_name", "engine"] for settings in prometheus.made.values())

    def test_figures_are_added_to_those_of_before(self, page: Shown, prometheus: Prometheus) -> None:
        for steps, waiting in ((2, 5), (3, 1)):
            figures = {"frozen_steps": steps, "requests_waiting_while_frozen": waiting, "gather_seconds": [0.5, 0.25]}
            page.hear(0, {**ON, "figures": figures})
        assert prometheus.series["vllm:balance_frozen_steps", "model", "0"].value == 5
        assert prometheus.series["vllm:balance_requests_waiting_while_frozen", "model", "0"].value == 1
        assert prometheus.series["vllm:balance_gather_seconds", "model", "0"].seen == [0.5, 0.25] * 2

    def test_engines_are_kept_apart(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(0, {**ON, "figures": {"frozen_steps": 1}})
        page.hear(1, {**ON, "figures": {"frozen_steps": 4}})
        assert [prometheus.series["vllm:balance_frozen_steps", "model", n].value for n in "01"] == [1, 4]

    def test_what_is_off_says_why_and_shows_nothing_else(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(0, {"on": False, "about": {"patcher": "1", "source": "s", "reason": "BP101 anchor not found"}})
        assert set(prometheus.made) == {"vllm:balance_enabled", "vllm:balance_info"}
        assert prometheus.series["vllm:balance_enabled", "model", "0"].value == 0
        assert ("vllm:balance_info", "model", "0", "", "1", "", "s", "BP101 anchor not found") in prometheus.series
        assert page.line() == ""

    def test_an_engine_that_tells_nothing_is_off(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(0, None)
        assert prometheus.series["vllm:balance_enabled", "model", "0"].value == 0
        (said,) = [series for series in prometheus.series if series[0] == "vllm:balance_info"]
        assert "balance_patcher is not active there" in said[-1]

    def test_one_that_has_spoken_may_be_silent(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(0, ON)
        page.hear(0, None)
        assert prometheus.series["vllm:balance_enabled", "model", "0"].value == 1

    def test_one_that_says_something_else_has_one_info_that_holds(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(0, None)
        page.hear(0, ON)
        values = [series.value for key, series in prometheus.series.items() if key[0] == "vllm:balance_info"]
        assert sorted(map(int, filter(lambda value: value is not None, values))) == [0, 1]

    def test_figures_that_are_not_known_here_are_left_out(self, page: Shown, prometheus: Prometheus) -> None:
        page.hear(0, {**ON, "figures": {"of_another_version": 3}, "more": 1})
        assert not any("another" in name for name in prometheus.made)

    def test_the_line_is_of_the_time_since_the_last_one(self, page: Shown) -> None:
        for _ in range(2):
            page.hear(
                0, {**ON, "figures": {"frozen_steps": 1, "frozen_seconds": 0.5, "gather_seconds": [0.001, 0.003]}}
            )
        assert page.line().startswith("balance: on in 1 engine; frozen 2 of 4 steps (50.0 %), 1.0 s; ")
        assert page.line() == ""

    def test_an_engine_that_was_quiet_is_on_all_the_same(self, page: Shown) -> None:
        page.hear(0, ON)
        page.hear(1, {**ON, "figures": {"requests_waiting_while_frozen": 2, "gather_seconds": [0.001]}})
        assert page.line().startswith("balance: on in 2 engines; frozen 0 of 1 steps (0.0 %), ")
        page.hear(0, {**ON, "figures": {"gather_seconds": [0.001]}})
        line = page.line()
        assert line.startswith("balance: on in 2 engines; frozen 0 of 1 steps (0.0 %), ")
        assert "waiting while frozen: 2 reqs" in line

    def test_without_prometheus_there_is_the_line(self) -> None:
        page = Shown("balance", balance_sight.MEASURES, None, "model")
        page.hear(0, {**ON, "figures": {"gather_seconds": [0.001]}})
        assert page.line().startswith("balance: on in 1 engine")


class TestWhatIsBuilt:
    """A manager of stat loggers gets one more where somebody asks, and whatever goes wrong stops nobody."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rule = Enabling(asked=lambda config: "somebody" if config == "asks" else None)
        measuring = test_relations.feature("balance", enabling=rule, measures=balance_sight.MEASURES)
        monkeypatch.setattr(shown, "features", lambda: (measuring, test_relations.feature("other")))
        monkeypatch.setattr(shown, "asked_by_name", lambda _: {})

    @pytest.mark.usefixtures("asked")
    def test_nobody_asks_and_nothing_is_added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shown, "receive", lambda _: pytest.fail("nobody asks"))
        manager = SimpleNamespace(stat_loggers=[])
        shown.built(manager, {"vllm_config": "does not ask"})
        shown.built(SimpleNamespace(decoder=None), {"vllm_config": "does not ask"})
        assert manager.stat_loggers == []

    @pytest.mark.usefixtures("asked")
    def test_somebody_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        heard: list[Any] = []
        monkeypatch.setattr(shown, "receive", heard.append)
        monkeypatch.setattr(shown, "stat_logger", lambda asked, *_, quiet: (*asked, quiet))
        manager, client = SimpleNamespace(stat_loggers=[]), SimpleNamespace(decoder=None)
        for more in ({}, {"client_count": 2}, {"enable_default_loggers": False}):
            shown.built(manager, {"vllm_config": "asks", **more})
        shown.built(client, {"vllm_config": "asks"})
        assert manager.stat_loggers == [("balance", False), ("balance", True), ("balance", True)]
        assert heard == [client]

    @pytest.mark.usefixtures("asked")
    def test_an_error_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            shown.built(SimpleNamespace(decoder=None), {"vllm_config": "asks"})
            shown.built(SimpleNamespace(decoder=None), {})
        assert len([record for record in caplog.records if "cannot be shown" in record.getMessage()]) == 1

    def test_arguments_are_known_by_name_however_they_were_given(self) -> None:
        def upstream(self: object, vllm_config: object, engine_idxs: object = None, *, client_count: int = 1) -> None:
            pass

        made = shown.given(upstream, "self", ("config",), {"client_count": 3})
        assert (made["vllm_config"], made["client_count"], made["engine_idxs"]) == ("config", 3, None)
        assert shown.given(upstream, "self", (), {"other": 1}) == {"other": 1}


# -- declarations -----------------------------------------------------------------------------


class TestDeclarations:
    @pytest.mark.parametrize(
        ("name", "kind", "buckets"),
        [
            ("steps", "summary", ()),
            ("steps", "counter", (1.0,)),
            ("seconds", "histogram", ()),
            ("Steps", "counter", ()),
            ("info", "gauge", ()),
            ("enabled", "gauge", ()),
        ],
    )
    def test_a_wrong_metric_is_refused(self, name: str, kind: str, buckets: tuple[float, ...]) -> None:
        with pytest.raises(PatchError, match="BP002"):
            Metric(name, kind, "For a test.", buckets)

    def test_two_of_one_name_are_refused(self) -> None:
        metric = Metric("steps", "counter", "For a test.")
        with pytest.raises(PatchError, match="BP002"):
            Measures((metric, metric), taken=lambda _: dict)

    def test_a_label_that_every_feature_has_is_refused(self) -> None:
        with pytest.raises(PatchError, match="BP002"):
            Measures((), taken=lambda _: dict, labels=("digest",))

    def test_a_feature_of_workers_measures_nothing(self) -> None:
        with pytest.raises(PatchError, match="statistics are sent by engine cores"):
            test_relations.feature("balance", enabling=Enabling(process="worker"), measures=balance_sight.MEASURES)

"""A step that waits: who has arrived and who is missing is said once, and once more when it goes on."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from balance_patcher import watchdog
from balance_patcher.errors import PatchError
from balance_patcher.watchdog import Watchdog, threshold
from tests import test_agreement

SECONDS = 0.5
#: Where several ranks have to keep up with each other, on a machine that is busy.
LONG = 4.0


class Store(test_agreement.Store):
    """One that can be held up, too."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    def _there(self) -> None:
        self.answers.wait()
        super()._there()


class Group:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


class Engine:
    """As much of an engine core as is read."""

    def __init__(self, rank: int, ranks: int, store: Store) -> None:
        self.dp_rank, self.dp_group, self.dp_store = rank, Group(ranks), store
        self.step_counter, self.current_wave, self.engines_running = 12, 3, True


@pytest.fixture
def ranks(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., list[tuple[Engine, Watchdog]]]]:
    caplog.set_level(logging.WARNING, "vllm.balance_patcher")
    started: list[Watchdog] = []
    alive: list[Engine] = []  # a watchdog does not keep its engine

    def start(
        count: int, *, seconds: float = SECONDS, store: Store | None = None, keep: bool = True
    ) -> list[tuple[Engine, Watchdog]]:
        store = store or Store()
        names = {rank: f"rank {rank} (host=h{rank} pid={rank})" for rank in range(count)}
        engines = [Engine(rank, count, store) for rank in range(count)]
        dogs = [Watchdog("toy", engine, names, seconds).start() for engine in engines]
        started.extend(dogs)
        alive.extend(engines if keep else ())
        return list(zip(engines, dogs, strict=True))

    yield start
    for dog in started:
        dog.stop()
    # One that is just looking round would speak in the next test.
    end = time.monotonic() + 30
    while any(t.name == "balance_patcher watchdog" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)


def wait_for(caplog: pytest.LogCaptureFixture, count: int, seconds: float = 30) -> list[str]:
    """The lines, as soon as there are so many."""
    end = time.monotonic() + seconds
    while len(caplog.messages) < count and time.monotonic() < end:
        time.sleep(0.02)
    return list(caplog.messages)


def test_who_waits_in_the_gather_has_arrived_and_who_is_in_its_step_is_missing(ranks, caplog) -> None:
    (_, first), (_, second) = ranks(2, seconds=LONG)
    first.enters()
    said = wait_for(caplog, 2)
    arrived = "arrived: rank 0 (host=h0 pid=0); missing: rank 1 (host=h1 pid=1)"
    assert sorted(said) == [
        f"toy: step 12 of wave 3 has not come to its gather here for {LONG:g} s; {arrived}",
        f"toy: step 12 of wave 3 has waited {LONG:g} s in the gather; {arrived}",
    ]
    assert not second.since


def test_it_is_said_once_and_once_more_when_the_step_goes_on(ranks, caplog) -> None:
    ((engine, dog),) = ranks(1)
    dog.enters()
    wait_for(caplog, 1)
    time.sleep(SECONDS)
    assert len(caplog.messages) == 1
    dog.leaves()
    engine.engines_running = False
    said = wait_for(caplog, 2)[-1]
    assert said.startswith("toy: step 12 of wave 3 went on after ")
    assert float(said.split()[-2]) >= 2 * SECONDS
    time.sleep(SECONDS)
    assert len(caplog.messages) == 2


def test_a_rank_whose_process_stands_still_says_nothing_and_that_is_said(ranks, caplog) -> None:
    (_, first), (_, second), (_, third) = ranks(3)
    third.stop()
    first.enters()
    second.enters()
    for line in wait_for(caplog, 2):
        assert line.endswith("missing: rank 2 (host=h2 pid=2), which says nothing")


def test_a_store_that_does_not_answer_is_not_waited_for(ranks, caplog, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER", 0.1)
    store = Store()
    engines = ranks(3, store=store)
    engines[0][1].stop()
    store.answers.clear()
    engines[1][1].enters()
    engines[2][1].stop()
    (said,) = wait_for(caplog, 1)
    assert said.endswith(
        "arrived: rank 1 (host=h1 pid=1); missing: rank 0 (host=h0 pid=0), which says nothing; "
        "not known: rank 2 (host=h2 pid=2)"
    )
    store.answers.set()


def test_a_store_that_is_gone_is_as_one_that_does_not_answer(ranks, caplog) -> None:
    store = Store()
    store.gone = True
    engines = ranks(2, store=store)
    engines[0][1].stop()
    engines[1][1].enters()
    (said,) = wait_for(caplog, 1)
    assert said.endswith("missing: rank 0 (host=h0 pid=0), which says nothing")


def test_who_arrives_late_has_arrived(ranks, caplog) -> None:
    (_, first), (_, second) = ranks(2, seconds=LONG)
    first.enters()
    time.sleep(1.2)
    second.enters()
    said = wait_for(caplog, 1)[0]
    assert "arrived: rank 0 (host=h0 pid=0), rank 1 (host=h1 pid=1); missing: none" in said


@pytest.mark.parametrize("running", [True, False])
def test_steps_that_go_on_and_engines_at_rest_are_not_spoken_of(ranks, caplog, running) -> None:
    ((engine, dog),) = ranks(1)
    engine.engines_running = running
    end = time.monotonic() + 3 * SECONDS
    while time.monotonic() < end:
        if running:
            dog.enters()
            dog.leaves()
        time.sleep(0.02)
    assert caplog.messages == []


def test_a_long_rest_before_a_step_is_not_counted(ranks, caplog) -> None:
    ((engine, _),) = ranks(1)
    engine.engines_running = False
    time.sleep(2 * SECONDS)
    engine.engines_running = True
    time.sleep(0.4 * SECONDS)
    assert caplog.messages == []
    assert len(wait_for(caplog, 1)) == 1


def test_with_zero_nothing_is_watched(ranks) -> None:
    before = threading.active_count()
    ranks(2, seconds=0)
    assert threading.active_count() == before


def test_the_thread_ends_with_the_engine_and_keeps_it_alive_no_longer(ranks) -> None:
    ((engine, dog),) = ranks(1, keep=False)
    engine.engines_running = False
    del engine
    end = time.monotonic() + 30
    while dog._engine() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert dog._engine() is None
    assert dog._over.wait(5)


@pytest.mark.parametrize(("text", "seconds"), [("", 20.0), ("2.5", 2.5), (" 0 ", 0.0)])
def test_the_threshold_is_read_from_the_environment(monkeypatch, text, seconds) -> None:
    monkeypatch.setenv("BALANCE_PATCHER_STALL", text)
    assert threshold() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_what_is_no_number_of_seconds_is_refused(monkeypatch, text) -> None:
    monkeypatch.setenv("BALANCE_PATCHER_STALL", text)
    with pytest.raises(PatchError, match="BP006 bad switch: BALANCE_PATCHER_STALL="):
        threshold()

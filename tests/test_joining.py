"""Ranks that join a running group: one verdict for all, before the old ranks touch what they have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from balance_patcher import agreement, joining
from balance_patcher.agreement import Agreed, Statement
from balance_patcher.errors import PatchError
from balance_patcher.joining import Peers, join, joins
from tests.test_agreement import Store, says

AT = ("127.0.0.1", 4711)


def said(rank: int, failure: str = "", **facts: object) -> Statement:
    return says(rank, failure, **{"data_parallel_size": 3, **facts})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of one scaling, whatever its address."""
    made = Store()
    monkeypatch.setattr(joining, "connect", lambda *_: made)
    monkeypatch.setattr(agreement, "PATIENCE", 60)
    monkeypatch.setattr(joining, "LOOK", 0.01)
    return made


@pytest.fixture
def impatient(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE", 0.2)


@pytest.fixture
def old() -> list[Peers]:
    """Two ranks that run as a group."""
    both = {rank: said(rank, data_parallel_size=2) for rank in (0, 1)}
    return [Peers("toy", Agreed((), both, mine)) for mine in both.values()]


def scale(old: list[Peers], new: int = 3) -> None:
    for peers in old:
        peers.scales(*AT, 2, new)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each of the calls returns, each in a thread of its own."""
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda at=at, call=call: found.update({at: call()})) for at, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return [found[at] for at in range(len(calls))]


def polled(peers: Peers) -> bool:
    """Whether it fits, asked over and over as a busy loop does."""
    end = time.monotonic() + 30
    while not peers.fits() and not peers.refused and time.monotonic() < end:
        time.sleep(0.01)
    return peers.fits() and not peers.refused


def codes(agreed: Agreed) -> list[str]:
    return [failure.code for failure in agreed.failures]


def test_a_rank_that_runs_the_same_is_let_in_and_known_from_then_on(store: Store, old: list[Peers]) -> None:
    scale(old)
    agreed, *fit = together(
        lambda: join(store, said(2), 3, "toy"), lambda: polled(old[0]), lambda: old[1].fits(wait=True)
    )
    assert codes(agreed) == []
    assert fit == [True, True]
    assert sorted(agreed.ranks) == [0, 1, 2]
    for peers in old:
        assert peers.names[2] == "rank 2 (host=host2 pid=102)"
        assert not peers.refused


def test_two_that_join_hear_each_other(store: Store, old: list[Peers]) -> None:
    scale(old, 4)
    one, other, *fit = together(
        lambda: join(store, said(2, data_parallel_size=4), 4, "toy"),
        lambda: join(store, said(3, data_parallel_size=4), 4, "toy"),
        lambda: polled(old[0]),
        lambda: polled(old[1]),
    )
    assert codes(one) == codes(other) == []
    assert fit == [True, True]


def test_as_long_as_one_has_not_spoken_nothing_is_worked_with_and_nobody_waits(store: Store, old: list[Peers]) -> None:
    scale(old)
    started = time.monotonic()
    assert not old[0].fits()
    assert time.monotonic() - started < 5
    assert not old[0].refused


def test_one_that_differs_does_not_start_and_all_old_ranks_give_the_scaling_up(
    store: Store, old: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    scale(old)
    agreed, *fit = together(
        lambda: join(store, said(2, cap=8), 3, "toy"), lambda: polled(old[0]), lambda: old[1].fits(wait=True)
    )
    assert codes(agreed) == ["BP704"]
    assert fit == [False, False]
    assert all(peers.refused and sorted(peers.names) == [0, 1] for peers in old)
    told = [line for line in caplog.messages if "the scaling is given up, and the ranks go on as before: BP704" in line]
    assert len(told) == 2


@pytest.mark.usefixtures("impatient")
def test_one_that_says_nothing_is_named_and_the_scaling_is_given_up(
    store: Store, old: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    scale(old)
    assert together(lambda: polled(old[0]), lambda: polled(old[1])) == [False, False]
    assert all(peers.refused for peers in old)
    assert "BP705 rank is silent: rank 2 of 3, of a scaling: it said nothing for 0.2 s; toy is off" in caplog.text


def test_the_time_to_speak_starts_when_the_group_is_there(store: Store, old: list[Peers], impatient: None) -> None:
    scale(old)
    time.sleep(0.4)
    assert not old[0].fits()
    assert not old[0].refused


def test_one_that_cannot_run_it_says_so_without_waiting_and_is_refused(
    store: Store, old: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    scale(old)
    assert codes(join(store, said(2, failure="BP101 anchor not found"), 3, "toy")) == []
    assert not polled(old[0])
    assert "rank 2 (host=host2 pid=102) does not run toy: BP101" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_group_that_says_nothing_is_not_joined(store: Store) -> None:
    agreed = join(store, said(2), 3, "toy")
    assert codes(agreed) == ["BP705", "BP705"]
    assert "rank 0 of 3, of a scaling: it said nothing for 0.2 s" in agreed.failures[0].what


def test_what_was_decided_first_is_obeyed_by_who_would_have_found_otherwise(
    store: Store, old: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    """One rank's patience ends, and in the same moment the new rank speaks."""
    scale(old)
    store.compare_set("balance_patcher/toy/scaling/verdict", "", "BP705 rank is silent: rank 2 of 3")
    agreed, *fit = together(lambda: join(store, said(2), 3, "toy"), lambda: polled(old[0]), lambda: polled(old[1]))
    assert codes(agreed) == ["BP706"]
    assert fit == [False, False]
    assert "the scaling to 3 ranks is given up: BP705 rank is silent: rank 2 of 3" in caplog.text


def test_a_group_that_gets_smaller_asks_nobody(store: Store, old: list[Peers]) -> None:
    for peers in old:
        peers.scales(*AT, 2, 1)
        assert peers.fits()
        assert not peers.refused
    assert store.values == {}


def test_after_a_scaling_that_was_given_up_the_next_one_begins_anew(
    store: Store, old: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale(old)
    together(lambda: join(store, said(2, cap=8), 3, "toy"), lambda: polled(old[0]), lambda: polled(old[1]))
    again = Store()
    monkeypatch.setattr(joining, "connect", lambda *_: again)  # vLLM makes a new one for each
    scale(old)
    assert not any(peers.refused for peers in old)
    _, *fit = together(lambda: join(again, said(2), 3, "toy"), lambda: polled(old[0]), lambda: polled(old[1]))
    assert fit == [True, True]


@pytest.mark.parametrize("lost", ["check", "compare_set"])
def test_a_store_that_goes_away_ends_the_scaling_and_not_the_engine(
    lost: str, store: Store, old: list[Peers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scale(old)
    store.set("balance_patcher/toy/scaling/says/2", json.dumps(asdict(said(2))))

    def gone(*_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(store, lost, gone)
    assert not polled(old[0])
    assert old[0].refused
    assert "the store went away" in caplog.text


def test_without_a_store_nothing_is_scaled(old: list[Peers]) -> None:
    with pytest.raises(PatchError, match="BP707 new ranks cannot be asked: this vLLM's scaling has no store"):
        old[0].scales("127.0.0.1", 0, 2, 3)


def test_what_the_old_ranks_say_has_the_size_of_the_next_group(store: Store, old: list[Peers]) -> None:
    scale(old)
    assert json.loads(store.values["balance_patcher/toy/scaling/says/0"]) == asdict(said(0))


@pytest.mark.parametrize("value", [None, "0", "", "1"])
def test_who_joins_is_told_by_vllms_own_variable(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(joining.LAUNCHED, raising=False)
    if value is not None:
        monkeypatch.setenv(joining.LAUNCHED, value)
    assert joins() is (value == "1")

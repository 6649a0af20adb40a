"""Ranks that join a running group: told what runs there, refused before the others switch to them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict

import pytest

from balance_patcher import agreement, joining
from balance_patcher.agreement import Agreed, Statement
from balance_patcher.errors import PatchError
from balance_patcher.joining import Peers, join, joins, unfit
from tests.test_agreement import Store, says

AT = ("127.0.0.1", 4711)


def said(rank: int, failure: str = "", **facts: object) -> Statement:
    return says(rank, failure, **{"data_parallel_size": 3, **facts})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of one scaling, whatever its address."""
    made = Store()
    monkeypatch.setattr(joining, "connect", lambda *_: made)
    monkeypatch.setattr(agreement, "PATIENCE", 0.3)
    return made


@pytest.fixture
def old() -> list[Peers]:
    """Two ranks that run as a group."""
    both = {rank: said(rank, data_parallel_size=2) for rank in (0, 1)}
    return [Peers("toy", Agreed((), both, mine)) for mine in both.values()]


def scale(old: list[Peers], new: int = 3) -> None:
    for peers in old:
        peers.scales(*AT, 2, new)


def codes(call: Callable[[], object]) -> list[str]:
    with pytest.raises(PatchError) as caught:
        call()
    return [failure.code for failure in caught.value.failures]


def test_a_rank_that_runs_the_same_is_admitted_and_known_from_then_on(store: Store, old: list[Peers]) -> None:
    scale(old)
    agreed = join(store, said(2), 3, "toy")
    assert agreed.failures == ()
    assert unfit(agreed, "toy") == ()
    assert sorted(agreed.ranks) == [0, 1, 2]
    for peers in old:
        peers.admit()
        assert peers.names[2] == "rank 2 (host=host2 pid=102)"


def test_two_that_join_hear_each_other(store: Store, old: list[Peers]) -> None:
    scale(old, 4)
    found = {}
    ranks = [
        threading.Thread(
            target=lambda rank=rank: found.update({rank: join(store, said(rank, data_parallel_size=4), 4, "toy")})
        )
        for rank in (2, 3)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    assert [found[rank].failures for rank in (2, 3)] == [(), ()]
    for peers in old:
        peers.admit()


def test_one_that_differs_goes_on_and_is_refused_by_every_old_rank(store: Store, old: list[Peers]) -> None:
    scale(old)
    agreed = join(store, said(2, cap=8), 3, "toy")
    assert agreed.failures == ()
    assert [failure.code for failure in unfit(agreed, "toy")] == ["BP704"]
    for peers in old:
        assert codes(peers.admit) == ["BP704"]
        assert sorted(peers.names) == [0, 1]


def test_one_that_has_said_nothing_is_refused_and_named(store: Store, old: list[Peers]) -> None:
    scale(old)
    with pytest.raises(PatchError, match="BP705 rank is silent: rank 2 of 3, of a scaling: it has said nothing; toy"):
        old[0].admit()


def test_one_that_cannot_run_it_says_so_without_waiting_and_is_refused(store: Store, old: list[Peers]) -> None:
    scale(old)
    assert join(store, said(2, failure="BP101 anchor not found"), 3, "toy").failures == ()
    with pytest.raises(PatchError, match=r"BP706 .*rank 2 \(host=host2 pid=102\) does not run toy: BP101"):
        old[0].admit()


def test_a_group_that_says_nothing_is_not_joined(store: Store) -> None:
    agreed = join(store, said(2), 3, "toy")
    assert [failure.code for failure in agreed.failures] == ["BP705", "BP705"]
    assert "rank 0 of 3, of a scaling: it said nothing for 0.3 s" in agreed.failures[0].what


def test_a_group_that_gets_smaller_asks_nobody(store: Store, old: list[Peers]) -> None:
    for peers in old:
        peers.scales(*AT, 2, 1)
        peers.admit()
    assert store.values == {}


def test_an_earlier_scaling_admits_nobody_to_a_later_one(
    store: Store, old: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale(old)
    join(store, said(2), 3, "toy")
    monkeypatch.setattr(joining, "connect", lambda *_: Store())  # vLLM makes a new one for each
    scale(old)
    assert codes(old[0].admit) == ["BP705"]


def test_a_store_that_is_gone_is_a_refusal(store: Store, old: list[Peers]) -> None:
    scale(old)
    store.gone = True
    with pytest.raises(PatchError, match="rank 2 of 3, of a scaling: RuntimeError: Connection reset by peer"):
        old[0].admit()


def test_without_a_store_nothing_is_scaled(old: list[Peers]) -> None:
    with pytest.raises(PatchError, match="BP707 new ranks cannot be asked: this vLLM's scaling has no store"):
        old[0].scales("127.0.0.1", 0, 2, 3)


def test_what_the_old_ranks_say_has_the_size_of_the_next_group(store: Store, old: list[Peers]) -> None:
    scale(old)
    told = json.loads(store.values["balance_patcher/toy/scaling/says/0"])
    assert told == asdict(said(0))


@pytest.mark.parametrize("value", [None, "0", "", "1"])
def test_who_joins_is_told_by_vllms_own_variable(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(joining.LAUNCHED, raising=False)
    if value is not None:
        monkeypatch.setenv(joining.LAUNCHED, value)
    assert joins() is (value == "1")

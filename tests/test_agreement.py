"""Ranks that say what they run: alike is silence, and who differs, fails or says nothing is named on all."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict

import pytest

from balance_patcher import agreement
from balance_patcher.agreement import Statement, agree

FACTS = {"cap": 4, "digest": "abc", "vLLM": "0.32.0"}


class Store:
    """As much of a ``torch.distributed.Store`` as an agreement uses; it can go away."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False

    def _there(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer\nat 0x1")

    def set(self, key: str, value: str) -> None:
        self._there()
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._there()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._there()
        return self.values[key]


def meet(*statements: Statement | None, size: int | None = None, patience: float = 0.4):
    """What each of the ranks finds; ``None`` for one that says nothing."""
    store, found = Store(), {}

    def rank(statement: Statement) -> None:
        found[statement.rank] = agree(store, statement, size or len(statements), "toy", patience=patience).failures

    threads = [threading.Thread(target=rank, args=(statement,)) for statement in statements if statement]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def says(rank: int, failure: str = "", **facts: object) -> Statement:
    return Statement(rank, {**FACTS, **facts}, failure, host=f"host{rank}", pid=100 + rank)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LINGER", 0.4)


def test_ranks_that_run_the_same_find_nothing_and_do_not_wait() -> None:
    started = time.monotonic()
    assert meet(says(0), says(1), says(2), patience=60) == {0: (), 1: (), 2: ()}
    assert time.monotonic() - started < 5


def test_a_fact_that_differs_is_named_with_every_ranks_value_on_all() -> None:
    found = meet(says(0), says(1, cap=8), says(2))
    assert len(found) == 3
    assert len(set(found.values())) == 1
    (failure,) = found[0]
    assert failure.code == "BP704"
    assert failure.what == "cap is not the same on all ranks of toy"
    assert dict(failure.fields) == {
        "rank 0": "4   host=host0 pid=100", "rank 1": "8   host=host1 pid=101", "rank 2": "4   host=host2 pid=102",
    }  # fmt: skip


def test_every_fact_that_differs_is_a_failure_of_its_own() -> None:
    found = meet(says(0), says(1, cap=8, vLLM="0.33.0"))
    assert [failure.what.split()[0] for failure in found[1]] == ["cap", "vLLM"]


def test_a_fact_that_one_rank_does_not_know_differs() -> None:
    (failure,) = meet(says(0), says(1, more=1))[0]
    assert dict(failure.fields)["rank 0"].startswith("None ")


def test_a_silent_rank_is_named_after_the_patience() -> None:
    started = time.monotonic()
    found = meet(says(0), None, says(2))
    assert 0.4 <= time.monotonic() - started < 10
    assert set(found) == {0, 2}
    for failures in found.values():
        (failure,) = failures
        assert failure.code == "BP705"
        assert failure.what.startswith("rank 1 of 3: it said nothing for 0.4 s; toy is off there, or balance_patcher")


def test_a_rank_that_cannot_run_it_is_named_on_the_others() -> None:
    found = meet(says(0), says(1, failure="BP101 anchor not found"))
    (failure,) = found[0]
    assert failure.code == "BP706"
    assert failure.what == "rank 1 (host=host1 pid=101) does not run toy: BP101 anchor not found"
    assert found[1] == ()


def test_a_rank_that_fails_stays_until_the_others_have_read() -> None:
    store, found = Store(), {}

    def failing() -> None:
        agree(store, says(0, failure="no"), 2, "toy", patience=5)
        store.gone = True  # it held the store

    def late() -> None:
        time.sleep(0.2)
        found[1] = agree(store, says(1), 2, "toy", patience=5).failures

    threads = [threading.Thread(target=target) for target in (failing, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [failure.code for failure in found[1]] == ["BP706"]


def test_a_store_that_goes_away_is_told() -> None:
    store = Store()
    threading.Timer(0.2, lambda: setattr(store, "gone", True)).start()
    (failure,) = agree(store, says(1), 2, "toy", patience=20).failures
    assert failure.code == "BP705"
    assert "rank 0 of 2: the store went away (RuntimeError: Connection reset by peer)" in failure.what


def test_another_format_is_a_difference_and_not_an_error() -> None:
    older = Statement(1, {"other": 1}, host="h", pid=1, schema=0)
    (failure,) = meet(says(0), older)[0]
    assert failure.what.startswith("balance_patcher's format is not the same")


def test_what_cannot_be_read_is_a_rank_that_cannot_run_it() -> None:
    store = Store()
    store.set("balance_patcher/toy/start/says/1", '{"rank": 1, "wings": 2}')
    (failure,) = agree(store, says(0), 2, "toy", patience=1).failures
    assert failure.code == "BP706"
    assert "cannot be read" in failure.what


def test_ranks_meet_again_on_the_same_store() -> None:
    store = Store()
    agree(store, says(0), 1, "toy")
    agree(store, says(0, cap=9), 1, "toy", occasion="later")
    assert len([key for key in store.values if "/says/" in key]) == 2


def test_a_rank_that_comes_late_does_not_go_on_without_those_that_gave_up() -> None:
    store, found = Store(), {}

    def early() -> None:
        found[0] = agree(store, says(0), 2, "toy", patience=0.3).failures

    thread = threading.Thread(target=early)
    thread.start()
    thread.join(30)
    found[1] = agree(store, says(1), 2, "toy", patience=5).failures
    assert [failure.code for failure in found[0]] == ["BP705"]
    (failure,) = found[1]
    assert failure.code == "BP706"
    assert failure.what.startswith("rank 0 (host=host0 pid=100) does not run toy: BP705 rank is silent: rank 1 of 2")


def test_a_rank_that_says_what_it_runs_and_is_gone_before_it_heard_the_others_is_named() -> None:
    store = Store()
    store.set("balance_patcher/toy/start/says/1", json.dumps(asdict(says(1))))
    (failure,) = agree(store, says(0), 2, "toy", patience=0.3).failures
    assert failure.code == "BP706"
    assert failure.what.endswith("rank 1 (host=host1 pid=101) does not run toy: it did not answer for 0.3 s")


def test_who_the_ranks_are_is_known_afterwards() -> None:
    agreed = agree(Store(), says(0), 1, "toy")
    assert str(agreed.ranks[0]) == "rank 0 (host=host0 pid=100)"
    assert agreed.mine == says(0)

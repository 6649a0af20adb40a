"""Ranks that say what they run: alike is silence, and who differs, fails or says nothing is named on all."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import pytest

from balance_patcher import agreement
from balance_patcher.agreement import Agreed, Statement, agree, part
from balance_patcher.board import Board

FACTS = {"cap": 4, "digest": "abc", "vLLM": "0.32.0"}


class Store:
    """As much of a ``torch.distributed.Store`` as an agreement uses; it can go away.

    Attributes:
        hidden: Keys that end so are not there, whoever wrote them.
        asked: Is called with each key that is looked for.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.hidden: tuple[str, ...] = ()
        self.asked: Callable[[str], object] = lambda key: None
        self._settling = threading.Lock()

    def _there(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer\nat 0x1")

    def set(self, key: str, value: str) -> None:
        self._there()
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._there()
        for key in keys:
            self.asked(key)
        return all(key in self.values and not key.endswith(self.hidden) for key in keys)

    def get(self, key: str) -> bytes:
        self._there()
        return self.values[key]

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self._settling:
            self._there()
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = value.encode()
            return self.values[key]


class View(Store):
    """What one rank sees of another one's store."""

    def __init__(self, store: Store, *hidden: str) -> None:
        super().__init__()
        self.values, self._settling, self.hidden = store.values, store._settling, hidden


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


def test_a_rank_that_cannot_run_it_is_named_on_the_others_at_once_and_waits_for_nobody() -> None:
    started = time.monotonic()
    found = meet(says(0), says(1, failure="BP101 anchor not found"), patience=60)
    assert time.monotonic() - started < 5
    (failure,) = found[0]
    assert failure.code == "BP706"
    assert failure.what == "rank 1 (host=host1 pid=101) does not run toy: BP101 anchor not found"
    assert found[1] == ()


class TestBeforeARankStops:
    """It may hold the store, and when it has ended, vLLM ends those that have not told why yet."""

    def told(self, store: Store) -> list[str]:
        return sorted(key.rpartition("/")[2] for key in store.values if "/told/" in key)

    def parts(self, store: Store, agreed: Agreed, size: int = 2, patience: float = 60) -> float:
        started = time.monotonic()
        part(store, agreed, size, "toy", patience=patience)
        return time.monotonic() - started

    def test_one_that_cannot_run_it_waits_until_the_others_have_heard_and_told_that(self) -> None:
        store, found = Store(), []

        def late() -> None:
            time.sleep(0.5)
            agreed = agree(store, says(1), 2, "toy", patience=60)
            found.append((agreed.failures[0].code, store.gone))
            part(store, agreed, 2, "toy", patience=60)

        thread = threading.Thread(target=late)
        thread.start()
        self.parts(store, agree(store, says(0, failure="no"), 2, "toy"))
        store.gone = True
        thread.join(30)
        assert found == [("BP706", False)]
        assert self.told(store) == ["0", "1"]

    def test_one_that_cannot_run_it_waits_for_silent_ones_no_longer_than_they_are_waited_for(self) -> None:
        store = Store()
        agreed = agree(store, says(0, failure="no"), 2, "toy")
        assert 0.3 <= self.parts(store, agreed, patience=0.3) < 5

    def test_ranks_that_differ_wait_for_each_other(self) -> None:
        store, order = Store(), []

        def rank(number: int) -> None:
            agreed = agree(store, says(number, cap=number), 2, "toy", patience=60)
            time.sleep(0.2 * number)  # it logs
            order.append(f"told {number}")
            part(store, agreed, 2, "toy", patience=60)
            order.append("left")

        threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert order == ["told 0", "told 1", "left", "left"]

    def test_a_silent_rank_is_not_waited_for_again(self) -> None:
        store = Store()
        agreed = agree(store, says(0), 2, "toy", patience=0.1)
        assert self.parts(store, agreed) < 0.3

    def test_one_that_has_died_is_waited_for_a_moment_only(self) -> None:
        store = Store()
        store.set("balance_patcher/toy/start/says/1", json.dumps(asdict(says(1, cap=9))))
        assert 0.4 <= self.parts(store, agree(store, says(0), 2, "toy", patience=1)) < 5

    def test_one_that_goes_on_without_it_waits_for_nobody_and_is_not_waited_for(self) -> None:
        store = Store()
        assert self.parts(store, agree(store, says(0, failure="no"), 2, "toy"), patience=0) < 0.3
        assert self.told(store) == ["0"]
        assert self.parts(store, agree(store, says(1), 2, "toy", patience=60)) < 0.3

    def test_where_nobody_was_asked_nothing_is_said(self) -> None:
        store = Store()
        part(store, Agreed(), 2, "toy")
        assert store.values == {}


class TestAStoreThatIsLost:
    def test_ranks_that_were_not_heard_are_named_with_why_and_the_own_one_is_not(self) -> None:
        store = Store()
        threading.Timer(0.2, lambda: setattr(store, "gone", True)).start()
        (failure,) = agree(store, says(1), 2, "toy", patience=20).failures
        assert failure.code == "BP705"
        assert failure.what == ("rank 0 of 2: the store of the group is lost (RuntimeError: Connection reset by peer)")
        assert "rank 0, whose process holds the store" in failure.next

    def test_also_where_not_even_the_own_statement_could_be_written(self) -> None:
        store = Store()
        store.gone = True
        (failure,) = agree(store, says(1), 2, "toy", patience=20).failures
        assert failure.what.startswith("rank 0 of 2: ")

    def test_between_a_statement_and_a_finding(self) -> None:
        store = Store()
        store.set("balance_patcher/toy/start/says/0", json.dumps(asdict(says(0))))
        store.asked = lambda key: setattr(store, "gone", "/finds/" in key)
        store._there = lambda: None if not store.gone else (_ for _ in ()).throw(RuntimeError())  # type: ignore[method-assign]
        (failure,) = agree(store, says(1), 2, "toy", patience=20).failures
        assert failure.code == "BP706"
        assert failure.what == (
            "rank 0 (host=host0 pid=100) does not run toy: the store of the group is lost (RuntimeError: )"
        )

    def test_before_the_verdict(self) -> None:
        class Deaf(Store):
            def compare_set(self, key: str, expected: str, value: str) -> bytes:
                raise RuntimeError("Broken pipe")

        (failure,) = agree(Deaf(), says(0), 1, "toy").failures
        assert failure.code == "BP706"
        assert (
            "whether all go on is not known: the store of the group is lost (RuntimeError: Broken pipe)" in failure.what
        )

    def test_a_holder_that_stands_still_does_not_stop_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agreement, "ANSWER", 0.2)
        goes_on, asked = threading.Event(), []

        class Still(Store):
            def _there(self) -> None:
                asked.append("the store")
                goes_on.wait(30)

        started = time.monotonic()
        (failure,) = agree(Still(), says(1), 2, "toy", patience=0.2).failures
        assert time.monotonic() - started < 5
        assert asked == ["the store"]  # and not once more for each thing that there is to say
        goes_on.set()
        assert failure.what == "rank 0 of 2: the store of the group is lost (no answer for 1.2 s)"

    def test_what_a_signal_raises_is_not_the_stores(self) -> None:
        """vLLM 0.23 handles SIGTERM so while an engine core is built; the process is to end then."""

        def handle(*_: object) -> None:
            raise AttributeError("shutdown_state")

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(AttributeError, match="shutdown_state"):
                agree(Store(), says(0), 2, "toy", patience=20)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_one_look_is_had_however_short_the_time(self) -> None:
        store = Store()
        store.set("balance_patcher/toy/board/key", "text")
        assert Board(store, "toy", "board", answer=10).read(["key", "other"], 0.0) == ({"key": "text"}, "")


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


def test_nor_can_what_is_no_text() -> None:
    store = Store()
    store.values["balance_patcher/toy/start/says/1"] = b"\xff\xfe{"
    (failure,) = agree(store, says(0), 2, "toy", patience=1).failures
    assert failure.code == "BP706"
    assert "cannot be read" in failure.what


def test_ranks_meet_again_on_the_same_store() -> None:
    store = Store()
    agree(store, says(0), 1, "toy")
    agree(store, says(0, cap=9), 1, "toy", occasion="later")
    assert len([key for key in store.values if "/says/" in key]) == 2


class TestLate:
    """Ranks that do not hear each other in time: all of them go on, or none."""

    def test_a_rank_that_speaks_when_the_others_have_given_up_does_not_go_on(self) -> None:
        store = Store()
        early = agree(store, says(0), 2, "toy", patience=0.3).failures
        (failure,) = agree(store, says(1), 2, "toy", patience=5).failures
        assert [failure.code for failure in early] == ["BP705"]
        assert failure.code == "BP706"
        assert failure.what.startswith(
            "rank 0 (host=host0 pid=100) does not run toy: BP705 rank is silent: rank 1 of 2"
        )

    def test_a_rank_that_is_gone_before_it_heard_the_others_is_named(self) -> None:
        store = Store()
        store.set("balance_patcher/toy/start/says/1", json.dumps(asdict(says(1))))
        (failure,) = agree(store, says(0), 2, "toy", patience=0.3).failures
        assert failure.code == "BP706"
        assert failure.what.endswith("rank 1 (host=host1 pid=101) does not run toy: it did not answer for 0.3 s")

    def spoken(self) -> Store:
        """Three ranks have spoken, and ranks 1 and 2 have found nothing."""
        store = Store()
        for rank in (0, 1, 2):
            store.set(f"balance_patcher/toy/start/says/{rank}", json.dumps(asdict(says(rank))))
        for rank in (1, 2):
            store.set(f"balance_patcher/toy/start/finds/{rank}", "")
        return store

    def test_one_that_gave_up_on_an_answer_goes_on_if_the_others_had_it_in_time(self) -> None:
        store = self.spoken()
        store = self.spoken()
        store.set("balance_patcher/toy/start/finds/0", "")
        assert agree(store, says(1), 3, "toy", patience=5).failures == ()
        assert agree(View(store, "finds/2"), says(0), 3, "toy", patience=0.2).failures == ()

    def test_one_that_had_every_answer_does_not_go_on_if_another_gave_up_before(self) -> None:
        store = self.spoken()
        (failure,) = agree(View(store, "finds/2"), says(0), 3, "toy", patience=0.2).failures
        assert failure.what.endswith("rank 2 (host=host2 pid=102) does not run toy: it did not answer for 0.2 s")
        for rank in (1, 2):
            (failure,) = agree(store, says(rank), 3, "toy", patience=5).failures
            assert failure.code == "BP706"
            assert failure.what.startswith("toy: rank 0 (host=host0 pid=100) has refused: BP706 another rank cannot: ")


def test_who_the_ranks_are_is_known_afterwards() -> None:
    agreed = agree(Store(), says(0), 1, "toy")
    assert str(agreed.ranks[0]) == "rank 0 (host=host0 pid=100)"
    assert agreed.mine == says(0)

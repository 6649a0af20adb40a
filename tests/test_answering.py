"""An engine's process answers how it stands: in one line, to whom it belongs, and nobody can hold it up."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from balance_patcher import answering, procfs, watchdog
from balance_patcher.answering import Active, Answerer
from balance_patcher.errors import PatchError
from balance_patcher.feature import Enabling
from balance_patcher.watchdog import Watchdog
from tests import asked

pytestmark = pytest.mark.skipif(not answering.can_be_asked(), reason="only Linux has abstract sockets")


def name() -> str:
    this = procfs.process("self")
    assert this is not None
    return answering.address(os.getpid(), this.started)


def listens() -> bool:
    return name() in procfs.abstract_names("self")


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def asks() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(f"\0{name()}")
    return connection


def heard(connection: socket.socket) -> dict[str, Any]:
    with connection:
        text = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    return dict(json.loads(text))


def end(answerer: Answerer) -> None:
    """Close it; where an engine that is gone has done that without waiting, the name goes a moment later."""
    answerer.close(30)
    assert until(lambda: not listens())


@pytest.fixture
def answerer() -> Iterator[Answerer]:
    made = Answerer()
    yield made
    end(made)


class TestTheAnswer:
    def test_says_which_process_it_is_and_where_its_engine_stands(self, answerer: Answerer) -> None:
        engine = asked.Engine(rank=1)
        answerer.begin(engine, [asked.active(1, (4711, 1147))])
        told = heard(asks())
        assert (told["protocol"], told["pid"], told["host"]) == (1, os.getpid(), socket.gethostname())
        assert told["balance_patcher"]
        (one,) = told["engines"]
        assert (one["rank"], one["ranks"], one["step"], one["wave"], one["engines_running"]) == (1, 2, 12, 3, True)
        assert (one["running"], one["waiting"]) == (3, 9)
        balance = one["features"]["balance"]
        assert balance["line"] == "balance: ON rank 1/2"
        assert balance["digest"] == "21f1e23a58ed"
        assert balance["tells"] == {"cap": 4, "counts": [4, 3], "frozen": True}
        assert balance["ranks"]["1"]["pid"] == 1147
        assert balance["watchdog"] is None
        assert one["errors"] == []

    def test_says_how_long_it_has_waited_in_the_gather(self, answerer: Answerer) -> None:
        engine = asked.Engine()
        dog = Watchdog("balance", engine, {}, 0)
        answerer.begin(engine, [asked.active()])

        def told() -> dict[str, Any]:
            return dict(heard(asks())["engines"][0]["features"]["balance"]["watchdog"])

        assert {told()[name] for name in ("in_gather_for", "in_step_for", "last_gather_ago")} == {None}
        dog.enters()
        time.sleep(0.05)
        assert 0.05 <= told()["in_gather_for"] < 30
        dog.leaves()
        now = told()
        assert (now["in_gather_for"], now["gathers"]) == (None, 1)
        assert 0 <= now["last_gather_ago"] < 30

    def test_says_how_long_it_has_been_in_its_step(self) -> None:
        engine = asked.Engine()
        dog = Watchdog("balance", engine, {}, 60)
        time.sleep(0.05)
        assert dog.told["in_step_for"] >= 0.05  # type: ignore[operator]
        dog.enters()
        assert dog.told["in_step_for"] is None
        dog.leaves()
        engine.engines_running = False
        assert dog.told["in_step_for"] is None

    def test_repeats_the_line_of_a_stall_while_it_lasts(self) -> None:
        engine = asked.Engine()
        dog = Watchdog("balance", engine, {0: "rank 0 (host=a pid=1)"}, 0.2).start()

        def told() -> Any:
            return (watchdog.told(engine, "balance") or {})["stall"]

        dog.enters()
        assert until(lambda: "arrived: rank 0 (host=a pid=1)" in told())
        dog.leaves()
        engine.engines_running = False
        assert until(lambda: not told())

    def test_holds_every_engine_core_of_the_process(self, answerer: Answerer) -> None:
        engines = [asked.Engine(rank) for rank in (0, 1)]
        for rank, engine in enumerate(engines):
            answerer.begin(engine, [asked.active(rank)])
        assert [one["rank"] for one in heard(asks())["engines"]] == [0, 1]
        del engine, engines[0]
        gc.collect()
        assert [one["rank"] for one in heard(asks())["engines"]] == [1]

    @pytest.mark.parametrize("wrong", [{(1, 2): 3}, {"itself": ...}, None], ids=["keys", "cycle", "raises"])
    def test_what_cannot_be_read_is_told_beside_the_rest(self, answerer: Answerer, wrong: Any) -> None:
        if wrong and "itself" in wrong:
            wrong["itself"] = wrong

        def odd(_: object) -> dict[str, object]:
            if wrong is None:
                raise RuntimeError("in the middle of it")
            return dict(wrong)

        engine = asked.Engine()
        answerer.begin(engine, [Active("odd", "odd: ON", "digest", odd), asked.active()])
        (one,) = heard(asks())["engines"]
        assert one["features"]["odd"]["tells"] is None
        assert [error.partition(":")[0] for error in one["errors"]] == ["odd"]
        assert one["features"]["balance"]["tells"]["cap"] == 4

    def test_an_engine_without_ranks_has_none(self, answerer: Answerer) -> None:
        engine = type("Plain", (), {"scheduler": None})()
        answerer.begin(engine, [Active("balance", "balance: ON", "digest")])
        (one,) = heard(asks())["engines"]
        assert (one["rank"], one["ranks"], one["running"]) == (None, None, None)
        assert len(one["errors"]) == 1


class TestWhoAsks:
    def test_nobody_who_does_not_read_holds_the_others_up(self, answerer: Answerer) -> None:
        engine = asked.Engine()
        answerer.begin(engine, [asked.active()])
        held = [asks() for _ in range(20)]
        assert heard(asks())["engines"]
        for connection in held:
            connection.close()

    def test_what_is_sent_is_not_read(self, answerer: Answerer) -> None:
        engine = asked.Engine()
        answerer.begin(engine, [asked.active()])
        with asks() as connection, pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.sendall(b"x" * (64 << 20))  # more than is kept for somebody who does not read
        assert heard(asks())["engines"]

    @pytest.mark.parametrize(
        ("user", "refused"), [(0, None), (1000, None), (1001, "it belongs to user 1000, and user 1001 asks")]
    )
    def test_only_its_own_user_and_root_are_told(
        self, monkeypatch: pytest.MonkeyPatch, user: int, refused: str | None
    ) -> None:
        class Connection:
            def getsockopt(self, *_: int) -> bytes:
                return answering.CREDENTIALS.pack(1, user, user)

        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        answer = Answerer()._answer(Connection())  # type: ignore[arg-type]
        assert ("engines" in answer) == (refused is None)
        assert answer.get("refused") == refused


class TestTheProcess:
    def test_the_socket_goes_with_the_last_engine(self, answerer: Answerer) -> None:
        engine = asked.Engine()
        answerer.begin(engine, [asked.active()])
        assert listens()
        thread = answerer._thread
        assert thread is not None
        del engine
        gc.collect()
        assert not listens()
        thread.join(30)
        assert not thread.is_alive()
        again = asked.Engine()
        answerer.begin(again, [asked.active()])
        assert heard(asks())["engines"]

    def test_it_answers_again_when_it_could_not_take_a_connection(self, answerer: Answerer, monkeypatch: Any) -> None:
        monkeypatch.setattr(answering, "PAUSE", 0.01)
        engine, tried = asked.Engine(), []
        real = answering._listen

        class Failing:
            def __init__(self) -> None:
                self.socket = real()

            def accept(self) -> Any:
                tried.append(1)
                if len(tried) < 4:
                    raise OSError(24, "Too many open files")
                return self.socket.accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(self.socket, name)

        monkeypatch.setattr(answering, "_listen", Failing)
        answerer.begin(engine, [asked.active()])
        assert heard(asks())["engines"]

    def test_it_ends_although_somebody_could_still_ask(self) -> None:
        done = subprocess.run(
            [sys.executable, str(Path(asked.__file__)), "ends"], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")

    def test_a_forked_child_has_a_socket_of_its_own_and_the_parent_keeps_its(self) -> None:
        with subprocess.Popen(
            [sys.executable, str(Path(asked.__file__)), "forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdout is not None
            assert parent.stdin is not None
            said = json.loads(parent.stdout.readline())
            assert not said["before"]
            ranks = [_told(pid)["engines"][0]["rank"] for pid in (parent.pid, said["child"])]
            assert ranks == [0, 1]
            parent.stdin.close()


def _told(pid: int) -> dict[str, Any]:
    from balance_patcher import inquiry

    one = procfs.process(pid)
    assert one is not None
    return inquiry.ask(one, 30)


class TestWhetherItAnswers:
    @pytest.fixture(autouse=True)
    def own(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(answering._Here, "answerer", Answerer())
        yield
        end(answering._Here.answerer)

    def test_it_does_for_an_engine_in_which_something_is_on(self) -> None:
        engine = asked.Engine()
        answering.begin(engine, [asked.active()])
        assert listens()

    def test_not_where_nothing_is_on(self) -> None:
        answering.begin(asked.Engine(), [])
        assert not listens()

    def test_not_where_it_is_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(answering.VARIABLE, "off")
        engine = asked.Engine()
        answering.begin(engine, [asked.active()])
        assert not listens()

    def test_not_where_there_are_no_abstract_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        engine = asked.Engine()
        answering.begin(engine, [asked.active()])
        monkeypatch.undo()
        assert not listens()

    def test_where_it_cannot_the_engine_goes_on_and_the_log_says_so(self, monkeypatch: Any, caplog: Any) -> None:
        caplog.set_level(logging.WARNING, "vllm.balance_patcher")

        def fails() -> socket.socket:
            raise OSError(98, "Address already in use")

        monkeypatch.setattr(answering, "_listen", fails)
        answering.begin(asked.Engine(), [asked.active()])
        (line,) = caplog.messages
        assert line.startswith(f"`status --pid {os.getpid()}` will not be answered: OSError: ")

    @pytest.mark.parametrize("value", ["1", "no", "auto"])
    def test_a_switch_has_two_values(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv(answering.VARIABLE, value)
        with pytest.raises(PatchError, match="BP006"):
            answering.answers()


def test_only_an_engines_feature_tells_something() -> None:
    with pytest.raises(PatchError, match="BP002"):
        Enabling(process="worker", tells=lambda _: {})


def test_the_name_may_be_held_a_moment_longer_by_the_engine_before(answerer: Answerer) -> None:
    before = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before.bind(f"\0{name()}")
    threading.Timer(0.2, before.close).start()
    answerer.begin(engine := asked.Engine(), [asked.active()])
    assert [one["rank"] for one in heard(asks())["engines"]] == [engine.dp_rank]


def test_a_name_that_somebody_keeps_is_an_error(answerer: Answerer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_patcher.answering.PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(f"\0{name()}")
        with pytest.raises(OSError, match="in use"):
            answerer.begin(asked.Engine(), [asked.active()])

"""Asking processes: what they answer, who waits for whom, and what is said of one that does not answer."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from balance_patcher import answering, cli, inquiry, procfs
from balance_patcher.errors import PatchError
from balance_patcher.inquiry import Inquiry, inquire
from balance_patcher.terminal_inquiry import judged, print_inquiry
from tests import asked

pytestmark = pytest.mark.skipif(not answering.can_be_asked(), reason="only Linux has abstract sockets")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["status", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def refused(pid: int, patience: float | None = None) -> PatchError:
    """Why nobody could be asked, or the one who was asked did not answer."""
    try:
        found = inquire(pid, patience)
    except PatchError as error:
        return error
    assert not found.answers
    return PatchError(*found.failures)


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 30
    while procfs.process(pid).state != "T" and time.monotonic() < end:  # type: ignore[union-attr]
        time.sleep(0.01)


class TestAnEngine:
    def test_is_told_in_lines(self, capsys: Any) -> None:
        with asked.process("in the gather") as engine:
            code, out, err = run(capsys, "--pid", engine.pid)
        assert (code, err) == (0, "")
        out = re.sub(r"\d+\.\d s", "N s", out)
        sentence, blank, head, *lines = out.splitlines()
        # It has been in it for a moment only.
        assert sentence == "rank 0 answers and goes on; a rank is at its cap, so none admits."
        assert not blank
        assert head.startswith(f"process {engine.pid}  host {socket.gethostname()}  balance_patcher ")
        assert lines == [
            "  engine    rank 0 of 2, step 12 of wave 3, engines running",
            "  requests  running 3, waiting 9",
            "  balance   balance: ON rank 0/2",
            "  counts    [4, 3]: rank 0 at the cap of 4, so no rank admits",
            "  gather    waits in it for N s; none done",
            f"  ranks     rank 0 (host={socket.gethostname()} pid=4711)",
        ]

    def test_is_told_as_json(self, capsys: Any) -> None:
        with asked.process() as engine:
            code, out, _ = run(capsys, "--pid", engine.pid, "--format", "json")
        told = json.loads(out)
        assert code == 0
        assert {key: told[key] for key in ("schema", "asked", "silent", "failures")} == {
            "schema": 1, "asked": engine.pid, "silent": {}, "failures": [],
        }  # fmt: skip
        (answer,) = told["processes"]
        assert answer["pid"] == engine.pid
        assert answer["engines"][0]["features"]["balance"]["tells"]["counts"] == [4, 3]


class TestWhatHasStartedThem:
    def test_all_engine_cores_below_it_are_told_by_rank(self, capsys: Any) -> None:
        with asked.process("parent") as parent:
            code, out, err = run(capsys, "--pid", parent.pid)
            pids = [one.pid for one in procfs.below(parent.pid)]
        assert (code, err) == (0, "")
        sentence, _, head, *rows = out.splitlines()[:5]
        assert sentence == "All ranks that were asked answer and go on; one is at its cap, so none admits."
        assert head.split() == "rank pid step wave running waiting counts / cap stands".split()
        # They were started in the other order.
        assert [row.split()[:2] for row in rows] == [["0", str(pids[1])], ["1", str(pids[0])]]
        assert "[4, 3] / 4" in rows[0]

    def test_one_that_is_stopped_is_told_beside_those_that_answer(self, capsys: Any) -> None:
        with asked.process("parent") as parent:
            first, _ = [one.pid for one in procfs.below(parent.pid)]
            try:
                stopped(first)
                code, out, _ = run(capsys, "--pid", parent.pid)
            finally:
                os.kill(first, signal.SIGKILL)  # its starter's end would not reach it
        assert code == 3
        assert f"BP752 process is stopped: process {first}" in out
        assert f"kill -CONT {first}" in out
        assert re.search(rf"^a rank \(pid {first}, stopped\) does not answer\.$", out, re.MULTILINE)
        (row,) = [line for line in out.splitlines() if re.match(rf"\s+\S+\s+{first} ", line)]
        assert row.split()[-1] == "stopped"

    def test_a_process_with_none_below_it_is_told(self) -> None:
        with asked.process("nothing") as other:
            error = refused(other.pid)
        (failure,) = error.failures
        assert failure.code == "BP751"
        assert "or has another version of balance_patcher" in failure.what
        assert re.match(r"(sleeps until something happens; state S|runs; state R)", dict(failure.fields)["state"])


class TestWhoDoesNotAnswer:
    def test_a_number_that_nobody_has(self) -> None:
        with asked.process("nothing") as other:
            pass
        assert refused(other.pid).failures[0].code == "BP750"

    def test_a_process_that_is_stopped_is_not_waited_for(self) -> None:
        with asked.process() as engine:
            stopped(engine.pid)
            began = time.monotonic()
            (failure,) = refused(engine.pid, 60).failures
            assert time.monotonic() - began < 30
            assert failure.code == "BP752"
            assert "is stopped (SIGSTOP); state T" in failure.what

    def test_a_process_that_is_stopped_while_it_is_asked(self) -> None:
        with asked.process() as engine:
            one = procfs.process(engine.pid)
            assert one is not None
            stopped(engine.pid)
            with pytest.raises(PatchError, match="BP752"):
                inquiry.ask(one, 0.2)

    def test_one_that_ends_while_it_is_asked(self) -> None:
        with asked.process() as engine:
            one = procfs.process(engine.pid)
        assert one is not None
        with pytest.raises(PatchError, match="BP754"):
            inquiry.ask(one, 5)

    def test_a_zombie(self) -> None:
        with subprocess.Popen(
            [sys.executable, str(Path(asked.__file__)), "zombie"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdout is not None
            assert parent.stdin is not None
            pid = int(parent.stdout.readline())
            (failure,) = refused(pid).failures
            parent.stdin.close()
        assert failure.code == "BP754"
        assert "(a zombie); state Z" in failure.what

    def test_one_whose_interpreter_is_held(self) -> None:
        with asked.process("holds the interpreter") as engine:
            (failure,) = refused(engine.pid, 0.3).failures
        assert failure.code == "BP753"
        assert re.search(r"; state [SR]", dict(failure.fields)["state"])
        assert f"py-spy dump --pid {engine.pid}" in failure.next

    def test_one_of_which_too_many_ask_at_once(self) -> None:
        with asked.process("holds the interpreter") as engine:
            one = procfs.process(engine.pid)
            assert one is not None
            held = []
            for _ in range(5000):
                connection = socket.socket(socket.AF_UNIX)
                connection.setblocking(False)
                held.append(connection)
                try:
                    connection.connect(f"\0{answering.address(one.pid, one.started)}")
                except BlockingIOError:
                    break
                except OSError:  # too many files
                    break
            with pytest.raises(PatchError, match=r"BP753|BP752"):
                inquiry.ask(one, 0.3)
            for connection in held:
                connection.close()

    @pytest.mark.parametrize(
        ("data", "code", "what"),
        [
            ("", "BP757", "nothing came"),
            ('{"protocol": 1, "eng', "BP757", "no whole line"),
            ("[]\\n", "BP757", "no whole line"),
            ('{"protocol": 2}\\n', "BP757", "version 2 of the protocol, and this one reads 1"),
            ("{}\\n", "BP757", "version None of the protocol"),
            ('{"protocol": 1, "refused": "it belongs to user 1, and user 2 asks"}\\n', "BP755", "user 2 asks"),
        ],
    )
    def test_one_that_answers_something_else(self, data: str, code: str, what: str) -> None:
        with asked.process("raw", data) as other:
            (failure,) = refused(other.pid).failures
        assert failure.code == code
        assert what in failure.what

    def test_another_that_has_taken_its_name(self) -> None:
        with asked.process("nothing") as named, asked.process("for another", named.pid) as other:
            (failure,) = refused(named.pid).failures
        assert failure.code == "BP757"
        assert f"process {other.pid} of user {os.geteuid()} answers in its place" in failure.what

    def test_a_number_that_was_given_out_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with asked.process() as engine:
            before = procfs.process(engine.pid)
            assert before is not None
            later = procfs.Process(before.pid, before.name, before.state, before.parent, before.started + 1)
            monkeypatch.setattr(procfs, "process", lambda _: later)
            assert refused(engine.pid).failures[0].code == "BP751"

    def test_one_in_another_network_namespace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with asked.process("nothing") as other:
            one = procfs.process(other.pid)
            assert one is not None
            there = {answering.address(one.pid, one.started)}
            monkeypatch.setattr(procfs, "abstract_names", lambda pid: there if pid == one.pid else set())
            (failure,) = refused(other.pid).failures
        assert failure.code == "BP756"
        assert f"nsenter --target {other.pid} --net" in failure.next

    @pytest.mark.skipif(not shutil.which("unshare") or os.geteuid() != 0, reason="only root makes a namespace")
    def test_one_in_a_real_other_network_namespace(self) -> None:
        command = ["unshare", "--net", sys.executable, str(Path(asked.__file__)), "engine"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            assert engine.stdin is not None
            if not engine.stdout.readline():
                pytest.skip("this machine has no network namespaces")
            assert refused(engine.pid).failures[0].code == "BP756"
            engine.stdin.close()

    def test_nobody_can_be_asked_where_there_are_no_abstract_sockets(self, monkeypatch: Any, capsys: Any) -> None:
        monkeypatch.setattr(inquiry, "can_be_asked", lambda: False)
        code, _, err = run(capsys, "--pid", os.getpid())
        assert code == 3
        assert err.startswith("BP758 ")
        assert "--url" in err

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
    def test_a_process_that_has_become_another_user_can_be_asked_by_root(self) -> None:
        with asked.process("another user") as engine:
            assert inquire(engine.pid).answers


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--pid", "1", "--url", "http://127.0.0.1"), ("--watch", "1"), ("--interval", "1"),
            ("--pid", "1", "--watch", "1"), ("--url", "http://127.0.0.1", "--watch", "1", "--interval", "1"),
        ],
    )  # fmt: skip
    def test_what_excludes_each_other_is_wrong_usage(self, capsys: Any, arguments: tuple[str, ...]) -> None:
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert err.startswith("BP007 ")

    def test_a_number_is_positive(self, capsys: Any) -> None:
        assert run(capsys, "--pid", "0")[0] == 2


# -- what is made of several answers ---------------------------------------------------------


def answer(
    rank: int, *, waits: float | None = None, steps: float | None = None, running: bool = True, frozen: bool = False
) -> dict[str, Any]:
    dog = {
        "gathers": 7,
        "in_gather_for": waits,
        "in_step_for": steps,
        "last_gather_ago": 0.5,
        "says_after": 20,
        "stall": "",
    }
    tells = {"cap": 4, "counts": [4, 3] if frozen else [1, 0], "frozen": frozen}
    peers = {str(other): {"host": "h", "pid": 100 + other} for other in (0, 1)}
    feature = {"line": "balance: ON", "digest": "d", "ranks": peers, "tells": tells, "watchdog": dog}
    engine = {
        "rank": rank, "ranks": 2, "step": 7, "wave": 1, "engines_running": running, "running": 1, "waiting": 0,
        "features": {"balance": feature}, "errors": [],
    }  # fmt: skip
    head = {"protocol": 1, "pid": 100 + rank, "asked": 100 + rank, "host": "h", "balance_patcher": "1", "vllm": "1"}
    return {**head, "python": "3", "engines": [engine]}


SLOW = "a long prefill or a compilation, or a worker or a device hangs"


@pytest.mark.parametrize(
    ("answers", "silent", "said"),
    [
        ([answer(0, waits=12), answer(1)], {}, "rank 0 waits in the gather for rank 1."),
        (
            [answer(0, waits=12)],
            {101: "stopped"},
            "rank 0 waits in the gather for rank 1 (pid 101, stopped).",
        ),
        ([answer(0)], {101: "stopped"}, "rank 1 (pid 101, stopped) does not answer."),
        (
            [answer(0, steps=6)],
            {101: "stopped"},
            "rank 1 (pid 101, stopped) does not answer, and rank 0 has not come to its gather for more than 5 s.",
        ),
        (
            [answer(0, waits=12), answer(1, waits=12)],
            {},
            "All ranks that were asked are in their gather: rank 0 and rank 1.",
        ),
        (
            [answer(0, steps=6), answer(1, steps=6)],
            {},
            f"rank 0 and rank 1 have not come to their gather for more than 5 s: {SLOW}.",
        ),
        ([answer(0)], {}, "rank 0 answers and goes on."),
        ([answer(0, frozen=True)], {}, "rank 0 answers and goes on; a rank is at its cap, so none admits."),
        ([answer(0, steps=6)], {}, f"rank 0 has not come to its gather for more than 5 s: {SLOW}."),
        (
            [answer(0, waits=12)], {},
            "rank 0 waits in the gather; ask the others too: rank 1 is process 101 on h.",
        ),
        # Every step is in its gather for a moment.
        (
            [answer(0, waits=0.01), answer(1)], {}, "All ranks that were asked answer and go on: rank 0 and rank 1.",
        ),
        (
            [answer(0, running=False), answer(1, running=False)], {},
            "All ranks that were asked answer and go on: rank 0 and rank 1.",
        ),
    ],
)  # fmt: skip
def test_one_sentence_says_who_waits_for_whom(answers: list[dict[str, Any]], silent: dict[int, str], said: str) -> None:
    assert judged(Inquiry(1, tuple(answers), (), silent)) == said


def test_of_many_others_some_are_named() -> None:
    one = answer(0, waits=12)
    one["engines"][0]["features"]["balance"]["ranks"] = {str(n): {"host": "h", "pid": 100 + n} for n in range(64)}
    named = ", ".join(f"rank {n} is process {100 + n} on h" for n in (1, 2, 3))
    assert judged(Inquiry(1, (one,))) == f"rank 0 waits in the gather; ask the others too: {named} and 60 more."
    one["engines"][0]["features"]["balance"]["ranks"] = {}
    assert judged(Inquiry(1, (one,))) == "rank 0 waits in the gather; ask what has started the others."


def printed(found: Inquiry) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_inquiry(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("one", "stands"),
    [
        (answer(0), "steps"),
        (answer(0, steps=6), "in a step"),
        (answer(0, waits=12), "in the gather"),
        (answer(0, running=False), "rests"),
    ],
)
def test_the_table_says_where_a_rank_stands(one: dict[str, Any], stands: str) -> None:
    text = printed(Inquiry(1, (one, answer(1))))
    (row,) = [line for line in text.splitlines() if line.startswith("  0 ")]
    assert re.split(r"  +", row.strip())[-1] == stands


def test_an_engine_that_is_gone_and_what_could_not_be_read_are_told() -> None:
    gone = {**answer(0), "engines": []}
    odd = answer(1)
    odd["engines"][0] |= {"errors": ["requests: KeyError: 1"], "running": None}
    text = printed(Inquiry(1, (gone, odd)))
    assert "its engine is gone" in text
    assert "not read  requests: KeyError: 1" in text
    assert "running ?, waiting 0" in text


@pytest.mark.parametrize(("frozen_for", "said"), [(None, ""), (3.21, "; requests wait here because of that for 3.2 s")])
def test_how_long_requests_have_been_held_back(frozen_for: float | None, said: str) -> None:
    one = answer(0, frozen=True)
    one["engines"][0]["features"]["balance"]["tells"] |= {"frozen_for": frozen_for} if frozen_for else {}
    line = next(line for line in printed(Inquiry(1, (one,))).splitlines() if "counts" in line)
    assert line.split("  ")[-1].strip() == f"[4, 3]: rank 0 at the cap of 4, so no rank admits{said}"


# -- what Linux tells ------------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(procfs, "PROC", tmp_path)

    def write(pid: int, name: str = "python", state: str = "S", parent: int = 1, **files: str) -> None:
        folder = tmp_path / str(pid)
        (folder / "net").mkdir(parents=True)
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {' '.join(map(str, range(5, 22)))} 777 0 0\n")
        for file, text in files.items():
            (folder / file.replace("__", "/")).write_text(text)

    return write


def test_a_name_may_hold_anything(proc: Callable[..., None]) -> None:
    proc(7, "a) R (b c")
    one = procfs.process(7)
    assert one == procfs.Process(7, "a) R (b c", "S", 1, 777)


def test_a_process_that_cannot_be_read_is_none(proc: Callable[..., None], tmp_path: Path) -> None:
    proc(7)
    (tmp_path / "7" / "stat").write_text("7 (python")
    assert procfs.process(7) is None
    assert procfs.process(8) is None


def test_where_it_waits_is_told_only_where_that_is_known(proc: Callable[..., None]) -> None:
    proc(7, wchan="futex_wait_queue")
    proc(8, wchan="0")
    proc(9)
    told = [procfs.process(pid).stands for pid in (7, 8, 9)]  # type: ignore[union-attr]
    assert told == [
        "sleeps until something happens; state S, wchan futex_wait_queue",
        *["sleeps until something happens; state S"] * 2,
    ]


def test_in_a_container_the_process_counts_anew(proc: Callable[..., None]) -> None:
    proc(7, status="Name:\tpython\nNSpid:\t7\t12\nThreads:\t1\n")
    proc(8)
    assert [procfs.inner_pid(pid) for pid in (7, 8)] == [12, 8]


def test_all_that_stand_below_are_found_and_the_nearest_first(proc: Callable[..., None]) -> None:
    for pid, parent in ((10, 1), (30, 10), (20, 10), (25, 30), (40, 2)):
        proc(pid, parent=parent)
    assert [one.pid for one in procfs.below(10)] == [20, 30, 25]


def test_names_of_abstract_sockets(proc: Callable[..., None]) -> None:
    rows = (
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000: 00000002 00000000 00010000 0001 01 1 /run/a b\n"
        "0000: 00000003 00000000 00000000 0001 03 2\n"
        "0000: 00000002 00000000 00010000 0001 01 3 @balance_patcher/7/777\n"
    )
    proc(7, net__unix=rows)
    proc(8)
    assert procfs.abstract_names(7) == {"balance_patcher/7/777"}
    assert procfs.abstract_names(8) == set()

"""The demo without vLLM: what it sends, measures and says; and a whole run of its processes on a stand-in."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from balance_patcher import __main__ as command
from balance_patcher.demo import engines, view
from balance_patcher.demo.figures import Answer, Figures, Measured, Replay, Step, percentile
from balance_patcher.demo.load import ANSWER, CAP, PROMPT, RANKS, skewed
from balance_patcher.demo.probe import gate_shut
from balance_patcher.driven import ENTRY_POINTS, first_error
from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# -- the load --------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_load() -> None:
    assert skewed(48, 3) == skewed(48, 3)
    assert skewed(48, 3) != skewed(48, 4)


@pytest.mark.parametrize("requests", [8, 9, 48])
@pytest.mark.parametrize("seed", range(5))
def test_the_load_is_skewed_whatever_the_seed(requests: int, seed: int) -> None:
    load = skewed(requests, seed)
    assert len(load) == requests
    assert [request.at for request in load] == sorted(request.at for request in load)
    lengths = [[request.length for request in load if request.rank == rank] for rank in range(RANKS)]
    assert len(lengths[0]) >= CAP
    assert lengths[1]
    assert min(lengths[0]) > max(lengths[1])
    assert sum(request.at == 0.0 for request in load) >= CAP
    assert all(request.prompt <= PROMPT and request.length <= ANSWER for request in load)


# -- what is measured ------------------------------------------------------------------------


def replay(mode: str, *columns: tuple[int, int, int, int], first: float = 0.1, token: float = 0.01) -> Replay:
    """A replay: for each step the running counts of both ranks, and rank 1's frozen and admitted."""
    made = Replay(mode, sent=2, started=0.0, seconds=2.0)
    for at, (zero, one, frozen, admitted) in enumerate(columns):
        made.steps[0].append(Step(at, zero, 0, 0, 0))
        made.steps[1].append(Step(at, one, 1, frozen, admitted))
    made.answers += [Answer(0, first, token, whole=True), Answer(1, 2 * first, 2 * token, whole=True)]
    return made


OFF = Figures("off", (replay("off", (4, 2, 0, 1), (4, 3, 0, 1)), replay("off", (4, 2, 0, 1), (4, 3, 0, 1))))
ON = Figures(
    "on", (replay("on", (4, 1, 1, 0), (3, 2, 0, 1), first=0.3), replay("on", (4, 1, 1, 0), (3, 2, 0, 1), first=0.4))
)


def test_the_figures_are_those_of_the_steps_and_answers() -> None:
    assert ON.imbalance.value == 2.0
    assert OFF.imbalance.value == 1.5
    assert [ON.frozen(rank) for rank in range(RANKS)] == [0, 2]
    assert ON.admitting.value == 0.5
    assert OFF.full(0) == 1.0
    assert OFF.full(1) == 0.0
    assert (ON.steps, ON.sent, ON.answered) == (4, 4, 4)
    assert ON.seconds.value == 2.0
    assert ON.first(0) == Measured(pytest.approx(0.35), (pytest.approx(0.3), pytest.approx(0.4)))
    assert ON.first(1, 0.95).value == pytest.approx(0.8)
    assert ON.token(1).value == pytest.approx(0.02)


def test_steps_after_the_last_request_do_not_count() -> None:
    made = replay("on", (4, 0, 0, 0), (2, 0, 0, 0))
    for rank in range(RANKS):
        made.steps[rank] += [Step(9, 0, 0, 0, 0)] * 30
    assert Figures("on", (made,)).imbalance.value == 3.0


def test_an_answer_that_was_cut_short_is_none() -> None:
    made = replay("on", (1, 1, 0, 0))
    made.answers[0] = Answer(0, 0.1, 0.1, whole=False)
    assert Figures("on", (made,)).answered == 1


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5), (0.95, 10), (0.1, 1), (1.0, 10)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    assert percentile(list(range(10, 0, -1)), share) == expected


def test_nothing_measured_is_not_a_number() -> None:
    empty = Figures("off", (Replay("off", 2, 0.0),))
    assert math.isnan(empty.imbalance.value)
    assert math.isnan(empty.first(0).value)


class Scheduler:
    """What the probe looks at."""

    def __init__(self, counts: tuple[int, ...] | None, running: int, waiting: int) -> None:
        if counts is not None:
            self.balance_queue = list(counts)
        self.counts = (running, waiting)

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def _balance_count(self) -> int:
        return self.counts[0]

    def _balance_cap(self) -> int:
        return CAP


@pytest.mark.parametrize(
    ("counts", "running", "waiting", "expected"),
    [
        ((CAP, 1), 1, 2, True),
        ((CAP, 1), 1, 0, False),  # nobody waits
        ((CAP, 1), CAP, 2, False),  # upstream's own stop
        ((CAP - 1, 1), 1, 2, False),
        (None, 1, 2, False),  # balance is off
    ],
)
def test_a_step_is_frozen_only_where_the_gate_is_what_stops_admission(
    counts: tuple[int, ...] | None, running: int, waiting: int, *, expected: bool
) -> None:
    assert gate_shut(Scheduler(counts, running, waiting)) is expected


# -- what is said ----------------------------------------------------------------------------


def measured(*each: float) -> Measured:
    return Measured(sum(each) / len(each), each)


@pytest.mark.parametrize(
    ("off", "on", "expected"),
    [
        (measured(1.0, 1.2), measured(2.0, 2.2), "rose from 1.10 to 2.10"),
        (measured(2.0, 2.2), measured(1.0, 1.2), "fell from 2.10 to 1.10"),
        (
            measured(1.0, 3.0),
            measured(2.4, 2.6),
            "was 2.00 with balance off and 2.50 with it on, no further apart than",
        ),
        (measured(math.nan), measured(1.0), "could not be measured"),
    ],
)
def test_a_difference_is_called_one_only_beyond_the_spread_of_the_replays(
    off: Measured, on: Measured, expected: str
) -> None:
    assert view.moved(off, on, view.number).startswith(expected)


def printed(renderable: object, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_off_stands_beside_on_while_it_runs() -> None:
    sides = [
        view.Side("off", "idle", (view.Row(4, 3, 0, 7), view.Row(1, 0, 0, 9))),
        view.Side("on", "replay 2 of 4", (view.Row(4, 3, 0, 7), view.Row(1, 2, 51, 9))),
    ]
    text = printed(view.tables(sides, 12.3))
    title = text.splitlines()[0]
    assert title.index("balance off: idle") < title.index("balance on: replay 2 of 4")
    assert "■··· 1" in text
    assert "51" in text
    assert "12 s" in text


def test_without_a_terminal_a_rank_is_told_in_words() -> None:
    side = view.Side("on", "replay 2 of 4", (view.Row(4, 3, 0, 7), view.Row(1, 2, 51, 9)))
    assert view.line(side, 12.3) == (
        " 12.3 s  balance on, replay 2 of 4   rank 0: running 4 waiting 3 frozen 0 finished 7   "
        "rank 1: running 1 waiting 2 frozen 51 finished 9"
    )
    assert view.line(view.Side("on", "starting", (view.Row(0, 0, 0, 0),) * 2), 1.0) == "  1.0 s  balance on, starting"


def test_the_rows_are_the_last_step_and_the_sums() -> None:
    assert view.rows_of(ON.replays) == (view.Row(3, 0, 0, 2), view.Row(2, 1, 2, 2))
    assert view.rows_of([]) == (view.Row(0, 0, 0, 0),) * RANKS


def test_the_summary_says_what_was_measured_and_what_it_is_not() -> None:
    text = " ".join(printed(view.summary(OFF, ON, "vLLM 9, here")).split())
    for expected in (
        "vLLM 9, here balance off balance on",
        "requests answered 4 of 4 4 of 4",
        "mean |running 0 - running 1| 1.50 2.00",
        "rank 1: frozen steps 0 2",
        "rank 0: first token, mean / p95 100 ms / 100 ms 350 ms / 400 ms",
        "8 of 8 requests were answered",
        "rank 0 was at its cap of 4 in 100.0 % of the steps, rank 1 in 0.0 %",
        "frozen on rank 0 in 0 and on rank 1 in 2 of 4 steps",
        "every rank waited for the prompt, fell from 100.0 % to 50.0 %",
        "The mean time to the first token on rank 1 rose from 200 ms to 700 ms",
        "no statement about speed",
    ):
        assert expected in text


def test_a_run_in_which_nothing_froze_says_so() -> None:
    assert "The gate stopped nothing in this run" in printed(view.summary(OFF, OFF, ""))


# -- what the processes are given ------------------------------------------------------------


def test_our_entry_points_are_those_of_the_installation() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    for group, points in declared.items():
        section = ENTRY_POINTS.partition(f"[{group}]")[2].partition("[")[0]
        for name, value in points.items():
            assert f"{name} = {value}" in section


def test_the_first_error_of_a_log_is_shown_without_vllms_prefixes() -> None:
    log = (
        "(EngineCore_DP0 pid=7) INFO 01-01 00:00:00 [core.py:1] fine\n"
        "(EngineCore_DP0 pid=7) ERROR 01-01 00:00:00 [core.py:2] Traceback (most recent call last):\n"
        "(EngineCore_DP0 pid=7) ERROR 01-01 00:00:00 [core.py:2] torch.OutOfMemoryError: no room\n"
        "RuntimeError: Engine core initialization failed\n"
    )
    assert first_error(log) == "torch.OutOfMemoryError: no room"
    assert first_error("all is well\n") is None


# -- a whole run, on a stand-in for vLLM -----------------------------------------------------

STAND_IN = {
    "__init__.py": """
        __version__ = "9.9"
        class SamplingParams:
            def __init__(self, max_tokens, **_): self.max_tokens = max_tokens
    """,
    "platforms.py": """
        import os
        class current_platform:
            device_type = os.environ.get("STAND_IN_DEVICE", "cpu")
            @classmethod
            def is_cpu(cls): return cls.device_type == "cpu"
    """,
    "engine/arg_utils.py": """
        class AsyncEngineArgs:
            def __init__(self, **given): self.given = given
    """,
    "v1/engine/async_llm.py": """
        import asyncio, json, os, subprocess, sys, time
        from types import SimpleNamespace as Box
        class AsyncLLM:
            @classmethod
            def from_engine_args(cls, arguments):
                self = cls()
                # A child that does not end by itself, and may not listen: an engine core at work.
                deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " * ("STAND_IN_DEAF" in os.environ)
                code = f"import signal, time; {deaf}time.sleep(120)"
                self.core = subprocess.Popen([sys.executable, "-c", code])
                if os.environ.get("STAND_IN_START") == "crash":
                    raise MemoryError("the stand-in has no memory")
                if os.environ.get("STAND_IN_START") == "hang":
                    time.sleep(120)
                self.on, self.flying = bool(arguments.given["additional_config"]), 0
                return self
            async def generate(self, tokens, wanted, number, data_parallel_rank):
                self.flying += 1
                await asyncio.sleep(0.002)
                for got in (1, wanted.max_tokens):
                    yield Box(outputs=[Box(token_ids=[0] * got)])
                self.flying -= 1
                for rank in range(2):
                    step = [time.monotonic(), 4 - rank, 1, int(self.on and rank == 1), 1]
                    folder = os.environ["BALANCE_PATCHER_DEMO_FOLDER"]
                    with open(f"{folder}/rank-{rank}.jsonl", "a") as out:
                        out.write(json.dumps({"steps": [step], "idle": not self.flying}) + "\\n")
            def shutdown(self): self.core.kill()
    """,
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stand-in")
    for name, text in STAND_IN.items():
        file = root / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        indent = len(text) - len(text.lstrip()) - 1
        file.write_text("\n".join(line[indent:] for line in text.splitlines()) + "\n", encoding="utf-8")
        for folder in file.relative_to(root).parents[:-1]:
            (root / folder / "__init__.py").touch()
    return root


class Running:
    """The command in a process of its own; ``folder`` holds the temporary files that it makes."""

    def __init__(self, root: Path, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "balance_patcher", "demo", *arguments], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{root}", "TMPDIR": str(folder), **environment},
            # A job in the background of a shell is started with Ctrl-C ignored, and its children would be too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )  # fmt: skip

    def groups(self) -> list[int]:
        """The sessions of both engines, once they are there with their children."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            found = [group for group in sessions_in(self.folder) if len(processes_of(group)) > 1]
            if len(found) == len(engines.MODES):
                return found
            time.sleep(0.05)
        raise AssertionError("the engines did not start")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def processes_of(group: int) -> list[Path]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if stat and int(stat[2]) == group and stat[0] != "Z":
            found.append(entry)
    return found


def sessions_in(folder: Path) -> list[int]:
    """The process groups that work below a folder: what a run of the demo started."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve().is_relative_to(folder):
                found.add(int((entry / "stat").read_text().rpartition(")")[2].split()[2]))
        except OSError:
            continue
    return sorted(found)


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")


@needs_proc
def test_a_whole_run_ends_with_the_figures_and_leaves_nothing(stand_in: Path, tmp_path: Path) -> None:
    code, out, err = Running(stand_in, tmp_path, "--requests", "8", "--seed", "1").end()
    assert code == 0, err
    states = ["starting", "warming up", *(f"replay {number} of 4" for number in (1, 2, 3, 4))]
    assert [out.index(state) for state in states] == sorted(out.index(state) for state in states)
    words = " ".join(out.split())
    assert "vLLM 9.9" in words
    assert "32 of 32 requests were answered" in words
    assert "frozen on rank 0 in 0 and on rank 1 in 16 of 16 steps" in words
    assert "With it off, in 0 of 16." in words
    assert sessions_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@needs_proc
def test_on_a_terminal_both_tables_change_in_place(stand_in: Path, tmp_path: Path) -> None:
    code, out, _ = Running(stand_in, tmp_path, "--requests", "8", FORCE_COLOR="1", COLUMNS="110").end()
    assert code == 0
    up = "\x1b[1A"
    assert up in out
    frames = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frame) for frame in out.split(up)]
    titles = [frame.strip() for frame in frames if "balance off: " in frame]
    assert any("balance off: replay 1 of 4" in title and "balance on: idle" in title for title in titles)
    assert any("balance off: idle" in title and "balance on: replay 2 of 4" in title for title in titles)


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("core", [{}, {"STAND_IN_DEAF": "1"}], ids=["", "deaf"])
def test_interrupted_it_ends_its_engines_and_exits_3(
    stand_in: Path, tmp_path: Path, number: signal.Signals, core: dict[str, str]
) -> None:
    running = Running(stand_in, tmp_path, STAND_IN_START="hang", **core)
    running.groups()
    running.process.send_signal(number)
    code, _, err = running.end()
    assert code == 3, err
    assert sessions_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@needs_proc
def test_killed_it_still_leaves_no_process(stand_in: Path, tmp_path: Path) -> None:
    running = Running(stand_in, tmp_path, STAND_IN_START="hang")
    groups = running.groups()
    running.process.kill()
    running.end()
    until = time.monotonic() + 30
    while any(processes_of(group) for group in groups) and time.monotonic() < until:
        time.sleep(0.05)
    assert [processes_of(group) for group in groups] == [[], []]


@needs_proc
def test_a_failing_engine_is_shown_with_its_log(stand_in: Path, tmp_path: Path) -> None:
    code, _, err = Running(stand_in, tmp_path, STAND_IN_START="crash").end()
    assert code == 3
    assert "BP518 an engine of the demo failed: the engine with balance" in err
    assert "cause     MemoryError: the stand-in has no memory" in err
    assert "next      " in err
    assert sessions_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_vllm_for_another_device_is_refused(stand_in: Path, tmp_path: Path) -> None:
    code, _, err = Running(stand_in, tmp_path, STAND_IN_DEVICE="cuda").end()
    assert code == 3
    assert "BP517 vLLM is not built for the CPU: vLLM 9.9 of this Python is built for cuda" in err
    assert "`make demo`" in err


def test_without_vllm_it_says_where_to_find_it(tmp_path: Path) -> None:
    code, out, err = Running(tmp_path, tmp_path).end()
    assert (code, out) == (3, "")
    assert err.startswith("BP512 vLLM is not installed")
    assert "`make demo`" in err


@pytest.mark.parametrize("arguments", [("--requests", "7"), ("--requests", "many"), ("--format", "loud")])
def test_wrong_arguments_exit_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    code, _, err = Running(tmp_path, tmp_path, *arguments).end()
    assert code == 2
    assert arguments[0] in err


def test_an_old_python_is_told_which_one_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit) as stop:
        command.run()
    assert stop.value.code == 3
    assert "BP519 Python is too old: this is 3.9, and 3.10 is the oldest" in capsys.readouterr().err


def test_the_oldest_python_is_the_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"].startswith(">=" + ".".join(map(str, command.OLDEST)))

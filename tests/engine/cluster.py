"""Run the commands of a launch, ask them over HTTP, and end them with nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from launches import CAP, HOST, Command
from processes import end, ended, plugin_site, recorded

from balance_patcher.errors import PatchError
from balance_patcher.exposition import metrics_url, read
from balance_patcher.served import Served
from balance_patcher.served import served as figures

#: Seconds that a start may take. A loaded machine is slow; a start that has failed ends by itself.
START = 600
#: Seconds that one answer may take, and that engine cores may take to come to rest.
ANSWER = 120


@dataclass
class Launched:
    """What came of a launch.

    Attributes:
        ready: Whether all servers answered; true where there is none.
        start: Seconds until they did, or until a command had ended instead.
        seconds: Seconds from the start to the end.
        answers: For each request, how many tokens it asked for and how many it got; none where it failed.
        gathers: For each rank, how often it had gathered when all was at rest.
        pages: What each server said at ``/metrics`` then.
        told: What `status --url` made of each, or why it could not.
        codes: The exit status of each command.
        logs: What each command printed.
        facts: For each rank, what ran there.
        steps: For each rank, one entry a gather.
        left: The processes that were still there some seconds after the commands had been told to end, by the
            number of the command; those that left none are not there.
    """

    ready: bool = True
    start: float = 0.0
    seconds: float = 0.0
    answers: list[tuple[int, int]] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    told: list[Served | PatchError] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    facts: list[dict] = field(default_factory=list)
    steps: list[list[dict]] = field(default_factory=list)
    left: dict[int, list[int]] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return "\n".join(self.logs)

    def lines(self, what: str) -> list[str]:
        """The lines of all logs that hold some text."""
        return [line for line in self.log.splitlines() if what in line]

    def printed(self) -> list[dict]:
        """The lines of JSON that offline.py has printed, in the order of the commands."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith('{"name"')]


#: What this run of pytest has started, by the name that a test gave it; the summary tells what each took.
STARTED: dict[str, Launched] = {}


class Cluster:
    """The commands of a launch while they run: ``with Cluster(folder, commands) as cluster``.

    Attributes:
        launched: What came of it; complete when the block is left.
    """

    def __init__(self, folder: Path, commands: Sequence[Command]) -> None:
        self.folder, self.commands, self.launched = folder, commands, Launched()
        self._processes: list[subprocess.Popen] = []
        self._started = time.monotonic()

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self is younger than the oldest Python here
        plugin_site(self.folder)
        for number, command in enumerate(self.commands):
            with (self.folder / f"log-{number}").open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, *command.words], env=command.start_environment(self.folder), stdout=log,
                        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.folder,
                    )
                )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        launched = self.launched
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        patience = 60 if launched.ready else 5
        for number, process in enumerate(self._processes):
            if left := ended(process.pid, patience):
                launched.left[number] = left
                end(left)
        launched.codes = [process.wait(30) for process in self._processes]
        assert all(ended(process.pid, 10) == [] for process in self._processes)
        launched.logs = self.logs()
        launched.facts, launched.steps = recorded(self.folder)
        launched.seconds = round(time.monotonic() - self._started, 1)

    @property
    def ports(self) -> list[int]:
        return [port for command in self.commands for port in command.ports]

    def logs(self) -> list[str]:
        """What each command has printed so far."""
        return [(self.folder / f"log-{number}").read_text(errors="replace") for number, _ in enumerate(self.commands)]

    def ready(self, bound: float = START) -> bool:
        """Wait until every server answers; false if a command ends or the time is over."""
        waiting, launched = list(self.ports), self.launched
        while waiting and time.monotonic() - self._started < bound and not self.over():
            waiting = [port for port in waiting if not _healthy(port)]
            time.sleep(0.1)
        launched.ready, launched.start = not waiting, round(time.monotonic() - self._started, 1)
        return launched.ready

    def over(self) -> list[int]:
        """Which commands have ended, by number."""
        return [number for number, process in enumerate(self._processes) if process.poll() is not None]

    def all_over(self, bound: float) -> bool:
        """Wait until every command has ended by itself; false if the time is over before."""
        until = time.monotonic() + bound
        while (some := len(self.over()) < len(self.commands)) and time.monotonic() < until:
            time.sleep(0.1)
        self.launched.start = round(time.monotonic() - self._started, 1)
        return not some

    def ask(self, lengths: Sequence[int]) -> None:
        """Send one request of each length, all at once and to each server in turn; wait for the answers."""
        ports = [self.ports[number % len(self.ports)] for number, _ in enumerate(lengths)]
        with ThreadPoolExecutor(len(lengths)) as pool:
            self.launched.answers += zip(lengths, pool.map(_answer, ports, lengths), strict=True)

    def page(self, port: int) -> str:
        """What a server says at ``/metrics``; empty where it does not answer."""
        return (_asked(port, "GET", "/metrics", ANSWER) or b"").decode()

    def rest(self) -> None:
        """Wait until the engine cores have come to rest: all have gathered as often, and none gathers any more."""
        files, seen, since = [], None, time.monotonic()
        until = since + ANSWER
        while time.monotonic() < until:
            files = sorted(self.folder.glob("rank-*.jsonl"))
            now = [file.stat().st_size for file in files]
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > 1 and len(set(self._counts(files))) == 1:
                break
            time.sleep(0.1)
        self.launched.gathers = self._counts(files)

    @staticmethod
    def _counts(files: Sequence[Path]) -> list[int]:
        return [len(file.read_text().splitlines()) - 1 for file in files]


def figures_of(port: int) -> Served | PatchError:
    """What `status --url` makes of a server, or why it cannot."""
    try:
        return figures(read(metrics_url(f"http://{HOST}:{port}")))
    except PatchError as error:
        return error


def _healthy(port: int) -> bool:
    return _asked(port, "GET", "/health", 5) is not None


def _answer(port: int, length: int) -> int:
    """How many tokens one request got; none if the server refused it."""
    wanted = {"model": "tiny", "prompt": [3 + length] * (1 + length % 9), "max_tokens": length, "ignore_eos": True}
    answer = _asked(port, "POST", "/v1/completions", ANSWER, json.dumps(wanted))
    return int(json.loads(answer)["usage"]["completion_tokens"]) if answer else 0


def _asked(port: int, method: str, path: str, bound: float, body: str | None = None) -> bytes | None:
    """What a server answers; ``None`` where it does not, or refuses."""
    connection = http.client.HTTPConnection(HOST, port, timeout=bound)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.read() if answer.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


#: More requests at once than all ranks may run, and some that last while others have ended.
BURST = [3, 40, 7, 25, 1, 12, 33, 5, 18, 2, 9, 28, 4, 15, 6, 21][: 4 * CAP]


def served(folder: Path, commands: Sequence[Command]) -> Launched:
    """Start servers, send a burst, and another one when the engine cores have come to rest."""
    with Cluster(folder, commands) as cluster:
        if cluster.ready():
            for _ in range(2):
                cluster.ask(BURST)
                cluster.rest()
            cluster.launched.pages = [cluster.page(port) for port in cluster.ports]
            cluster.launched.told = [figures_of(port) for port in cluster.ports]
    return cluster.launched


def ran(folder: Path, commands: Sequence[Command], bound: float = START) -> Launched:
    """Run commands that end by themselves, as those of offline.py do."""
    with Cluster(folder, commands) as cluster:
        cluster.launched.ready = cluster.all_over(bound)
    launched = cluster.launched
    launched.answers = [tuple(answer) for told in launched.printed() for answer in told.get("answers", ())]
    launched.gathers = [len(steps) for steps in launched.steps]
    return launched

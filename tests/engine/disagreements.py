"""Launches of which one rank does not fit the others: start them, and know who said what when.

A module apart, so that the modules of several tests can import it by a plain name.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import cluster
import launches
from cluster import Launched
from launches import CAP, Rank

#: How long a rank that says nothing is waited for: in one of these runs, and everywhere else.
REAL, SHORT = 60, 3
#: What may be added to that on a loaded machine, and what "at once" is there: less than the patience.
SLACK = 40
#: What is logged first when weights are loaded, on each lane.
LOADING = "Starting to load model"
SAYS = re.compile(r"\(EngineCore_DP(\d) pid=(\d+)\) \w+ \d\d-\d\d (\d\d:\d\d:\d\d) \[\w+\.py:\d+\] (.*)")
DAY = 24 * 60 * 60


@dataclass
class Refused:
    """What came of a launch that was refused.

    Attributes:
        launched: Its commands.
        odd: The rank that is unlike the others.
        ends: When each command had ended by itself, by number: in seconds of the day, as all times here.
        said: What each rank said: when, and the text of one line.
        pids: The engine core of each rank.
        alone: Whether the odd rank has a command of its own, which may be there when the others have ended.
    """

    launched: Launched
    odd: int
    ends: dict[int, int]
    said: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    alone: bool = False

    def __post_init__(self):
        for line in self.launched.log.splitlines():
            found = SAYS.match(line)
            if found:
                rank, pid, clock, text = found.groups()
                self.pids[int(rank)] = int(pid)
                self.said.setdefault(int(rank), []).append((of_day(clock), text))

    def told(self, rank: int, what: str) -> list[int]:
        """When a rank said it."""
        return [at for at, text in self.said.get(rank, ()) if text.startswith(what)]

    @property
    def enabled(self) -> int:
        return 1 - self.odd


def of_day(clock: str) -> int:
    hours, minutes, seconds = map(int, clock.split(":"))
    return (hours * 60 + minutes) * 60 + seconds


def between(one: int, other: int) -> int:
    """Seconds between two times of a day, also over midnight."""
    return min((one - other) % DAY, (other - one) % DAY)


def refused(folder, commands, odd, *, patience=None, alone=False, bound=cluster.START):
    """Start commands and wait until they have ended by themselves.

    Args:
        folder: Where everything is written.
        commands: What is started.
        odd: The rank that is unlike the others.
        patience: How long a silent rank is waited for.
        alone: Whether that of the odd rank may be left; it is told to end then, as each is that is left.
        bound: Seconds until all are told to.
    """
    told = {} if patience is None else {"ENGINE_PATIENCE": str(patience)}
    commands = [replace(command, environment={**told, **command.environment}) for command in commands]
    ends, until = {}, time.monotonic() + bound
    wanted = {number for number, _ in enumerate(commands) if not (alone and number == odd)}
    with cluster.Cluster(folder, commands) as running:
        while not wanted <= ends.keys() and time.monotonic() < until:
            ends = {**dict.fromkeys(running.over(), of_day(time.strftime("%H:%M:%S"))), **ends}
            time.sleep(0.1)
        running.launched.ready = wanted <= ends.keys()
    return Refused(running.launched, odd, ends, alone=alone)


UNLIKE = {"off": Rank(balance=False), "without": Rank(installed=False), "cap": Rank(cap=2 * CAP)}


def came_to_nothing(run):
    """Nobody has loaded weights, the ranks that asked have ended by themselves, and nothing is left of them."""
    assert run.launched.lines(LOADING) == []
    assert run.launched.lines("balance: ON") == []
    assert run.launched.left.keys() <= ({run.odd} if run.alone else set())
    assert run.launched.ready
    assert run.launched.codes[0] not in (0, None)  # a headless node of upstream's ends with 0, whatever happened


MEANTIME: list[Future[Refused]] = []


def in_the_meantime(places) -> Future[Refused]:
    """One launch with the patience that everybody has. It waits most of the time, while other tests run.

    Args:
        places: Pytest's factory of folders.
    """
    if not MEANTIME:
        commands = launches.internal({1: UNLIKE["off"]})
        MEANTIME.append(ThreadPoolExecutor(1).submit(refused, places.mktemp("refused"), commands, 1))
    return MEANTIME[0]

"""Say which rank a step waits for: data-parallel ranks go step by step together, so one that stops stops all.

Beside the step, in a thread of its own. The step only leaves the time at which it entered the gather and the
number of gathers so far. When nothing has moved for a while, each rank writes down in the group's store where
it stands; those that wrote that they wait in the gather have arrived, the others have not, and one whose whole
process stands still writes nothing. It is said once, and once more when the step goes on. Nothing is ever
ended: a compilation or a long prefill is no hang.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .board import Board
from .errors import refuse

VARIABLE = "BALANCE_PATCHER_STALL"
#: Seconds of waiting after which it is said.
THRESHOLD = 20.0
#: How much of the threshold passes until a rank writes down where it stands: long enough for the others' clocks.
EARLY = 0.25
#: Seconds that the store has for an answer; it may be held by the very process that stands still.
ANSWER = 2.0

#: The rank whose process holds the store of a group, on every release.
HOLDER = 0

_GATHER, _STEP = "in the gather", "in its step"
_logger = logging.getLogger("vllm.balance_patcher")
#: Those of this process; an engine keeps its own.
_WATCHING: list[weakref.ref[Watchdog]] = []


def threshold() -> float:
    """The seconds of waiting after which a stall is said; 0 for never.

    Raises:
        PatchError: BP006, if the environment variable is not a number of seconds.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        seconds = float(text) if text else THRESHOLD
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise refuse(
            "BP006", f"{VARIABLE}={text}", next=f"set it to seconds ({THRESHOLD:g} without it), or to 0 for never"
        )
    return seconds


class Watchdog:
    """Watches the gathers of one engine core.

    Args:
        feature: Whose gathers, for the log.
        engine: The engine core; only a weak reference is kept. ``dp_store``, ``dp_rank``, ``step_counter``,
            ``current_wave`` and ``engines_running`` are read from it.
        names: What a rank is called, by its number; those that are missing are called by their number. It
            may be changed: ranks join.
        seconds: How long a step may wait until that is said; 0 for any time.

    Attributes:
        since: When the gather was entered that this rank waits in, in seconds of ``time.monotonic()``; 0 outside
            of it.
        stall: What was said of the wait that goes on now; empty if nothing was.
        gathers: How many were completed on this group.
        moved: When the last one was completed.
        stalls: How many waits were said so far.
    """

    def __init__(self, feature: str, engine: Any, names: Mapping[int, str], seconds: float = THRESHOLD) -> None:
        self.feature, self.seconds, self.stalls = feature, seconds, 0
        self.since, self.gathers, self.moved = 0.0, 0, time.monotonic()
        self._rested = self.moved
        self._engine: Callable[[], Any] = weakref.ref(engine)
        self._names = names
        self.stall = ""
        self._over = threading.Event()
        _WATCHING[:] = [known for known in _WATCHING if known() is not None] + [weakref.ref(self)]
        weakref.finalize(engine, self._over.set)

    @property
    def told(self) -> dict[str, object]:
        """Where it stands, for somebody who asks: seconds from now backwards."""
        now, since, gathers, engine = time.monotonic(), self.since, self.gathers, self._engine()
        works = bool(self.seconds) and not since and getattr(engine, "engines_running", False)
        return {
            "gathers": gathers,
            "in_gather_for": round(now - since, 3) if since else None,
            # Only who looks regularly knows when the ranks have rested last.
            "in_step_for": round(now - max(self.moved, self._rested), 3) if works else None,
            "last_gather_ago": round(now - self.moved, 3) if gathers else None,
            "says_after": self.seconds,
            "stall": self.stall,
        }

    # -- on the step's own path --

    def enters(self, *, anew: bool = False) -> None:
        """This rank enters the gather; on another group the ranks count anew, because a joiner has no history."""
        if anew:
            self.gathers = 0
        self.since = time.monotonic()

    def leaves(self) -> None:
        """The gather is over, also where it failed."""
        self.since = 0.0
        self.moved = time.monotonic()
        self.gathers += 1

    # -- beside it --

    def start(self) -> Watchdog:
        """Begin to watch, in a daemon thread."""
        if self.seconds:
            threading.Thread(target=self._run, name="balance_patcher watchdog", daemon=True).start()
        return self

    def stop(self) -> None:
        self._over.set()

    def of(self, engine: Any) -> bool:
        """Whether it watches this engine."""
        return self._engine() is engine

    def _run(self) -> None:
        while not self._over.wait(self.seconds * EARLY / 2):
            engine = self._engine()
            stands = self._stands(engine) if engine is not None else None
            if stands is not None and time.monotonic() - stands[1] >= self.seconds * EARLY:
                self._follow(engine, *stands)
            del engine

    def _stands(self, engine: Any) -> tuple[str, float] | None:
        """Where this rank stands and since when; ``None`` where no step is due."""
        since = self.since
        if since:
            return _GATHER, since
        if getattr(engine, "engines_running", False):
            return _STEP, max(self.moved, self._rested)
        self._rested = time.monotonic()
        return None

    def _follow(self, engine: Any, where: str, since: float) -> None:
        """Keep an eye on one wait until it is over."""
        number, told = self.gathers, False
        board = Board(getattr(engine, "dp_store", None), self.feature, f"stall/{number}", answer=ANSWER, again=True)
        rank, ranks = self._rank(engine)
        step = f"step {getattr(engine, 'step_counter', '?')} of wave {getattr(engine, 'current_wave', '?')}"
        board.write(str(rank), where)
        while not self._over.wait(self.seconds * EARLY / 5):
            now = self._stands(engine)
            if self.gathers != number or now is None:
                break
            if now[0] != where:
                where = now[0]
                board.write(str(rank), where)
            if not told and time.monotonic() - since >= self.seconds:
                told = True
                self.stalls += 1
                said, gone = board.read([str(other) for other in ranks])
                known = None if gone else {int(other): text for other, text in said.items()}
                self.stall = self._stall(step, where, rank, known, ranks)
                _logger.warning("%s: %s", self.feature, self.stall)
        self.stall = ""
        if told and not self._over.is_set():
            _logger.warning("%s: %s went on after %.1f s", self.feature, step, time.monotonic() - since)

    def _stall(self, step: str, where: str, rank: int, said: Mapping[int, str] | None, ranks: Sequence[int]) -> str:
        """The line: how long, who has arrived, who has not, and of whom that is not known."""
        waited = "waited {} in the gather" if where == _GATHER else "not come to its gather here for {}"
        known: dict[int, str | None] = {other: (said or {}).get(other) for other in ranks} | {rank: where}
        arrived = [self._name(other) for other in ranks if known[other] == _GATHER]
        missing, unknown = [], []
        for other in ranks:
            if known[other] == _STEP:
                missing.append(self._name(other))
            elif known[other] is None and (said is not None or other == HOLDER):
                missing.append(f"{self._name(other)}, which says nothing")
            elif known[other] is None:
                unknown.append(self._name(other))
        parts = {"arrived": arrived or ["none"], "missing": missing or ["none"], "not known": unknown}
        told = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)
        return f"{step} has {waited.format(f'{self.seconds:g} s')}; {told}"

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    @staticmethod
    def _rank(engine: Any) -> tuple[int, range]:
        group = getattr(engine, "dp_group", None)
        return getattr(engine, "dp_rank", 0), range(group.size() if group is not None else 0)


def told(engine: Any, feature: str) -> dict[str, object] | None:
    """Where the gathers of one feature in one engine stand; ``None`` where nobody watches them."""
    dogs = (known() for known in list(_WATCHING))
    return next((dog.told for dog in dogs if dog is not None and dog.feature == feature and dog.of(engine)), None)

"""What the gate of the balance feature did, in figures; a part of that feature.

Counted where the ranks gather, once a step, so that nothing more stands in ``schedule``. A step is frozen where the
gate kept a waiting request out of a rank that had room for it: another rank was at the cap. What the rank's own cap
keeps out is upstream's own stop, and is not counted here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from balance_patcher.carried import send
from balance_patcher.measures import Figures, Measures, Metric, Timed

#: Seconds of one freeze after which it is said.
PATIENCE = 30.0
#: Seconds after which a rank without requests sends its figures by themselves; the others send them each step.
QUIET = 5.0
#: Gathers that are kept at most; where vLLM makes no statistics, nobody takes them.
KEPT = 10_000
_logger = logging.getLogger("vllm.balance_patcher")


class Sight:
    """The figures of one engine.

    Attributes:
        looked: Whether the gate was looked at in this step: a step that does not come to the WAITING loop, because
            the engine is paused or a request was preempted, is not one of the gate's.
        engine: Gives the engine core, once it has been built.
        names: What each rank is called.
        watch: The watchdog of the gathers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.looked = False
        self.engine: Callable[[], Any] = lambda: None
        self.names: Mapping[int, str] = {}
        self.watch: Any = None
        self._clock = clock
        self._sent = self._waiting = 0
        self._entered = self._left = self._taken = clock()
        self._leaders: tuple[int, ...] = ()  # the counts by which this step is frozen; none where it is not
        self._since: float | None = None  # when the freeze began
        self._told = False
        # Since they were taken last.
        self._steps, self._seconds, self._stalls = 0, 0.0, 0
        self._gathers: deque[float] = deque(maxlen=KEPT)

    @property
    def frozen_since(self) -> float | None:
        """Since when requests wait here because of another rank, in seconds of ``time.monotonic()``; else ``None``."""
        return self._since

    # -- on the step's own path --

    def enters(self, scheduler: Any) -> None:
        """The step is done and the ranks are going to gather: was it frozen?

        Args:
            scheduler: Its scheduler, with the counts by which the step went.
        """
        looked, self.looked = self.looked, False
        self._waiting, self._leaders = scheduler.get_request_counts()[1] if looked else 0, ()
        if self._waiting:
            counts = tuple(count.item() for count in scheduler._balance_counts)  # noqa: SLF001 - our own
            cap = scheduler._balance_cap()  # noqa: SLF001 - what the gate's own delta exports
            if self._sent < cap <= max(counts):
                self._leaders = counts
        self._entered = self._clock()

    def leaves(self, sent: int) -> None:
        """They have gathered, and this rank has sent its count."""
        self._sent = sent
        now = self._clock()
        self._gathers.append(now - self._entered)
        if self._leaders:
            self._steps += 1
            self._seconds += now - self._left
            if self._since is None:
                self._since = self._left
            elif not self._told and now - self._since >= PATIENCE:
                self._told = True
                self._tell(now - self._since)
        elif self._since is not None:
            self._thaws(now)
        self._left = now
        if now - self._taken >= QUIET:
            self._send()

    def rests(self) -> None:
        """All ranks have come to rest: nothing waits, and the server is told what it does not know yet."""
        self._leaders = ()
        if self._since is not None:
            self._thaws(self._clock())
        self._send()

    # -- beside it --

    def taken(self) -> Figures:
        """What has been added since it was taken last, and how many requests wait now while admission is frozen."""
        stalls = getattr(self.watch, "stalls", 0)
        figures = {
            "frozen_steps": self._steps,
            "frozen_seconds": self._seconds,
            "stalls": stalls - self._stalls,
            "gather_seconds": list(self._gathers),
            "requests_waiting_while_frozen": self._waiting if self._leaders else 0,
        }
        self._steps, self._seconds, self._stalls = 0, 0.0, stalls
        self._gathers.clear()
        self._taken = self._clock()
        return figures

    def _send(self) -> None:
        self._taken = self._clock()
        engine = self.engine()
        if engine is not None:
            send(engine)

    def _tell(self, seconds: float) -> None:
        cap = max(self._leaders)
        leaders = [self.names.get(rank, f"rank {rank}") for rank, count in enumerate(self._leaders) if count == cap]
        _logger.warning(
            "balance: admission has been frozen for %.0f s here, and %d request(s) wait; at the cap of %d: %s",
            seconds, self._waiting, cap, ", ".join(leaders),
        )  # fmt: skip

    def _thaws(self, now: float) -> None:
        if self._told and self._since is not None:
            _logger.warning("balance: admission is not frozen any more here, after %.1f s", now - self._since)
        self._since, self._told = None, False


def balance_taken(engine: Any) -> Callable[[], Figures]:
    """What gives the figures of an engine core in which balance is on."""
    sight: Sight = engine.scheduler._balance_sight  # noqa: SLF001 - our own
    return sight.taken


def balance_line(engines: Mapping[int, Figures]) -> str:
    """The sentence for vLLM's periodic log; none where no step was made since the last."""
    gathers = {engine: figures.get("gather_seconds", Timed()) for engine, figures in engines.items()}
    steps = sum(timed.count for timed in gathers.values())
    if not steps:
        return ""
    frozen = {engine: int(figures.get("frozen_steps", 0)) for engine, figures in engines.items()}
    worst = max(frozen, key=lambda engine: frozen[engine])
    most = f", most of them in engine {worst}" if frozen[worst] and len(frozen) > 1 else ""
    seconds = sum(figures.get("frozen_seconds", 0.0) for figures in engines.values())
    waiting = sum(figures.get("requests_waiting_while_frozen", 0) for figures in engines.values())
    stalls = sum(figures.get("stalls", 0) for figures in engines.values())
    mean = 1000 * sum(timed.total for timed in gathers.values()) / steps
    longest = 1000 * max(timed.longest for timed in gathers.values())
    return (
        f"on in {len(engines)} engine{'s' * (len(engines) != 1)}; frozen {sum(frozen.values())} of {steps} steps "
        f"({100 * sum(frozen.values()) / steps:.1f} %{most}), {seconds:.1f} s; waiting while frozen: {waiting:g} reqs; "
        f"gather {mean:.2f} ms on average, {longest:.1f} ms at most" + (f"; stalls: {stalls:g}" if stalls else "")
    )


MEASURES = Measures(
    metrics=(
        Metric(
            "frozen_steps",
            "counter",
            "Steps in which the gate kept waiting requests out of an engine that had room, because a rank was at its cap.",
        ),
        Metric("frozen_seconds", "counter", "Seconds that these steps took."),
        Metric(
            "stalls",
            "counter",
            "Steps that did not come through the gather in the time that BALANCE_PATCHER_STALL gives.",
        ),
        Metric(
            "gather_seconds",
            "histogram",
            "Seconds that an engine waited in the gather of a step, for the other ranks too.",
            buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0),
        ),
        Metric(
            "requests_waiting_while_frozen",
            "gauge",
            "Requests that wait in an engine whose admission is frozen; 0 where it is not.",
        ),
    ),
    taken=balance_taken,
    labels=("cap",),
    line=balance_line,
)

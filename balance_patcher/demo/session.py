"""One run of the demo, from the start of the engines to the summary.

Both engines start side by side, because a start has long waits. They are never loaded side by side: while one
replays the load, the other is idle, so the figures of each are its own. The order off, on, on, off does the
same to both where the machine gets slower or faster meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.live import Live

from balance_patcher.driven import interruptible
from balance_patcher.errors import PatchError
from balance_patcher.source import open_source

from .engines import MAKE, MODES, Engine, engines
from .figures import Figures
from .view import Side, cores, line, rows_of, summary, tables

ORDER = ("off", "on", "on", "off")

#: Seconds after which something is taken for hung: the start, and one warm-up or replay.
START_LIMIT, LIMIT = 420.0, 300.0

#: Seconds between two looks at the engines; where there is no terminal, between two lines that differ, and
#: between two that do not.
INTERVAL, PAUSE, LONG_PAUSE = 0.1, 2.5, 15.0


def run_demo(requests: int, seed: int, console: Console, *, live: bool) -> None:
    """Start the engines, replay the load, show it while it happens, and say what was measured.

    Args:
        requests: How many requests a replay has.
        seed: Of the load.
        console: Where it is shown.
        live: Whether as tables that change in place; else as lines.

    Raises:
        PatchError: BP512, BP517, if this Python's vLLM cannot do it; BP518, if an engine fails or hangs.
    """
    _need_vllm()
    with interruptible(), engines() as started:
        with Live(console=console, auto_refresh=False) if live else nullcontext() as display:
            _drive(started, Screen(started, console, display), requests, seed)
        off, on = (Figures(mode, tuple(started[mode].replays)) for mode in MODES)
        version = started["off"].version
    console.print(summary(off, on, f"vLLM {version}, {cores()} CPU cores"))


def _need_vllm() -> None:
    try:
        open_source("installed")
    except PatchError as error:
        why = error.failures[0]
        raise PatchError(
            replace(why, next=f"{MAKE}, or run it with the Python of an environment that has it")
        ) from error


def _drive(started: Mapping[str, Engine], screen: Screen, requests: int, seed: int) -> None:
    screen.wait("starting", MODES, lambda engine: engine.ready, START_LIMIT)
    for mode in MODES:
        started[mode].tell(warm=True)
        screen.wait("warming up", [mode], lambda engine: engine.pace > 0, LIMIT)
    for number, mode in enumerate(ORDER, 1):
        wanted = len(started[mode].replays) + 1
        started[mode].tell(replay=requests, seed=seed, pace=started["off"].pace)
        screen.wait(f"replay {number} of {len(ORDER)}", [mode], partial(_replayed, wanted=wanted), LIMIT)


def _replayed(engine: Engine, wanted: int) -> bool:
    """Whether that many replays are finished, and all ranks are idle again."""
    return len(engine.replays) == wanted and engine.replays[-1].seconds > 0 and all(engine.idle)


class Screen:
    """Shows the engines while something is waited for.

    Args:
        started: The engines by mode.
        console: Where they are shown.
        display: Where tables change in place; without it, lines are printed.
    """

    def __init__(self, started: Mapping[str, Engine], console: Console, display: Live | None) -> None:
        self._engines, self._console, self._display = started, console, display
        self._states = dict.fromkeys(started, "")
        self._started = time.monotonic()
        self._told, self._shown = -math.inf, list[Side]()

    def wait(self, state: str, modes: Sequence[str], until: Callable[[Engine], bool], limit: float) -> None:
        """Show these modes in this state until something holds for each of them.

        Raises:
            PatchError: What :meth:`Engine.look` raises; BP518, when the limit (in seconds) is reached.
        """
        self._states = {mode: state if mode in modes else "idle" for mode in self._states}
        self._told = -math.inf
        end = time.monotonic() + limit
        while True:
            for engine in self._engines.values():
                engine.look()
            self._show(modes)
            late = [self._engines[mode] for mode in modes if not until(self._engines[mode])]
            if not late:
                self._told = -math.inf
                self._show(modes)  # how it ended
                return
            if time.monotonic() > end:
                what = f"the engine with balance {late[0].mode} hangs: {state} for {limit:.0f} s"
                raise PatchError(late[0].failure(what))
            time.sleep(INTERVAL)

    def _show(self, modes: Sequence[str]) -> None:
        seconds = time.monotonic() - self._started
        sides = [Side(mode, self._states[mode], rows_of(engine.replays)) for mode, engine in self._engines.items()]
        if self._display is not None:
            self._display.update(tables(sides, seconds), refresh=True)
        elif seconds - self._told >= (LONG_PAUSE if sides == self._shown else PAUSE):
            self._told, self._shown = seconds, sides
            for side in sides:
                if side.mode in modes:
                    self._console.print(line(side, seconds), soft_wrap=True, highlight=False, markup=False)

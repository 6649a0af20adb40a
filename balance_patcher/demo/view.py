"""What a person sees of the demo: two tables beside each other while it runs, lines without a terminal, then words."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .figures import Figures, Measured, Replay
from .load import CAP, RANKS

_COLOURS = {"off": "yellow", "on": "cyan"}


@dataclass(frozen=True)
class Row:
    """A rank at one moment: requests that run, wait and are finished, and its frozen steps so far."""

    running: int
    waiting: int
    frozen: int
    finished: int


@dataclass(frozen=True)
class Side:
    """One mode at one moment: what it is doing, in words, and its ranks."""

    mode: str
    state: str
    rows: tuple[Row, ...]


def rows_of(replays: Sequence[Replay]) -> tuple[Row, ...]:
    """The ranks now: the last step of the last replay, and sums over all replays."""
    rows = []
    for rank in range(RANKS):
        steps = [replay.steps[rank] for replay in replays]
        last = steps[-1][-1] if steps and steps[-1] else None
        rows.append(
            Row(
                running=last.running if last else 0,
                waiting=last.waiting if last else 0,
                frozen=sum(step.frozen for part in steps for step in part),
                finished=sum(answer.rank == rank for replay in replays for answer in replay.answers),
            )
        )
    return tuple(rows)


# -- while it runs ---------------------------------------------------------------------------


def tables(sides: Sequence[Side], seconds: float) -> RenderableType:
    """Both modes, off beside on."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*(_table(side) for side in sides))
    return Group(grid, Text(f"two real engine cores each, on the CPU, {seconds:.0f} s", "dim"))


def _table(side: Side) -> Table:
    colour = _COLOURS[side.mode]
    table = Table(title=f"balance {side.mode}: {side.state}", title_style=colour, title_justify="left", min_width=46)
    table.add_column("rank")
    table.add_column("running")
    for name in ("waiting", "frozen steps", "finished"):
        table.add_column(name, justify="right")
    for rank, row in enumerate(side.rows):
        bar = Text("■" * row.running, colour) + Text("·" * (CAP - row.running), "dim") + Text(f" {row.running}")
        table.add_row(str(rank), bar, *(str(number) for number in (row.waiting, row.frozen, row.finished)))
    return table


def line(side: Side, seconds: float) -> str:
    """One mode on one line, for where there is no terminal; its ranks once it has been sent something."""
    ranks = [
        f"rank {rank}: running {row.running} waiting {row.waiting} frozen {row.frozen} finished {row.finished}"
        for rank, row in enumerate(side.rows)
        if any(row != Row(0, 0, 0, 0) for row in side.rows)
    ]
    return "   ".join([f"{seconds:5.1f} s  balance {side.mode}, {side.state}", *ranks])


# -- afterwards ------------------------------------------------------------------------------


def summary(off: Figures, on: Figures, about: str) -> RenderableType:
    """The figures of both modes side by side, and what they say.

    Args:
        off: The replays with balance off.
        on: Those with balance on.
        about: Where it was measured.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(about)
    for figures in (off, on):
        table.add_column(f"balance {figures.mode}", justify="right", style=_COLOURS[figures.mode])
    for name, show in FIGURES:
        table.add_row(name, show(off), show(on))
    words = [Text(f"* {sentence}") for sentence in sentences(off, on)]
    return Group(Text(), table, Text(), *words)


def _of_rank(rank: int) -> list[tuple[str, Callable[[Figures], str]]]:
    def times(figure: Callable[[Figures], Callable[..., Measured]]) -> Callable[[Figures], str]:
        def show(figures: Figures) -> str:
            values = figure(figures)(rank), figure(figures)(rank, 0.95)
            return " / ".join(milliseconds(value.value) for value in values)

        return show

    return [
        (f"rank {rank}: steps at its cap", lambda figures: percent(figures.full(rank))),
        (f"rank {rank}: frozen steps", lambda figures: str(figures.frozen(rank))),
        (f"rank {rank}: first token, mean / p95", times(lambda figures: figures.first)),
        (f"rank {rank}: each token, mean / p95", times(lambda figures: figures.token)),
    ]


#: Every figure that is shown: its name, and how it is written.
FIGURES: list[tuple[str, Callable[[Figures], str]]] = [
    ("requests answered", lambda figures: f"{figures.answered} of {figures.sent}"),
    ("time of a replay", lambda figures: seconds(figures.seconds.value)),
    ("engine steps", lambda figures: str(figures.steps)),
    ("mean |running 0 - running 1|", lambda figures: number(figures.imbalance.value)),
    ("steps in which a rank admitted", lambda figures: percent(figures.admitting.value)),
    *(entry for rank in range(RANKS) for entry in _of_rank(rank)),
]


def sentences(off: Figures, on: Figures) -> list[str]:
    """What the figures say, and what they do not."""
    admitting = moved(off.admitting, on.admitting, percent)
    first = moved(off.first(1), on.first(1), milliseconds)
    apart = moved(off.imbalance, on.imbalance, number)
    tokens = [moved(off.token(rank), on.token(rank), milliseconds) for rank in range(RANKS)]
    return [
        _answered(off, on),
        _skewed(off),
        _frozen(off, on),
        f"The share of steps in which some rank admitted, and every rank waited for the prompt, {admitting}.",
        f"The mean time to the first token on rank 1 {first}.",
        *(f"The mean time from token to token on rank {rank} {change}." for rank, change in enumerate(tokens)),
        f"The gate aligns admissions, not counts: the mean difference of the running counts {apart}.",
        _no_claim(),
    ]


def _answered(off: Figures, on: Figures) -> str:
    return (
        f"{off.answered + on.answered} of {off.sent + on.sent} requests were answered: the same load, sent "
        f"{len(off.replays)} times with balance off and {len(on.replays)} times with it on."
    )


def _skewed(off: Figures) -> str:
    full = [percent(off.full(rank)) for rank in range(RANKS)]
    return (
        f"The load is skewed: with balance off, rank 0 was at its cap of {CAP} in {full[0]} of the steps, "
        f"rank 1 in {full[1]}."
    )


def _frozen(off: Figures, on: Figures) -> str:
    frozen = [on.frozen(rank) for rank in range(RANKS)]
    if not any(frozen):
        return "The gate stopped nothing in this run: no request waited on one rank while the other was at its cap."
    without = sum(off.frozen(rank) for rank in range(RANKS))
    return (
        f"With balance on, admission was frozen on rank 0 in {frozen[0]} and on rank 1 in {frozen[1]} of {on.steps} "
        "steps: the rank had room and requests waited, but the other was at its cap. With it off, in "
        f"{without} of {off.steps}."
    )


def _no_claim() -> str:
    return (
        "So the declared gate runs in real engine cores, and this is what it does there. It is no statement about "
        f"speed: the model is tiny and random, and everything here shares {cores()} CPU cores and no accelerator."
    )


def moved(off: Measured, on: Measured, show: Callable[[float], str]) -> str:
    """How a figure changed, in words; where that is less than two replays of one mode differ by, that is said."""
    if math.isnan(off.value) or math.isnan(on.value):
        return "could not be measured in this run"
    if abs(on.value - off.value) <= max(off.spread, on.spread):
        return (
            f"was {show(off.value)} with balance off and {show(on.value)} with it on, no further apart than two "
            "replays of one mode"
        )
    return f"{'rose' if on.value > off.value else 'fell'} from {show(off.value)} to {show(on.value)}"


def milliseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{1000 * value:.{0 if value >= 0.1 else 1}f} ms"  # noqa: PLR2004


def seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} s"


def percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def cores() -> int:
    """The processors that this process, and so its engines, may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""The bench in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .machine import busy
from .results import Results, Row, Verdict, counted

TITLES = {
    "install": "install, after vLLM is imported",
    "schedule": "schedule() per step",
    "gather": "gather per step, gloo on this machine",
    "verify": "verify, as a command",
    "drift": "drift report, as a command",
    "engine": "real engine, DP=2, tiny MoE on the CPU",
}
COLOURS = {
    Verdict.MET: "green", Verdict.MISSED: "red", Verdict.UNSURE: "yellow", Verdict.UNKNOWN: "red", Verdict.NONE: "",
}  # fmt: skip


def show(results: Results, console: Console) -> None:
    """Print a table for each part, then what is met and what the machine did meanwhile."""
    for part, rows in groupby(results.rows, lambda one: one.part):
        console.print(_table(part, list(rows)))
    for name, why in results.lost.items():
        console.print(f"[red]not measured[/]: {name}:", Text(why))
    machine = results.machine
    console.print(Text(
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}; commit {machine['commit'][:12]}"
        f"{' and changes' if machine['changed'] else ''}; load {machine['load before']} before, "
        f"{machine.get('load after', '?')} after"
    ))  # fmt: skip
    for name, lane in machine["lanes"].items():
        console.print(Text(f"lane {name}: " + ", ".join(f"{what} {value}" for what, value in lane.items())))
    if busy(machine):
        console.print("[yellow]The machine was busy when the bench began: intervals are wider than they need be.[/]")
    console.print("targets:", _summary(results.rows))


def _table(part: str, rows: Sequence[Row]) -> Table:
    table = Table(title=TITLES.get(part, part), title_justify="left", title_style="bold")
    for name, justify in (
        ("lane", "left"),
        ("", "left"),
        ("measured", "right"),
        ("95 %", "right"),
        ("target", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=name != "")  # type: ignore[arg-type]
    table.add_column("")
    last = ""
    for one in rows:
        verdict = Text(one.verdict.value, COLOURS[one.verdict])
        if one.why:
            verdict.append(f"{': ' if one.verdict.value else ''}{one.why}", "" if one.limit is not None else "dim")
        limit = f"≤ {number(one.limit, one.unit)}" if one.limit is not None else ""
        interval = f"{number(one.low, one.unit)} .. {number(one.high, one.unit)}" if one.low != one.high else ""
        value = number(one.value, one.unit) if one.value is not None else "-"
        table.add_row(one.lane if one.lane != last else "", one.what, value, interval, limit, verdict)
        last = one.lane
    return table


def number(value: float, unit: str) -> str:
    """A figure with its unit, with as many digits as say something."""
    if unit == "x":
        return f"{value:.3f}"
    if unit == "n":
        return f"{value:g}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004 - three digits
    return f"{value:,.{digits}f} {unit}"


def _summary(rows: Sequence[Row]) -> Text:
    text = Text()
    for verdict, count in counted(rows):
        text.append(f"{', ' if text else ''}{count} {verdict.value}", COLOURS[verdict])
    return text or Text("none")

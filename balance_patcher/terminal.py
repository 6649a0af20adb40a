"""The report as a person reads it in a terminal: one table, then every failure."""

from __future__ import annotations

import io

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .errors import Outcome
from .report import Report, footer, place

_COLOURS = {
    "applied": "green", "absorbed": "cyan", "not-applicable": "cyan", "failed": "red", "unknown": "yellow",
    "holds": "green", "broken": "red",
}  # fmt: skip
WIDE = 150


def as_text(report: Report) -> str:
    console = Console(width=WIDE, record=True, file=io.StringIO())
    print_report(report, console)
    return console.export_text()


def print_report(report: Report, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("lane", "vLLM", "delta", "status", "variant", "where", "matches", "detail"):
        table.add_column(column, justify="right" if column == "matches" else "left", overflow="fold")
    for lane in report.lanes:
        name, version = escape(lane.name), escape(lane.vllm_version or "unknown")
        if not lane.features:
            table.add_row(name, version, "", _painted(lane.status), "", "", "", "")
        for feature in lane.features:
            for delta in feature.deltas:
                table.add_row(
                    name, version, delta.name, _painted(delta.status), escape(delta.variant or ""),
                    escape(place(delta)), str(delta.matches), escape(delta.detail),
                )  # fmt: skip
            table.add_row(
                name,
                version,
                f"[bold]{feature.name}[/]",
                _painted(feature.status),
                "",
                "",
                "",
                ", ".join(footer(feature)),
            )
        if lane.pin:
            status = {"proven": "[green]proven[/]", "different": "[red]different[/]"}.get(
                lane.pin.status, f"[yellow]{lane.pin.status}[/]"
            )
            table.add_row(name, version, escape(f"pin {lane.pin.wanted}"), status, "", "", "", escape(lane.pin.detail))
    console.print(table)
    for lane in report.lanes:
        for failure in lane.all_failures:
            console.print()
            console.print(f"{lane.name}: {failure}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(
        report.verdict, style="bold green" if report.outcome is Outcome.HOLDS else "bold red", highlight=False
    )


def _painted(status: str) -> str:
    colour = _COLOURS.get(status, "yellow")
    return f"[{colour}]{status}[/]"

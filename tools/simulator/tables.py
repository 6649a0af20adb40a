"""The summary as tables that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from .figures import Figures

LABELS = {"off": "gate off", "on": "gate on", "catch-up": "counter-example:\nlagging ranks catch up"}

#: Title, how it is written, whether more is better (none: neither).
Row = tuple[str, Callable[[Figures], float], str, bool | None]

ROWS: tuple[Row, ...] = (
    ("output tokens/s", lambda f: f.throughput, "{:,.0f}", True),
    ("TTFT mean s", lambda f: f.ttft_mean, "{:.2f}", False),
    ("TTFT p50 s", lambda f: f.ttft_50, "{:.2f}", False),
    ("TTFT p90 s", lambda f: f.ttft_90, "{:.2f}", False),
    ("TTFT p99 s", lambda f: f.ttft_99, "{:.2f}", False),
    ("TPOT mean ms", lambda f: 1000 * f.tpot_mean, "{:.1f}", False),
    ("TPOT p50 ms", lambda f: 1000 * f.tpot_50, "{:.1f}", False),
    ("TPOT p90 ms", lambda f: 1000 * f.tpot_90, "{:.1f}", False),
    ("TPOT p99 ms", lambda f: 1000 * f.tpot_99, "{:.1f}", False),
    ("imbalance (requests)", lambda f: f.imbalance, "{:.1f}", None),
    ("steps", lambda f: f.steps, "{:,.0f}", None),
    ("frozen steps", lambda f: f.frozen_steps, "{:,.0f}", None),
    ("frozen, of the time", lambda f: 100 * f.frozen_share, "{:.0f} %", None),
    ("somebody prefills", lambda f: 100 * f.prefill_share, "{:.0f} %", None),
    ("some rank at its cap", lambda f: 100 * f.at_cap_share, "{:.0f} %", None),
    ("preemptions", lambda f: f.preemptions, "{:,.0f}", None),
    ("simulated s", lambda f: f.seconds, "{:,.1f}", None),
    ("CPU s", lambda f: f.cpu, "{:.1f}", None),
    ("CPU µs a token", lambda f: 1e6 * f.cpu / f.output_tokens, "{:.1f}", None),
    ("memory MB", lambda f: f.memory, "{:,.0f}", None),
)


def tables(parts: Sequence[Figures], assumed: str) -> list[Table]:
    """A table for each number of ranks, the gates side by side, each beside off.

    Args:
        parts: What was simulated.
        assumed: What it rests on, on one line.
    """
    numbers = sorted({part.ranks for part in parts})
    return [_table([part for part in parts if part.ranks == ranks], assumed) for ranks in numbers]


def _table(parts: Sequence[Figures], assumed: str) -> Table:
    first = parts[0]
    table = Table(
        title=f"{first.ranks} ranks, {first.requests:,} requests", title_justify="left",
        caption=escape(f"vLLM {first.vllm}; {assumed}"), caption_justify="left",
    )  # fmt: skip
    table.add_column("")
    for part in parts:
        table.add_column(LABELS[part.gate], justify="right")
    off = first if first.gate == "off" else None
    for title, value, form, better in ROWS:
        cells = [form.format(value(part)) for part in parts]
        if better is not None and off is not None:
            changes = [_change(value(part), value(off), "green" if better else "red") for part in parts]
            cells = [f"{cell}{change}" for cell, change in zip(cells, changes, strict=True)]
        table.add_row(title, *cells)
    return table


def _change(value: float, off: float, more: str) -> str:
    """How far a figure lies from that with the gate off, in the colour of what more of it means, or of the other."""
    if value == off or not off:
        return ""
    change = 100 * (value / off - 1)
    less = "red" if more == "green" else "green"
    colour = "dim" if abs(change) < 1 else more if change > 0 else less
    return f" [{colour}]{change:+.0f} %[/]"

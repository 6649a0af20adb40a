"""Plots: what each rank runs over time, off beside on, how far the ranks lie apart, and what they wait for."""

from __future__ import annotations

import bisect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from balance_patcher.extras import require

from .figures import Figures
from .files import read_running, read_steps
from .tables import LABELS

#: Moments that are drawn: more than there are pixels tells nothing.
MOMENTS = 600

#: Pieces of the time whose shares are drawn.
PIECES = 60

#: Up to so many ranks each gets a line; more are rows of colour.
LINES = 8

#: Colours that differ to those who see red and green alike, and on paper.
RUNNING, PREFILL, FROZEN = "#0072b2", "#e69f00", "#56b4e9"


def plot(folder: Path, parts: Sequence[Figures], assumed: str) -> list[Path]:
    """A picture for each number of ranks, in the folder of the parts.

    Args:
        folder: Where the parts are.
        parts: What is drawn.
        assumed: What it rests on, on one line.

    Raises:
        PatchError: BP513, without matplotlib.
    """
    require("matplotlib", "plots").use("Agg")
    pyplot = require("matplotlib.pyplot", "plots")
    files = []
    for ranks in sorted({part.ranks for part in parts}):
        beside = [part for part in parts if part.ranks == ranks]
        figure = _picture(pyplot, folder, beside, assumed)
        files.append(folder / f"running-{ranks}-ranks.png")
        figure.savefig(files[-1], dpi=120)
        pyplot.close(figure)
    return files


def _picture(pyplot: Any, folder: Path, parts: Sequence[Figures], assumed: str) -> Any:
    ranks = parts[0].ranks
    figure, axes = pyplot.subplots(
        3, len(parts), figsize=(1 + 5 * len(parts), 8), sharex=True, sharey="row", squeeze=False,
        height_ratios=(4, 2, 2), layout="constrained",
    )  # fmt: skip
    runs = [_sampled(*read_running(folder, part)) for part in parts]
    last = max(times[-1] for times, _ in runs)
    most = max(max(row) for _, rows in runs for row in rows)
    image = None
    for column, (part, (times, rows)) in enumerate(zip(parts, runs, strict=True)):
        above, between, below = axes[0][column], axes[1][column], axes[2][column]
        what = LABELS[part.gate].replace("\n", " ")
        above.set_title(f"{what}\n{part.throughput:,.0f} tokens/s, TTFT p50 {part.ttft_50:.2f} s, "
                        f"TPOT p50 {1000 * part.tpot_50:.0f} ms", fontsize=10)  # fmt: skip
        if ranks <= LINES:
            for rank in range(ranks):
                above.step(times, [row[rank] for row in rows], where="post", label=f"rank {rank}", linewidth=1)
        else:
            turned = [list(row) for row in zip(*rows, strict=True)]
            extent = (times[0], times[-1], ranks - 0.5, -0.5)
            image = above.imshow(turned, aspect="auto", extent=extent, vmin=0, vmax=most, interpolation="nearest")
        between.fill_between(
            times, [min(row) for row in rows], [max(row) for row in rows], alpha=0.3, step="post", color=RUNNING,
            label="fewest to most",
        )  # fmt: skip
        mean = [sum(row) / ranks for row in rows]
        between.step(times, mean, where="post", linewidth=1, color=RUNNING, label="mean")
        ends, prefill, frozen = _shares(read_steps(folder, part))
        below.step(ends, prefill, where="pre", color=PREFILL, label="somebody prefills: all wait for it")
        below.fill_between(ends, frozen, step="pre", alpha=0.5, color=FROZEN, label="admission is frozen")
        below.set_xlabel("seconds")
        below.set_xlim(0, last)
        below.set_ylim(0, 105)
    axes[0][0].set_ylabel("running requests" if ranks <= LINES else "rank")
    axes[1][0].set_ylabel("running requests\nof a rank")
    axes[2][0].set_ylabel("% of the time")
    if image is not None:
        figure.colorbar(image, ax=list(axes[0]), label="running requests")
    else:
        axes[0][-1].legend(loc="upper right", fontsize=8)
    for row in axes[1:]:
        row[0].legend(loc="best", fontsize=8)
    figure.suptitle(f"{ranks} ranks, {parts[0].requests:,} requests")
    # In one column there is room for half of it.
    lines = textwrap.wrap(f"vLLM {parts[0].vllm}; {assumed}", 85 * len(parts))
    figure.supxlabel("\n".join(lines).replace("$", r"\$"), fontsize=8, color="0.35")
    return figure


def _sampled(ends: Sequence[float], rows: Sequence[Sequence[int]]) -> tuple[list[float], list[Sequence[int]]]:
    """What the ranks ran at moments that lie equally far apart: steps are not equally long."""
    length = ends[-1] / MOMENTS
    times = [length * moment for moment in range(1, MOMENTS + 1)]
    return times, [rows[min(len(rows) - 1, bisect.bisect_left(ends, at))] for at in times]


def _shares(steps: Sequence[tuple[float, float, bool, bool]]) -> tuple[list[float], list[float], list[float]]:
    """The ends of equal pieces of the time, and the share of each in which somebody prefilled, or was frozen.

    A step counts in the piece in which it ends; of a piece without any, and while all rest, nothing is said.
    """
    length = steps[-1][0] / PIECES
    sums = [[0.0, 0.0, 0.0] for _ in range(PIECES)]
    for end, seconds, prefill, frozen in steps:
        piece = sums[min(PIECES - 1, int(end / length))]
        piece[0] += seconds
        piece[1] += seconds * prefill
        piece[2] += seconds * frozen
    shares = [[100 * part / whole if whole else 0.0 for part in parts] for whole, *parts in sums]
    return [length * (at + 1) for at in range(PIECES)], [one[0] for one in shares], [one[1] for one in shares]

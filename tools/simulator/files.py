"""What a simulation leaves: a folder for each part, written whole or not at all, and a summary of those that there are.

A part is written beside its place and moved there, so that an interrupt leaves whole parts only. The summary is made
from the parts, not kept beside them.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .events import Run
from .figures import NAMES, Figures
from .job import part_name
from .traces import Arrival

STEPS = ("end", "seconds", "prefill", "decode", "admitted", "preempted", "leader", "frozen", "waiting")
REQUESTS = ("arrival", "prompt", "output", "rank", "first", "finish", "tokens")  #: the first four are a trace again


def write_part(folder: Path, found: Figures, trace: Sequence[Arrival], run: Run) -> Path:
    """Leave one part.

    Args:
        folder: Where all parts are.
        found: Its figures.
        trace: What arrived.
        run: What happened.
    """
    place = folder / part_name(found.ranks, found.gate)
    draft = folder / f".{place.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    lengths = ((one.prompt, one.output) for one in trace)
    requests = zip(run.sent, lengths, run.rank, run.first, run.finish, run.tokens, strict=True)
    _write(draft / "requests.csv", REQUESTS, ((sent, *one, *got) for sent, one, *got in requests))
    _write(draft / "steps.csv", STEPS, zip(*(getattr(run, name) for name in STEPS), strict=True))
    names = ("end", *(f"rank{number}" for number in range(run.ranks)))
    _write(draft / "running.csv", names, ((end, *run.counts(step)) for step, end in enumerate(run.end)))
    (draft / "figures.json").write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    draft.rename(place)
    return place


def _write(file: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        for row in rows:
            writer.writerow([f"{value:.9g}" if isinstance(value, float) else value for value in row])


def read_parts(folder: Path) -> list[Figures]:
    """The figures of the parts that are there, by ranks and then by gate, off first."""
    order = ("off", "on", "catch-up")
    found = [Figures(**json.loads(file.read_text("utf-8"))) for file in folder.glob("*-ranks-*/figures.json")]
    return sorted(found, key=lambda one: (one.ranks, order.index(one.gate)))


def write_summary(folder: Path, parts: Sequence[Figures]) -> None:
    """``summary.csv``: a line for each part."""
    _write(folder / "summary.csv", NAMES, [[getattr(part, name) for name in NAMES] for part in parts])


def read_running(folder: Path, part: Figures) -> tuple[list[float], list[list[int]]]:
    """When each step of a part ended, and the counts of its ranks then."""
    with (folder / part_name(part.ranks, part.gate) / "running.csv").open(newline="", encoding="utf-8") as stream:
        rows = csv.reader(stream)
        next(rows)
        table = [(float(row[0]), [int(value) for value in row[1:]]) for row in rows]
    return [end for end, _ in table], [counts for _, counts in table]


def read_steps(folder: Path, part: Figures) -> list[tuple[float, float, bool, bool]]:
    """Of each step of a part: when it ended, how long it took, whether somebody prefilled, whether one was frozen."""
    with (folder / part_name(part.ranks, part.gate) / "steps.csv").open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream)
        return [(float(row["end"]), float(row["seconds"]), row["prefill"] != "0", row["frozen"] != "0") for row in rows]

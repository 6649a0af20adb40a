"""A page of Prometheus metrics as a test reads it."""

from __future__ import annotations

import itertools
import re

LINE = re.compile(r"(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read(page: str, start: str = "vllm:balance_") -> dict[str, dict[str, dict[tuple, float]]]:
    """Of each metric whose name starts so, without that start: the value of each engine.

    Labels besides the engine and the model are a part of the key, as sorted pairs.
    """
    found: dict[str, dict[str, dict[tuple, float]]] = {}
    for line in page.splitlines():
        match = LINE.fullmatch(line)
        if match and match["name"].startswith(start) and not match["name"].endswith("_created"):
            labels = dict(LABEL.findall(match["labels"] or ""))
            engine = labels.pop("engine")
            labels.pop("model_name", None)
            series = found.setdefault(match["name"].removeprefix(start), {}).setdefault(engine, {})
            key = tuple(sorted(labels.items()))
            assert key not in series, f"twice on the page: {line}"
            series[key] = float(match["value"])
    return found


def plain(page: str) -> dict[str, dict[str, float]]:
    """Of each of our metrics without further labels, the value of each engine."""
    return {
        name: {engine: series[()] for engine, series in of.items() if () in series} for name, of in read(page).items()
    }


def about(page: str) -> dict[str, dict[str, str]]:
    """What the info metric says of each engine."""
    return {
        engine: dict(key) for engine, series in read(page).get("info", {}).items() for key, on in series.items() if on
    }


def frozen(steps: list[dict], cap: int) -> int:
    """In how many steps of a rank the gate kept a waiting request out, by what its probe has written down.

    By the counts of the gather before, this rank had room and another was at its cap; after the step requests wait.
    """
    pairs = itertools.pairwise(steps)
    return sum(
        bool(after["waiting"]) and max(before["counts"]) >= cap and before["running"] < cap for before, after in pairs
    )

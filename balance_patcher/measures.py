"""What a feature measures in the engine cores in which it runs, and how a server shows it.

A declaration, like the deltas. The engine core gives figures by name, as differences since it gave them last; the
server knows of each whether it is counted, shown as it is, or timed, and what it is called for Prometheus. Two
figures are of every feature and are not declared: ``enabled``, and ``info``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import refuse

KINDS = ("counter", "gauge", "histogram")
#: The labels of ``info`` that every feature has.
ABOUT = ("digest", "patcher", "source", "reason")

#: Of one engine and one stretch of time: what was counted, what was last shown, and what was timed.
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """One figure.

    Attributes:
        name: Its name, under that of the feature: ``frozen_steps`` is ``vllm:balance_frozen_steps_total``.
        kind: A ``counter`` gets what was added since, a ``gauge`` what is now, a ``histogram`` a list.
        help: What it is, for the page of metrics.
        buckets: The upper bounds of a histogram.
    """

    name: str
    kind: str
    help: str
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS or bool(self.buckets) != (self.kind == "histogram"):
            raise _bad(f"metric {self.name!r} is a {' or a '.join(KINDS)}, and buckets are a histogram's")
        if not re.fullmatch(r"[a-z][a-z_]*[a-z]", self.name) or self.name in ("enabled", "info"):
            raise _bad(f"a metric cannot be called {self.name!r}")


@dataclass(frozen=True)
class Timed:
    """What a histogram got in one stretch of time."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def more(self, values: Sequence[float]) -> Timed:
        return Timed(self.count + len(values), self.total + sum(values), max(self.longest, *values, 0.0))


@dataclass(frozen=True)
class Measures:
    """The figures of a feature.

    Attributes:
        metrics: What they are.
        taken: Told of a finished engine core in which the feature runs; returns what gives its figures since the
            last call, by name. A figure that is left out has not changed.
        labels: What is said of it besides in ``info``: names of what the feature's rule observes.
        line: A sentence for vLLM's periodic log from the figures of each engine since the last one; empty for none.
            Of a histogram it gets a :class:`Timed`.
    """

    metrics: tuple[Metric, ...]
    taken: Callable[[Any], Callable[[], Figures]]
    labels: tuple[str, ...] = ()
    line: Callable[[Mapping[int, Figures]], str] = lambda _: ""

    def __post_init__(self) -> None:
        names = [metric.name for metric in self.metrics]
        if len(set(names)) < len(names) or set(self.labels) & set(ABOUT):
            raise _bad("what a feature measures needs names of its own")


def _bad(what: str) -> Exception:
    return refuse("BP002", what, next="mend the declaration; nothing was patched")

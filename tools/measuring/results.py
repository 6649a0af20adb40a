"""What a bench says: rows with a figure, its interval, a target where there is one, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from .ratios import Interval

#: Of what is written to a file: raised when a key changes its meaning.
SCHEMA = 1


class Verdict(str, Enum):
    """Whether a target is met; the value is what a person reads."""

    MET = "met"
    MISSED = "missed"
    UNSURE = "unsure"
    UNKNOWN = "not measured"
    NONE = ""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        part: What it belongs to: ``install``, ``schedule``, ``gather``, ``verify``, ``drift``, ``engine``.
        lane: Where it was measured.
        what: What was measured.
        unit: Of the figure; ``x`` for a ratio, ``n`` for a count.
        value: The figure; ``None`` if it could not be had, and then ``why`` says why.
        low: The lower end of its interval, or the value.
        high: The upper end.
        limit: The target: no more than this.
        spent: Of a time by the clock, how much of it the processor worked for us. Where that alone is within the
            target, other work on the machine may be why the target looks missed.
        once: Whether it was measured a single time, so that its interval says nothing.
        why: One sentence made of what was measured; of a target that is missed, where the time goes.
        detail: What the sentence was made of.
    """

    part: str
    lane: str
    what: str
    unit: str
    value: float | None = None
    low: float = 0.0
    high: float = 0.0
    limit: float | None = None
    spent: float | None = None
    once: bool = False
    why: str = ""
    detail: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """An interval that lies on both sides of the target is no pass; nor is what was measured once."""
        if self.limit is None:
            return Verdict.NONE
        if self.value is None:
            return Verdict.UNKNOWN
        if self.once:
            return Verdict.UNSURE
        if self.high <= self.limit:
            return Verdict.MET
        held_up = self.spent is not None and self.spent <= self.limit
        return Verdict.MISSED if self.low > self.limit and not held_up else Verdict.UNSURE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict.value}

    @staticmethod
    def of(values: Mapping[str, Any]) -> Row:
        """The row that such a dictionary is."""
        known = {one.name for one in fields(Row)}
        return Row(**{name: value for name, value in values.items() if name in known})


def row(part: str, lane: str, what: str, unit: str, interval: Interval, **more: Any) -> Row:
    """A row of a figure with its interval."""
    return Row(part, lane, what, unit, interval.value, interval.low, interval.high, **more)


@dataclass
class Results:
    """All of a run.

    Attributes:
        machine: Where and on what it was measured; see :mod:`.machine`.
        rows: In the order of the table.
        lost: Parts that could not be measured, each with the reason.
    """

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def failed(self) -> bool:
        """Whether any target is not met for sure, or a part could not be measured."""
        return bool(self.lost) or any(one.verdict not in (Verdict.MET, Verdict.NONE) for one in self.rows)

    def text(self) -> str:
        """As JSON."""
        rows = [one.as_dict() for one in self.rows]
        content = {"schema": SCHEMA, "machine": self.machine, "rows": rows, "not measured": self.lost}
        return json.dumps(content, indent=2) + "\n"

    @staticmethod
    def of(text: str) -> Results:
        """What such a text holds."""
        content = json.loads(text)
        return Results(content["machine"], [Row.of(one) for one in content["rows"]], content["not measured"])


def shares(stages: Mapping[str, float], unit: str = "ms", most: int = 3) -> str:
    """The largest stages in words: ``proof 12.0 ms, plan 8.1 ms, rewrite 7.0 ms of 41.2 ms``."""
    total = sum(stages.values())
    largest = sorted(stages.items(), key=lambda item: -item[1])[:most]
    named = ", ".join(f"{name} {value:.1f} {unit}" for name, value in largest)
    return f"{named} of {total:.1f} {unit}"


def counted(rows: Iterable[Row]) -> Sequence[tuple[Verdict, int]]:
    """How many targets have each verdict, those first that ask for attention."""
    found = [one.verdict for one in rows if one.limit is not None]
    order = (Verdict.MISSED, Verdict.UNSURE, Verdict.UNKNOWN, Verdict.MET)
    return [(verdict, found.count(verdict)) for verdict in order if verdict in found]

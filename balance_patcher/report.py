"""What was seen on every lane, in one structure.

:mod:`balance_patcher.renderings` turns it into text for machines, :mod:`balance_patcher.terminal` for a person.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import Failure, Outcome
from .pins import Pin

_CLAUSES = ("Wrong usage", "Broken", "Not the pinned one", "Could not check")


@dataclass
class DeltaReport:
    """One delta on one lane."""

    name: str
    target: str
    status: str
    variant: str | None
    file: str | None
    line: int | None
    matches: int
    detail: str
    declared: str


@dataclass
class InvariantReport:
    """One invariant on one lane: ``holds``, ``broken`` or ``unknown``."""

    name: str
    status: str
    detail: str


@dataclass
class CallReport:
    """One call shape on one lane: ``holds``, ``broken`` or ``unknown``."""

    call: str
    status: str
    detail: str


@dataclass
class FeatureReport:
    """One feature on one lane.

    Attributes:
        reversible: Whether taking the deltas out again gives upstream's text and tree back; ``None``
            when there was nothing to take out of.
        live: Whether this was seen in a running engine core: each invariant is a line for a person, and where
            nothing was put in there is nothing to take out.
    """

    name: str
    deltas: list[DeltaReport] = field(default_factory=list)
    invariants: list[InvariantReport] = field(default_factory=list)
    calls: list[CallReport] = field(default_factory=list)
    reversible: bool | None = None
    failures: list[Failure] = field(default_factory=list)
    live: bool = False

    @property
    def outcome(self) -> Outcome:
        statuses = [item.status for item in self.invariants] + [call.status for call in self.calls]
        unknown = "unknown" in statuses or (not statuses if self.live else self.reversible is None)
        broken = self.reversible is False
        extra = [Outcome.BROKEN] * broken + [Outcome.UNKNOWN] * unknown
        return Outcome.worst([*(failure.outcome for failure in self.failures), *extra])

    @property
    def status(self) -> str:
        """``applied``, ``absorbed``, ``not-applicable``, ``failed`` or ``unknown``; ``holds`` of a live one."""
        if self.outcome is Outcome.UNKNOWN:
            return "unknown"
        if self.outcome is not Outcome.HOLDS:
            return "failed"
        if self.live:
            return "holds"
        found = {delta.status for delta in self.deltas}
        return next((status for status in ("applied", "absorbed", "not-applicable") if status in found), "unknown")


@dataclass
class LaneReport:
    """One lane.

    Attributes:
        vllm: Whether it is one; else it holds what is wrong with declarations, and is not counted.
    """

    name: str
    source: str
    vllm_version: str | None = None
    commit: str | None = None
    pin: Pin | None = None
    features: list[FeatureReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    vllm: bool = True

    @property
    def all_failures(self) -> list[Failure]:
        return [*self.failures, *(failure for feature in self.features for failure in feature.failures)]

    @property
    def outcome(self) -> Outcome:
        if not self.features and not self.failures:
            return Outcome.UNKNOWN
        own = [failure.outcome for failure in self.failures]
        return Outcome.worst([*own, *(feature.outcome for feature in self.features)])

    @property
    def status(self) -> str:
        return {Outcome.HOLDS: "ok", Outcome.BROKEN: "failed", Outcome.USAGE: "usage", Outcome.UNKNOWN: "unknown"}[
            self.outcome
        ]

    @property
    def clauses(self) -> list[str]:
        """What the verdict says of it: how bad it is, and that it is not the pinned one."""
        words = {Outcome.USAGE: _CLAUSES[0], Outcome.BROKEN: _CLAUSES[1], Outcome.UNKNOWN: _CLAUSES[3]}
        different = any(failure.code == "BP510" for failure in self.failures)
        rest = [failure.outcome for failure in self.failures if failure.code != "BP510"]
        outcome = Outcome.worst([*rest, *(f.outcome for f in self.features)]) if different else self.outcome
        found = [words[outcome]] if outcome in words else []
        return [*found, _CLAUSES[2]] if different else found


@dataclass
class Report:
    """Every lane of a run."""

    lanes: list[LaneReport]

    @property
    def outcome(self) -> Outcome:
        if not self.lanes:
            return Outcome.UNKNOWN
        return Outcome.worst(lane.outcome for lane in self.lanes)

    @property
    def verdict(self) -> str:
        """One sentence for a person, with a clause for each way in which lanes are not green."""
        if not self.lanes:
            return "Could not check: there is no lane."
        found: dict[str, list[str]] = {word: [] for word in _CLAUSES}
        for lane in self.lanes:
            for word in lane.clauses:
                found[word].append(lane.name)
        clauses = [f"{word}: {', '.join(names)}" for word, names in found.items() if names]
        if not clauses:
            return f"All deltas hold on {_count(len(self.lanes), 'lane')}."
        # Of several clauses the last one's count would be read as that of all.
        lanes = [lane for lane in self.lanes if lane.vllm]
        bad = sum(lane.outcome is not Outcome.HOLDS for lane in lanes)
        if not bad and lanes:
            return f"{'. '.join(clauses)}. All else holds on {_count(len(lanes), 'lane')}."
        count = f"{bad} of " if len(clauses) == 1 else "of "
        return f"{'. '.join(clauses)} ({count}{_count(len(lanes), 'lane')})."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def place(delta: DeltaReport) -> str:
    """``scheduler.py:567``, or nothing."""
    return f"{delta.file.replace(chr(92), '/').rpartition('/')[2]}:{delta.line}" if delta.file and delta.line else ""


def footer(feature: FeatureReport) -> Iterator[str]:
    """How many invariants and call shapes hold, and whether the rewrite is reversible."""
    for name, items in (
        ("lines" if feature.live else "invariants", feature.invariants),
        ("call shapes", feature.calls),
    ):
        if items:
            unknown = sum(item.status == "unknown" for item in items)
            holds = sum(item.status == "holds" for item in items)
            yield f"{name} {holds}/{len(items)}" + (f" ({unknown} not checked)" if unknown else "")
    if not feature.live or feature.reversible is not None:
        yield {True: "takes out clean", False: "does not take out clean", None: "not rewritten"}[feature.reversible]


def names(failure: Failure, delta: str, declared: str) -> bool:
    """Whether a finding is about a delta: it says its name, or the line that declares it."""
    fields = dict(failure.fields)
    if fields.get("delta") == delta or repr(delta) in failure.what:
        return True
    return fields.get("declared") == declared and "delta '" not in failure.what

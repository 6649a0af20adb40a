"""What the counters have written, added up, and what follows from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .counter import KINDS
from .plugin import CONTROL, COUNT

#: Where balance does anything in a step: its gate stands in the one, its gather is the other.
OURS = ("schedule", "gather")

Written = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass
class Seen:
    """What one engine's processes saw.

    Attributes:
        first: The first entry of each process: what it is, and whether its counter counts.
        steps: Steps of all engine cores together that were counted.
        counts: How often each kind was seen at each place, in those steps, in all processes.
        control: How often a scalar was read in ``schedule``, with the counts on the device.
        gathers: Nanoseconds of the gathers of steps that were not counted.
    """

    first: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    control: int = 0
    gathers: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        return [facts for name, facts in self.first.items() if name.startswith("rank")]

    def a_step(self, kinds: Iterable[str] = KINDS, places: Iterable[str] | None = None) -> float:
        """How often these were seen a step of one engine core, at these places or at any."""
        kinds, places = tuple(kinds), None if places is None else tuple(places)
        found = sum(
            count
            for (place, kind), count in self.counts.items()
            if kind in kinds and (places is None or place in places)
        )
        return found / self.steps if self.steps else 0.0

    def gather(self, share: float) -> float:
        """Microseconds of a gather: that of which so many take less."""
        ordered = sorted(self.gathers)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1000


def seen(written: Written) -> Seen:
    """Add up what the processes of one engine wrote."""
    found = Seen()
    for name, (first, *lines) in ((name, entries) for name, entries in written.items() if entries):
        found.first[name] = first
        for line in lines:
            found.gathers += line["gathers"]
            if line["phase"] == CONTROL:
                found.control += line["counts"].get("schedule", {}).get(KINDS[0], 0)
            if line["phase"] != COUNT:
                continue
            found.steps += line["steps"] if name.startswith("rank") else 0
            for place, kinds in line["counts"].items():
                for kind, count in kinds.items():
                    found.counts[place, kind] += count
    return found


class Verdict(str, Enum):
    """What the check says."""

    NONE_ADDED = "balance adds no device synchronisation"
    ADDED = "balance makes the host wait for the device"
    UNKNOWN = "could not be checked"


@dataclass(frozen=True)
class Judged:
    """A verdict and its reasons."""

    verdict: Verdict
    reasons: tuple[str, ...]


def judge(off: Seen, on: Seen) -> Judged:
    """What two engines show. It is only as good as the counter, so that is judged first."""
    why = [*_blind("off", off), *_blind("on", on)]
    if not all(one["enabled"] for one in on.ranks):
        why.append("balance was not on in the engine that asked for it")
    if any(one["enabled"] for one in off.ranks):
        why.append("balance was on in the engine that did not ask for it")
    if not on.control:
        why.append("with the counts put on the device, no read of them was seen: the counter is blind in schedule()")
    if not on.gathers:
        why.append("no gather was timed")
    if why:
        return Judged(Verdict.UNKNOWN, tuple(why))
    added: list[str] = []
    unclear: list[str] = []
    for place in OURS:
        for kind in KINDS:
            with_it, without = on.a_step([kind], [place]), off.a_step([kind], [place])
            if with_it > without:
                # Where upstream does it too, the number depends on what each engine ran.
                told = f"{with_it:.2f} x {kind} a step in {place}, {without:.2f} with balance off"
                (unclear if without else added).append(told)
    if added:
        return Judged(Verdict.ADDED, tuple(added))
    return Judged(Verdict.UNKNOWN if unclear else Verdict.NONE_ADDED, tuple(unclear))


def _blind(mode: str, found: Seen) -> Iterable[str]:
    if len(found.ranks) < 2:  # noqa: PLR2004 - the check has two ranks
        yield f"balance {mode}: {len(found.ranks)} of 2 engine cores wrote anything"
    if not found.steps:
        yield f"balance {mode}: no step was counted"
    for name, facts in found.first.items():
        if not facts["sound"]:
            saw = facts["seen"] or "none"
            yield f"balance {mode}, {name}: of one read, one copy and one wait the counter saw {saw}"

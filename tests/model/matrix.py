"""The models that are explored, and which of them are quick enough for every run of the tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from tests.model.setup import GENERATIONS, IN_SCHEDULE, IN_STEP, NOWHERE, SCHEDULING, Setup

#: What operators do every day: requests, to any rank, at any time.
REQUESTS = [
    Setup(ranks=ranks, generation=generation, scheduling=scheduling)
    for ranks, generation, scheduling in product((2, 3), GENERATIONS, SCHEDULING)
]

#: And something else on top, for two ranks in each way of scheduling, for three in one.
EVENTS = [
    Setup(ranks=ranks, generation=generation, scheduling=scheduling, requests=1, **{event: 1})
    for ranks, ways in ((2, SCHEDULING), (3, SCHEDULING[1:2]))
    for generation, scheduling, event in product(GENERATIONS, ways, ("aborts", "pauses", "faults"))
]

#: The two lessons: each misplaced gather, in each way of scheduling.
LESSONS = [
    Setup(placement=placement, generation=generation, scheduling=scheduling, requests=1)
    for generation, placement, scheduling in product(GENERATIONS, (IN_SCHEDULE, IN_STEP), SCHEDULING)
]


def upstream(setup):
    """The same without a gather."""
    return replace(setup, placement=NOWHERE)


def quick(setup):
    """Whether it takes a second or two and runs with the tests; the others are left to ``make model``."""
    if setup.ranks == 2:
        return setup.generation != "told" or setup.scheduling != SCHEDULING[2]
    return setup.generation == "engines" and setup.scheduling != SCHEDULING[2] and not setup.pauses


def name(setup):
    """What tells one setup from another."""
    events = [f"{count} {what}{'s' * (count > 1)}" for what, count in zip(WORDS, setup.events, strict=True) if count]
    return f"{setup.ranks} ranks, {setup.scheduling}, {setup.generation}, {', '.join(events)}"


WORDS = ("request", "abort", "pause", "fault")

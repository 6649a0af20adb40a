"""The requests of the demo: a skewed load, the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Data-parallel ranks of an engine, and how many requests one of them runs at a time.
RANKS = 2
CAP = 4

#: The longest prompt and the longest answer, in tokens.
PROMPT, ANSWER = 160, 90


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        at: When it is sent, in engine steps from the start of a replay. In steps, so that the load is as
            skewed on a fast machine as on a slow one.
        rank: The rank that it is sent to.
        prompt: Tokens of its prompt.
        length: Tokens of its answer; each takes a step.
    """

    at: float
    rank: int
    prompt: int
    length: int


def skewed(requests: int, seed: int) -> list[Request]:
    """A load that keeps one rank at its cap, most of the time, and the other below.

    Rank 0 gets bursts of long answers, at least as many as its cap; rank 1 gets as many requests with
    short answers, one by one.

    Args:
        requests: How many.
        seed: Of the lengths and times.
    """
    pick = random.Random(seed)  # noqa: S311 - a load, no secret
    start, load = 0.0, list[Request]()
    while len(load) < requests:
        for _ in range(pick.randint(CAP, CAP + 3)):
            load.append(Request(start, 0, pick.randint(4, 24), pick.randint(40, ANSWER)))
            load.append(Request(start + pick.uniform(2, 90), 1, pick.randint(40, PROMPT), pick.randint(8, 30)))
        start += pick.uniform(90, 140)
    return sorted(load[:requests], key=lambda request: request.at)

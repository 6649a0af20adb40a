"""Who gets the next request: what stands in front of the ranks.

vLLM's own way is not written down a second time: ``fronts.py`` asks the lane's own method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .traces import Arrival

NAMES = ("vllm", "round-robin", "least-loaded", "skewed", "recorded")


class Seen(Protocol):
    """What a dispatcher can see of a rank."""

    @property
    def count(self) -> int:
        """Requests that run."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""


class Dispatcher(Protocol):
    """Chooses ranks."""

    def choose(self, number: int, arrival: Arrival) -> int:
        """The rank of a request."""

    def finished(self, number: int) -> None:
        """A request was answered."""

    def passes(self, now: float) -> None:
        """A step has ended, at that time."""


class RoundRobin:
    """One rank after the other."""

    def __init__(self, ranks: Sequence[Seen]) -> None:
        self._ranks = len(ranks)
        self._next = 0

    def choose(self, number: int, arrival: Arrival) -> int:  # noqa: ARG002 - which request it is does not matter
        rank = self._next
        self._next = (rank + 1) % self._ranks
        return rank

    def finished(self, number: int) -> None:
        pass

    def passes(self, now: float) -> None:
        pass


class LeastLoaded(RoundRobin):
    """The rank with the fewest requests at this very moment; of equals, one after the other.

    No real front end knows that much: it is the best that a dispatcher could do with counts.
    """

    def __init__(self, ranks: Sequence[Seen]) -> None:
        super().__init__(ranks)
        self._seen = ranks

    def choose(self, number: int, arrival: Arrival) -> int:
        start = super().choose(number, arrival)
        loads = [rank.count + rank.waiting for rank in self._seen]
        best: int = min((*range(start, self._ranks), *range(start)), key=loads.__getitem__)
        return best


class Skewed(RoundRobin):
    """One after the other, but the first rank gets half as many again: a front end that does not see the load."""

    def choose(self, number: int, arrival: Arrival) -> int:
        extra = number % (2 * self._ranks + 1) == 0
        return 0 if extra else super().choose(number, arrival)


class Recorded(RoundRobin):
    """The rank that the trace says, or one after the other where it says none."""

    def choose(self, number: int, arrival: Arrival) -> int:
        return arrival.rank if arrival.rank >= 0 else super().choose(number, arrival)

"""Medians, ratios and differences of what was measured in turns, each with an interval that says how sure it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

#: Resamplings. The 95 % interval of a thousand is stable to a few per cent of its own width.
DRAWS = 1000
#: Beyond so many rounds the interval is narrow anyway, and resampling them all would take longer than measuring.
ROUNDS = 400


@dataclass(frozen=True)
class Interval:
    """A figure, and the 95 % bootstrap interval around it."""

    value: float
    low: float
    high: float


def middle(samples: Sequence[float]) -> Interval:
    """The median.

    Args:
        samples: At least one.
    """
    return _bootstrap(list(zip(samples, strict=True)), lambda rounds: median(one for (one,) in rounds))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The ratio of two medians; the n-th sample of one was measured beside the n-th of the other."""

    def of(rounds: Sequence[tuple[float, ...]]) -> float:
        return median(one for one, _ in rounds) / median(other for _, other in rounds)

    return _bootstrap(list(zip(ours, theirs, strict=True)), of)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """How much more one median is than another; samples as for :func:`ratio`."""

    def of(rounds: Sequence[tuple[float, ...]]) -> float:
        return median(one for one, _ in rounds) - median(other for _, other in rounds)

    return _bootstrap(list(zip(ours, theirs, strict=True)), of)


def slope(levels: Sequence[Sequence[float]], bases: Sequence[Sequence[float]]) -> Interval:
    """How much more a cost is at the last level than at the first; each level has its own base.

    Args:
        levels: Samples with the cost, a sequence a level.
        bases: Samples without it, beside those.
    """
    last, first = difference(levels[-1], bases[-1]), difference(levels[0], bases[0])
    value = last.value - first.value
    # The two are independent, so the squares of the halves add up.
    below = ((last.value - last.low) ** 2 + (first.high - first.value) ** 2) ** 0.5
    above = ((last.high - last.value) ** 2 + (first.value - first.low) ** 2) ** 0.5
    return Interval(value, value - below, value + above)


def _bootstrap(rounds: Sequence[tuple[float, ...]], of: Callable[[Sequence[tuple[float, ...]]], float]) -> Interval:
    """Whole rounds are drawn, so what hit all of a round alike stays together."""
    value = of(rounds)
    pick = random.Random(0)  # noqa: S311 - resampling, no secret; the same samples give the same interval
    drawn = sorted(of(pick.choices(rounds, k=min(len(rounds), ROUNDS))) for _ in range(DRAWS))
    # Fewer draws than rounds make the spread wider than it is: by the root of their ratio.
    narrow = (min(len(rounds), ROUNDS) / len(rounds)) ** 0.5
    low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS) - 1]
    return Interval(value, value - (value - low) * narrow, value + (high - value) * narrow)

"""What one run measured: replays with balance off and on, pooled by mode; how far the replays lie apart is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .load import CAP, RANKS


class Step(NamedTuple):
    """One engine step of one rank.

    Attributes:
        at: When it ended, in seconds of ``time.monotonic``.
        running: Requests that run, at its end.
        waiting: Requests that wait, at its end.
        frozen: 1 if the gate stopped admission in it while a request waited and the rank had room.
        admitted: Requests that it admitted.
    """

    at: float
    running: int
    waiting: int
    frozen: int
    admitted: int


@dataclass(frozen=True)
class Answer:
    """How one request was answered: seconds to its first token, and from each token to the next."""

    rank: int
    first: float
    token: float
    whole: bool


@dataclass
class Replay:
    """The load, sent once to one engine.

    Attributes:
        mode: ``off`` or ``on``.
        sent: How many requests.
        started: When, in seconds of ``time.monotonic``.
        seconds: How long it took; 0 while it runs.
        answers: One for each request that is answered.
        steps: For each rank, its steps. The ranks step together: equal positions are the same step.
    """

    mode: str
    sent: int
    started: float
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=lambda: [[] for _ in range(RANKS)])

    def together(self) -> list[tuple[Step, ...]]:
        """The steps of all ranks side by side, up to the last one with something to do."""
        rows = list(zip(*self.steps, strict=False))
        while rows and not any(step.running or step.waiting or step.admitted for step in rows[-1]):
            rows.pop()
        return rows


@dataclass(frozen=True)
class Measured:
    """A figure of one mode: over all replays, and for each of them."""

    value: float
    each: tuple[float, ...]

    @property
    def spread(self) -> float:
        """How far the replays of the mode lie apart."""
        return max(self.each) - min(self.each)


@dataclass(frozen=True)
class Figures:
    """The replays of one mode."""

    mode: str
    replays: tuple[Replay, ...]

    def _over(self, figure: Callable[[Sequence[Replay]], float]) -> Measured:
        return Measured(figure(self.replays), tuple(figure([replay]) for replay in self.replays))

    @property
    def sent(self) -> int:
        return sum(replay.sent for replay in self.replays)

    @property
    def answered(self) -> int:
        return sum(answer.whole for replay in self.replays for answer in replay.answers)

    @property
    def steps(self) -> int:
        return sum(len(replay.together()) for replay in self.replays)

    @property
    def seconds(self) -> Measured:
        """The mean length of a replay."""
        return self._over(lambda replays: mean([replay.seconds for replay in replays]))

    @property
    def imbalance(self) -> Measured:
        """How many more requests the fuller rank runs than the other: the mean over all steps."""
        return self._over(
            lambda replays: mean(
                [max(s.running for s in row) - min(s.running for s in row) for r in replays for row in r.together()]
            )
        )

    @property
    def admitting(self) -> Measured:
        """The share of steps in which some rank admitted a request, and so all waited for its prompt."""
        return self._over(
            lambda replays: mean([any(step.admitted for step in row) for r in replays for row in r.together()])
        )

    def frozen(self, rank: int) -> int:
        return sum(row[rank].frozen for replay in self.replays for row in replay.together())

    def full(self, rank: int) -> float:
        """The share of steps at whose end the rank was at its cap."""
        return mean([row[rank].running >= CAP for replay in self.replays for row in replay.together()])

    def first(self, rank: int, share: float | None = None) -> Measured:
        """Seconds to the first token: the mean, or the percentile of that share."""
        return self._answers(lambda answer: answer.first, rank, share)

    def token(self, rank: int, share: float | None = None) -> Measured:
        """Seconds from each token to the next: the mean, or the percentile of that share."""
        return self._answers(lambda answer: answer.token, rank, share)

    def _answers(self, value: Callable[[Answer], float], rank: int, share: float | None) -> Measured:
        def figure(replays: Sequence[Replay]) -> float:
            values = [value(answer) for replay in replays for answer in replay.answers if answer.rank == rank]
            return mean(values) if share is None else percentile(values, share)

        return self._over(figure)


def mean(values: Sequence[float]) -> float:
    """The mean; not a number, where there is nothing to take it of."""
    return sum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan

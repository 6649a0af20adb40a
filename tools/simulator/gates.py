"""How what one rank runs reaches the others: not at all, by the patch's own gate, or as the gate is often mistaken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .ranks import LaneRank


class Off:
    """No rank hears of another: upstream's behaviour."""

    freezes = False

    def __init__(self, ranks: Sequence[LaneRank]) -> None:
        pass

    def gathered(self, counts: Sequence[int]) -> None:
        pass


class Leader:
    """The largest count, where the gate looks for one tensor a rank.

    The gate asks for the largest of what these say, so one that says the largest is as good as all of them: it is
    what makes 512 ranks cost no more for each than two. That it is as good is tested beside the tensors.
    """

    def __init__(self) -> None:
        self.count = 0

    def item(self) -> int:
        return self.count


class On:
    """The gate. All ranks have heard the same, so they share what they have heard."""

    freezes = True

    def __init__(self, ranks: Sequence[LaneRank]) -> None:
        self._leader = Leader()
        heard = [self._leader]
        for rank in ranks:
            rank.scheduler.balance_queue = heard

    def gathered(self, counts: Sequence[int]) -> None:
        self._leader.count = max(counts)


class Tensors:
    """The gate once more, with the tensors that the gather fills. All ranks share them, as they are alike."""

    freezes = True

    def __init__(self, ranks: Sequence[LaneRank]) -> None:
        import torch

        self._torch = torch
        self._counts = torch.zeros(len(ranks), dtype=torch.int, device="cpu")
        queue = list(self._counts.split(1))
        for rank in ranks:
            rank.scheduler.balance_queue = queue

    def gathered(self, counts: Sequence[int]) -> None:
        self._counts.copy_(self._torch.tensor(counts, dtype=self._torch.int))


class CatchUp:
    """A counter-example: ranks above the mean wait until the others have caught up, instead of all waiting."""

    freezes = False

    def __init__(self, ranks: Sequence[LaneRank]) -> None:
        self._ranks = ranks

    def gathered(self, counts: Sequence[int]) -> None:
        mean = sum(counts) / len(counts)
        for rank, count in zip(self._ranks, counts, strict=True):
            rank.scheduler.held = count > mean


def hold(scheduler: Any, cap: str, count: Callable[[Any], int]) -> None:
    """Let a scheduler admit nobody while it is held: for one call its cap is the count that it has.

    Args:
        scheduler: One of the lane's own.
        cap: The attribute with which it compares its count.
        count: Counts what it runs.
    """
    schedule = scheduler.schedule
    scheduler.held = False

    def held(*args: Any, **kwargs: Any) -> Any:
        allowed = getattr(scheduler, cap)
        if scheduler.held:
            setattr(scheduler, cap, min(allowed, count(scheduler)))
        try:
            return schedule(*args, **kwargs)
        finally:
            setattr(scheduler, cap, allowed)

    scheduler.schedule = held

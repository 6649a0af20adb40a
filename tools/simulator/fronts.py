"""What stands in front of real schedulers: vLLM's own choice of a rank, asked of the lane, beside the simpler ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

from .dispatch import Dispatcher, LeastLoaded, Recorded, RoundRobin, Skewed
from .ranks import LaneRank
from .traces import Arrival

#: Seconds after which vLLM's coordinator tells the front end the counts anew.
COUNTS_EVERY = 0.1


class VllmsOwn:
    """The lane's own choice: the very method of its client, on counts that are as old as they are there."""

    def __init__(self, ranks: Sequence[LaneRank]) -> None:
        from vllm.v1.engine.core_client import DPLBAsyncMPClient

        self._choose = DPLBAsyncMPClient.get_core_engine_for_request
        self._ranks, self._told = ranks, 0.0
        self._client = SimpleNamespace(
            core_engines=list(range(len(ranks))), client_count=1, reqs_in_flight={}, engine_inflight=Counter(),
            eng_start_index=0,
        )  # fmt: skip
        self._usage = True
        self._tell()

    def choose(self, number: int, arrival: Arrival) -> int:  # noqa: ARG002 - vLLM does not look at lengths
        request = SimpleNamespace(request_id=str(number), data_parallel_rank=None, pooling_params=None)
        try:
            chosen: int = self._choose(self._client, request)
        except ValueError:
            if not self._usage:
                raise
            self._usage = False  # this lane's client weighs only the requests of a rank, not its KV cache
            self._tell()
            chosen = self._choose(self._client, request)
        return chosen

    def finished(self, number: int) -> None:
        rank = self._client.reqs_in_flight.pop(str(number))
        self._client.engine_inflight[rank] -= 1

    def passes(self, now: float) -> None:
        if now - self._told >= COUNTS_EVERY:
            self._told = now
            self._tell()

    def _tell(self) -> None:
        def seen(rank: LaneRank) -> list[float]:
            return [rank.waiting, len(rank.scheduler.running), *([rank.usage] if self._usage else [])]

        self._client.lb_engines = [seen(rank) for rank in self._ranks]


def dispatcher(name: str, ranks: Sequence[LaneRank]) -> Dispatcher:
    """What stands in front of the ranks, by its name."""
    known: dict[str, type[VllmsOwn | RoundRobin]] = {
        "vllm": VllmsOwn,
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "skewed": Skewed,
        "recorded": Recorded,
    }
    return known[name](ranks)

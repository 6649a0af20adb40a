"""The real thing: a lane's schedulers, one a rank, as the engine cores would build and drive them.

What stands around a scheduler is made as small as it may be, so that little but its own work takes time: prefix
caching and statistics are off, the KV cache has as many blocks as the longest requests need, prompts of one length
share their tokens, and all that decode share one answer. What differs between lanes is asked of the lane's own code.
"""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from balance_patcher.installation import Installation, install
from balance_patcher.live_engine import TINY_MOE

from .dispatch import Dispatcher, LeastLoaded, RoundRobin
from .events import Answered, Rank, Work
from .traces import Arrival

#: Off and on are the patch; the third is what the gate is often taken for, as a counter-example.
GATES = ("off", "on", "catch-up")

#: Every token that is sampled, and every token of a prompt. Nothing is computed from them.
TOKEN = 7

#: Seconds after which vLLM's coordinator tells the front end the counts anew.
COUNTS_EVERY = 0.1


@dataclass(frozen=True)
class Shape:
    """How each scheduler is configured.

    Attributes:
        seqs: Requests that run at a time.
        tokens: Tokens of a step.
        longest: Tokens that the model takes.
        block: Tokens of a KV cache block.
        blocks: KV cache blocks of a rank.
    """

    seqs: int
    tokens: int
    longest: int
    block: int
    blocks: int


# -- one rank ----------------------------------------------------------------------------------------


class LaneRank:
    """A real scheduler, and a model that answers it.

    Args:
        scheduler: A ``vllm.v1.core.sched.scheduler.Scheduler``.
        made: Makes the request of a number.
        count: Counts what a scheduler runs, as the gate's delta found it.
    """

    def __init__(self, scheduler: Any, made: Requests, count: Callable[[Any], int]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.scheduler = scheduler
        self._made, self._count, self._outputs = made, count, ModelRunnerOutput
        self._requests: dict[str, Any] = {}
        self._prefilling: dict[str, Any] = {}  # admitted, and not yet caught up with their own tokens
        self._scheduled: Any = None
        self._late: list[str] = []
        self._caught: list[str] = []

    @property
    def count(self) -> int:
        return self._count(self.scheduler)

    @property
    def waiting(self) -> int:
        return len(self._requests) - len(self.scheduler.running)

    def add(self, number: int, arrival: Arrival) -> None:
        request = self._made(number, arrival)
        self._requests[request.request_id] = request
        self.scheduler.add_request(request)

    def step(self) -> Work:
        scheduled = self._scheduled = self.scheduler.schedule()
        tokens = scheduled.num_scheduled_tokens
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        preempted = scheduled.preempted_req_ids or ()
        prefilling = self._prefilling
        for new in scheduled.scheduled_new_reqs:
            prefilling[new.req_id] = self._requests[new.req_id]
        for name in resumed:
            prefilling[name] = self._requests[name]
        for name in preempted:
            prefilling.pop(name, None)
        self._late, self._caught = [], []
        for name, request in prefilling.items():
            if name in tokens:
                late = request.num_computed_tokens < request.num_tokens
                (self._late if late else self._caught).append(name)
        decode = len(tokens) - len(self._late) - len(self._caught)
        admitted = len(scheduled.scheduled_new_reqs) + len(resumed)
        return Work(scheduled.total_num_scheduled_tokens - decode, decode, admitted, len(preempted))

    def answer(self) -> Answered:
        scheduled, scheduler = self._scheduled, self.scheduler
        names = list(scheduled.num_scheduled_tokens)
        sampled = [[TOKEN]] * len(names)
        places = dict(zip(names, range(len(names)), strict=True))
        for name in self._late:
            sampled[places[name]] = []
        output = self._outputs(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
        scheduler.update_from_output(scheduled, output)
        # One that was preempted has more tokens than one when it has caught up.
        first = [int(name) for name in self._caught if self._prefilling.pop(name).num_output_tokens == 1]
        # What ended in this step is what the next one tells the workers to forget.
        finished = [(int(name), self._requests.pop(name).num_output_tokens) for name in scheduler.finished_req_ids]
        return Answered(first, finished)


class Requests:
    """Makes requests. Prompts of one length share their tokens, answers of one length their sampling parameters."""

    def __init__(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._class = Request
        self._fixed = _accepted(Request.__init__, pooling_params=None, eos_token_id=2)
        self._prompt = functools.cache(lambda length: [TOKEN] * length)
        self._params = functools.cache(lambda length: SamplingParams(max_tokens=length, ignore_eos=True))

    def __call__(self, number: int, arrival: Arrival) -> Any:
        return self._class(
            request_id=str(number), prompt_token_ids=self._prompt(arrival.prompt),
            sampling_params=self._params(arrival.output), arrival_time=arrival.at, **self._fixed,
        )  # fmt: skip


def _accepted(function: Any, **wanted: Any) -> dict[str, Any]:
    """Those arguments that a function takes on this lane."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in wanted.items() if name in parameters}


# -- the gates ---------------------------------------------------------------------------------------


class Off:
    """No rank hears of another: upstream's behaviour."""

    freezes = False

    def __init__(self, ranks: Sequence[LaneRank]) -> None:
        pass

    def gathered(self, counts: Sequence[int]) -> None:
        pass


class On:
    """The gate. Each scheduler's ``balance_queue`` holds one tensor a rank, as the gather leaves it.

    The gather leaves the same counts in all of them. So all share the tensors here, which are views of one, and one
    copy brings the counts of a step to all ranks.
    """

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


# -- the group ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The ranks of one simulation."""

    ranks: Sequence[LaneRank]
    gate: Off | On | CatchUp
    cap: int


def group(number: int, gate: str, shape: Shape, class_: type | None = None) -> Group:
    """As many schedulers as there are ranks, with one way to admit.

    Args:
        number: How many.
        gate: One of ``GATES``.
        shape: How each is configured.
        class_: Another scheduler than that of this process.
    """
    installation = install("balance")
    from vllm.v1.core.sched.scheduler import Scheduler

    cap, count = cap_attribute(installation), Scheduler._balance_count  # noqa: SLF001 - our own
    chosen = class_ or Scheduler
    config = _config(number, shape, enabled=gate == "on")
    arguments = _arguments(config, shape)
    made = Requests()
    ranks = [LaneRank(chosen(**arguments, kv_cache_config=_cache(shape)), made, count) for _ in range(number)]
    if gate == "catch-up":
        for rank in ranks:
            hold(rank.scheduler, cap, count)
    gates: dict[str, type[Off | On | CatchUp]] = {"off": Off, "on": On, "catch-up": CatchUp}
    return Group(ranks, gates[gate](ranks), getattr(ranks[0].scheduler, cap))


def cap_attribute(installation: Installation) -> str:
    """The attribute that upstream's own admission stop compares with, as the gate's delta found it."""
    exports: dict[str, str] = {}
    for placement in installation.built.plan.placements:
        exports |= placement.exports
    return exports["_balance_cap"].rpartition(".")[2]


def _config(ranks: int, shape: Shape, *, enabled: bool) -> Any:
    """One configuration for all ranks: a scheduler reads nothing of it that differs between them."""
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig

    model = _model(shape.longest)
    scheduler = SchedulerConfig(
        max_num_seqs=shape.seqs, max_num_batched_tokens=shape.tokens, max_model_len=shape.longest,
        enable_chunked_prefill=True, async_scheduling=False, is_encoder_decoder=False,
    )  # fmt: skip
    cache = CacheConfig(block_size=shape.block, enable_prefix_caching=False)
    cache.num_gpu_blocks = shape.blocks
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduler, device_config=DeviceConfig("cpu"),
        additional_config={"enable_balance_scheduling": True} if enabled else {},
    )  # fmt: skip
    config.parallel_config.data_parallel_size = ranks
    return config


#: Folders of model configurations: vLLM looks into them again for each of its own. They go with the process.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _model(longest: int) -> Any:
    from vllm.config import ModelConfig

    folder = tempfile.TemporaryDirectory(prefix="balance-simulate-")
    _FOLDERS.append(folder)
    description = json.dumps(TINY_MOE | {"max_position_embeddings": longest})
    (Path(folder.name) / "config.json").write_text(description, encoding="utf-8")
    return ModelConfig(
        model=folder.name, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest, enforce_eager=True
    )


def _cache(shape: Shape) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    layer = FullAttentionSpec(block_size=shape.block, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    return KVCacheConfig(
        num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
    )


def _arguments(config: Any, shape: Shape) -> dict[str, Any]:
    from vllm.v1.structured_output import StructuredOutputManager

    return {
        "vllm_config": config,
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": shape.block,
        "log_stats": False,
    }


# -- the dispatcher ----------------------------------------------------------------------------------


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

    def choose(self, number: int) -> int:
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
            usage = [rank.scheduler.kv_cache_manager.usage] if self._usage else []
            return [rank.waiting, len(rank.scheduler.running), *usage]

        self._client.lb_engines = [seen(rank) for rank in self._ranks]


def dispatcher(name: str, ranks: Sequence[LaneRank]) -> Dispatcher:
    """What stands in front of the ranks, by its name."""
    known: dict[str, Callable[[Sequence[LaneRank]], Dispatcher]] = {
        "vllm": VllmsOwn,
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
    }
    return known[name](ranks)


def needed_blocks(trace: Sequence[Arrival], seqs: int, block: int) -> int:
    """KV cache blocks with which no rank ever preempts: its share of the longest requests, and upstream's own block."""
    longest = max(-(-(one.prompt + one.output) // block) for one in trace)
    return seqs * (longest + 1) + 1


__all__ = ["GATES", "Group", "LaneRank", "Rank", "Shape", "dispatcher", "group", "needed_blocks"]

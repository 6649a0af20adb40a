"""One rank: a real scheduler, driven as its engine core would, and a model that answers it.

With asynchronous scheduling the engine core decides on a step before it has the tokens of the one before: its queue
of batches is two long. Which of the two a step waits for is upstream's own rule (``EngineCore.step_with_batch_queue``).
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from .events import Answered, Work
from .traces import Arrival

#: Every token that is sampled, and every token of a prompt. Nothing is computed from them.
TOKEN = 7

#: Batches in flight with asynchronous scheduling, and without.
ASYNCHRONOUS, SYNCHRONOUS = 2, 1


class Batch(NamedTuple):
    """What a scheduler has decided on: its output, requests that do not catch up in it, and those that do."""

    scheduled: Any
    late: list[str]
    caught: list[str]


class LaneRank:
    """A real scheduler, and a model that answers it.

    Args:
        scheduler: A ``vllm.v1.core.sched.scheduler.Scheduler``.
        made: Makes the request of a number.
        count: Counts what a scheduler runs, as the gate's delta found it.
        flight: Batches that may be in flight.
        usage: Counts the share of the KV cache that is in use; without it, the scheduler's own cache is asked.
    """

    def __init__(
        self, scheduler: Any, made: Requests, count: Callable[[Any], int], flight: int = SYNCHRONOUS,
        usage: Callable[[Any], float] | None = None,
    ) -> None:  # fmt: skip
        from vllm.v1.outputs import ModelRunnerOutput

        self.scheduler = scheduler
        self._made, self._count, self._outputs = made, count, ModelRunnerOutput
        self._flight, self._usage = flight, usage
        self._requests: dict[str, Any] = {}
        self._prefilling: dict[str, Any] = {}  # admitted, and not yet caught up with their own tokens
        self._batches: deque[Batch] = deque()
        self._awaited: Batch | None = None

    @property
    def count(self) -> int:
        return self._count(self.scheduler)

    @property
    def waiting(self) -> int:
        return len(self._requests) - len(self.scheduler.running)

    @property
    def usage(self) -> float:
        """The share of the KV cache that is in use."""
        return self._usage(self.scheduler) if self._usage is not None else float(self.scheduler.kv_cache_manager.usage)

    def add(self, number: int, arrival: Arrival) -> None:
        request = self._made(number, arrival)
        self._requests[request.request_id] = request
        self.scheduler.add_request(request)

    def step(self) -> Work:
        scheduled = self.scheduler.schedule()
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
        late: list[str] = []
        caught: list[str] = []
        for name, request in prefilling.items():
            if name in tokens:
                (late if request.num_computed_tokens < request.num_tokens else caught).append(name)
        for name in caught:
            del prefilling[name]
        self._batches.append(Batch(scheduled, late, caught))
        # Something is in flight, so the next decision comes before its tokens.
        full = len(self._batches) == self._flight
        waits = full or not (tokens or self.scheduler.has_requests())
        self._awaited = self._batches.popleft() if waits else None
        admitted = len(scheduled.scheduled_new_reqs) + len(resumed)
        if self._awaited is None:
            return Work(0, 0, admitted, len(preempted), awaited=False)
        decode = len(self._awaited.scheduled.num_scheduled_tokens) - len(self._awaited.late) - len(self._awaited.caught)
        prefill = self._awaited.scheduled.total_num_scheduled_tokens - decode
        return Work(prefill, decode, admitted, len(preempted))

    def answer(self) -> Answered:
        if self._awaited is None:
            return Answered((), ())
        (scheduled, late, caught), scheduler = self._awaited, self.scheduler
        names = list(scheduled.num_scheduled_tokens)
        sampled = [[TOKEN]] * len(names)
        places = dict(zip(names, range(len(names)), strict=True))
        for name in late:
            sampled[places[name]] = []
        output = self._outputs(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
        scheduler.update_from_output(scheduled, output)
        # One that was preempted before has more tokens than one; one that was preempted since has none.
        first = [int(name) for name in caught if self._requests[name].num_output_tokens == 1]
        # What ended in this step is what the next one tells the workers to forget.
        finished = [(int(name), self._requests.pop(name).num_output_tokens) for name in scheduler.finished_req_ids]
        if not self._requests:
            self._batches.clear()  # an empty one: the engine core takes it from its queue before it rests
        return Answered(first, finished)


class Requests:
    """Makes requests. Prompts of one length share their tokens, answers of one length their sampling parameters."""

    def __init__(self) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._class = Request
        self._fixed = accepted(Request.__init__, pooling_params=None, eos_token_id=2)
        self._prompt = functools.cache(lambda length: [TOKEN] * length)
        self._params = functools.cache(lambda length: SamplingParams(max_tokens=length, ignore_eos=True))

    def __call__(self, number: int, arrival: Arrival) -> Any:
        return self._class(
            request_id=str(number), prompt_token_ids=self._prompt(arrival.prompt),
            sampling_params=self._params(arrival.output), arrival_time=arrival.at, **self._fixed,
        )  # fmt: skip


def accepted(function: Any, **wanted: Any) -> dict[str, Any]:
    """Those arguments that a function takes on this lane."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in wanted.items() if name in parameters}

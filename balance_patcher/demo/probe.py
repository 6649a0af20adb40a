"""Plugged into the demo's engine cores: makes a mixture of experts run on the CPU, and writes down each step.

A general plugin of vLLM's, for the demo's processes only. vLLM's CPU communicator lacks the two ragged
collectives that dispatch and combine use under data parallelism; here they are over gloo, slow and exact.
Runs inside vLLM, on the standard library and what vLLM has loaded.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

#: The environment variable that names the folder of the samples.
FOLDER = "BALANCE_PATCHER_DEMO_FOLDER"

#: Seconds between two writes. A step takes some milliseconds, and must not wait for a file each time.
INTERVAL = 0.1


def register() -> None:
    """The plugin; vLLM may call it more than once in a process."""
    give_collectives()
    watch()


def give_collectives() -> None:
    """Give vLLM's CPU communicator ``all_gatherv`` and ``reduce_scatterv``, if it has none of its own."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        counts = sizes or [input_.shape[0]] * self.world_size
        padded = input_.new_zeros((max(counts), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:  # noqa: ARG001
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.device_group)
        counts = sizes or [total.shape[0] // self.world_size] * self.world_size
        return total.split(counts)[self.rank_in_group].clone()

    for function in (all_gatherv, reduce_scatterv):
        if function.__name__ not in vars(CpuCommunicator):
            setattr(CpuCommunicator, function.__name__, function)


def watch() -> None:
    """Let each engine core of this process record its steps, from the start of its busy loop."""
    from vllm.v1.engine.core import DPEngineCoreProc

    loop = DPEngineCoreProc.run_busy_loop
    if getattr(loop, "recorded", False):
        return

    def run_busy_loop(self: Any) -> Any:
        file = Path(os.environ[FOLDER]) / f"rank-{self.dp_rank}.jsonl"
        with file.open("a", encoding="utf-8", buffering=1) as out:
            Recorder(self, out)
            return loop(self)

    run_busy_loop.recorded = True  # type: ignore[attr-defined]
    DPEngineCoreProc.run_busy_loop = run_busy_loop


class Recorder:
    """Records an engine core's steps: one line of JSON for some steps, at most every :data:`INTERVAL`.

    A line is ``{"steps": [[at, running, waiting, frozen, admitted], …], "idle": …}``: ``at`` in seconds of
    ``time.monotonic``; requests running and waiting at the end of the step; whether the gate stopped
    admission in it; how many requests it admitted. ``idle`` where no rank has any work left. The ranks step
    together, so the n-th step of one is the n-th of all.

    Both methods are put on the instances, around what runs there, with balance on and off alike.
    """

    def __init__(self, engine: Any, out: TextIO) -> None:
        self._scheduler, self._out = engine.scheduler, out
        self._steps: list[tuple[float, int, int, int, int]] = []
        self._written = 0.0
        self._frozen = self._admitted = 0
        self._schedule, self._agree = engine.scheduler.schedule, engine._has_global_unfinished_reqs  # noqa: SLF001
        engine.scheduler.schedule = self._on_schedule
        engine._has_global_unfinished_reqs = self._on_agree  # noqa: SLF001

    def _on_schedule(self, *args: Any, **kwargs: Any) -> Any:
        shut = gate_shut(self._scheduler)
        output = self._schedule(*args, **kwargs)
        self._admitted = len(output.scheduled_new_reqs)
        self._frozen = int(shut and not self._admitted)
        return output

    def _on_agree(self, *args: Any, **kwargs: Any) -> Any:
        """Around the ranks' synchronisation: the one place where each of them passes once a step."""
        more = self._agree(*args, **kwargs)
        now = time.monotonic()
        running, waiting = self._scheduler.get_request_counts()
        self._steps.append((round(now, 4), running, waiting, self._frozen, self._admitted))
        self._frozen = self._admitted = 0
        if not more or now - self._written > INTERVAL:
            self._out.write(json.dumps({"steps": self._steps, "idle": not more}) + "\n")
            self._steps, self._written = [], now
        return more


def gate_shut(scheduler: Any) -> bool:
    """Whether requests wait, this rank has room for one, and another rank's count is at the cap."""
    queue = getattr(scheduler, "balance_queue", None)
    if queue is None or not scheduler.get_request_counts()[1]:
        return False
    return bool(scheduler._balance_count() < scheduler._balance_cap() <= max(int(count) for count in queue))  # noqa: SLF001

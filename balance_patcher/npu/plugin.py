"""Plugged into the check's engine cores and workers: counts in each step, while a file says so, and writes it down.

A general plugin of vLLM's, for the check's processes only. Runs inside vLLM, on the standard library and what vLLM has
loaded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from .counter import Counts, mode, passes, self_test, wrap_waits

#: The environment variables: where to write, and which device is counted.
FOLDER, DEVICE = "BALANCE_PATCHER_NPU_FOLDER", "BALANCE_PATCHER_NPU_DEVICE"

#: This file says what is done: nothing, count, or count with the counts of the ranks on the device, as a control: the
#: gate then reads the device, and a check that does not see that sees nothing. Without it gathers are timed.
PHASE = "phase"
COUNT, CONTROL = "count", "control"

#: Seconds between two writes of an engine core.
INTERVAL = 0.2


def register() -> None:
    """The plugin; vLLM may call it more than once in a process."""
    if os.environ[DEVICE] == "cpu":
        from balance_patcher.demo.probe import give_collectives

        with contextlib.suppress(ImportError):  # another device than the CPU runs the model, and brings its own
            give_collectives()
    watch_engines()
    watch_workers()


def watch_engines() -> None:
    """Let each engine core of this process record its steps, from the start of its busy loop."""
    from vllm.v1.engine.core import DPEngineCoreProc

    loop = DPEngineCoreProc.run_busy_loop
    if getattr(loop, "counted", False):
        return

    @functools.wraps(loop)
    def run_busy_loop(self: Any) -> Any:
        Recorder(self)
        return loop(self)

    run_busy_loop.counted = True  # type: ignore[attr-defined]
    DPEngineCoreProc.run_busy_loop = run_busy_loop


def watch_workers() -> None:
    """Let each worker process of its own count from the start of its loop; elsewhere the engine core's is the loop."""
    try:
        from vllm.v1.executor.multiproc_executor import WorkerProc
    except ImportError:
        return
    loop = WorkerProc.worker_busy_loop
    if getattr(loop, "counted", False):
        return

    @functools.wraps(loop)
    def worker_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        writer = Writer(f"worker-{os.getpid()}")
        writer.begin()
        run = self.worker.execute_model

        def execute_model(*given: Any, **named: Any) -> Any:
            with writer.step():
                return run(*given, **named)

        # The worker's own object hands attributes on; its loop looks methods up by name each time.
        self.worker.execute_model = execute_model
        return loop(self, *args, **kwargs)

    worker_busy_loop.counted = True  # type: ignore[attr-defined]
    WorkerProc.worker_busy_loop = worker_busy_loop


class Writer:
    """Counts in one process, and the file that they go to: a line on the process, then one every some steps.

    Attributes:
        counts: What counts.
        phase: What is done now.
    """

    def __init__(self, name: str) -> None:
        self.folder = Path(os.environ[FOLDER])
        self.counts = Counts(os.environ[DEVICE])
        self._file = self.folder / f"{name}.jsonl"
        self._steps, self._written = 0, time.monotonic()
        self._mode: Any = None
        self.phase = ""
        self._gathers: list[int] = []

    def begin(self, **facts: Any) -> None:
        """Wrap, try the counter, and say so."""
        waits = wrap_waits(self.counts)
        seen = self_test(self.counts)
        sound = passes(seen, self.counts.device)
        self.write(waits=waits, seen=seen, sound=sound, hardware=hardware(self.counts.device), **facts)

    def write(self, **what: Any) -> None:
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(what) + "\n")

    def turn(self) -> None:
        """A step is over. What is asked for now holds for the next one."""
        if self._mode is not None:
            self._steps += 1
        wanted = self._wanted()
        if wanted != self.phase:
            self.counts.open = False
            if self._mode is not None:
                self._mode.__exit__(None, None, None)
                self._mode = None
            self.flush()
            self.phase = wanted
            if wanted:
                self._mode = mode(self.counts)
                self._mode.__enter__()
                self.counts.open = True
        elif time.monotonic() - self._written > INTERVAL:
            self.flush()

    def _wanted(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / PHASE).read_text(encoding="utf-8")
        return ""

    def gathered(self, nanoseconds: int) -> None:
        """A gather took so long; those of a step that is counted are not kept, because counting takes time."""
        if not self.phase:
            self._gathers.append(nanoseconds)

    def flush(self) -> None:
        taken = self.counts.taken()
        if self._steps or self._gathers:
            self.write(phase=self.phase, steps=self._steps, counts=taken, gathers=self._gathers)
        self._steps, self._gathers, self._written = 0, [], time.monotonic()

    @contextlib.contextmanager
    def step(self) -> Any:
        """One call in a loop that is not ours."""
        try:
            yield
        finally:
            self.turn()


class Recorder:
    """Records an engine core's steps, around what runs there, with balance on and off alike.

    A step ends where the ranks have agreed whether there is work: the one place where each of them passes once a step.
    """

    def __init__(self, engine: Any) -> None:
        self._writer = writer = Writer(f"rank-{engine.dp_rank}")
        scheduler = engine.scheduler
        writer.begin(
            enabled=bool(getattr(scheduler, "_balance_enabled", False)), scheduler=type(scheduler).__qualname__,
            schedule=type(scheduler).schedule.__code__.co_filename, digest=digest(),
        )  # fmt: skip
        self._scheduler, self._schedule = scheduler, writer.counts.at("schedule", scheduler.schedule)
        scheduler.schedule = self._on_schedule
        self._agree = writer.counts.at("agree", engine._has_global_unfinished_reqs)  # noqa: SLF001
        engine._has_global_unfinished_reqs = self._on_agree  # noqa: SLF001
        gather = getattr(scheduler, "balance_gather", None)
        if gather is not None:
            self._gather = writer.counts.at("gather", gather)
            scheduler.balance_gather = self._on_gather

    def _on_schedule(self, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self._scheduler, "balance_queue", None)
        if own is None or self._writer.phase != CONTROL:
            return self._schedule(*args, **kwargs)
        self._scheduler.balance_queue = [one.clone().to(self._writer.counts.device) for one in own]
        try:
            return self._schedule(*args, **kwargs)
        finally:
            self._scheduler.balance_queue = own

    def _on_gather(self, *args: Any) -> None:
        begin = time.perf_counter_ns()
        self._gather(*args)
        self._writer.gathered(time.perf_counter_ns() - begin)

    def _on_agree(self, *args: Any, **kwargs: Any) -> Any:
        more = self._agree(*args, **kwargs)
        self._writer.turn()
        if not more:
            self._writer.flush()
        return more


def digest() -> str:
    """The digest of the texts that run for balance here; empty where it is not installed."""
    from balance_patcher.inspection import status

    return next((one.running or "" for one in status().features if one.name == "balance" and one.installed), "")


def hardware(device: str) -> str:
    """What the device calls itself."""
    import torch

    name = getattr(getattr(torch, device, None), "get_device_name", None)
    return str(name()) if name is not None else device

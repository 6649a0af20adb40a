"""Plugged into real engine cores: writes down what each of their steps computed, and how long it took.

A general plugin of vLLM's; ``python -m tools.simulate recorder FOLDER`` makes a folder that plugs it in. Each rank
leaves ``steps-RANK.csv`` in ``$BALANCE_STEPS``, a line for each step of a wave. ``fit`` takes the files of all ranks.

A step lasts from the end of the one before it to the point where the ranks agree whether anybody has work: the one
place that each of them passes once a step. Where there is no such point (one rank, or a dense model), nothing is
recorded. The methods are wrapped on the instances, around what runs there. Runs inside vLLM, on the standard library.
"""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any, TextIO

from balance_patcher.demo.probe import gate_shut

#: The environment variable that names the folder of the files.
FOLDER = "BALANCE_STEPS"

#: ``step`` counts the steps of a process: ranks step together, so equal numbers are one step of all. A wave's last
#: steps run nothing. ``frozen``: the gate stopped this rank, which had room and requests waiting.
COLUMNS = (
    "step", "wave", "prefill_tokens", "decode_batch", "seconds", "running", "waiting", "admitted", "frozen",
)  # fmt: skip


def register() -> None:
    """The plugin; vLLM may call it more than once in a process."""
    if os.environ.get(FOLDER):
        watch(Path(os.environ[FOLDER]))


def watch(folder: Path) -> None:
    """Let each engine core of this process record its steps, from the start of its busy loop."""
    from vllm.v1.engine.core import DPEngineCoreProc

    loop = DPEngineCoreProc.run_busy_loop
    if getattr(loop, "steps_recorded", False):
        return

    def run_busy_loop(self: Any) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"steps-{self.dp_rank}.csv").open("w", encoding="utf-8", newline="", buffering=1) as out:
            Recorder(self, out)
            return loop(self)

    run_busy_loop.steps_recorded = True  # type: ignore[attr-defined]
    DPEngineCoreProc.run_busy_loop = run_busy_loop


class Recorder:
    """Records the steps of an engine core.

    Args:
        engine: A ``vllm.v1.engine.core.DPEngineCoreProc``.
        out: Where the lines go.
    """

    def __init__(self, engine: Any, out: TextIO) -> None:
        self._engine, self._scheduler = engine, engine.scheduler
        self._rows = csv.writer(out)
        self._rows.writerow(COLUMNS)
        self._step, self._since = 0, 0.0
        self._kinds: dict[int, tuple[int, int]] = {}
        self._computed, self._admitted, self._frozen = (0, 0), 0, 0
        self._schedule, self._update = engine.scheduler.schedule, engine.scheduler.update_from_output
        self._agree, self._process = engine._has_global_unfinished_reqs, engine._process_engine_step  # noqa: SLF001
        engine.scheduler.schedule, engine.scheduler.update_from_output = self._on_schedule, self._on_update
        engine._has_global_unfinished_reqs = self._on_agree  # noqa: SLF001
        engine._process_engine_step = self._on_process  # noqa: SLF001

    def _on_process(self) -> Any:
        """Where a wave begins, a step begins here, also on a rank that has nothing to schedule."""
        self._since = self._since or time.perf_counter()
        return self._process()

    def _on_schedule(self, *args: Any, **kwargs: Any) -> Any:
        shut = gate_shut(self._scheduler)
        output = self._schedule(*args, **kwargs)
        self._admitted += len(output.scheduled_new_reqs)
        self._frozen = int(shut and not self._admitted)
        self._kinds[id(output)] = self._kind(output)
        return output

    def _kind(self, output: Any) -> tuple[int, int]:
        """Prompt tokens of a batch, and requests in it that decode."""
        tokens, requests = output.num_scheduled_tokens, self._scheduler.requests
        decode = sum(
            requests[name].num_computed_tokens - count >= requests[name].num_prompt_tokens
            for name, count in tokens.items()
        )
        return output.total_num_scheduled_tokens - decode, decode

    def _on_update(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """With asynchronous scheduling what is awaited in a step was decided on in the one before."""
        self._computed = self._kinds.pop(id(scheduled), (0, 0))
        return self._update(scheduled, *args, **kwargs)

    def _on_agree(self, *args: Any, **kwargs: Any) -> Any:
        more = self._agree(*args, **kwargs)
        now = time.perf_counter()
        running, waiting = self._scheduler.get_request_counts()
        wave = self._engine.current_wave
        seconds = f"{now - self._since:.6f}"
        self._rows.writerow(
            (self._step, wave, *self._computed, seconds, running, waiting, self._admitted, self._frozen)
        )
        self._step, self._since = self._step + 1, now if more else 0.0
        self._computed, self._admitted, self._frozen = (0, 0), 0, 0
        return more

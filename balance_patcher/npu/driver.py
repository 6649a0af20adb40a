"""One engine of the check: starts vLLM with two data-parallel ranks, and sends it what it is told to.

``python -m balance_patcher.npu.driver SETTINGS`` is a process of its own, the first of its session; it is told what to
do as the demo's driver is. ``{"send": N, "full": …, "phase": …}`` sends N requests at once; ``{"end": …}`` ends it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from balance_patcher.demo.driver import EXECUTOR, Driver, listen
from balance_patcher.demo.load import ANSWER, CAP, PROMPT, RANKS, Request, skewed

from .plugin import PHASE

#: Whose versions are told.
NAMED = ("balance_patcher", "vllm-ascend", "torch", "torch-npu")


class CheckDriver(Driver):
    """An engine on whatever device this vLLM is built for.

    Attributes:
        folder: Where it writes, and where its processes look for what to do.
    """

    def __init__(self, settings: dict[str, Any], out: Any) -> None:
        super().__init__(settings["model"], balance=settings["balance"], out=out)
        self.folder = Path(settings["folder"])
        self._device = settings["device"]

    async def run(self, commands: queue.Queue[dict[str, Any]]) -> None:
        import vllm

        self._engine = self._start()
        try:
            self.say("ready", versions={"vllm": vllm.__version__} | versions())
            while "end" not in (command := await asyncio.to_thread(commands.get)):
                phase = self.folder / PHASE
                if command["phase"]:
                    phase.write_text(command["phase"], encoding="utf-8")
                else:
                    phase.unlink(missing_ok=True)
                await self._burst(command["send"], full=command["full"])
        finally:
            self._engine.shutdown()

    def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        more = {"distributed_executor_backend": EXECUTOR, "async_scheduling": False} if self._device == "cpu" else {}
        arguments = AsyncEngineArgs(
            model=self.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            data_parallel_size=RANKS, max_num_seqs=CAP, max_model_len=PROMPT + ANSWER + 6,
            enable_prefix_caching=False,
            additional_config={"scheduler_config": {"enable_balance_scheduling": True}} if self.balance else {}, **more,
        )  # fmt: skip
        return AsyncLLM.from_engine_args(arguments)

    async def _burst(self, requests: int, *, full: bool) -> None:
        """Send requests, and say how many were answered in how many seconds.

        Full: all at once, so that a rank is at its cap and admission freezes. Else each rank has one less than its
        cap at a time, so that the gate never closes and off and on do the same.
        """
        started = time.monotonic()
        if full:
            answers = await self._send(skewed(requests, 0), 0.0)
        else:
            each = [Request(0.0, rank, 16, 24) for rank in range(RANKS) for _ in range(requests // RANKS)]
            lines: list[Sequence[Request]] = []
            for rank in range(RANKS):
                own = [request for request in each if request.rank == rank]
                lines += [own[at :: CAP - 1] for at in range(CAP - 1)]
            answers = [
                one for done in await asyncio.gather(*(self._one_by_one(line) for line in lines)) for one in done
            ]
        seconds = time.monotonic() - started
        tokens = sum(answer["tokens"] for answer in answers)
        whole = sum(answer["whole"] for answer in answers)
        self.say("sent", requests=len(answers), whole=whole, tokens=tokens, seconds=seconds)
        await asyncio.sleep(0.3)  # the ranks notice together that there is no more work, some steps later

    async def _one_by_one(self, line: Sequence[Request]) -> list[dict[str, Any]]:
        return [answer for request in line for answer in await self._send([request], 0.0)]

    async def _answer(self, request: Request, number: int) -> dict[str, Any]:
        return await super()._answer(request, number) | {"tokens": request.length}


def versions() -> dict[str, str]:
    """Of what is installed here of the packages that matter."""
    found = {}
    for name in NAMED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(text: str) -> None:
    settings = json.loads(text)
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    with (Path(settings["folder"]) / "events.jsonl").open("a", encoding="utf-8", buffering=1) as out:
        asyncio.run(CheckDriver(settings, out).run(commands))


if __name__ == "__main__":
    main(sys.argv[1])

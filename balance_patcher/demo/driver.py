"""One engine of the demo: starts vLLM with two data-parallel ranks on the CPU, and sends it what it is told to.

``python -m balance_patcher.demo.driver SETTINGS`` is a process of its own, the first of its session. It reads
one line of JSON a command from standard input, ``{"warm": …}``, ``{"replay": …}`` or ``{"end": …}``, and
appends what happens to ``events.jsonl``. When its input ends without having been told to end, whoever started
it is gone, and it ends its engine cores with itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from .load import ANSWER, CAP, PROMPT, RANKS, Request, skewed

#: The model runs in the engine core's own process: half as many processes to start as with vLLM's default on the
#: CPU, which is there for the binding of threads. Named by its class, because the platform replaces "uni".
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class Driver:
    """An engine, and the file that says what happens to it.

    Attributes:
        model: The folder of the model's configuration.
        balance: Whether balance scheduling is asked for.
    """

    def __init__(self, model: str, *, balance: bool, out: TextIO) -> None:
        self.model, self.balance = model, balance
        self._out = out
        self._sent = 0
        self._engine: Any = None

    def say(self, event: str, **facts: Any) -> None:
        self._out.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")

    async def run(self, commands: queue.Queue[dict[str, Any]]) -> None:
        import vllm
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            self.say("unfit", device=str(current_platform.device_type or "none"), vllm=vllm.__version__)
            return
        self._engine = self._start()
        try:
            self.say("ready", vllm=vllm.__version__)
            while True:
                command = await asyncio.to_thread(commands.get)
                if "warm" in command:
                    self.say("warm", pace=await self.warm())
                elif "replay" in command:
                    await self.replay(skewed(command["replay"], command["seed"]), command["pace"])
                else:
                    break
        finally:
            self._engine.shutdown()

    def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # Without prefix caching: a replay must not find its prompts in the cache of the one before.
        arguments = AsyncEngineArgs(
            model=self.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            data_parallel_size=RANKS, max_num_seqs=CAP, max_model_len=PROMPT + ANSWER + 6,
            enable_prefix_caching=False, async_scheduling=False, distributed_executor_backend=EXECUTOR,
            additional_config={"enable_balance_scheduling": True} if self.balance else {},
        )  # fmt: skip
        return AsyncLLM.from_engine_args(arguments)

    async def warm(self) -> float:
        """Make the engine ready for what is measured; seconds that a step takes when both ranks are full."""

        async def burst(length: int) -> list[dict[str, Any]]:
            return await self._send([Request(0.0, rank, 8, length) for rank in range(RANKS) for _ in range(CAP)], 0.0)

        await burst(8)  # pays for what is made at first use
        return float(median(answer["token"] for answer in await burst(32)))

    async def replay(self, load: Sequence[Request], pace: float) -> None:
        """Send the requests, a step being ``pace`` seconds, and say how each was answered."""
        self.say("started", requests=len(load))
        started = time.monotonic()
        await self._send(load, pace, tell=True)
        seconds = time.monotonic() - started
        await asyncio.sleep(0.3)  # the ranks notice together that there is no more work, some steps later
        self.say("finished", seconds=seconds)

    async def _send(self, load: Sequence[Request], pace: float, *, tell: bool = False) -> list[dict[str, Any]]:
        start = time.monotonic()

        async def one(request: Request) -> dict[str, Any]:
            self._sent += 1
            number = self._sent
            await asyncio.sleep(max(0.0, start + request.at * pace - time.monotonic()))
            answer = await self._answer(request, number)
            if tell:
                self.say("answer", **answer)
            return answer

        return await asyncio.gather(*(one(request) for request in load))

    async def _answer(self, request: Request, number: int) -> dict[str, Any]:
        """Seconds to the first token, and from each to the next; whether the answer is as long as asked for."""
        from vllm import SamplingParams

        tokens = {"prompt_token_ids": [3 + (number + at) % 500 for at in range(request.prompt)]}
        wanted = SamplingParams(max_tokens=request.length, ignore_eos=True, detokenize=False)
        sent = first = last = time.monotonic()
        got = 0
        async for output in self._engine.generate(tokens, wanted, str(number), data_parallel_rank=request.rank):
            last = time.monotonic()
            first = last if got == 0 else first
            got = len(output.outputs[0].token_ids)
        token = (last - first) / max(1, got - 1)
        return {"rank": request.rank, "first": first - sent, "token": token, "whole": got == request.length}


def listen(commands: queue.Queue[dict[str, Any]]) -> None:
    """Hand on the commands; when they stop coming, end this process group, engine cores and all."""
    for line in sys.stdin:
        command = json.loads(line)
        commands.put(command)
        if "end" in command:
            return
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main(text: str) -> None:
    settings = json.loads(text)
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    with (Path(settings["folder"]) / "events.jsonl").open("a", encoding="utf-8", buffering=1) as out:
        asyncio.run(Driver(settings["model"], balance=settings["balance"], out=out).run(commands))


if __name__ == "__main__":
    main(sys.argv[1])

"""Drive two real data-parallel engine cores on CPU with waves of requests; run in a lane's Python.

``python waves.py '{"ends": 34, "bursts": 40, …}'`` prints one line of JSON last: ``{"ok": true, …}``, or what
went wrong in which wave of which shape. A drive that stands still, with no token and no gather for ``limit``
seconds, is a hang; a slow one is not. After the waves come the incidents that are asked for, in their order.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import incidents
from records import folder, gathered, records

for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1",
}.items():  # fmt: skip
    os.environ.setdefault(name, value)

LANE = Path(__file__).resolve().parent.parent / "lane"
SETTINGS = {
    "ends": 0,
    "bursts": 0,
    "drains": 0,
    "mixed": 0,
    "closed": 0,
    "incidents": [],
    "seed": 0,
    "balance": True,
    "asynchronous": False,
    "limit": 60,
    "tell": 0,
    "seqs": 4,
    "model": str(LANE / "tiny_moe"),
    "extra": {},
}


# -- shapes: each yields the requests of a wave, and how long to wait after it (None: until the engines rest) --


def ends(count, _):
    """One request a wave, one token shorter each time: its last step falls on every offset of the ranks' sync.

    The next one is sent when the engines have come to rest: what a wave does is then settled by its length alone.
    """
    for length in range(count, 0, -1):
        yield [{"prompt": 8, "length": length}], None


def bursts(count, pick):
    """Random bursts at random distances."""
    for _ in range(count):
        burst = pick.choice([1, 1, 2, 3, 9, 17])
        requests = [{"prompt": pick.randint(2, 40), "length": pick.randint(1, 50)} for _ in range(burst)]
        yield requests, pick.choice([0, 0, 0.01, 0.05, 0.2])


def drains(count, pick):
    """Rank 0 has a few short requests and is done; rank 1 goes on, over its cap with long ones."""
    for _ in range(count):
        short = [{"prompt": 4, "length": pick.randint(1, 3), "rank": 0} for _ in range(pick.randint(1, 3))]
        long = [{"prompt": pick.randint(2, 40), "length": pick.randint(20, 45), "rank": 1} for _ in range(6)]
        yield short + long, pick.choice([0, 0, 0.05])


def mixed(count, pick):
    """Bursts, drains and single requests in turn, as it happens."""
    for _ in range(count):
        shape = pick.choice([bursts, bursts, drains, None])
        yield from shape(1, pick) if shape else [([{"prompt": 8, "length": pick.randint(1, 40)}], None)]


def closed(count, _):
    """All requests of a wave are there before its first step: more than a rank may run, and more on the one.

    They do not depend on the seed. Each has a cache of its own, so that none finds another's prompt there.
    """
    pick = random.Random(11)
    for wave in range(count):
        shares = ((12, 7), (8, 8), (6, 14), (15, 9))[wave % 4]
        yield [
            {"prompt": pick.randint(2, 60), "length": pick.randint(3, 30), "rank": rank, "salt": True}
            for rank, share in enumerate(shares)
            for _ in range(share)
        ], None  # fmt: skip


def announce(requests):
    """Tell each rank how many of these it is to wait for."""
    for rank, count in Counter(request["rank"] for request in requests).items():
        (folder() / "written").write_text(str(count))
        (folder() / "written").rename(folder() / f"burst-{rank}")


class Drive:
    """One engine and what has been asked of it."""

    def __init__(self, wanted):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.wanted, self.where = wanted, {}
        self.sent = self.tokens = self.done = 0
        config = {"enable_balance_scheduling": True} if wanted["balance"] else {}
        arguments = AsyncEngineArgs(
            model=wanted["model"], load_format="dummy", skip_tokenizer_init=True, data_parallel_size=2,
            enforce_eager=True, max_model_len=512, max_num_seqs=wanted["seqs"], dtype="bfloat16",
            async_scheduling=wanted["asynchronous"], additional_config=config, **wanted["extra"],
        )  # fmt: skip
        self.engine = AsyncLLM.from_engine_args(arguments)

    async def one(self, prompt, length, rank=None, *, salt=False):
        """One request; "answered" if it was in full, else why it ended."""
        from vllm import SamplingParams

        self.sent += 1
        number, got, reason = self.sent, 0, None
        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        tokens = {"prompt_token_ids": [3 + number % 50] * prompt, **({"cache_salt": str(number)} if salt else {})}
        async for output in self.engine.generate(tokens, params, request_id=str(number), data_parallel_rank=rank):
            got, reason = len(output.outputs[0].token_ids), output.outputs[0].finish_reason
            self.tokens += 1
        return "answered" if got == length else str(reason)

    async def moving(self, work):
        """The result of some work; a ``TimeoutError`` if it stands still."""
        task, seen, since = asyncio.ensure_future(work), None, time.monotonic()
        while not task.done():
            await asyncio.wait([task], timeout=0.5)
            now = self.tokens, *(file.stat().st_size for file in records())
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.wanted["limit"]:
                raise TimeoutError
        return task.result()

    async def rest(self):
        while self.engine.engine_core.dp_engines_running():  # noqa: ASYNC110 - vLLM's client has no event for it
            await asyncio.sleep(0.005)

    async def waves(self):
        pick, told = random.Random(self.wanted["seed"]), time.monotonic()
        for shape in (ends, bursts, drains, mixed, closed):
            if shape is closed and self.wanted["closed"]:
                await self.moving(self.rest())
                await asyncio.sleep(0.5)  # whoever has noticed last rests too
            for wave, (requests, pause) in enumerate(shape(self.wanted[shape.__name__], pick)):
                self.where = {"shape": shape.__name__, "wave": wave}
                if shape is closed:
                    announce(requests)
                answers = await self.moving(asyncio.gather(*(self.one(**request) for request in requests)))
                if {*answers} != {"answered"}:
                    raise ValueError(f"an answer was cut short: {answers}")
                await (self.moving(self.rest()) if pause is None else asyncio.sleep(pause))
                self.done += 1
                if self.wanted["tell"] and time.monotonic() - told >= self.wanted["tell"]:
                    told = time.monotonic()
                    print(json.dumps({"waves": self.done, "requests": self.sent, "gathers": gathered()}), flush=True)

    async def gathers(self):
        """How often each rank has gathered when all is at rest; the last one is written down a moment later."""
        await self.moving(self.rest())
        for _ in range(100):
            counts = gathered()
            if len(set(counts)) == 1:
                break
            await asyncio.sleep(0.1)
        return counts


async def drive(wanted):
    run, result = Drive(wanted), {"ok": True}
    started = time.monotonic()
    try:
        await run.waves()
        result |= {"waves": run.done, "gathers": await run.gathers()}
        for name, *arguments in wanted["incidents"]:
            run.where = {"incident": name}
            print(f"-- {name} {arguments}", flush=True)
            result[name] = await getattr(incidents, name)(run, *arguments)
            if name != "kill":
                result["gathers"] = await run.gathers()
    except TimeoutError:
        # Engines that wait for each other do not end when they are asked to; who started this ends them.
        print(json.dumps({"ok": False, "why": "hang", **run.where, "sent": run.sent}), flush=True)
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - a dead engine is a result too
        result = {"ok": False, "why": f"{type(error).__name__}: {error}", **run.where}
    finally:
        run.engine.shutdown()
    return {**result, "sent": run.sent, "seconds": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive({**SETTINGS, **json.loads(sys.argv[1] if sys.argv[1:] else "{}")}))), flush=True)

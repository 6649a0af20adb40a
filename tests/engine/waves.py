"""Drive two real data-parallel engine cores on CPU with waves of random bursts; run in a lane's Python.

``python waves.py '{"waves": 40, "seed": 0, …}'`` prints one line of JSON last: ``{"ok": true, …}``, or what hung.
"""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1",
}.items():  # fmt: skip
    os.environ.setdefault(name, value)

MODEL = str(Path(__file__).resolve().parent.parent / "lane" / "tiny_moe")
SETTINGS = {
    "waves": 40,
    "seed": 0,
    "balance": True,
    "asynchronous": False,
    "limit": 60,
    "seqs": 4,
    "dp": 2,
    "extra": {},
}


async def drive(wanted):
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = {"enable_balance_scheduling": True} if wanted["balance"] else {}
    arguments = AsyncEngineArgs(
        model=MODEL, load_format="dummy", skip_tokenizer_init=True, data_parallel_size=wanted["dp"],
        enforce_eager=True, max_model_len=512, max_num_seqs=wanted["seqs"], dtype="bfloat16",
        async_scheduling=wanted["asynchronous"], additional_config=config, **wanted["extra"],
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)
    pick, sent, started = random.Random(wanted["seed"]), 0, time.monotonic()

    async def one(number, prompt, length):
        got = 0
        params = SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)
        tokens = {"prompt_token_ids": [3 + number % 50] * prompt}
        async for output in engine.generate(tokens, params, request_id=str(number)):
            got = len(output.outputs[0].token_ids)
        return got == length

    result = {"ok": True}
    try:
        for wave in range(wanted["waves"]):
            burst = pick.choice([1, 1, 2, 3, 9, 17])
            jobs = [one(sent + at, pick.randint(2, 40), pick.randint(1, 50)) for at in range(burst)]
            answered = await asyncio.wait_for(asyncio.gather(*jobs), wanted["limit"])
            if not all(answered):
                result = {"ok": False, "why": "an answer was cut short", "wave": wave}
                break
            sent += burst
            await asyncio.sleep(pick.choice([0, 0, 0.01, 0.05, 0.2]))
    except asyncio.TimeoutError:
        # Engines that wait for each other do not end when they are asked to; who started this ends them.
        print(json.dumps({"ok": False, "why": "hang", "wave": wave, "sent": sent}), flush=True)
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - a dead engine is a result too
        result = {"ok": False, "why": f"{type(error).__name__}: {error}", "wave": wave}
    finally:
        engine.shutdown()
    return {**result, "sent": sent, "seconds": round(time.monotonic() - started, 1)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive({**SETTINGS, **json.loads(sys.argv[1] if sys.argv[1:] else "{}")}))), flush=True)

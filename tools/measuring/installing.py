"""Installation after vLLM is imported: balance alone, and all features together; split by stage.

What a user pays is the first installation of a fresh process, so each sample is a process of its own. They come in
turns.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from .machine import ROOT
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
    tell("install: which features fit this lane")
    names = {"balance": ["balance"], "all": _asked("fitting")}
    for at in range(fresh):
        for what in LIMITS:
            tell(f"install: {TITLES[what]}, fresh process {at + 1} of {fresh}")
            # The last one goes on, to be installed again and again.
            samples[what].append(_asked(str(repeated if at == fresh - 1 else 0), *names[what]))
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
    spent = median(one["spent"] for one in samples)
    features = ", ".join(samples[0]["features"])
    made = [
        row("install", lane, f"{title}, fresh process", "ms", total, limit=LIMITS[what], spent=spent,
            once=len(samples) == 1,
            why=f"{shares(stages)}; {spent:.1f} ms of processor time", detail=stages),
        *(row("install", lane, f"  {name}", "ms", middle([one["stages"][name] for one in samples])) for name in names),
        row("install", lane, f"{title}: importing ours, before it", "ms", middle([one["import"] for one in samples]),
            why=f"features: {features}" if what == "all" else ""),
    ]  # fmt: skip
    again = samples[-1]["again"]
    if again:
        made.append(row("install", lane, f"{title}, again in the same process", "ms", middle(again)))
    return made


def _asked(*words: str) -> Any:
    """What a fresh process of this module says."""
    command = [sys.executable, "-m", "tools.measuring.installing", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, cwd=ROOT)
    said = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not said:
        sys.stderr.write(done.stdout + done.stderr)
        raise RuntimeError(f"`{' '.join(command[1:])}` ended with status {done.returncode}")
    return json.loads(said[-1].removeprefix(MARK))


# -- in the fresh process ------------------------------------------------------------------------------


def install_once(repeated: int, names: Sequence[str]) -> dict[str, Any]:
    """Import vLLM as an engine core has it when it decides, install, and say how long each stage took.

    Args:
        repeated: How often they are installed again.
        names: The features.
    """
    import gc
    import time

    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.core  # noqa: F401 - an engine core has imported it

    begin = time.perf_counter()
    from balance_patcher.installation import uninstall
    from balance_patcher.registry import find_feature

    chosen = [find_feature(name) for name in names]
    imported = 1000 * (time.perf_counter() - begin)
    for module in {delta.module for feature in chosen for delta in feature.deltas}:
        with contextlib.suppress(ImportError):  # a process that installs a feature has them loaded, as far as there are
            importlib.import_module(module)

    from .stages import Stages

    gc.collect()
    stages = Stages()
    with stages:
        began = time.process_time()
        took = _install(chosen)
        spent = 1000 * (time.process_time() - began)
    stages.rest(took)
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
        "install": took, "spent": spent, "stages": first, "import": imported, "again": again,
        "features": list(names),
    }  # fmt: skip


def _install(chosen: Sequence[Any]) -> float:
    """As a decision does it: what shares a function together. Milliseconds."""
    import time

    from balance_patcher.compose import overlapping
    from balance_patcher.installation import install_together

    begin = time.perf_counter()
    for group in overlapping(chosen):
        install_together(group)
    return 1000 * (time.perf_counter() - begin)


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
    first, *others = sys.argv[1:]
    answer = fitting() if first == "fitting" else install_once(int(first), others)
    sys.stdout.write(MARK + json.dumps(answer) + "\n")

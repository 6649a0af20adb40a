"""Check in real engine cores that what is declared is what runs, on as well as off, without loading a model.

The engine cores are started by :mod:`balance_patcher.live_engine` in a session of their own, which is ended
after a bound. :mod:`balance_patcher.live_checks` compares what they write down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import groups
from .byname import KEY
from .feature import Feature
from .live_checks import Run, compare
from .probe import FOLDER, RANKS
from .report import LaneReport
from .source import InstalledSource, Lane

#: For all engine cores together, in seconds. Each pair costs about 20 s of processor time, most of it imports.
LIMIT = 600.0
OFF = "off"
_TAIL, _WIDTH = 25, 200  # lines of the log, and how much of each
# What a check on CPU needs, where nobody has said otherwise; none of it changes what is checked.
_DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip


def check_live(chosen: Sequence[Feature], start_method: str, limit: float = LIMIT) -> list[LaneReport]:
    """Start engine cores with nothing asked for, then with each feature that says how to ask for it.

    Args:
        chosen: The features to look at.
        start_method: ``spawn`` or ``fork``.
        limit: For all of them together, in seconds.

    Raises:
        PatchError: BP512, if there is no vLLM in this Python.
    """
    lane = Lane("installed", InstalledSource())
    # Engine cores are looked at when they come to their executor: there is no worker yet.
    chosen = [feature for feature in chosen if feature.process == "engine"]
    runs = [Run(OFF, {})]
    runs += [Run(feature.name, example) for feature in chosen if (example := _example(feature))]
    start(runs, start_method, limit)
    reports = []
    for run in runs:
        looked_at = [feature for feature in chosen if run.name in (OFF, feature.name)]
        report = LaneReport(f"live {run.name}", f"{RANKS} engine cores, {start_method}", lane.version)
        report.features = [compare(feature, run, lane, start_method) for feature in looked_at]
        reports.append(report)
    return reports


def _example(feature: Feature) -> Mapping[str, Any]:
    """A configuration that asks for a feature; empty where it is asked for in another way."""
    if feature.distribution:
        return {KEY: {"features": [feature.name]}}
    return feature.enabling.example if feature.enabling is not None else {}


# -- starting --------------------------------------------------------------------------------


def start(runs: Sequence[Run], start_method: str, limit: float) -> None:
    """Start the engine cores of each run, wait for them, and leave no process behind."""
    with tempfile.TemporaryDirectory(prefix="balance_patcher-live-") as name:
        root = Path(name)
        folders = {run.name: root / str(at) for at, run in enumerate(runs)}
        for folder in folders.values():
            folder.mkdir()
        settings = {
            "start_method": start_method,
            "runs": {str(folders[run.name]): dict(run.additional_config) for run in runs},
        }
        with (root / "log").open("w+", encoding="utf-8", errors="replace") as log:
            ended = _wait(json.dumps(settings), limit, log)
            log.seek(0)
            tail = "\n".join(line[:_WIDTH] for line in log.read().rstrip().split("\n")[-_TAIL:])
        for run in runs:
            files = sorted(folders[run.name].glob("*.json"))
            run.reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
            run.ended, run.log = ended, tail


def _wait(settings: str, limit: float, log: Any) -> str:
    """How the process that starts them ended, if not by itself and well."""
    environment = {**_DEFAULTS, **os.environ}
    environment.pop(FOLDER, None)
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.live_engine", settings],
        env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"they had not ended after {limit:g} s"
    finally:
        # Engine cores that wait for each other end for nobody: their session is ours to end.
        groups.end(process.pid)
        process.wait()
    return "" if code == 0 else f"the process that starts them ended with status {code}"

"""What runs in a lane's Python: ``python -m tools.measuring.worker PART LANE SCALE PIPE``.

Rows and progress go to the pipe, a line of JSON each. What vLLM prints is not in it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tools.quiet import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]

#: Each part's module, whose ``measure`` gives its rows.
MODULES = {"install": "installing", "schedule": "scheduling", "gather": "gathering", "engine": "engines"}


def main(part: str, lane: str, scale: str, pipe: str) -> None:
    """Measure one part on the lane whose Python this is."""
    with os.fdopen(int(pipe), "w", encoding="utf-8", buffering=1) as out:

        def say(event: str, **facts: Any) -> None:
            out.write(json.dumps({"event": event, **facts}) + "\n")

        sys.path.insert(0, str(ROOT / "tests" / "lane"))  # real schedulers are built as the tests build them
        say("versions", **versions())
        module = importlib.import_module(f".{MODULES[part]}", __package__)
        for one in module.measure(lane, lambda text: say("tell", text=text), float(scale)):
            say("row", row=one.as_dict())
        say("end")


def versions() -> dict[str, str]:
    """What this lane has."""
    import platform

    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(*sys.argv[1:])

"""Stands in for a lane's Python: the worker itself, with stand-ins for what drives vLLM.

``$STANDIN`` is JSON: gates whose parts never end (``hang``), and one whose part fails (``fail``).
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

from standin import StandInGate, StandInRank

from tools.simulator.dispatch import RoundRobin

WANTED = {"hang": [], "fail": "", **json.loads(os.environ.get("STANDIN", "{}"))}


def group(ranks, gate, shape):
    if ranks > 1 and gate in WANTED["hang"]:
        Path(os.environ["STANDIN_PIDS"], str(os.getpid())).touch()
        time.sleep(600)
    if ranks > 1 and gate == WANTED["fail"]:
        raise RuntimeError("this vLLM has another scheduler")
    heard = StandInGate(freezes=gate == "on")
    return SimpleNamespace(ranks=[StandInRank(shape.seqs, heard) for _ in range(ranks)], gate=heard, cap=shape.seqs)


lane, fronts, vllm = ModuleType("tools.simulator.lane"), ModuleType("tools.simulator.fronts"), ModuleType("vllm")
lane.Shape = lambda seqs, *_: SimpleNamespace(seqs=seqs)
lane.group = group
fronts.dispatcher = lambda _, ranks: RoundRobin(ranks)
vllm.__version__ = "0.0"

if __name__ == "__main__":
    import tools.simulator

    for module in (lane, fronts, vllm):
        sys.modules[module.__name__] = module
    tools.simulator.lane, tools.simulator.fronts = lane, fronts
    assert sys.argv[1:3] == ["-m", "tools.simulator.worker"]
    sys.argv = sys.argv[2:]
    runpy.run_module("tools.simulator.worker", run_name="__main__", alter_sys=True)

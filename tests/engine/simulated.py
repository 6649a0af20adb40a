"""Let the simulator answer the closed waves, in a lane's Python: ``python simulated.py '[["on", false, 4], …]'``.

Prints one line of JSON last: for each gate, mode and cap, the steps of each wave.
"""

import json
import os
import sys

from settings import CLOSED
from waves import closed

from tools.quiet import ENVIRONMENT
from tools.simulator import cache, fronts, lane
from tools.simulator.events import simulate
from tools.simulator.steptime import StepTime
from tools.simulator.traces import Arrival


def steps(requests, gate, asynchronous, cap):
    """Each step of one wave: running on each rank, prompt tokens, admitted, frozen ranks."""
    trace = [Arrival(0.0, one["prompt"], one["length"], one["rank"]) for one in requests]
    blocks = cache.needed_blocks(trace, cap, 16)
    group = lane.group(2, gate, lane.Shape(cap, 2048, 512, 16, blocks, endless=True, asynchronous=asynchronous))
    front = fronts.dispatcher("recorded", group.ranks)
    run = simulate(group.ranks, trace, front, StepTime(), group.gate, group.cap)
    rows = zip(run.prefill, run.admitted, run.frozen, strict=True)
    return [(list(run.counts(step)), *row) for step, row in enumerate(rows)]


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    waves = [requests for requests, _ in closed(CLOSED["closed"], None)]
    print(json.dumps([[steps(wave, *asked) for wave in waves] for asked in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)

"""The simulation itself, in the lane's Python: ``python -m tools.simulator.worker FOLDER``.

It reads ``job.json`` in the folder, and tells its progress on standard output, a line of JSON each. What vLLM prints
goes to standard error. When nobody reads any more, it ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

#: As small and quiet as a lane can be; read by vLLM and torch when they are imported.
ENVIRONMENT = {
    "BALANCE_PATCHER": "off",  # it is installed by a call here, and there is no engine that could ask
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(folder: Path, out: TextIO) -> None:
    """Simulate part after part."""

    def tell(event: str, **facts: Any) -> None:
        out.write(json.dumps({"event": event, **facts}) + "\n")
        out.flush()

    from . import lane
    from .files import part_name
    from .job import Job

    job = Job.of((folder / "job.json").read_text("utf-8"))
    for ranks in job.ranks:
        trace = job.trace(ranks)
        blocks = -(-job.cache // job.block) if job.cache else lane.needed_blocks(trace, job.seqs, job.block)
        shape = lane.Shape(job.seqs, job.tokens, job.longest, job.block, blocks)
        for gate in job.gates:
            name = part_name(ranks, gate)
            tell("part", name=name, requests=len(trace))
            _part(
                folder, job, trace, shape, ranks, gate, lambda done, name=name: tell("progress", name=name, done=done)
            )
            tell("done", name=name)
    import vllm

    tell("end", vllm=vllm.__version__)


def _part(folder: Path, job: Any, trace: Any, shape: Any, ranks: int, gate: str, tell: Any) -> None:
    from . import lane
    from .events import simulate
    from .figures import figures
    from .files import write_part

    with _quiet_memory():
        group = lane.group(ranks, gate, shape)
        gc.collect()
        gc.freeze()  # what was built stays; looking through it again and again took as long as the rest
        front = lane.dispatcher(job.dispatcher, group.ranks)
        run = simulate(group.ranks, trace, front, job.step, group.gate, group.cap, tell)
    write_part(folder, figures(gate, trace, run, _memory()), trace, run)


@contextlib.contextmanager
def _quiet_memory() -> Any:
    """Without the garbage collector: a scheduler leaves no cycles behind. The peak of memory starts anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()


def _memory() -> int:
    """The largest size of this process in MB: since the part began, where the system tells."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.update(ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started this says how far it came
    try:
        main(Path(sys.argv[1]), told)
        code = 0
    except BaseException:  # noqa: BLE001 - it is told by its log
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # vLLM's native parts complain at length when an interpreter ends

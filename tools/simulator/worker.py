"""The simulation itself, in the lane's Python: ``python -m tools.simulator.worker FOLDER``.

It reads ``job.json`` in the folder, and tells its progress on standard output, a line of JSON each. What vLLM prints
goes to standard error. It imports vLLM once, and forks a process for each part, as many at a time as the job says.
It is the first of its process group; when its standard input ends, whoever started it is gone, and the group ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tools.quiet import ENVIRONMENT


def main(folder: Path, out: TextIO) -> None:
    """Simulate all parts, some at a time."""

    def tell(event: str, **facts: Any) -> None:
        # One write: lines of several processes do not mix.
        out.write(json.dumps({"event": event, **facts}) + "\n")
        out.flush()

    from .job import Job

    job = Job.of((folder / "job.json").read_text("utf-8"))
    running: dict[int, str] = {}
    for part in parts(job):
        if (folder / part.name).exists():  # whole, from a run that was interrupted
            continue
        if len(running) == job.processes:
            _join(running)
        tell("part", name=part.name, requests=len(part.trace))
        running[_forked(functools.partial(_simulated, job, part, folder, tell))] = part.name
    while running:
        _join(running)
    import vllm

    tell("end", vllm=vllm.__version__)


class Part(NamedTuple):
    """One simulation of a job: so many ranks, with one way to admit."""

    name: str
    ranks: int
    gate: str
    trace: Any
    shape: Any


def parts(job: Any) -> Iterator[Part]:
    """The parts of a job; those of one number of ranks have the same trace."""
    from . import cache, lane
    from .job import part_name

    for ranks in job.ranks:
        trace = job.trace(ranks)
        blocks = -(-job.cache // job.block) if job.cache else cache.needed_blocks(trace, job.seqs, job.block)
        shape = lane.Shape(job.seqs, job.tokens, job.longest, job.block, blocks, not job.cache, job.asynchronous)
        lane.group(1, "on", shape)  # whatever is made at first use is made once, and not by each process
        for gate in job.gates:
            yield Part(part_name(ranks, gate), ranks, gate, trace, shape)


def _forked(work: Callable[[], None]) -> int:
    """The process that does some work; it ends with 1 if that fails, and says why on standard error."""
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - it is told by its log
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return process


def _join(running: dict[int, str]) -> None:
    """Wait until one of these has ended.

    Raises:
        RuntimeError: If it failed. The others are let go on to their end first.
    """
    process, status = os.wait()
    name = running.pop(process)
    if status:
        while running:
            running.pop(os.wait()[0])
        raise RuntimeError(f"{name} ended with {os.waitstatus_to_exitcode(status)}")


def _simulated(job: Any, part: Part, folder: Path, tell: Callable[..., None]) -> None:
    """Simulate a part, and leave it in the folder."""
    import vllm

    from . import fronts, lane
    from .events import simulate
    from .figures import figures
    from .files import write_part

    with contextlib.suppress(OSError):  # the peak of memory starts anew
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    # A scheduler leaves no cycles behind, and looking for some again and again took as long as the rest.
    gc.disable()
    group = lane.group(part.ranks, part.gate, part.shape)
    run = simulate(
        group.ranks, part.trace, fronts.dispatcher(job.dispatcher, group.ranks), job.step, group.gate, group.cap,
        lambda done: tell("progress", name=part.name, done=done), job.closed * part.ranks,
    )  # fmt: skip
    write_part(folder, figures(part.gate, run, _memory(), vllm.__version__), part.trace, run)
    tell("done", name=part.name)


def _listen() -> None:
    """End this process group when standard input ends."""
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


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
    threading.Thread(target=_listen, daemon=True).start()
    try:
        main(Path(sys.argv[1]), told)
        code = 0
    except BaseException:  # noqa: BLE001 - it is told by its log
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # vLLM's native parts complain at length when an interpreter ends

"""Start the lane's Python for a job, and follow it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from balance_patcher.errors import PatchError, refuse

from .job import Job

ROOT = Path(__file__).resolve().parents[2]
LANES = ROOT / ".lanes"

#: Lines of a failed simulation's log that are shown.
TAIL = 12


def python_of(lane: str | None) -> Path:
    """The Python that has the vLLM to simulate: a lane's, by name or by path; without one, this Python if it has one.

    Raises:
        PatchError: BP512, if there is none.
    """
    if lane is None and importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    name = lane or "main"
    for place in (LANES / name / "bin" / "python", Path(name)):
        if place.is_file():
            return place
    follow = f"python -m tools.lanes {name}, or --lane PATH of a Python that has vLLM"
    raise refuse("BP512", f"there is no lane {name!r} in {LANES}", next=follow)


def job_in(folder: Path) -> Job:
    """What the parts of a folder were made with.

    Raises:
        PatchError: BP514, if that is not there.
    """
    try:
        return Job.of((folder / "job.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"{folder / 'job.json'}: {getattr(error, 'strerror', None) or error}"
        raise refuse("BP514", what, next="name the folder that `run` was given") from error


def prepare(job: Job, folder: Path, *, resume: bool) -> None:
    """Make the folder of a job; parts that it will make are taken out of it, unless they are to be gone on with.

    Raises:
        PatchError: BP007, if what is there is of another job; BP515, if nothing can be written there.
    """
    note = folder / "job.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resume and (not note.exists() or not Job.of(note.read_text("utf-8")).like(job)):
            what = f"--resume: what is in {folder} was not made with these settings"
            raise refuse("BP007", what, next="give the settings of that run, or another --output-dir")
        for name in job.names():
            if not resume and (folder / name).exists():
                shutil.rmtree(folder / name)
        note.write_text(job.text() + "\n", encoding="utf-8")
    except OSError as error:
        raise refuse("BP515", f"{folder}: {error.strerror}", next="check the path and its rights") from error


def run(folder: Path, python: Path, tell: Callable[[dict[str, Any]], None]) -> None:
    """Simulate the job of a folder in another Python. Whole parts are left there, also if this is interrupted.

    Parts that are there are not made again.

    Args:
        folder: Where the job is, and its parts are left; see :func:`prepare`.
        python: The Python that has vLLM.
        tell: Told each event.

    Raises:
        PatchError: BP515, if nothing can be written there; BP952, if it ends too early.
    """
    try:
        log = (folder / "worker.log").open("w", encoding="utf-8")
    except OSError as error:
        raise refuse("BP515", f"{folder}: {error.strerror}", next="check the path and its rights") from error
    command = [str(python), "-m", "tools.simulator.worker", str(folder.resolve())]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = False
    # A session of its own: an interrupt reaches this process alone, which ends all of that one's.
    with (
        log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        ) as worker,
    ):
        try:
            for line in worker.stdout or ():
                event = json.loads(line)
                ended = event["event"] == "end"
                tell(event)
        finally:
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            for draft in folder.glob(".*.draft"):
                shutil.rmtree(draft, ignore_errors=True)
    if not ended:
        raise PatchError(_failed(folder, worker.returncode).failures[0])


def _failed(folder: Path, code: int) -> PatchError:
    lines = (folder / "worker.log").read_text("utf-8", errors="replace").splitlines()
    return refuse(
        "BP952", f"the lane's Python ended with {code}", ("log", "\n".join(lines[-TAIL:]) or "empty"),
        next=f"see {folder / 'worker.log'}; finished parts are kept beside it",
    )  # fmt: skip

"""This lane's vLLM with upstream's seam in its scheduler: beside the lane's own in one process, or on the path."""

import functools
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from balance_patcher.build import Built, build
from balance_patcher.source import InstalledSource, Lane
from tools.upstream_seam import seam_of

SCHEDULER = "vllm.v1.core.sched.scheduler"
ASYNC = "vllm.v1.core.sched.async_scheduler"
PATH = "vllm/v1/core/sched/scheduler.py"


class WithTheSeam(InstalledSource):
    """The installed vLLM, with another file in the place of the scheduler's."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def read(self, path: str) -> bytes | None:
        return self.file.read_bytes() if path == PATH else super().read(path)

    def display(self, path: str) -> str:
        return str(self.file) if path == PATH else super().display(path)


@dataclass(frozen=True)
class Classes:
    """Upstream's two schedulers of one text, and ours over them."""

    plain: type
    asynchronous: type
    balance: type
    balance_asynchronous: type
    built: Built


@functools.cache
def text() -> str:
    """The lane's scheduler module with the seam in."""
    return seam_of(Lane("installed", InstalledSource())).text


@functools.cache
def classes() -> Classes:
    """The classes of a second scheduler module, which has the seam; all else is the lane's own, and shared."""
    folder = Path(tempfile.mkdtemp(prefix="seam-"))
    file = folder / "scheduler.py"
    file.write_text(text(), encoding="utf-8")
    own = {name: importlib.import_module(name) for name in (SCHEDULER, ASYNC)}
    try:
        plain = _loaded(SCHEDULER, file).Scheduler
        asynchronous = _loaded(ASYNC, Path(own[ASYNC].__file__)).AsyncScheduler
        assert plain in asynchronous.__mro__
        built = build("balance", Lane("seam", WithTheSeam(file)))
    finally:
        sys.modules.update(own)
        shutil.rmtree(folder)
    balance = built.classes[f"{SCHEDULER}:Scheduler"]
    assert plain in balance.__mro__
    joined = type("BalanceAsyncScheduler", (asynchronous, balance), {})
    return Classes(plain, asynchronous, balance, joined, built)


def _loaded(name: str, file: Path):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_the_path(folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` that has this lane's ``vllm``, link by link, with the seam in its scheduler."""
    theirs = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
    *above, name = Path(PATH).relative_to("vllm").parts
    ours = folder / "vllm"
    for part in (*above, None):
        ours.mkdir(parents=True)
        for entry in theirs.iterdir():
            if entry.name not in (part, name if part is None else part, "__pycache__"):
                (ours / entry.name).symlink_to(entry)
        if part is not None:
            ours, theirs = ours / part, theirs / part
    (ours / name).write_text(text(), encoding="utf-8")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that imports that ``vllm``."""
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

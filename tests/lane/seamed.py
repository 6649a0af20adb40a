"""This lane's scheduler with upstream's seam in it, beside the lane's own in one process."""

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


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that imports that ``vllm``."""
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

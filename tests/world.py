"""A small vLLM in a folder, with engine core, scheduler and workers, and a distribution that brings features for it.

What is decided, bound and taken back in one process is the same with it as with the real one, and takes no time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from balance_patcher import byname, distributions, installation, outcome, plugin
from tests.distributions import put

SCHEDULER = """
class Scheduler:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.log = []

    def schedule(self):
        self.log.append("upstream")
        first = 1
        second = 2
        return self.log


class Derived(Scheduler):
    pass
"""

CORE = """
class EngineCore:
    def __init__(self, vllm_config, executor=None):
        self.vllm_config = vllm_config
        self.requests = []
        self.executor = executor(vllm_config) if executor else None
        self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(vllm_config)

    def add(self, request):
        self.requests.append(request)

    def drop(self, request):
        self.requests.remove(request)
"""

WORKER = """
from vllm.plugins import load_general_plugins


class WorkerBase:
    def __init__(self, vllm_config, rank=0):
        self.vllm_config, self.rank = vllm_config, rank
        self.done = []

    def init_device(self):
        self.done.append("device")

    def execute(self, step):
        self.done.append(step)


class WorkerWrapperBase:
    def init_worker(self, vllm_config, worker_class=WorkerBase):
        self.vllm_config = vllm_config
        load_general_plugins()
        self.worker = worker_class(vllm_config)

    def init_device(self):
        self.worker.init_device()
"""

#: What the distribution's features are made with.
MAKERS = """
from balance_patcher.decided import decided
from balance_patcher.delta import Anchor, CallThrough, Delta, InsertAfter, Prologue, Variant
from balance_patcher.feature import Enabling, Feature, RuntimeClass

SCHEDULER, CORE = "vllm.v1.core.sched.scheduler:Scheduler", "vllm.v1.engine.core:EngineCore"
WORKER = "vllm.v1.worker.worker_base:WorkerBase"
IN_WORKERS = Enabling(process="worker")
NOTHING_TO_DO = Enabling(process="worker", needless=lambda worker, config: "there is nothing to count")


def delta(name, target, *variants, after=()):
    return Delta(name, target, "why", "upstream", "never", variants, after)


def in_place(name, method, text=None, **said):
    owner = WORKER if said.get("enabling") else CORE
    text = text or f"{'self.done' if said.get('enabling') else 'self.requests'}.append({name!r})"
    through = Variant("through", edits=(CallThrough(text),))
    return Feature(name, name, (delta(f"{name}.x", f"{owner}.{method}", through),), **said)


def with_class(name, anchor, **said):
    flag = f"_{name}"

    def make(base):
        def construct(self, vllm_config):
            super(made, self).__init__(vllm_config)
            setattr(self, flag, bool(decided(vllm_config, name)))

        made = type(f"{name.title()}Scheduler", (base,), {"__init__": construct, flag: False})
        return made

    off = Prologue(f"if not self.{flag}:\\n    return super().schedule($$$PARAMETERS)")
    on = InsertAfter(f"if self.{flag}:\\n    self.log.append({name!r})")
    deltas = (
        delta(f"{name}.off", f"{SCHEDULER}.schedule", Variant("x", edits=(off,))),
        delta(f"{name}.on", f"{SCHEDULER}.schedule", Variant("x", Anchor(anchor), (on,)), after=(f"{name}.off",)),
    )
    runtime = RuntimeClass(f"{name.title()}Scheduler", SCHEDULER, make, frozenset({flag}))
    return Feature(name, name, deltas, runtime=runtime, **said)


def idle(name, status, **said):
    there = Variant("there", Anchor("self.requests.remove($_)"), status=status, note=f"upstream: {status}")
    ours = Variant("ours", Anchor("self.requests.forget($_)"), (InsertAfter("self.forgotten = True"),))
    return Feature(name, name, (delta(f"{name}.x", f"{CORE}.drop", ours, there),), **said)

"""


class World:
    """The live modules, and what is done with them."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
        self.core = importlib.import_module("vllm.v1.engine.core")
        self.workers = importlib.import_module("vllm.v1.worker.worker_base")
        self.plugins = importlib.import_module("vllm.plugins")

    def config(self, *names: str, **more: Any) -> Any:
        """A configuration that asks for features by their names."""
        chosen = SimpleNamespace(get_scheduler_cls=lambda: self.scheduler.Derived, scheduler_cls=None)
        parallel = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, enable_eplb=False)
        return Config(
            additional_config={"balance_patcher": {"features": list(names)}, **more},
            scheduler_config=chosen, parallel_config=parallel, kv_transfer_config=None,
        )  # fmt: skip

    def engine(self, *names: str, executor: Callable[[Any], Any] | None = None, config: Any = None) -> Any:
        return self.core.EngineCore(config or self.config(*names), executor)

    def worker(self, *names: str, config: Any = None) -> Any:
        return self.workers.WorkerBase(config or self.config(*names))

    def started(self, config: Any, worker_class: type | None = None) -> Any:
        """A worker as an executor makes one, up to its device."""
        wrapper = self.workers.WorkerWrapperBase()
        wrapper.init_worker(config, worker_class or self.workers.WorkerBase)
        wrapper.init_device()
        return wrapper.worker

    def state(self) -> object:
        """Every object that may be changed."""
        kept: tuple[Any, ...] = (self.core.EngineCore, self.workers.WorkerBase, self.workers.WorkerWrapperBase)
        held = [{name: id(value) for name, value in vars(cls).items()} for cls in kept]
        return self.scheduler.Scheduler, self.scheduler.Derived.__bases__, held


class Config:
    """By attributes, and weakly referenced, as vLLM's is."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


@contextmanager
def world(folder: Path, monkeypatch: pytest.MonkeyPatch, declared: str) -> Iterator[World]:
    """Put everything there, and take it away again; whatever was done meanwhile must have left vLLM as it was.

    Args:
        folder: Where it is written.
        monkeypatch: For the path and the switches.
        declared: Lines that bind features to their names, with :data:`MAKERS` before them.
    """
    for path, text in {
        "vllm/plugins/__init__.py": "def load_general_plugins():\n    pass\n",
        "vllm/v1/core/sched/scheduler.py": SCHEDULER,
        "vllm/v1/engine/core.py": CORE,
        "vllm/v1/worker/worker_base.py": WORKER,
    }.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for outer in (file.parent, *file.parent.parents):
            if outer == folder:
                break
            (outer / "__init__.py").touch()
    names = [line.partition(" = ")[0] for line in declared.splitlines() if " = " in line]
    put(folder, "brought", {name: f"brought:{name}" for name in names}, {"brought.py": MAKERS + declared})
    for name in ("vllm", "brought"):
        assert name not in sys.modules
    monkeypatch.syspath_prepend(str(folder))
    for variable in (byname.FEATURES, byname.COMPOSE, "BALANCE_PATCHER", "BALANCE_PATCHER_ON_FAILURE"):
        monkeypatch.delenv(variable, raising=False)
    _forget()
    made = World(folder)
    before = made.state()
    plugin.arm()
    try:
        yield made
        plugin.disarm()
        for held in list(installation._INSTALLED):
            installation.uninstall(held)
        assert made.state() == before
    finally:
        plugin.disarm()
        byname._HOSTS.clear()
        outcome._OUTCOMES.clear()
        installation._INSTALLED.clear()
        installation._CALLED.clear()
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "brought")]:
            del sys.modules[name]
        _forget()


def _forget() -> None:
    importlib.invalidate_caches()
    distributions.offers.cache_clear()
    distributions.load.cache_clear()

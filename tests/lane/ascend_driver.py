"""Runs in a process of its own, with vllm-ascend's wheel and a stub of ``torch_npu`` on its path.

``python -c 'import ascend_driver; ascend_driver.main()' JOB`` prints one line of JSON. The jobs:

patched
    What there is after vllm-ascend's own ``_ensure_global_patch()``.
engines
    Real ``DPEngineCoreProc`` constructors in spawned and forked children, as far as the executor.
late
    vllm-ascend's module is loaded before balance_patcher is armed.
pinned
    What vllm-ascend's own unit tests say of the module.
again
    The module is imported a second time, as a new module.
"""

import importlib
import json
import multiprocessing
import os
import pickle
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

MODULE = "vllm_ascend.patch.platform.patch_balance_schedule"
FILE = "patch_balance_schedule.py"
HOOK = "_has_global_unfinished_reqs"
PATCHABLE = (FunctionType, staticmethod, classmethod, type)
EXECUTED = []

CONFIGURATIONS = {
    "top-level": ({"enable_balance_scheduling": True}, {}),
    "nested": ({"scheduler_config": {"enable_balance_scheduling": True}}, {}),
    "environment": ({}, {"VLLM_ASCEND_BALANCE_SCHEDULING": "1"}),
    "off": ({}, {}),
}


def listen():
    """Note every execution of the host's file, by the interpreter's own audit event."""

    def hook(event, arguments):
        if event == "exec" and getattr(arguments[0], "co_filename", "").endswith(FILE):
            EXECUTED.append(arguments[0].co_name)

    sys.addaudithook(hook)


def classes():
    from vllm.v1.core.sched import scheduler
    from vllm.v1.engine import core

    return scheduler, core


def origin(value):
    """Where a function or class comes from: ours, theirs by name, or upstream's."""
    value = getattr(value, "__func__", value)
    module = getattr(value, "__module__", None) or ""
    file = getattr(getattr(value, "__code__", None), "co_filename", "")
    if file.startswith("<balance_patcher") or file.endswith("balance_ascend.py"):
        return "balance_patcher"
    if module.startswith("balance_patcher"):
        return "balance_patcher"
    name = f"{module}:{getattr(value, '__qualname__', '?')}"
    return "the copy" if module == MODULE else name


def patches():
    """Every attribute of a vLLM module or class that vllm-ascend put there, but for those of the copy."""
    found = set()
    for name, module in sorted(sys.modules.items()):
        if module is None or not (name == "vllm" or name.startswith("vllm.")):
            continue
        for attribute, value in list(vars(module).items()):
            owned = isinstance(value, type) and value.__module__ == name
            for inner, member in [("", value), *(vars(value).items() if owned else ())]:
                where = origin(member) if isinstance(member, PATCHABLE) else ""
                if where.startswith("vllm_ascend") and not name.startswith("vllm_ascend"):
                    found.add(f"{name}.{attribute}.{inner} = {where}")
    return sorted(found)


def schedulers():
    """For each of vllm-ascend's scheduler classes, the class that each scheduler method comes from."""
    from vllm.v1.core.sched import scheduler
    from vllm_ascend.core import recompute_scheduler, scheduler_profiling_chunk

    found = {}
    for cls in (
        recompute_scheduler.RecomputeScheduler,
        recompute_scheduler.AsyncRecomputeScheduler,
        scheduler_profiling_chunk.ProfilingChunkScheduler,
    ):
        for name in ("schedule", "update_from_output", "_update_after_schedule", "_preempt_request", "add_request"):
            holder = next(base for base in cls.__mro__ if name in vars(base))
            found[f"{cls.__name__}.{name}"] = origin(holder)
        found[f"{cls.__name__} derives from the name"] = scheduler.Scheduler in cls.__mro__
    return found


def patched():
    listen()
    scheduler, core = classes()
    hook = vars(core.DPEngineCoreProc)[HOOK]
    run = vars(core.EngineCoreProc)["run_engine_core"]
    import vllm_ascend

    vllm_ascend._ensure_global_patch()
    module = sys.modules[MODULE]
    placed = vars(core.EngineCoreProc)["run_engine_core"]
    return {
        "executed": EXECUTED,
        "scheduler": origin(vars(scheduler.Scheduler)["schedule"]),
        "class": scheduler.Scheduler is module.BalanceScheduler,
        "parent": sys.modules[MODULE.rpartition(".")[0]].patch_balance_schedule is module,
        "spec": module.__spec__.name,
        "hook": vars(core.DPEngineCoreProc)[HOOK] is hook,
        "run_engine_core": origin(core.EngineCoreProc.run_engine_core),
        "pickled": pickle.dumps(core.EngineCoreProc.run_engine_core).decode("latin-1"),
        "kind": [type(run).__name__, type(placed).__name__],
        "genuine": getattr(module, "_ORIGINAL_RUN_ENGINE_CORE", None) is run.__func__,
        "finders": [type(finder).__module__ for finder in sys.meta_path],
        "init": origin(core.EngineCore.__init__),
        "patches": patches(),
        "schedulers": schedulers(),
        "platform": sorted(name for name in sys.modules if name.startswith("vllm_ascend.patch.platform")),
    }


# -- real engine cores, as far as their executor ---------------------------------------------


class Address(str):
    """An address that nobody listens on. Where it arrives, the engine core shakes no hands and has no group."""

    __slots__ = ()

    def __reduce__(self):
        return alone, ()


def alone():
    _, core = classes()
    from vllm.v1.engine.utils import EngineZmqAddresses

    @contextmanager
    def no_handshakes(self, *args, **kwargs):
        yield EngineZmqAddresses(inputs=["none"], outputs=["none"])

    def no_group(self, vllm_config):
        self.dp_rank, self.dp_size = vllm_config.parallel_config.data_parallel_rank, 2
        self.dp_group = self.dp_store = None

    core.EngineCoreProc._perform_handshakes = no_handshakes
    core.DPEngineCoreProc._init_data_parallel = no_group
    return Address()


class Executor:
    """Stands where weights would be loaded: writes down what runs here, and ends the process."""

    supports_pp = False

    def __init__(self, vllm_config):
        Path(os.environ["ASCEND_FACTS"]).write_text(json.dumps(self.facts(vllm_config)))
        raise SystemExit(0)

    def facts(self, vllm_config):
        import harness

        from balance_patcher.decision import decisions

        _, core = classes()
        cls = vllm_config.scheduler_config.get_scheduler_cls()
        scheduler = harness.new_scheduler(cls, harness.Shape(ranks=2), vllm_config)
        return {
            "engine": core.DPEngineCoreProc.__module__,
            "reasons": [made.reason for decided in decisions() for made in decided],
            "gate": scheduler._balance_enabled,
            "queue": hasattr(scheduler, "balance_queue"),
            "schedule": origin(next(vars(base)["schedule"] for base in cls.__mro__ if "schedule" in vars(base))),
            "hook": origin(vars(core.DPEngineCoreProc)[HOOK]),
            "executed": EXECUTED,
        }


def start(method, name, folder):
    """A child whose target is what vLLM's own launcher would take."""
    import harness

    _, core = classes()
    additional, environment = CONFIGURATIONS[name]
    config = harness.vllm_config(harness.Shape(ranks=2), additional)
    config.parallel_config.data_parallel_rank_local = 0
    facts = Path(folder) / f"{method}-{name}.json"
    changed = {**environment, "ASCEND_FACTS": str(facts)}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    child = multiprocessing.get_context(method).Process(
        target=core.EngineCoreProc.run_engine_core,
        kwargs={
            "vllm_config": config, "local_client": True, "handshake_address": Address(),
            "executor_class": Executor, "log_stats": False, "dp_rank": 0, "local_dp_rank": 0,
        },
    )  # fmt: skip
    child.start()
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})
    return child, facts


def engines():
    listen()
    import vllm_ascend

    vllm_ascend._ensure_global_patch()
    folder = os.environ["ASCEND_FOLDER"]
    found = {}
    # A spawned child reads what its parent wrote for it, so nothing of this process is changed until it has.
    names = os.environ.get("ASCEND_CONFIGURATIONS", " ".join(CONFIGURATIONS)).split()
    for method in ("spawn", "fork"):
        if method == "fork":
            alone()
        deadline = time.monotonic() + 600  # four interpreters import vLLM at once
        children = [(name, *start(method, name, folder)) for name in names]
        for name, child, facts in children:
            child.join(max(0, deadline - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()
            found[f"{method} {name}"] = json.loads(facts.read_text()) if facts.exists() else {"code": child.exitcode}
    return found


# -- the other order, and what vllm-ascend's tests say ---------------------------------------


def late():
    import harness
    import vllm_ascend

    from balance_patcher import plugin
    from balance_patcher.decision import decide
    from balance_patcher.errors import PatchError

    scheduler, core = classes()  # which arms, by the platform plugin
    plugin.disarm()
    vllm_ascend._ensure_global_patch()
    plugin.arm()
    theirs = scheduler.Scheduler
    engine = object.__new__(core.DPEngineCoreProc)
    engine.dp_rank = 0
    off = decide(engine, harness.vllm_config(harness.Shape(ranks=2), {}))
    untouched = scheduler.Scheduler is theirs
    on = {"enable_balance_scheduling": True}
    try:
        decide(engine, harness.vllm_config(harness.Shape(ranks=2), on))
        refused = []
    except PatchError as error:
        refused = [str(failure) for failure in error.failures]
    return {
        "theirs": origin(theirs),
        "off": [made.active for made in off],
        "untouched": untouched and scheduler.Scheduler is theirs,
        "refused": refused,
    }


def pinned():
    import inspect

    scheduler, core = classes()
    upstream, engine, run = scheduler.Scheduler, core.DPEngineCoreProc, core.EngineCoreProc.run_engine_core
    import vllm_ascend

    vllm_ascend._ensure_global_patch()
    module = sys.modules[MODULE]
    source = inspect.getsource(module.BalanceScheduler.schedule)
    parameters = [
        [(name, str(one.default)) for name, one in inspect.signature(cls.__init__).parameters.items()]
        for cls in (module.BalanceScheduler, upstream)
    ]
    module.init_ascend_config = lambda config: config.answer
    answer = type("Config", (), {"additional_config": {}})()
    answer.answer = type("Ascend", (), {"enable_balance_scheduling": True})()
    return {
        "source": source,
        "init": parameters,
        "schedule": [str(inspect.signature(cls.schedule)) for cls in (module.BalanceScheduler, upstream)],
        "engine": core.DPEngineCoreProc is engine,
        "run": core.EngineCoreProc.run_engine_core is module._balance_run_engine_core,
        "genuine": module._OriginalRunEngineCore is run,
        "builds by name": "DPEngineCoreProc(" in inspect.getsource(module._OriginalRunEngineCore),
        "asked there": module._balance_scheduling_enabled(answer),
        "without a configuration": module._balance_scheduling_enabled(None),
    }


def again():
    listen()
    _, core = classes()
    genuine = core.EngineCoreProc.run_engine_core
    import vllm_ascend

    vllm_ascend._ensure_global_patch()
    first = sys.modules.pop(MODULE)
    placed = vars(core.EngineCoreProc)["run_engine_core"]
    without = run_by(core)
    second = importlib.import_module(MODULE)

    from balance_patcher import takeover

    return {
        "executed": EXECUTED,
        "new": second is not first,
        "names": sorted(set(vars(first)) ^ set(vars(second))),
        "same": [name for name in vars(first) if name[:2] != "__" and vars(first)[name] is not vars(second)[name]],
        "genuine": second._OriginalRunEngineCore is genuine,
        "placed": vars(core.EngineCoreProc)["run_engine_core"] is placed,
        "runs": [without, run_by(core)],
        "declined": [done.declined for done in takeover.take_overs()],
    }


def run_by(core):
    """What ``run_engine_core`` raises when it is called with nothing: upstream's own function says what it lacks."""
    try:
        core.EngineCoreProc.run_engine_core()
    except KeyError as error:
        return str(error)
    return "nothing"


def main():
    job = sys.argv[1]
    result = {"patched": patched, "engines": engines, "late": late, "pinned": pinned, "again": again}[job]()
    print(json.dumps({"ascend": result}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # what vllm-ascend registers for the end of a process needs an NPU

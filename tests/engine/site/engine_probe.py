"""A general plugin for tests: makes data-parallel MoE run on CPU, and writes down what engine cores do.

The collectives that vLLM's CPU communicator lacks are those of the demo. Each engine core appends one line of
JSON a step to ``$ENGINE_PROBE/rank-N.jsonl``, from a wrapper around its busy loop, which is upstream's own
otherwise.
"""

import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import engine_bursts
import engine_ranks

FOLDER = os.environ.get("ENGINE_PROBE")


def register():
    from balance_patcher.demo.probe import give_collectives

    give_collectives()
    if os.environ.get("ENGINE_ASYNC") == "1":
        keep_asynchronous()
    if os.environ.get("ENGINE_START") == "fork":
        keep_forking()
    if os.environ.get("ENGINE_REMIND"):
        from balance_patcher import reminder

        reminder.INTERVAL = float(os.environ["ENGINE_REMIND"])
    if os.environ.get("ENGINE_PATIENCE"):
        from balance_patcher import agreement

        agreement.PATIENCE = float(os.environ["ENGINE_PATIENCE"])
    if os.environ.get("ENGINE_RANKS"):
        engine_ranks.differ(os.environ["ENGINE_RANKS"])
    if os.environ.get("ENGINE_RAY"):
        engine_ranks.actors()
    if os.environ.get("ENGINE_CLOSED"):
        from tools.simulator import recorder

        recorder.watch(Path(FOLDER))
    if FOLDER:
        watch()
    if os.environ.get("ENGINE_READS"):
        count_reads(os.environ["ENGINE_READS"])


def count_reads(phase):
    """The counter of the NPU check, in one phase for the whole run; it writes into a folder of its own.

    It comes after the probe, so that what the probe reads of the counts is not taken for the gather's.
    """
    from balance_patcher.npu import plugin

    folder = Path(FOLDER) / "reads"
    folder.mkdir(exist_ok=True)
    (folder / plugin.PHASE).write_text(phase, encoding="utf-8")
    os.environ |= {plugin.FOLDER: str(folder), plugin.DEVICE: "cpu"}
    plugin.watch_engines()
    plugin.watch_workers()


def keep_asynchronous():
    """Asynchronous scheduling on CPU, where the platform switches it off as "not required"."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    complete_streams()


def keep_forking():
    """Engine cores and workers that are forked: on CPU the platform overrides the start method with spawn."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        check(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def complete_streams():
    """A stream that others can be made to wait for: the CPU worker's stand-in for one lacks it on older lanes.

    There is no device, so nothing is ever waited for. It is done when a worker sets up its device: only there
    may the CPU worker's module, which changes torch for the whole process, be imported.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_device = WorkerWrapperBase.init_device

    def completed(self):
        import torch
        from vllm.v1.worker import cpu_model_runner

        without_cuda = cpu_model_runner._torch_cuda_wrapper

        @contextmanager
        def with_streams():
            with without_cuda():
                if not hasattr(torch.cuda.Stream(), "wait_stream"):
                    torch.cuda.Stream.wait_stream = lambda *_: None
                yield

        cpu_model_runner._torch_cuda_wrapper = with_streams
        init_device(self)

    WorkerWrapperBase.init_device = completed


def watch():
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for cls in (DPEngineCoreProc, EngineCoreProc):  # the second is what a dense model's ranks are
        if "probed" not in vars(cls):
            cls.probed = True
            cls.run_busy_loop = recorded(cls.run_busy_loop)


def recorded(loop):
    """A busy loop that writes down what runs in its process, and every gather."""

    def run_busy_loop(self):
        file = Path(FOLDER) / f"rank-{self.engine_index}.jsonl"
        with file.open("a", encoding="utf-8", buffering=1) as out:
            out.write(json.dumps(facts(self)) + "\n")
            gather = getattr(self.scheduler, "balance_gather", None)
            if gather is not None:
                self.scheduler.balance_gather = recording(self, gather, out)
            if os.environ.get("ENGINE_CLOSED"):
                engine_bursts.hold(self, FOLDER)
            if os.environ.get("ENGINE_SLOW"):
                slow_down(self)
            if os.environ.get("ENGINE_CONTROL"):
                misplace(self, os.environ["ENGINE_CONTROL"])
            loop(self)

    return run_busy_loop


def misplace(engine, place):
    """The gather where it must not be: at the top of ``schedule`` or of ``_process_engine_step``."""
    from balance_patcher.installation import installed

    hook = "_has_global_unfinished_reqs"
    upstream = installed("balance").built.originals[f"vllm.v1.engine.core:DPEngineCoreProc.{hook}"]
    setattr(engine, hook, upstream.__get__(engine))
    owner, name = {"schedule": (engine.scheduler, "schedule"), "step": (engine, "_process_engine_step")}[place]
    real = getattr(owner, name)

    def gathering(*args, **kwargs):
        engine.scheduler.balance_gather(engine.dp_group)
        return real(*args, **kwargs)

    setattr(owner, name, gathering)


def facts(engine):
    """What runs in this process."""
    from vllm.v1.core.sched import scheduler as module
    from vllm.v1.engine import core

    classes = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(engine.scheduler).__mro__]
    return {
        "pid": os.getpid(),
        # What multiprocessing calls this is not what it says: a spawned process has it on its command line.
        "start": "spawn" if "--multiprocessing-fork" in sys.orig_argv else "fork",
        "classes": classes,
        "schedule file": type(engine.scheduler).schedule.__code__.co_filename,
        "hook file": core.DPEngineCoreProc._has_global_unfinished_reqs.__code__.co_filename,
        "scheduler name": module.Scheduler.__name__,
        "enabled": getattr(engine.scheduler, "_balance_enabled", None),
        "queue": hasattr(engine.scheduler, "balance_queue"),
    }


def recording(engine, gather, out):
    """A gather that is written down with what follows from it; the first one after a pause with what it found."""
    found = {}

    def state():
        running, waiting = engine.scheduler.get_request_counts()
        return {
            "counts": [int(count) for count in engine.scheduler.balance_queue], "running": running, "waiting": waiting
        }  # fmt: skip

    def record(*args):
        gather(*args)
        out.write(json.dumps({**state(), "step": engine.step_counter, **found}) + "\n")
        found.clear()

    resume = engine.resume_scheduler

    def resume_scheduler():
        resume()
        found["resumed"] = state()

    engine.resume_scheduler = resume_scheduler
    return record


def slow_down(engine):
    """Steps that take as many seconds more as a file of this rank says, while there is one.

    They run the model first, and another file says in which step the rank rests. A step that has nothing to run
    does so later, in a dummy batch, without which the other rank's would not end.
    """
    file, asleep = (Path(FOLDER) / f"{name}-{engine.engine_index}" for name in ("slow", "asleep"))
    step = engine._process_engine_step

    def _process_engine_step():
        executed = step()
        if executed and file.exists():
            asleep.write_text(str(engine.step_counter + 1))
            with suppress(FileNotFoundError):  # it goes when the driver has seen enough
                time.sleep(float(file.read_text()))
            asleep.unlink()
        return executed

    engine._process_engine_step = _process_engine_step

"""A worker as a device outside of vLLM has one: found by its name, in processes that vLLM's executor starts.

A CPU is refused the balancer with the configuration. So it is switched on here, for as long as the workers' base
looks, and what a worker of that kind finds is printed.
"""

import os

from vllm.distributed.eplb import eplb_state
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    """With the balancer on while its base is built."""

    def __init__(self, *args, **kwargs):
        parallel = (kwargs.get("vllm_config") or args[0]).parallel_config
        object.__setattr__(parallel, "enable_eplb", True)
        try:
            super().__init__(*args, **kwargs)
        finally:
            object.__setattr__(parallel, "enable_eplb", False)
        hooks = hasattr(eplb_state.EplbState, "create_policy")
        print(f"\nOWN WORKER {os.getpid()} of {os.getppid()} hooks={hooks}", flush=True)  # noqa: T201 - it is read


class Broken(Worker):
    """Somebody has replaced what the hooks would edit."""

    def __init__(self, *args, **kwargs):
        eplb_state.EplbState.rearrange = lambda self, *_, **__: None
        super().__init__(*args, **kwargs)

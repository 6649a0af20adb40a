"""For tests: ranks that share a command are made unlike each other, where their processes are started.

``$ENGINE_RANKS`` holds what is different for some of them, by their number: an ``environment``, and settings of the
configuration. It is all that they get; nothing is done in the engine cores themselves.
"""

import copy
import json
import os
from multiprocessing.process import BaseProcess


def differ(text):
    """Start the engine cores of this process with what ``text`` has for their rank."""
    unlike, start = json.loads(text), BaseProcess.start

    def start_unlike(self):
        given = self._kwargs
        told = unlike.get(str(given.get("dp_rank"))) if "vllm_config" in given else None
        if told is None:
            start(self)
            return
        self._kwargs = {**given, "vllm_config": changed(given["vllm_config"], told)}
        before = dict(os.environ)
        os.environ.update(told["environment"])
        try:
            start(self)
        finally:
            os.environ.clear()
            os.environ.update(before)

    if BaseProcess.start.__name__ != "start_unlike":
        BaseProcess.start = start_unlike


def changed(vllm_config, told):
    """A configuration of its own for one rank."""
    config = copy.deepcopy(vllm_config)
    config.scheduler_config.max_num_seqs = told["max_num_seqs"]
    config.additional_config = told["additional_config"]
    return config


def actors():
    """Let Ray place engine cores on the CPU, whose platform does not say which of Ray's resources it is.

    In an actor, the class has a copy of each method that it inherits, which hides the probe's. The busy loop's goes.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import DPEngineCoreProc

    CpuPlatform.ray_device_key = "CPU"
    for actor in DPEngineCoreProc.__subclasses__():
        for made_by_ray in actor.__subclasses__():
            if "run_busy_loop" in vars(made_by_ray):
                del made_by_ray.run_busy_loop

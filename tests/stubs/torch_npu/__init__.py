"""Just enough of ``torch_npu`` for vllm-ascend's global patches to be applied on a machine without an NPU.

Every attribute is there and does nothing; ``torch.npu`` is this module, as the real one makes it.
"""

import sys
import types


class _Anything:
    """Stands for any function, class or constant."""

    def __init__(self, name="torch_npu"):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # a class, which annotations and base classes want to be one
            return type(name, (), {"__module__": self._name})
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        return None


def __getattr__(name):
    return getattr(_Anything(), name)


def _module(name, **members):
    module = types.ModuleType(name)
    module.__getattr__ = _Anything(name).__getattr__
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def _install():
    import torch

    npu = _module("torch_npu.npu", is_available=lambda: False, device_count=lambda: 0, current_device=lambda: 0)
    if not hasattr(torch, "npu"):
        torch.npu = npu
        sys.modules["torch.npu"] = npu
        torch.distributed.is_hccl_available = lambda: False
    return npu


npu = _install()

"""Tests that need a lane: an environment in which one real vLLM is installed.

Run in the lane's own interpreter (``.lanes/<lane>/bin/python -m pytest tests/lane``). Elsewhere
nothing here is collected, because nothing here means anything without vLLM.
"""

import importlib.util
import os
import sys
from pathlib import Path

# Read by vLLM and torch when they are imported, so they are set before either is.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# A checkout that is installed for development has its plugin entry points on this path too.
os.environ["BALANCE_PATCHER"] = "off"
# What vLLM found out about a model is kept by the model's name; lanes that share it undo each other's.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / ".vllm-cache"))

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "third/test_*.py"]
else:
    import pytest
    from ascend_fixtures import ascend, site  # noqa: F401 - fixtures

    def pytest_collection_modifyitems(items):
        """Warnings are errors in this project; those of vLLM and torch are not this project's."""
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.filterwarnings("default"))

    @pytest.fixture(scope="session")
    def balance_class():
        """``BalanceScheduler``, built against the vLLM of this lane."""
        from harness import balance_scheduler

        return balance_scheduler()

    @pytest.fixture(scope="session")
    def balance_async_class():
        """``AsyncScheduler`` with ``BalanceScheduler`` between it and upstream's ``Scheduler``."""
        from harness import async_scheduler, balance_scheduler

        return balance_scheduler(async_scheduler())

"""What is set for a lane's Python that is driven by a tool: as small and quiet as it can be.

Read by vLLM and torch when they are imported, so it has to be there before.
"""

from __future__ import annotations

ENVIRONMENT = {
    "BALANCE_PATCHER": "off",  # it is installed by a call, and there is no engine that could ask
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

"""The KV cache of a rank: as many blocks as are asked for, or one that never fills.

Where nothing is ever preempted, which blocks a request has decides nothing, and keeping account of them takes a third
of a scheduler's time and nearly all of its memory. So a cache that never fills is the lane's own with its account left
out: it grants what it is asked for. What a dispatcher sees of it, the share in use, is counted from what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .traces import Arrival


def needed_blocks(trace: Sequence[Arrival], seqs: int, block: int) -> int:
    """KV cache blocks with which no rank ever preempts: its share of the longest requests, and upstream's own block."""
    longest = max(-(-(one.prompt + one.output) // block) for one in trace)
    return seqs * (longest + 1) + 1


def layout(blocks: int, block: int) -> Any:
    """One layer of a model, as vLLM describes it to a scheduler.

    Args:
        blocks: How many.
        block: Tokens of each.
    """
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    layer = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])


def never_fills(scheduler: Any) -> None:
    """Let a scheduler's cache grant every request what it asks for, and keep no account of it."""
    manager = scheduler.kv_cache_manager
    granted = manager.empty_kv_cache_blocks

    def allocate_slots(*_: Any, **__: Any) -> Any:
        return granted

    def nothing(*_: Any, **__: Any) -> None:
        pass

    manager.allocate_slots, manager.free, manager.cache_blocks = allocate_slots, nothing, nothing


def usage(blocks: int, block: int) -> Callable[[Any], float]:
    """The share of so many blocks that a scheduler's running requests would have, as upstream's cache counts it.

    Args:
        blocks: How many there would be; one is upstream's own.
        block: Tokens of each.
    """

    def share(scheduler: Any) -> float:
        used: int = sum(-(-request.num_computed_tokens // block) for request in scheduler.running)
        return used / (blocks - 1)

    return share

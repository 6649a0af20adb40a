"""The real thing: a lane's schedulers, one a rank, configured as the engine cores would build them.

What stands around a scheduler is made as small as it may be, so that little but its own work takes time: prefix
caching and statistics are off, prompts of one length share their tokens, and all that decode share one answer. What
differs between lanes is asked of the lane's own code.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balance_patcher.installation import Installation, install
from balance_patcher.live_engine import TINY_MOE

from . import cache
from .gates import CatchUp, Off, On, hold
from .ranks import ASYNCHRONOUS, SYNCHRONOUS, LaneRank, Requests

#: Off and on are the patch; the third is what the gate is often taken for, as a counter-example.
GATES: dict[str, type[Off | On | CatchUp]] = {"off": Off, "on": On, "catch-up": CatchUp}


@dataclass(frozen=True)
class Shape:
    """How each scheduler is configured.

    Attributes:
        seqs: Requests that run at a time.
        tokens: Tokens of a step.
        longest: Tokens that the model takes.
        block: Tokens of a KV cache block.
        blocks: KV cache blocks of a rank.
        endless: Whether the cache never fills; ``blocks`` is then only what its use is a share of.
        asynchronous: Whether a step is decided on before the one before it has its tokens.
    """

    seqs: int
    tokens: int
    longest: int
    block: int
    blocks: int
    endless: bool = False
    asynchronous: bool = False


@dataclass(frozen=True)
class Group:
    """The ranks of one simulation."""

    ranks: Sequence[LaneRank]
    gate: Off | On | CatchUp
    cap: int


def group(number: int, gate: str, shape: Shape, class_: type | None = None) -> Group:
    """As many schedulers as there are ranks, with one way to admit.

    Args:
        number: How many.
        gate: One of ``GATES``.
        shape: How each is configured.
        class_: Another scheduler than the one that this configuration gets here.
    """
    # Before ours is in place, as in an engine core: it is then rebased with the others, and undoing puts it back.
    import vllm.v1.core.sched.async_scheduler  # noqa: F401

    installation = install("balance")
    from vllm.v1.core.sched.scheduler import Scheduler

    cap, count = cap_attribute(installation), Scheduler._balance_count  # noqa: SLF001 - our own
    config = _config(number, shape, enabled=gate == "on")
    chosen = class_ or config.scheduler_config.get_scheduler_cls()
    arguments = _arguments(config, shape)
    made, flight = Requests(), ASYNCHRONOUS if shape.asynchronous else SYNCHRONOUS
    usage = cache.usage(shape.blocks, shape.block) if shape.endless else None
    ranks = []
    for _ in range(number):
        # A cache that keeps no account needs no more blocks than vLLM wants for one request.
        blocks = -(-shape.longest // shape.block) + 1 if shape.endless else shape.blocks
        scheduler = chosen(**arguments, kv_cache_config=cache.layout(blocks, shape.block))
        if shape.endless:
            cache.never_fills(scheduler)
        if gate == "catch-up":
            hold(scheduler, cap, count)
        ranks.append(LaneRank(scheduler, made, count, flight, usage))
    return Group(ranks, GATES[gate](ranks), getattr(ranks[0].scheduler, cap))


def cap_attribute(installation: Installation) -> str:
    """The attribute that upstream's own admission stop compares with, as the gate's delta found it."""
    exports: dict[str, str] = {}
    for placement in installation.built.plan.placements:
        exports |= placement.exports
    return exports["_balance_cap"].rpartition(".")[2]


def _config(ranks: int, shape: Shape, *, enabled: bool) -> Any:
    """One configuration for all ranks: a scheduler reads nothing of it that differs between them."""
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig

    model = _model(shape.longest)
    scheduler = SchedulerConfig(
        max_num_seqs=shape.seqs, max_num_batched_tokens=shape.tokens, max_model_len=shape.longest,
        enable_chunked_prefill=True, async_scheduling=False, is_encoder_decoder=False,
    )  # fmt: skip
    blocks = CacheConfig(block_size=shape.block, enable_prefix_caching=False)
    blocks.num_gpu_blocks = shape.blocks
    config = VllmConfig(
        model_config=model, cache_config=blocks, scheduler_config=scheduler, device_config=DeviceConfig("cpu"),
        additional_config={"enable_balance_scheduling": True} if enabled else {},
    )  # fmt: skip
    # On the finished object: the CPU's platform would take it back as "not required".
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.parallel_config.data_parallel_size = ranks
    return config


#: Folders of model configurations: vLLM looks into them again for each of its own. They go with the process.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _model(longest: int) -> Any:
    from vllm.config import ModelConfig

    folder = tempfile.TemporaryDirectory(prefix="balance-simulate-")
    _FOLDERS.append(folder)
    description = json.dumps(TINY_MOE | {"max_position_embeddings": longest})
    (Path(folder.name) / "config.json").write_text(description, encoding="utf-8")
    return ModelConfig(
        model=folder.name, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest, enforce_eager=True
    )


def _arguments(config: Any, shape: Shape) -> dict[str, Any]:
    from vllm.v1.structured_output import StructuredOutputManager

    return {
        "vllm_config": config,
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": shape.block,
        "log_stats": False,
    }

"""Build a real ``Scheduler`` and its requests in one process, and compare two of them.

Nothing here knows a vLLM version. What differs between lanes is read from the lane's own code:
from the names that upstream's ``schedule`` uses, and from the parameters that its constructors take.
"""

import dataclasses
import enum
import functools
import inspect
import marshal
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import SimpleNamespace

import torch

MODEL = str(Path(__file__).parent / "tiny_moe")
BLOCK = 16
MODEL_LEN = 256
TARGET = "vllm.v1.core.sched.scheduler:Scheduler"


# -- the classes ------------------------------------------------------------------------------


@functools.cache
def upstream_scheduler():
    """Upstream's own ``Scheduler`` class, also while another stands under its name."""
    from vllm.v1.core.sched import scheduler

    return next(cls for cls in scheduler.Scheduler.__mro__ if cls.__module__ == scheduler.__name__)


@functools.cache
def async_scheduler():
    """Upstream's own ``AsyncScheduler`` class, as it was when it was first asked for."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler


@functools.cache
def _built():
    from balance_patcher.build import build

    return build("balance")


def balance_scheduler(base=None):
    """``BalanceScheduler``; with ``base``, a direct subclass of upstream's ``Scheduler`` over it.

    The method resolution order of the latter is base, ``BalanceScheduler``, ``Scheduler``: what an
    installed patch arrives at by rebasing, here without changing anything in vLLM.
    """
    balanced = _built().classes[TARGET]
    if base is None:
        return balanced
    return type(f"Balance{base.__name__}", (base, balanced), {})


def engine_core():
    """Upstream's ``EngineCore``."""
    from vllm.v1.engine.core import EngineCore

    return EngineCore


def dp_engine_core():
    """Upstream's ``DPEngineCoreProc``."""
    from vllm.v1.engine.core import DPEngineCoreProc

    return DPEngineCoreProc


class Loop(SimpleNamespace):
    """As much of a data-parallel engine core as a decision looks at."""

    dp_rank = 1

    def _has_global_unfinished_reqs(self):
        raise AssertionError("not called while deciding")


# -- what this lane's upstream looks like ---------------------------------------------------------


def schedule_names():
    """Global and attribute names used by the body of upstream's ``schedule``."""
    return frozenset(upstream_scheduler().schedule.__code__.co_names)


def cap_attribute():
    """The attribute that upstream's own admission stop compares with."""
    return "max_num_active_reqs" if "max_num_active_reqs" in schedule_names() else "max_num_running_reqs"


def counts_paused_sessions():
    """Whether upstream's own admission stop counts paused streaming sessions."""
    return "num_waiting_for_streaming_input" in schedule_names()


def takes_throttle():
    """Whether upstream's ``schedule`` has ``throttle_prefills``."""
    return "throttle_prefills" in inspect.signature(upstream_scheduler().schedule).parameters


def admission_cap(scheduler):
    """The number of requests at which ``scheduler`` stops admitting."""
    return getattr(scheduler, cap_attribute())


def admission_count(scheduler):
    """What upstream's own stop compares with the cap, computed without any code under test."""
    paused = scheduler.num_waiting_for_streaming_input if counts_paused_sessions() else 0
    return len(scheduler.running) + paused


# -- construction -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """How a scheduler is configured. ``blocks`` counts KV cache blocks of ``BLOCK`` tokens."""

    seqs: int = 4
    active: int | None = None
    tokens: int = 64
    blocks: int = 200
    ranks: int = 2
    rank: int = 0
    policy: str = "fcfs"
    prefix_caching: bool = True
    reserve_full: bool = True
    long_prefill: int = 0
    spec_tokens: int = 0
    max_loras: int = 0
    connector: bool = False
    load_failure: str = "recompute"
    asynchronous: bool = False
    encoder: bool = False
    window: bool = False
    zeroing: bool = False
    v2_runner: bool = False
    log_stats: bool = True

    @property
    def cap(self):
        """The admission cap that upstream makes of this shape."""
        return self.active or self.seqs


def accepted(callable_, **wanted):
    """Those of ``wanted`` that ``callable_`` has parameters for on this lane."""
    parameters = inspect.signature(callable_).parameters
    return {name: value for name, value in wanted.items() if name in parameters}


def supports_active_cap():
    """Whether the admission cap can be configured apart from ``max_num_seqs``."""
    from vllm.config import SchedulerConfig

    return "max_num_active_seqs" in inspect.signature(SchedulerConfig).parameters


@functools.cache
def _model_config():
    from vllm.config import ModelConfig

    return ModelConfig(
        model=MODEL, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MODEL_LEN, enforce_eager=True
    )


def vllm_config(shape, additional_config=None):
    """A ``VllmConfig`` for ``shape``; ``additional_config`` is where balance scheduling is enabled."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        LoRAConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    model = _model_config()
    scheduler = SchedulerConfig(
        max_num_seqs=shape.seqs,
        max_num_batched_tokens=shape.tokens,
        max_model_len=MODEL_LEN,
        enable_chunked_prefill=True,
        policy=shape.policy,
        async_scheduling=False,
        is_encoder_decoder=False,
        long_prefill_token_threshold=shape.long_prefill,
        scheduler_reserve_full_isl=shape.reserve_full,
        **({"max_num_active_seqs": shape.active} if shape.active else {}),
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=shape.prefix_caching)
    cache.num_gpu_blocks = shape.blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        device_config=DeviceConfig("cpu"),
        additional_config=additional_config or {},
    )
    # The rest is set on the finished object: what vLLM derives or refuses for it when it starts an
    # engine (drafters, adapters, transports) is not what a scheduler in one process needs.
    config.parallel_config.data_parallel_size = shape.ranks
    config.parallel_config.data_parallel_rank = shape.rank
    config.scheduler_config.async_scheduling = shape.asynchronous
    if shape.spec_tokens:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=shape.spec_tokens,
            prompt_lookup_max=3,
            target_model_config=model,
            target_parallel_config=config.parallel_config,
        )
    if shape.max_loras:
        config.lora_config = LoRAConfig(max_loras=shape.max_loras, max_lora_rank=8, max_cpu_loras=8)
    if shape.connector:
        from toy_connector import ToyConnector

        config.kv_transfer_config = KVTransferConfig(
            kv_connector=ToyConnector.__name__,
            kv_connector_module_path=ToyConnector.__module__,
            kv_role="kv_both",
            kv_load_failure_policy=shape.load_failure,
        )
    return config


def enabled_config(shape):
    """A ``VllmConfig`` in which balance scheduling is enabled."""
    return vllm_config(shape, {"enable_balance_scheduling": True})


def kv_cache_config(shape):
    """One full-attention layer; with ``window``, a second group with a sliding window."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    class Zeroed(KVCacheConfig):
        """A layout whose new blocks the workers clear, as they do for state-space layers."""

        needs_kv_cache_zeroing = True

    size = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**size))]
    if shape.window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**size, sliding_window=2 * BLOCK)))
    layout = Zeroed if shape.zeroing else KVCacheConfig
    return layout(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def scheduler_arguments(config, shape):
    """The keyword arguments with which the engine core builds its scheduler."""
    from vllm.v1.structured_output import StructuredOutputManager

    return {
        "vllm_config": config,
        "kv_cache_config": kv_cache_config(shape),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK,
        "log_stats": shape.log_stats,
    }


def new_scheduler(class_, shape, config=None):
    """A ``class_`` for ``shape``; balance scheduling is off unless ``config`` says otherwise."""
    config = vllm_config(shape) if config is None else config
    scheduler = class_(**scheduler_arguments(config, shape))
    if shape.encoder:
        # The model is a text model, so upstream gave it no encoder budget.
        scheduler.max_num_encoder_input_tokens = 24
        scheduler.encoder_cache_manager = type(scheduler.encoder_cache_manager)(cache_size=48)
    if shape.v2_runner:
        scheduler.use_v2_model_runner = True
    return scheduler


@functools.cache
def _block_hasher():
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def new_request(
    request_id,
    prompt,
    output_tokens,
    *,
    arrival=0.0,
    priority=0,
    lora=0,
    grammar=None,
    resumable=False,
    transfer=None,
    image=None,
):
    """A ``Request`` for ``prompt`` (token ids, or how many).

    ``lora`` is an adapter number, ``grammar`` a future, ``transfer`` the request's
    ``kv_transfer_params``, ``image`` an ``(offset, length)`` of encoder tokens in the prompt.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request

    prompt = list(range(3, 3 + prompt)) if isinstance(prompt, int) else list(prompt)
    params = SamplingParams(
        max_tokens=output_tokens,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(json_object=True) if grammar is not None else None,
        extra_args={"kv_transfer_params": dict(transfer)} if transfer else None,
    )
    images = []
    if image is not None:
        name = f"image-{request_id}"
        place = PlaceholderRange(offset=image[0], length=image[1])
        images.append(MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place))
    request = Request(
        **accepted(
            Request.__init__,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival,
            priority=priority,
            eos_token_id=2,
            lora_request=LoRARequest(f"adapter-{lora}", lora, f"/nowhere/{lora}") if lora else None,
            mm_features=images,
            resumable=resumable,
            block_hasher=_block_hasher(),
        )
    )
    if grammar is not None:
        request.structured_output_request.grammar = grammar
    return request


def set_counts(scheduler, counts):
    """Write one count per rank into ``balance_queue``, as the gather would."""
    for tensor, count in zip(scheduler.balance_queue, counts, strict=True):
        tensor.fill_(count)


# -- comparison -------------------------------------------------------------------------------

CLOCK_FIELDS = frozenset({"timestamp"})
SCALARS = frozenset({type(None), bool, int, float, str, bytes})


@functools.cache
def _named_types():
    """vLLM's types that a comparison names instead of opening, and its read-only list."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request
    from vllm.v1.utils import ConstantList

    return Request, KVCacheBlock, ConstantList


def plain(value):
    """``value`` as nested lists, dicts and scalars, with every field of every object in it.

    Sets are sorted; dicts keep their order, which is the order in which workers see requests.
    Fields in ``CLOCK_FIELDS`` are left out, because they hold the wall clock.

    Raises:
        TypeError: for an object whose fields cannot be listed; it must not be left out silently.
    """
    if type(value) in SCALARS:
        return value
    request, block, constant_list = _named_types()
    if isinstance(value, constant_list):
        return list(value)
    if isinstance(value, (list, tuple, deque)):
        return [entry if type(entry) in SCALARS else plain(entry) for entry in value]
    if isinstance(value, request):
        return f"request {value.request_id}"
    if isinstance(value, block):
        return f"block {value.block_id}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((plain(entry) for entry in value), key=repr)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif hasattr(value, "__struct_fields__"):
        names = value.__struct_fields__
    else:
        raise TypeError(f"plain: a {type(value).__module__}.{type(value).__qualname__} has no list of fields")
    fields = {name: plain(getattr(value, name)) for name in names if name not in CLOCK_FIELDS}
    return {"class": type(value).__name__, **fields}


def first_difference(left, right):
    """``None``, or the path of the first field in which two ``plain`` values differ, with both values."""
    # Bytes are equal only if types and orders are, and are made in C. Version 2 has no references.
    if marshal.dumps(left, 2) == marshal.dumps(right, 2):
        return None
    return _first_difference(left, right, "")


def _first_difference(left, right, path):
    if type(left) is type(right) and isinstance(left, dict):
        if list(left) != list(right):
            return f"{path or 'top'}: keys {list(left)} / {list(right)}"
        pairs = ((f"{path}.{key}" if path else str(key), left[key], right[key]) for key in left)
    elif type(left) is type(right) and isinstance(left, list):
        if len(left) != len(right):
            return f"{path}: {left!r} / {right!r}"
        pairs = ((f"{path}[{number}]", *both) for number, both in enumerate(zip(left, right, strict=True)))
    else:
        return None if left == right and type(left) is type(right) else f"{path}: {left!r} / {right!r}"
    return next((found for at, one, other in pairs if (found := _first_difference(one, other, at))), None)


REQUEST_STATE = (
    "status",
    "num_computed_tokens",
    "num_preemptions",
    "num_output_placeholders",
    "spec_token_ids",
    "is_prefill_chunk",
    "all_token_ids",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "drop_stale_output",
    "async_tokens_to_discard",
    "next_decode_eligible_step",
    "last_sched_seq",
)


def _is_state(value):
    """Scalars and collections of requests, ids or numbers: what a scheduler remembers between steps."""
    from vllm.v1.request import Request

    if isinstance(value, (list, set, frozenset, deque)):
        return all(isinstance(entry, (Request, str, int)) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))


def state(scheduler, names):
    """What ``scheduler`` remembers: queues in order, every request, free blocks, its own scalars.

    ``names`` are the attributes to read, of those in ``state_names``.
    """
    from vllm.v1.core.sched.request_queue import RequestQueue

    manager = scheduler.kv_cache_manager
    own = {}
    for name in names:
        value = getattr(scheduler, name)
        own[name] = [plain(entry) for entry in value] if isinstance(value, RequestQueue) else plain(value)
    requests = {}
    for request_id, request in scheduler.requests.items():
        known = {name: plain(getattr(request, name)) for name in REQUEST_STATE if hasattr(request, name)}
        requests[request_id] = {**known, "blocks": plain(manager.get_block_ids(request_id))}
    return {
        "scheduler": own,
        "requests": requests,
        "free_blocks": manager.block_pool.get_num_free_blocks(),
        "encoder_slots": scheduler.encoder_cache_manager.num_free_slots,
    }


def state_names(scheduler):
    """Names of the attributes of ``scheduler`` that hold state, sorted."""
    from vllm.v1.core.sched.request_queue import RequestQueue

    return sorted(
        name for name, value in vars(scheduler).items() if isinstance(value, RequestQueue) or _is_state(value)
    )

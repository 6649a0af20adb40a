"""vllm-ascend's ``patch_balance_schedule``: what it holds, who covers it, and what stands in its place.

vllm-ascend patches balance scheduling in by a copy of ``Scheduler.schedule``. Where balance_patcher is
installed beside it, that module is filled with the names below instead, at its place in vllm-ascend's import
order; the scheduler's deltas are those of :mod:`.balance`. Its own text is read and never run.

The covers were written from the releases 0.23.0 to 0.26.0rc1. A statement that none of them knows is a
reason to leave the module alone: then vllm-ascend's own copy runs.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from balance_patcher.delta import Level
from balance_patcher.standin import STALE, STAND_IN, Bind, Cover, StandIn

MODULE = "vllm_ascend.patch.platform.patch_balance_schedule"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ENGINE = "vllm.v1.engine.core"

_logger = logging.getLogger("vllm.balance_patcher")

#: Marks the module that was filled here, so that its names are never mistaken for those of the original.
FILLED = "_filled_by_balance_patcher"


# -- what the module is filled with ----------------------------------------------------------


def filled() -> ModuleType | None:
    """The module that stands in, where it does."""
    module = sys.modules.get(MODULE)
    return module if getattr(module, FILLED, False) else None


def fill(module: ModuleType, ours: type, bind: Bind) -> None:
    """Give the module the names that vllm-ascend takes from it, and put ``run_engine_core`` in its place.

    The engine core's class is left alone here, as theirs leaves it alone: the gather is bound in place once
    balance is decided to be on.
    """
    from vllm.v1.engine import core

    attribute = vars(core.EngineCoreProc)["run_engine_core"]
    found = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
    again = found is _balance_run_engine_core  # the module is loaded a second time
    genuine = vars(module)["_OriginalRunEngineCore"] if again else found
    upstream = next(base for base in ours.__mro__ if base.__module__ == SCHEDULER.partition(":")[0])
    vars(module).update({
        FILLED: True,
        "init_ascend_config": _init_ascend_config(),
        "BalanceScheduler": ours,
        "BalanceDPEngineCoreProc": core.DPEngineCoreProc,
        "_ORIGINAL_SCHEDULER": upstream,
        "_ORIGINAL_RUN_ENGINE_CORE": genuine,
        "_OriginalRunEngineCore": genuine,
        "_OriginalDPEngineCoreProc": core.DPEngineCoreProc,
        "_balance_run_engine_core": _balance_run_engine_core,
        "run_engine_core": _balance_run_engine_core,
        "_balance_scheduling_enabled": _balance_scheduling_enabled,
    })  # fmt: skip
    if hasattr(ours, "_disable_preemption"):
        vars(module)["_disable_preemption_on_prefill_node"] = _disable_preemption_on_prefill_node
    # A process target is pickled by module and name: a child imports that module, and all that vllm-ascend
    # does on the way there happens in it, as it would with theirs.
    for function in (_balance_run_engine_core, _balance_scheduling_enabled, _disable_preemption_on_prefill_node):
        function.__module__ = module.__name__
    if not again:
        same_kind = staticmethod if isinstance(attribute, staticmethod) else lambda function: function
        bind(core.EngineCoreProc, "run_engine_core", same_kind(_balance_run_engine_core))


def _init_ascend_config() -> Any:
    """vllm-ascend's own parser of its configuration; ``None`` where it is not installed or not usable."""
    try:
        from vllm_ascend.ascend_config import init_ascend_config
    except ImportError:
        return None
    return init_ascend_config


def ascend_config(vllm_config: Any) -> Any:
    """vllm-ascend's parsed configuration, by the parser that its own module would use; ``None`` without one.

    Where it refuses a configuration, vllm-ascend refuses the engine in its own words; here that is only told.
    """
    module = filled()
    init = getattr(module, "init_ascend_config", None) if module is not None else _init_ascend_config()
    if init is None:
        return None
    try:
        return init(vllm_config)
    except Exception as error:  # noqa: BLE001 - what somebody else's parser raises
        _logger.warning("vllm_ascend's configuration cannot be read here, so additional_config is: %s", error)
        return None


def _balance_run_engine_core(*args: Any, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs: Any) -> Any:
    """Upstream's ``run_engine_core``; balance is decided in the constructor of the engine that it builds.

    A child in which this is the process target has imported its module, and so is armed.
    """
    original = vars(sys.modules[_balance_run_engine_core.__module__])["_OriginalRunEngineCore"]
    return original(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)


def _balance_scheduling_enabled(vllm_config: Any) -> bool:
    """Whether the configuration asks for balance; without a configuration nobody does."""
    from .balance import balance_asked_by

    return vllm_config is not None and balance_asked_by(vllm_config) is not None


def _disable_preemption_on_prefill_node(vllm_config: Any) -> bool:
    """Whether this is a node that only prefills, on which nobody may be preempted."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return getattr(transfer, "kv_role", None) == "kv_producer"


def short_request_first(scheduler: Any) -> None:
    """Let short requests go first where vllm-ascend is configured so: its own queue, by its own function.

    Its patch does this in the scheduler's ``__init__``; the releases that have no such setting do nothing here.
    """
    if filled() is None:
        return
    wanted: Any = getattr(ascend_config(scheduler.vllm_config), "scheduler_config", None)
    wanted = getattr(wanted, "short_request_first_config", None)
    if getattr(wanted, "enabled", False):
        from vllm_ascend.core.short_request_first_scheduler import install_short_request_first_waiting_queue

        install_short_request_first_waiting_queue(
            scheduler, threshold=wanted.threshold, long_max_wait_ms=wanted.long_max_wait_ms
        )


# -- what the original may hold --------------------------------------------------------------

_WAITING = (Level("waiting", "if $_", outermost=True), Level("loop", "while $_"))
_FROZEN = "max(t.item() for t in self.balance_queue) == self.max_num_running_reqs"


def _covers(place: str, by: str, *patterns: str, inside: tuple[Level, ...] = (), why: str = "") -> tuple[Cover, ...]:
    return tuple(Cover(place, pattern, by, why, inside) for pattern in patterns)


def _disabled_path(header: str) -> tuple[Cover, ...]:
    within = (Level("off", header, direct=False, outermost=True),)
    patterns = (
        "return super().schedule()",
        "return super().schedule(throttle_prefills)",
        "if vllm_version_is($_)",
        "if _SUPER_SCHEDULE_HAS_THROTTLE",
    )
    return (
        *_covers("BalanceScheduler.schedule", "balance.disabled-path", header),
        *_covers("BalanceScheduler.schedule", "balance.disabled-path", *patterns, inside=within),
    )


_NAMES = _covers(
    "", STAND_IN,
    "class BalanceScheduler(Scheduler)",
    "class BalanceDPEngineCoreProc(DPEngineCoreProc)",
    "_ORIGINAL_RUN_ENGINE_CORE = EngineCoreProc.run_engine_core",
    "_OriginalRunEngineCore = EngineCoreProc.run_engine_core",
    "_OriginalDPEngineCoreProc = _engine_core_mod.DPEngineCoreProc",
    "_ORIGINAL_SCHEDULER = Scheduler",
    "_SUPER_SCHEDULE_HAS_THROTTLE = $_ in inspect.signature(Scheduler.schedule).parameters",
    "EngineCoreProc.run_engine_core = run_engine_core",
    "EngineCoreProc.run_engine_core = staticmethod(_balance_run_engine_core)",
    "vllm.v1.core.sched.scheduler.Scheduler = BalanceScheduler",
    "_sched_mod.Scheduler = BalanceScheduler",
    "stand_in(__name__)",
    "__all__ = [$$$_]",
)  # fmt: skip

_ASKED_FOR = _covers("", "prefill_preemption", "stand_in(__name__, 'prefill_preemption')")

_CONFIGURATION = _covers(
    "_balance_scheduling_enabled", STAND_IN,
    """
    try:
        from vllm_ascend.ascend_config import get_ascend_config
        return bool($_.enable_balance_scheduling)
    except Exception:
        pass
    """,
    "additional_config = getattr(vllm_config, 'additional_config', None) or {}",
    "scheduler_config = additional_config.get('scheduler_config')",
    "if isinstance(scheduler_config, dict) and 'enable_balance_scheduling' in scheduler_config",
    "if 'enable_balance_scheduling' in additional_config",
    "return bool($_['enable_balance_scheduling'])",
    "return bool($_.enable_balance_scheduling)",
    "return bool(int(os.getenv('VLLM_ASCEND_BALANCE_SCHEDULING', '0')))",
    "return False",
    "if vllm_config is None: return False",
    why="vllm-ascend's own configuration is asked, and only where it cannot be, the plain one",
)  # fmt: skip

_CONSTRUCTOR = (
    *_covers(
        "BalanceScheduler.__init__", STAND_IN,
        "super().__init__($$$_)",
        "self._balance_enabled = _balance_scheduling_enabled(vllm_config)",
        "if self._balance_enabled",
        "self.balance_queue = [torch.tensor([0], dtype=torch.int, device='cpu') for $_ in range($_)]",
        "self.dp_group = None",
    ),
    *_covers(
        "BalanceScheduler.__init__", STAND_IN,
        "short_request_first_config = init_ascend_config(vllm_config).scheduler_config.short_request_first_config",
        "if short_request_first_config.enabled",
        "install_short_request_first_waiting_queue($$$_)",
        why="short-request-first: vllm-ascend's own queue, installed in our __init__",
    ),
)  # fmt: skip

_GATHER = (
    *_covers(
        "BalanceScheduler.balance_gather", "balance.gather",
        "if not self._balance_enabled: return",
        "if not self._balance_enabled or self.dp_group is None: return",
        "running_tensor = torch.tensor([len(self.running)], dtype=torch.int, device='cpu')",
        "dist.all_gather(self.balance_queue, running_tensor, group=$_)",
    ),
    *_covers(
        "BalanceDPEngineCoreProc._has_global_unfinished_reqs", "balance.gather",
        "result = super()._has_global_unfinished_reqs(local_unfinished)",
        "self.scheduler.dp_group = self.dp_group",
        "self.scheduler.balance_gather()",
        "return result",
    ),
    *_covers(
        "BalanceDPEngineCoreProc.run_busy_loop", "balance.gather",
        "self.scheduler.balance_gather(self.dp_group)",
        inside=(Level("loop", "while True", outermost=True),),
    ),
    *_covers("BalanceDPEngineCoreProc.run_busy_loop", STALE, "while True", "self.execute_dummy_batch()"),
    *_covers(
        "_balance_run_engine_core", STAND_IN,
        "vllm_config = kwargs.get('vllm_config')",
        "if _balance_scheduling_enabled(vllm_config): _engine_core_mod.DPEngineCoreProc = BalanceDPEngineCoreProc\n"
        "else: _engine_core_mod.DPEngineCoreProc = _OriginalDPEngineCoreProc",
        "return _OriginalRunEngineCore(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)",
        why="the hook is bound in place, so no class has to be swapped",
    ),
)  # fmt: skip

_ENGINE_COPY = (
    *_covers(
        "run_engine_core", STAND_IN,
        "vllm_config = kwargs.get('vllm_config')",
        "if not _balance_scheduling_enabled(vllm_config): return _ORIGINAL_RUN_ENGINE_CORE($$$_)",
        "engine_core = BalanceDPEngineCoreProc(*args, **kwargs)",
        why="upstream's own function runs, with the hook in place",
    ),
    *_covers(
        "run_engine_core", STALE,
        "shutdown_requested = False",
        """
        def signal_handler($_, $_):
            nonlocal $FLAG
            if not $FLAG:
                $FLAG = True
                raise SystemExit()
        """,
        "signal.signal($_, signal_handler)",
        "parallel_config: ParallelConfig = kwargs['vllm_config'].parallel_config",
        "if parallel_config.data_parallel_size > 1 or dp_rank > 0",
        "set_process_title($$$_)",
        "decorate_logs()",
        "parallel_config.data_parallel_rank = dp_rank",
        "engine_core = EngineCoreProc(*args, **kwargs)",
        "logger.debug($_)",
    ),
)  # fmt: skip

_SCHEDULE = (
    *_disabled_path("if not self._balance_enabled"),
    *_disabled_path("if not self._balance_enabled and not self._disable_preemption"),
    *_covers(
        "BalanceScheduler.schedule", "balance.admission-gate",
        f"if {_FROZEN}: break", "if self._balance_enabled",
        inside=_WAITING,
    ),
    *_covers(
        "BalanceScheduler.schedule", "balance.admission-gate",
        f"balance_flag = {_FROZEN}", "if balance_flag: break",
        inside=(*_WAITING, Level("on", "if self._balance_enabled")),
    ),
    *_covers(
        "BalanceScheduler.schedule", "balance.empty-queue-guard", "if request_queue is None: break", inside=_WAITING
    ),
    *_covers(
        "BalanceScheduler.schedule", STALE,
        "if self.need_mamba_block_aligned_split",
        "effective_lookahead_tokens = 0 if request.num_computed_tokens == 0 else self.num_lookahead_tokens",
        "meta: KVConnectorMetadata = self.connector.build_connector_meta(scheduler_output)",
        "limit_lookahead_tokens = load_kv_async and self.use_eagle",
        "if defer_prefills and request.num_computed_tokens == 0",
        "{req.request_id for req in preempted_reqs}",
        why="upstream's older wording; the installed vLLM's own runs",
    ),
    *_covers(
        "BalanceScheduler.schedule", STALE, "if len(self.running) == self.max_num_running_reqs: break",
        inside=_WAITING, why="upstream's own stop before 0.25",
    ),
)  # fmt: skip

_PREFILL_NODE = (
    *_covers(
        "BalanceScheduler.schedule", "prefill_preemption.keep-running", "if self._disable_preemption: break",
        inside=(Level("retry", "while True"),),
    ),
    *_covers(
        "BalanceScheduler.__init__", "prefill_preemption",
        "self._disable_preemption = _disable_preemption_on_prefill_node(vllm_config)",
        "if self._disable_preemption: logger.warning($_)",
    ),
    *_covers(
        "BalanceScheduler.reset_prefix_cache", "prefill_preemption",
        "if self._disable_preemption and reset_running_requests and self.running: raise RuntimeError($_)",
        "return super().reset_prefix_cache(reset_running_requests, reset_connector)",
    ),
    *_covers(
        "_disable_preemption_on_prefill_node", "prefill_preemption",
        "if not vllm_version_is($_): return False",
        "kv_transfer_config = getattr(vllm_config, 'kv_transfer_config', None)",
        "return getattr(kv_transfer_config, 'kv_role', None) == 'kv_producer'",
    ),
)  # fmt: skip

PATCH_BALANCE_SCHEDULE = StandIn(
    owner="vllm-ascend",
    module=MODULE,
    fill=fill,
    copies={
        "BalanceScheduler.schedule": f"{SCHEDULER}.schedule",
        "BalanceDPEngineCoreProc.run_busy_loop": f"{ENGINE}:DPEngineCoreProc.run_busy_loop",
        "run_engine_core": f"{ENGINE}:EngineCoreProc.run_engine_core",
    },
    imports=(
        "inspect", "os", "signal", "time", "torch", "vllm", "vllm_ascend.ascend_config", "vllm_ascend.utils",
        "vllm_ascend.core.short_request_first_scheduler", "balance_patcher.plugin",
    ),
    covers=(
        *_NAMES, *_ASKED_FOR, *_CONFIGURATION, *_CONSTRUCTOR, *_GATHER, *_ENGINE_COPY, *_SCHEDULE, *_PREFILL_NODE,
    ),
)  # fmt: skip

"""What vllm-ascend's ``patch_balance_schedule`` may hold, and who covers it.

Written from the releases 0.23.0 to 0.26.0rc1. A statement that none of them knows, a known one in another
place, or one that is not there any more, is a reason to leave the module alone: then vllm-ascend's own copy
runs. The covers of a function stand in the order of its text.
"""

from __future__ import annotations

from balance_patcher.delta import Level
from balance_patcher.standin import STALE, STAND_IN

from .balance_ascend_schedule import DELEGATED, DISABLED, GATED, SCHEDULE, STEP, STEP_LACKS, covers, each

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ENGINE = "vllm.v1.engine.core"

COPIES = {
    SCHEDULE: f"{SCHEDULER}.schedule",
    "BalanceDPEngineCoreProc.run_busy_loop": f"{ENGINE}:DPEngineCoreProc.run_busy_loop",
    "run_engine_core": f"{ENGINE}:EngineCoreProc.run_engine_core",
}

#: What upstream's own modules do not import under that name.
IMPORTS = {
    "torch": "torch",
    "dist": "torch.distributed",
    "vllm": "vllm",
    "logger": "vllm.logger:logger",
    "_sched_mod": "vllm.v1.core.sched.scheduler",
    "_engine_core_mod": "vllm.v1.engine.core",
    "vllm_version_is": "vllm_ascend.utils:vllm_version_is",
    "init_ascend_config": "vllm_ascend.ascend_config:init_ascend_config",
    "install_short_request_first_waiting_queue":
        "vllm_ascend.core.short_request_first_scheduler:install_short_request_first_waiting_queue",
    "stand_in": "balance_patcher.plugin:stand_in",
}  # fmt: skip

SIGNATURES = {
    "_balance_scheduling_enabled": ("vllm_config",),
    "_disable_preemption_on_prefill_node": ("vllm_config",),
    "_balance_run_engine_core": ("*args, dp_rank=0, local_dp_rank=0, **kwargs",),
    "BalanceScheduler.__init__": (
        (
            "self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=None, "
            "mm_registry=MULTIMODAL_REGISTRY, include_finished_set=False, log_stats=False"
        ),
    ),
    "BalanceScheduler.balance_gather": ("self, dp_group", "self"),
    "BalanceScheduler.reset_prefix_cache": ("self, reset_running_requests=False, reset_connector=False",),
    # 0.23 has the parameter of 0.24 already.
    SCHEDULE: ("self, throttle_prefills=False",),
    "BalanceDPEngineCoreProc._has_global_unfinished_reqs": ("self, local_unfinished",),
}

_STARTED = "the class, or the call that asks for ours"
_BOUND = "the class in upstream's place"
_LAUNCHED = "the function in upstream's place"

_NAMES = (
    *covers("", STAND_IN, "__all__ = [$$$NAMES]"),
    *covers("", STAND_IN, "stand_in(__name__)", role=_STARTED),
    *covers("", "prefill_preemption", "stand_in(__name__, 'prefill_preemption')", role=_STARTED),
    *covers(
        "", STAND_IN,
        "_ORIGINAL_RUN_ENGINE_CORE = EngineCoreProc.run_engine_core",
        "_ORIGINAL_SCHEDULER = Scheduler",
    ),
    *covers("", STAND_IN, "class BalanceScheduler(Scheduler)", role=_STARTED),
    *covers("", STAND_IN, "class BalanceDPEngineCoreProc(DPEngineCoreProc)", role="the engine core's class"),
    *covers("", STAND_IN, "_sched_mod.Scheduler = BalanceScheduler", role=_BOUND),
    *covers(
        "", STAND_IN,
        "_OriginalDPEngineCoreProc = _engine_core_mod.DPEngineCoreProc",
        "_OriginalRunEngineCore = EngineCoreProc.run_engine_core",
    ),
    *covers(
        "", STAND_IN,
        "EngineCoreProc.run_engine_core = run_engine_core",
        "EngineCoreProc.run_engine_core = staticmethod(_balance_run_engine_core)",
        role=_LAUNCHED,
    ),
    *covers("", STAND_IN, "vllm.v1.core.sched.scheduler.Scheduler = BalanceScheduler", role=_BOUND),
)  # fmt: skip

_ASKED, _ANSWERED = "vllm-ascend's own configuration", "the answer without a configuration"
_NESTED = "if isinstance(scheduler_config, dict) and 'enable_balance_scheduling' in scheduler_config"
_TOP = "if 'enable_balance_scheduling' in additional_config"


def _configured(attribute: str) -> str:
    return f"""
    try:
        from vllm_ascend.ascend_config import get_ascend_config
        return bool(get_ascend_config().{attribute})
    except Exception:
        pass
    """


_ORDER = "vllm-ascend's own configuration is asked, and only where it cannot be, the plain one"
_CONFIGURATION = (
    *covers(
        "_balance_scheduling_enabled", STAND_IN,
        _configured("enable_balance_scheduling"), _configured("scheduler_config.enable_balance_scheduling"),
        role=_ASKED, why=_ORDER,
    ),
    *each(
        "_balance_scheduling_enabled", STAND_IN,
        "additional_config = getattr(vllm_config, 'additional_config', None) or {}", why=_ORDER,
    ),
    *covers(
        "_balance_scheduling_enabled", STAND_IN,
        "scheduler_config = additional_config.get('scheduler_config')", _NESTED, why=_ORDER,
    ),
    *covers(
        "_balance_scheduling_enabled", STAND_IN, "return bool(scheduler_config['enable_balance_scheduling'])",
        inside=(Level("nested", _NESTED, outermost=True),), why=_ORDER,
    ),
    *each("_balance_scheduling_enabled", STAND_IN, _TOP, why=_ORDER),
    *each(
        "_balance_scheduling_enabled", STAND_IN, "return bool(additional_config['enable_balance_scheduling'])",
        inside=(Level("top", _TOP, outermost=True),), why=_ORDER,
    ),
    *covers(
        "_balance_scheduling_enabled", STAND_IN,
        "return bool(int(os.getenv('VLLM_ASCEND_BALANCE_SCHEDULING', '0')))", "return False",
        role=_ANSWERED, why=_ORDER,
    ),
)  # fmt: skip

_ON = (Level("on", "if self._balance_enabled", outermost=True),)
_SHORT = "short-request-first: vllm-ascend's own queue, installed in our __init__"
_CONSTRUCTOR = (
    *each(
        "BalanceScheduler.__init__", STAND_IN,
        "super().__init__(vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, "
        "mm_registry, include_finished_set, log_stats)",
    ),
    *covers(
        "BalanceScheduler.__init__", STAND_IN,
        "short_request_first_config = init_ascend_config(vllm_config).scheduler_config.short_request_first_config",
        "if short_request_first_config.enabled",
        why=_SHORT,
    ),
    *covers(
        "BalanceScheduler.__init__", STAND_IN,
        "install_short_request_first_waiting_queue(self, threshold=short_request_first_config.threshold, "
        "long_max_wait_ms=short_request_first_config.long_max_wait_ms)",
        inside=(Level("wanted", "if short_request_first_config.enabled", outermost=True),),
        why=_SHORT,
    ),
    *each(
        "BalanceScheduler.__init__", STAND_IN, "self._balance_enabled = _balance_scheduling_enabled(vllm_config)"
    ),
    *covers(
        "BalanceScheduler.__init__", "prefill_preemption",
        "self._disable_preemption = _disable_preemption_on_prefill_node(vllm_config)",
        role="the switch for prefill nodes",
    ),
    *covers(
        "BalanceScheduler.__init__", "prefill_preemption", "if self._disable_preemption: logger.warning($TEXT)"
    ),
    *covers("BalanceScheduler.__init__", STAND_IN, "self.dp_group = None", "if self._balance_enabled"),
    *each(
        "BalanceScheduler.__init__", STAND_IN,
        "self.balance_queue = [torch.tensor([0], dtype=torch.int, device='cpu') "
        "for _ in range(self.vllm_config.parallel_config.data_parallel_size)]",
        inside=_ON,
    ),
)  # fmt: skip

_GATHERED = "the gather after each step"
_GATHER = (
    *covers(
        "BalanceScheduler.balance_gather", "balance.gather",
        "if not self._balance_enabled: return",
        "if not self._balance_enabled or self.dp_group is None: return",
        role="the gather's own switch",
    ),
    *each(
        "BalanceScheduler.balance_gather", "balance.gather",
        "running_tensor = torch.tensor([len(self.running)], dtype=torch.int, device='cpu')",
    ),
    *covers(
        "BalanceScheduler.balance_gather", "balance.gather",
        "dist.all_gather(self.balance_queue, running_tensor, group=dp_group)",
        "dist.all_gather(self.balance_queue, running_tensor, group=self.dp_group)",
        role="the gather itself",
    ),
    *each(
        "BalanceDPEngineCoreProc._has_global_unfinished_reqs", "balance.gather",
        "result = super()._has_global_unfinished_reqs(local_unfinished)",
        "self.scheduler.dp_group = self.dp_group",
    ),
    *covers(
        "BalanceDPEngineCoreProc._has_global_unfinished_reqs", "balance.gather", "self.scheduler.balance_gather()",
        role=_GATHERED,
    ),
    *each("BalanceDPEngineCoreProc._has_global_unfinished_reqs", "balance.gather", "return result"),
    *covers("BalanceDPEngineCoreProc.run_busy_loop", STALE, "while True"),
    *covers(
        "BalanceDPEngineCoreProc.run_busy_loop", STALE, "self.execute_dummy_batch()",
        inside=(Level("loop", "while True", outermost=True), Level("idle", "if not executed")),
    ),
    *covers(
        "BalanceDPEngineCoreProc.run_busy_loop", "balance.gather", "self.scheduler.balance_gather(self.dp_group)",
        inside=(Level("loop", "while True", outermost=True),),
        after="self.engines_running = self._has_global_unfinished_reqs(local_unfinished_reqs)",
        role=_GATHERED,
    ),
    *each(
        "_balance_run_engine_core", STAND_IN,
        "vllm_config = kwargs.get('vllm_config')",
        "if _balance_scheduling_enabled(vllm_config): _engine_core_mod.DPEngineCoreProc = BalanceDPEngineCoreProc\n"
        "else: _engine_core_mod.DPEngineCoreProc = _OriginalDPEngineCoreProc",
        "return _OriginalRunEngineCore(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)",
        why="the hook is bound in place, so no class has to be swapped",
    ),
)  # fmt: skip

_INSTEAD = "upstream's own function runs, with the hook in place"
_ENGINE_COPY = (
    *each(
        "run_engine_core", STAND_IN,
        "vllm_config = kwargs.get('vllm_config')",
        "if not _balance_scheduling_enabled(vllm_config): "
        "return _ORIGINAL_RUN_ENGINE_CORE(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)",
        why=_INSTEAD,
    ),
    *covers(
        "run_engine_core", STALE,
        "shutdown_requested = False",
        """
        def signal_handler(signum, frame):
            nonlocal shutdown_requested
            if not shutdown_requested:
                shutdown_requested = True
                raise SystemExit()
        """,
        "signal.signal(signal.SIGTERM, signal_handler)",
        "signal.signal(signal.SIGINT, signal_handler)",
        "parallel_config: ParallelConfig = kwargs['vllm_config'].parallel_config",
        "if parallel_config.data_parallel_size > 1 or dp_rank > 0",
        "set_process_title('EngineCore', f'DP{dp_rank}')",
        "decorate_logs()",
        "parallel_config.data_parallel_rank = dp_rank",
    ),
    *each("run_engine_core", STAND_IN, "engine_core = BalanceDPEngineCoreProc(*args, **kwargs)", why=_INSTEAD),
    *covers(
        "run_engine_core", STALE,
        "set_process_title('EngineCore')",
        "decorate_logs()",
        "engine_core = EngineCoreProc(*args, **kwargs)",
        "logger.debug('EngineCore exiting.')",
    ),
)  # fmt: skip

_RESET = "BalanceScheduler.reset_prefix_cache"
_PREFILL_NODE = (
    *each(
        _RESET, "prefill_preemption",
        "if self._disable_preemption and reset_running_requests and self.running: raise RuntimeError($TEXT)",
        "return super().reset_prefix_cache(reset_running_requests, reset_connector)",
    ),
    *each(
        "_disable_preemption_on_prefill_node", "prefill_preemption",
        "if not vllm_version_is('0.23.0'): return False",
        "kv_transfer_config = getattr(vllm_config, 'kv_transfer_config', None)",
        "return getattr(kv_transfer_config, 'kv_role', None) == 'kv_producer'",
    ),
)  # fmt: skip

COVERS = (*_NAMES, *_CONFIGURATION, *_CONSTRUCTOR, *_GATHER, *_ENGINE_COPY, *STEP, *_PREFILL_NODE)


def _roles(place: str) -> tuple[str, ...]:
    """The roles of the covers that are needed, each for itself, where their place is."""
    return tuple(dict.fromkeys(cover.role for cover in COVERS if cover.place == place and cover.role.startswith("`")))


NEEDS = {
    "": (_STARTED,),
    "BalanceScheduler": (
        _BOUND, _LAUNCHED, "the engine core's class", _ASKED, _ANSWERED, *_roles("_balance_scheduling_enabled"),
        *_roles("BalanceScheduler.__init__"), "the gather's own switch", *_roles("BalanceScheduler.balance_gather"),
        "the gather itself", _GATHERED, DISABLED, DELEGATED, GATED,
    ),
    "_disable_preemption_on_prefill_node": (
        "the switch for prefill nodes", "no preemption on prefill nodes", *_roles(_RESET),
        *_roles("_disable_preemption_on_prefill_node"),
    ),
    **{
        place: _roles(place)
        for place in (
            "BalanceDPEngineCoreProc._has_global_unfinished_reqs", "_balance_run_engine_core", "run_engine_core",
        )
    },
}  # fmt: skip

LACKS = {
    SCHEDULE: STEP_LACKS,
    # Of a loop that the engine core left in another way then.
    "BalanceDPEngineCoreProc.run_busy_loop": (("if self.eep_scaling_state is not None", "raise SystemExit"),),
}

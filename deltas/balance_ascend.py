"""vllm-ascend's ``patch_balance_schedule``: what it holds, who covers it, and what stands in its place.

vllm-ascend patches balance scheduling in by a copy of ``Scheduler.schedule``. Where balance_patcher is
installed beside it, that module is filled with the names below instead, at its place in vllm-ascend's import
order; the scheduler's deltas are those of :mod:`.balance`. Its own text is read and never run, and what
that may hold is declared in :mod:`.balance_ascend_covers`.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from balance_patcher.standin import Bind, StandIn

from .asking import kv_role
from .balance_ascend_covers import COPIES, COVERS, IMPORTS, LACKS, NEEDS, SCHEDULER, SIGNATURES

MODULE = "vllm_ascend.patch.platform.patch_balance_schedule"

_logger = logging.getLogger("vllm.balance_patcher")

#: Marks the module that was filled here, so that its names are never mistaken for those of the original.
FILLED = "_filled_by_balance_patcher"

#: vLLM's own ``run_engine_core``, by what it was found as. Not only in the module: that may be imported anew.
_GENUINE: list[Callable[..., Any]] = []
_TOLD: set[str] = set()


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
    # The module is loaded, or imported, a second time. What wraps ours calls it: ours must not call that.
    again = inspect.unwrap(found) is _balance_run_engine_core
    if not again:
        _GENUINE[:] = [found]
    (genuine,) = _GENUINE
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
    """vllm-ascend's own parser of its configuration; ``None`` where it is not installed or not usable.

    It imports what drives the hardware, so anything may be raised; an engine that asks for nothing must start.
    """
    try:
        from vllm_ascend.ascend_config import init_ascend_config
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - what somebody else's import raises
        _tell(f"vllm_ascend cannot be used here, so its configuration is not: {type(error).__name__}: {error}")
        return None
    return init_ascend_config


def _tell(what: str) -> None:
    """Warn once of what every engine would be told again."""
    if what not in _TOLD:
        _TOLD.add(what)
        _logger.warning("%s", what)


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
    module = sys.modules.get(_balance_run_engine_core.__module__)
    original = getattr(module, "_OriginalRunEngineCore", *_GENUINE)
    return original(*args, dp_rank=dp_rank, local_dp_rank=local_dp_rank, **kwargs)


def _balance_scheduling_enabled(vllm_config: Any) -> bool:
    """Whether the configuration asks for balance; without a configuration nobody does."""
    from .balance import balance_asked_by

    return vllm_config is not None and balance_asked_by(vllm_config) is not None


def _disable_preemption_on_prefill_node(vllm_config: Any) -> bool:
    """Whether this is a node that only prefills, on which nobody may be preempted."""
    return kv_role(vllm_config) == "kv_producer"


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


PATCH_BALANCE_SCHEDULE = StandIn(
    owner="vllm-ascend", module=MODULE, fill=fill, copies=COPIES, imports=IMPORTS, signatures=SIGNATURES,
    covers=COVERS, lacks=LACKS, needs=NEEDS,
)  # fmt: skip

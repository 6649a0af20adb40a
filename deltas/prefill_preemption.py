"""No preemption on prefill nodes: a request that finds no blocks waits, and nobody is preempted for it.

Where prefill and decode run on nodes of their own, a prefill node that preempts a request throws away
blocks that a decode node may still fetch. So on a ``kv_producer`` the running requests keep what they
have: the first one that finds no free blocks ends the pass over them, as if there were nothing to preempt.
"""

from __future__ import annotations

import logging
from typing import Any

from balance_patcher.decided import decided
from balance_patcher.delta import Anchor, Delta, InsertAfter, Level, Prologue, Variant
from balance_patcher.feature import CallShape, Enabling, Example, Feature, Ordered, Refusal, RuntimeClass, Sets

from .asking import asked, kv_role
from .balance_ascend import filled

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULE = f"{SCHEDULER}.schedule"

DISABLED_PATH = Delta(
    name="prefill_preemption.disabled-path",
    target=SCHEDULE,
    why="With the feature off, upstream's own method runs, and the class costs one attribute test.",
    upstream="vllm/v1/core/sched/scheduler.py, Scheduler.schedule",
    remove_when="preemption can be switched off in vLLM itself",
    variants=(
        Variant(
            "early-return",
            edits=(
                Prologue(
                    """
                    if not self._disable_preemption:
                        return super().schedule($$$PARAMETERS)
                    """
                ),
            ),
        ),
    ),
)

# `schedule` asks for blocks in a loop of its own, and makes room by preempting until it gets them. A break
# right after the first refusal leaves it without blocks, which upstream takes as the end of the pass.
KEEP_RUNNING = Delta(
    name="prefill_preemption.keep-running",
    target=SCHEDULE,
    why="A request that finds no blocks waits for the next step, and preempts nobody.",
    upstream="the loop around allocate_slots() of a running request; vllm-ascend PR 14233",
    remove_when="preemption can be switched off in vLLM itself",
    after=("prefill_preemption.disabled-path",),
    variants=(
        Variant(
            "before a victim is chosen",
            Anchor(
                "if $BLOCKS is not None: break",
                inside=(Level("retry", "while True"),),
                after="$BLOCKS = self.kv_cache_manager.allocate_slots($$$_)",
            ),
            edits=(
                InsertAfter(
                    """
                    if self._disable_preemption:
                        break
                    """
                ),
            ),
        ),
    ),
)

KEY = "disable_preemption_on_prefill_node"
# vllm-ascend 0.23.0 has this rule in its scheduler's file; what stands in for that file keeps it by this name.
ASCEND_RULE = "_disable_preemption_on_prefill_node"


def prefill_preemption_asked_by(vllm_config: Any) -> str | None:
    """Who asks for it: vllm-ascend where it has the rule, else ``additional_config``, nested before top level.

    Args:
        vllm_config: A ``vllm.config.VllmConfig``.
    """
    rule = getattr(filled(), ASCEND_RULE, None)
    if rule is not None and rule(vllm_config):
        return f"vllm_ascend, kv_role={kv_role(vllm_config)}"
    return asked(vllm_config, KEY)


def prefill_preemption_excluded(_: Any, vllm_config: Any) -> tuple[str, ...]:
    """It is for prefill nodes: elsewhere a full cache would stop everything for good."""
    role = kv_role(vllm_config)
    if role == "kv_producer":
        return ()
    return (f"{KEY} needs kv_transfer_config.kv_role=kv_producer, and it is {role}",)


def prefill_preemption_needless(*_: Any) -> str | None:
    """It always has something to do."""
    return None


def prefill_preemption_observed(engine: Any) -> dict[str, object] | None:
    """Nothing that needs to be told; ``None`` where the engine's scheduler preempts after all."""
    return {} if getattr(getattr(engine, "scheduler", None), "_disable_preemption", False) else None


def prefill_scheduler(upstream: type) -> type:
    """``PrefillScheduler``, a subclass of the installed ``Scheduler``; ``schedule`` is added by the patcher.

    Args:
        upstream: ``vllm.v1.core.sched.scheduler.Scheduler`` as it is in this process.
    """
    logger = logging.getLogger("vllm.balance_patcher")

    class PrefillScheduler(upstream):  # type: ignore[misc]
        """vLLM's scheduler for a prefill node: nobody is preempted for want of blocks."""

        _disable_preemption = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            decision = decided(self.vllm_config, "prefill_preemption")
            asks = prefill_preemption_asked_by(self.vllm_config) is not None
            self._disable_preemption = asks if decision is None else decision
            if self._disable_preemption:
                logger.warning("Preemption is switched off on this prefill node; requests without blocks wait.")

        def reset_prefix_cache(self, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:  # noqa: FBT001, FBT002
            """Upstream's, which would preempt running requests: refused while there are any.

            Raises:
                RuntimeError: If running requests would have to be preempted.
            """
            if self._disable_preemption and reset_running_requests and self.running:
                raise RuntimeError(
                    f"the prefix cache cannot be reset with {len(self.running)} running requests: preemption is "
                    "switched off on this prefill node; drain or abort them first"
                )
            reset: bool = super().reset_prefix_cache(reset_running_requests, *args, **kwargs)
            return reset

    return PrefillScheduler


FEATURE = Feature(
    name="prefill_preemption",
    summary="No preemption on prefill nodes: a running request that finds no blocks waits.",
    deltas=(DISABLED_PATH, KEEP_RUNNING),
    runtime=RuntimeClass(
        "PrefillScheduler",
        base=SCHEDULER,
        make=prefill_scheduler,
        provides=frozenset({"_disable_preemption"}),
    ),
    invariants=(
        Ordered(
            "without blocks the pass over running requests ends",
            target=SCHEDULE,
            first="if new_blocks is None:\n    $$$_\n    break\nscheduled_running_reqs.append($_)",
            then="scheduled_running_reqs.append($_)",
        ),
        Sets(
            "the scheduler keeps its configuration",
            target=f"{SCHEDULER}.__init__",
            attribute="vllm_config",
        ),
    ),
    call_shapes=(
        CallShape(SCHEDULE, ""),
        CallShape(f"{SCHEDULER}.reset_prefix_cache", ""),
        CallShape(f"{SCHEDULER}.reset_prefix_cache", "True"),
        CallShape(f"{SCHEDULER}.reset_prefix_cache", "reset_running_requests=True"),
    ),
    enabling=Enabling(
        asked=prefill_preemption_asked_by,
        excluded=prefill_preemption_excluded,
        needless=prefill_preemption_needless,
        observed=prefill_preemption_observed,
    ),
)


# -- what it does to a function, and what it refuses -----------------------------------------

_RETRY = """
class Scheduler:
    def __init__(self):
        self.kv_cache_manager, self.running = None, []

    def schedule(self):
        while self.running:
            while True:
                blocks = self.kv_cache_manager.allocate_slots(1)
                if blocks is not None:
                    # There is room.
                    break
                # Make some.
                self.running.pop()
            if blocks is None:
                break
"""

EXAMPLES = (
    Example(
        "prefill_preemption.disabled-path",
        before="""
class Scheduler:
    def schedule(self, throttle=False):
        return self.step(throttle)
""",
        after="""
class Scheduler:
    def schedule(self, throttle=False):
        if not self._disable_preemption:
            return super().schedule(throttle)
        return self.step(throttle)
""",
    ),
    Example(
        "prefill_preemption.keep-running",
        before=_RETRY,
        after=_RETRY.replace(
            """
                    break
                # Make some.
""",
            """
                    break
                if self._disable_preemption:
                    break
                # Make some.
""",
        ),
    ),
)

REFUSES = (
    Refusal("prefill_preemption.disabled-path", "class Scheduler:\n    def plan(self):\n        pass\n", "BP104"),
    Refusal("prefill_preemption.keep-running", _RETRY.replace("is not None", "is None", 1), "BP112"),
    Refusal("prefill_preemption.keep-running", _RETRY.replace("while True", "for _ in self.tries"), "BP117"),
    Refusal("prefill_preemption.keep-running", _RETRY.replace("allocate_slots(1)", "allocate(1)"), "BP117"),
)

"""Defer-aware preemption: nobody is preempted for blocks that will not come back in this step.

With a step in flight (asynchronous scheduling, pipeline parallelism) and a KV connector that loads into blocks,
vLLM returns a preempted request's blocks only when that step is done: until then they are fenced. The loop that
makes room for a running request did not know of that until 0.30: it preempted one request after the other, all of
them in vain, and computed them again. Here it looks at the victim first, and ends where its blocks are fenced.
"""

from __future__ import annotations

import textwrap
from typing import Any

from balance_patcher.decided import decided
from balance_patcher.delta import (
    Anchor,
    Delta,
    Edit,
    InsertBefore,
    Level,
    Nowhere,
    Prologue,
    Replace,
    There,
    Variant,
)
from balance_patcher.feature import CallShape, Enabling, Example, Feature, Ordered, Pure, Refusal, RuntimeClass, Sets

from .asking import asked

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULE = f"{SCHEDULER}.schedule"

# 0.30 gave the question a method of its own, and asks it in the loop. One without the other is neither shape.
QUESTION = f"{SCHEDULER}._request_blocks_can_be_freed"
UNASKED = Nowhere(QUESTION)
ANSWER = There(QUESTION, "return not self.defer_block_free or $_.last_sched_seq <= self.processed_step_seq")

# Where nothing has asked yet, upstream itself fences by the same condition, for every request that is preempted.
FENCED = (
    There(
        f"{SCHEDULER}._free_request_blocks",
        """
        if not self.defer_block_free or $REQUEST.last_sched_seq <= self.processed_step_seq:
            self.kv_cache_manager.free($REQUEST)
            return
        """,
    ),
    There(f"{SCHEDULER}._preempt_request", "self._free_request_blocks($_)"),
)
UNFENCED = Nowhere(f"{SCHEDULER}.defer_block_free")

RETRY = Level("retry", "while True")

# The victim is chosen and taken out of the running requests in one go.
CHOSEN_AND_REMOVED = Anchor(
    "$VICTIM = max(self.running, key=$KEY)",
    inside=(
        RETRY,
        Level(
            "removal",
            """
            if self.policy == SchedulingPolicy.PRIORITY:
                $VICTIM = max(self.running, key=$KEY)
                $$$_
            else:
                $VICTIM = self.running.pop()
            """,
        ),
    ),
)

CHOSEN_AND_LOOKED_AT = Anchor(
    """
    if self.policy == SchedulingPolicy.PRIORITY:
        $VICTIM = $_
    else:
        $VICTIM = self.running[-1]
    if not self._request_blocks_can_be_freed($VICTIM):
        break
    """,
    inside=(RETRY,),
)


def shapes(*edits: Edit) -> tuple[Variant, ...]:
    """The three shapes of upstream's loop, with what is done to the one that has fences and does not look."""
    return (
        Variant("fenced", CHOSEN_AND_REMOVED, edits, given=(*FENCED, UNASKED)),
        Variant(
            "looks first", CHOSEN_AND_LOOKED_AT, status="absorbed", given=(ANSWER,),
            note="upstream looks at the victim first, from 0.30",
        ),
        Variant(
            "unfenced", CHOSEN_AND_REMOVED, status="not-applicable", given=(UNFENCED, UNASKED),
            note="upstream returns blocks at once, until 0.23",
        ),
    )  # fmt: skip


DISABLED_PATH = Delta(
    name="defer_preemption.disabled-path",
    target=SCHEDULE,
    why="With the feature off, upstream's own method runs, and the class costs one attribute test.",
    upstream="vllm/v1/core/sched/scheduler.py, Scheduler.schedule",
    remove_when="the oldest supported vLLM is 0.30.0",
    variants=shapes(
        Prologue(
            """
            if not self._defer_preemption:
                return super().schedule($$$PARAMETERS)
            """
        ),
    ),
)

# Without blocks, the pass over running requests ends; waiting ones are looked at as always. Upstream's own choice
# is made once: here, or with the feature off where it stood.
LOOK_FIRST = Delta(
    name="defer_preemption.retry",
    target=SCHEDULE,
    why="A victim whose blocks are fenced frees none for this step; its work would be thrown away for nothing.",
    upstream="vLLM PR 49675, in 0.30.0; the loop around allocate_slots() of a running request",
    remove_when="the oldest supported vLLM is 0.30.0",
    after=("defer_preemption.disabled-path", "prefill_preemption.keep-running"),
    variants=shapes(
        InsertBefore(
            """
            if self._defer_preemption:
                if self.policy == SchedulingPolicy.PRIORITY:
                    $VICTIM = max(self.running, key=$KEY)
                else:
                    $VICTIM = self.running[-1]
                if not self._request_blocks_can_be_freed($VICTIM):
                    break
            """,
            at="removal",
        ),
        Replace(
            """
            if not self._defer_preemption:
                $VICTIM = max(self.running, key=$KEY)
            """
        ),
    ),
)

KEY = "defer_aware_preemption"


def defer_preemption_asked_by(vllm_config: Any) -> str | None:
    """Who asks for it: ``additional_config``, nested before top level. A host plugin may write it there, too.

    Args:
        vllm_config: A ``vllm.config.VllmConfig``.
    """
    return asked(vllm_config, KEY)


def defer_preemption_excluded(*_: Any) -> tuple[str, ...]:
    """It goes with everything: it only leaves out preemptions that bring nothing."""
    return ()


def defer_preemption_needless(*_: Any) -> str | None:
    """Whether blocks are fenced is known when the scheduler is built, and may be changed by others later."""
    return None


def defer_preemption_observed(engine: Any) -> dict[str, object] | None:
    """Whether this engine's scheduler fences blocks at all; ``None`` where it does not look at its victims."""
    scheduler = getattr(engine, "scheduler", None)
    if not getattr(scheduler, "_defer_preemption", False):
        return None
    return {"fences": getattr(scheduler, "defer_block_free", None)}


def defer_aware_scheduler(upstream: type) -> type:
    """``DeferAwareScheduler``, a subclass of the installed ``Scheduler``; ``schedule`` is added by the patcher.

    Args:
        upstream: ``vllm.v1.core.sched.scheduler.Scheduler`` as it is in this process.
    """

    class DeferAwareScheduler(upstream):  # type: ignore[misc]
        """vLLM's scheduler, which preempts nobody whose blocks would not come back in this step."""

        _defer_preemption = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            decision = decided(self.vllm_config, "defer_preemption")
            asks = defer_preemption_asked_by(self.vllm_config) is not None
            self._defer_preemption = asks if decision is None else decision

        def _request_blocks_can_be_freed(self, request: Any) -> bool:
            """Whether a request's blocks would come back at once: no step in flight may still write to them."""
            return not self.defer_block_free or request.last_sched_seq <= self.processed_step_seq

    return DeferAwareScheduler


FEATURE = Feature(
    name="defer_preemption",
    summary="Defer-aware preemption: nobody is preempted whose blocks are fenced by a step in flight.",
    deltas=(DISABLED_PATH, LOOK_FIRST),
    runtime=RuntimeClass(
        "DeferAwareScheduler",
        base=SCHEDULER,
        make=defer_aware_scheduler,
        provides=frozenset({"_defer_preemption", "_request_blocks_can_be_freed"}),
    ),
    invariants=(
        Ordered(
            "without blocks the pass over running requests ends",
            target=SCHEDULE,
            first="if new_blocks is None:\n    $$$_\n    break\nscheduled_running_reqs.append($_)",
            then="scheduled_running_reqs.append($_)",
        ),
        Pure("to choose a victim changes nothing", delta="defer_preemption.retry", hole="KEY", calls=()),
        Sets(
            "the scheduler keeps its configuration",
            target=f"{SCHEDULER}.__init__",
            attribute="vllm_config",
        ),
    ),
    call_shapes=(CallShape(SCHEDULE, ""),),
    enabling=Enabling(
        asked=defer_preemption_asked_by,
        excluded=defer_preemption_excluded,
        needless=defer_preemption_needless,
        observed=defer_preemption_observed,
    ),
)


# -- what it does to a function, and what it refuses -----------------------------------------

_BEFORE = """
class Scheduler:
    def __init__(self):
        self.kv_cache_manager, self.running, self.policy = None, [], None
        self.defer_block_free, self.processed_step_seq = False, 0

    def schedule(self):
        while self.running:
            while True:
                blocks = self.kv_cache_manager.allocate_slots(1)
                if blocks is not None:
                    break
                # Make some room.
                if self.policy == SchedulingPolicy.PRIORITY:
                    victim = max(self.running, key=lambda r: r.priority)
                    self.running.remove(victim)
                else:
                    victim = self.running.pop()
                self._preempt_request(victim)
            if blocks is None:
                break

    def _preempt_request(self, request):
        self._free_request_blocks(request)

    def _free_request_blocks(self, request):
        if not self.defer_block_free or request.last_sched_seq <= self.processed_step_seq:
            self.kv_cache_manager.free(request)
            return


class SchedulingPolicy:
    PRIORITY = "priority"
"""

_ROOM = "                # Make some room.\n"
_GUARD = """\
                if self.policy == SchedulingPolicy.PRIORITY:
                    victim = max(self.running, key=lambda r: r.priority)
                else:
                    victim = self.running[-1]
                if not self._request_blocks_can_be_freed(victim):
                    break
"""
_ASKED = """\
                if not self._request_blocks_can_be_freed(victim):
                    break
"""
_CHOICE = "                    victim = max(self.running, key=lambda r: r.priority)\n"
_PREDICATE = """
    def _request_blocks_can_be_freed(self, request):
        return not self.defer_block_free or request.last_sched_seq <= self.processed_step_seq
"""
_LOOP = _BEFORE[_BEFORE.index("            while True:") : _BEFORE.index("            if blocks is None:")]
_DECLARATION = "    def _preempt_request("

_GUARDED = _BEFORE.replace(_CHOICE, "").replace(_ROOM, _GUARD)
_LOOKS_FIRST = _GUARDED.replace(_DECLARATION, f"{_PREDICATE}\n{_DECLARATION}")

_EARLY = """
    def schedule(self):
        if not self._defer_preemption:
            return super().schedule()
"""

# A bound expression stands in parentheses, unless it needs none in any place.
_OURS = ("key=lambda r: r.priority", "key=(lambda r: r.priority)")
_LOOKED_AT = f"                if self._defer_preemption:\n{textwrap.indent(_GUARD, '    ')}".replace(*_OURS)
_CHOSEN_HERE = f"                    if not self._defer_preemption:\n    {_CHOICE}".replace(*_OURS)

EXAMPLES = (
    Example(
        "defer_preemption.disabled-path",
        before=_BEFORE,
        after=_BEFORE.replace("\n    def schedule(self):\n", _EARLY),
    ),
    Example(
        "defer_preemption.retry",
        before=_BEFORE,
        after=_BEFORE.replace(_CHOICE, _CHOSEN_HERE).replace(_ROOM, _LOOKED_AT + _ROOM),
    ),
)

REFUSES = (
    # One half of upstream's change without the other.
    Refusal("defer_preemption.disabled-path", _GUARDED, "BP125"),
    Refusal("defer_preemption.retry", _GUARDED, "BP125"),
    Refusal("defer_preemption.retry", _BEFORE.replace(_DECLARATION, f"{_PREDICATE}\n{_DECLARATION}"), "BP125"),
    Refusal("defer_preemption.retry", _LOOKS_FIRST.replace(_ASKED, ""), "BP101"),
    # The question is another one.
    Refusal("defer_preemption.retry", _LOOKS_FIRST.replace("return not self", "return self"), "BP125"),
    # Fences by another rule, or for others than the preempted ones.
    Refusal("defer_preemption.retry", _BEFORE.replace("seq <= self", "seq < self"), "BP125"),
    Refusal("defer_preemption.retry", _BEFORE.replace("self._free_request_blocks(", "self._free("), "BP125"),
    # Another loop.
    Refusal("defer_preemption.retry", _BEFORE.replace("while True", "for _ in self.tries"), "BP117"),
    Refusal("defer_preemption.retry", _BEFORE.replace("self.running.pop()", "self.running.pop(0)"), "BP117"),
    Refusal("defer_preemption.retry", _BEFORE.replace(_LOOP, _LOOP + _LOOP), "BP102"),
)

"""An example of a feature in a distribution of its own: count scheduler steps, and requests that come in.

It edits ``Scheduler.schedule``, which other features edit too, and calls through ``EngineCore.add_request``. The
counts are in the scheduler's ``tally``. It imports neither torch nor vLLM, so that it can be checked without them.
"""

from __future__ import annotations

from typing import Any

from balance_patcher.decided import decided
from balance_patcher.delta import Anchor, CallThrough, Delta, InsertAfter, Prologue, Variant
from balance_patcher.feature import CallShape, Enabling, Example, Feature, Refusal, RuntimeClass

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULE = f"{SCHEDULER}.schedule"

# Every feature that edits a function brings this early return. Where several do, they share one, which is taken
# when none of them is on; so all other edits ask for their own flag.
DISABLED_PATH = Delta(
    name="step_tally.disabled-path",
    target=SCHEDULE,
    why="With the feature off, upstream's own method runs.",
    upstream="vllm/v1/core/sched/scheduler.py, Scheduler.schedule",
    remove_when="vLLM counts its steps itself",
    variants=(
        Variant(
            "early-return",
            edits=(
                Prologue(
                    """
                    if not self._tally_on:
                        return super().schedule($$$PARAMETERS)
                    """
                ),
            ),
        ),
    ),
)

COUNT_STEP = Delta(
    name="step_tally.count-step",
    target=SCHEDULE,
    why="A step is counted once it has a budget.",
    upstream="the step's token budget",
    remove_when="vLLM counts its steps itself",
    variants=(
        Variant(
            "budget",
            Anchor("token_budget = self.max_num_scheduled_tokens"),
            edits=(
                InsertAfter(
                    """
                    if self._tally_on:
                        self.tally["steps"] += 1
                    """
                ),
            ),
        ),
    ),
)

COUNT_REQUEST = Delta(
    name="step_tally.count-request",
    target="vllm.v1.engine.core:EngineCore.add_request",
    why="A request is counted once upstream has taken it.",
    upstream="vllm/v1/engine/core.py, EngineCore.add_request",
    remove_when="vLLM counts its requests itself",
    variants=(
        Variant(
            "after",
            edits=(
                CallThrough(
                    """
                    if getattr(self.scheduler, "_tally_on", False):
                        self.scheduler.tally["requests"] += 1
                    """
                ),
            ),
        ),
    ),
)


def tally_scheduler(upstream: type) -> type:
    """``TallyScheduler``, a subclass of the installed ``Scheduler``; ``schedule`` is added by the patcher."""

    class TallyScheduler(upstream):  # type: ignore[misc, valid-type]
        """vLLM's scheduler with two counts."""

        _tally_on = False

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # One decision for each engine, made before it is built; nobody else is asked here.
            self._tally_on = bool(decided(self.vllm_config, "step_tally"))
            self.tally = {"steps": 0, "requests": 0}

    return TallyScheduler


def tally_observed(engine: Any) -> dict[str, object] | None:
    """The counts for the line in the log; ``None`` where the engine that was built counts nothing."""
    scheduler = getattr(engine, "scheduler", None)
    return dict(scheduler.tally) if getattr(scheduler, "_tally_on", False) else None


FEATURE = Feature(
    name="step_tally",
    summary="Counts scheduler steps, and requests that come in.",
    deltas=(DISABLED_PATH, COUNT_STEP, COUNT_REQUEST),
    runtime=RuntimeClass(
        "TallyScheduler", base=SCHEDULER, make=tally_scheduler, provides=frozenset({"_tally_on", "tally"})
    ),
    call_shapes=(CallShape(SCHEDULE, ""),),
    enabling=Enabling(observed=tally_observed),
    # Where both edit at one point, balance's edits come first. There is no such point today.
    after=("balance",),
)

_BEFORE = """
class Scheduler:
    def __init__(self):
        self.max_num_scheduled_tokens = 8

    def schedule(self):
        token_budget = self.max_num_scheduled_tokens
        return self.fill(token_budget)
"""

EXAMPLES = (
    Example(
        "step_tally.disabled-path",
        before=_BEFORE,
        after=_BEFORE.replace(
            "        token_budget",
            "        if not self._tally_on:\n            return super().schedule()\n        token_budget",
            1,
        ),
    ),
    Example(
        "step_tally.count-step",
        before=_BEFORE,
        after=_BEFORE.replace(
            "        return", '        if self._tally_on:\n            self.tally["steps"] += 1\n        return'
        ),
    ),
    Example(
        "step_tally.count-request",
        before="""
class EngineCore:
    def __init__(self):
        self.scheduler = None

    def add_request(self, request, request_wave=0):
        self.scheduler.add_request(request)
""",
        after="""
def upstream(balance_patcher_upstream):
    class EngineCore:
        def add_request(self, request, request_wave=None):
            balance_result = balance_patcher_upstream(self, request, request_wave)
            if getattr(self.scheduler, "_tally_on", False):
                self.scheduler.tally["requests"] += 1
            return balance_result
    return EngineCore
""",
    ),
)

REFUSES = (
    Refusal("step_tally.disabled-path", "class Scheduler:\n    async def schedule(self):\n        pass\n", "BP108"),
    Refusal("step_tally.count-step", _BEFORE.replace("token_budget =", "budget ="), "BP101"),
    Refusal("step_tally.count-request", "class EngineCore:\n    def add(self, request):\n        pass\n", "BP104"),
)

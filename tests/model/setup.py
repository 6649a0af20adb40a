"""What is explored: which upstream, where the gather stands, and how much may happen.

Between vLLM 0.21 and 0.33 three things in ``vllm/v1/engine`` changed who waits for whom, so there are
three generations:

========== ============ ==================================================== ======================
generation releases     who starts a wave                                    the hook synchronises
========== ============ ==================================================== ======================
eager      0.21 … 0.28  the coordinator, when a front-end tells it of a      every n-th step
                        request; it then takes the engines for running
told       0.29 … 0.32  the coordinator, but it takes them for running when  every n-th step, and
                        an engine says so (``start_wave`` of rank 0)         step 1 from 0.30
engines    0.33         an idle engine that gets a request                   the same
========== ============ ==================================================== ======================
"""

from __future__ import annotations

from dataclasses import dataclass

#: Upstream as it is.
NOWHERE = "nowhere"
#: The shipped placement: at the end of ``_has_global_unfinished_reqs``, on every return of it.
AFTER_SYNC = "after the sync"
#: The first lesson: at the top of ``Scheduler.schedule``.
IN_SCHEDULE = "at the top of schedule"
#: The second lesson: at the top of ``EngineCoreProc._process_engine_step``.
IN_STEP = "at the top of _process_engine_step"

#: Mutants of the shipped placement.
BEFORE_GATE = "before the sync and the idle gate"
BEFORE_SYNC = "before the sync, in the hook"
SKIP_EARLY = "only after a sync: skipped on the early return"
SKIP_SYNCED = "skipped on the return after a sync"
SKIP_DRAINED = "skipped on a rank that has no requests"

GENERATIONS = ("eager", "told", "engines")

#: ``step``; ``step_with_batch_queue`` where a forward pass is waited for when its output is taken (a worker
#: process, or a device's stream); and the same where it is waited for at once (a worker in the process, on CPU).
SCHEDULING = ("synchronous", "asynchronous", "asynchronous in one process")


@dataclass(frozen=True)
class Setup:
    """One model.

    Attributes:
        placement: Where the gather stands.
        every: The ranks synchronise every so many steps (upstream: 32, or ``dp_sync_interval``). Two is
            enough: what matters of a step is whether it synchronises.
        requests: How many requests the front-end may send, each to any rank, at any time.
        aborts: How often it may abort whatever a rank has.
        pauses: How often it may pause all ranks, in any mode, and resume them once all have answered.
        faults: How often a rank may raise in a collective; recovery follows.
        flushed: Whether no request ends in a step that synchronises, as most do not where that is one in 32.
        broken: What is taken out of upstream, to see that the search can fail: its ``sync``, the ``end`` of a
            wave, its ``dummy`` batches, its idle ``gate``, or the coordinator's ``start`` of waves.
        reduced: Whether steps that concern nobody else are done at once (``Cluster.run_on``), and states that
            differ in the numbers of ranks only are one (``Cluster.freeze``).
    """

    placement: str = AFTER_SYNC
    generation: str = "engines"
    scheduling: str = "synchronous"
    ranks: int = 2
    requests: int = 2
    aborts: int = 0
    pauses: int = 0
    faults: int = 0
    every: int = 2
    flushed: bool = False
    broken: str = ""
    reduced: bool = True

    @property
    def asynchronous(self) -> bool:
        return self.scheduling != "synchronous"

    @property
    def events(self) -> tuple[int, int, int, int]:
        return self.requests, self.aborts, self.pauses, self.faults

"""Balance scheduling: a global admission gate for data-parallel serving.

In a mixture-of-experts model under data parallelism every rank takes part in every step, so the
slowest rank sets the pace. If any rank ran at its cap at the end of the last step, no rank admits
a waiting request in this one; requests that run go on. (It is not "lagging ranks catch up".)

Once per engine step, right after the ranks agree whether anybody still has work, each rank sends
the count that upstream's own admission stop looks at; ``balance_queue`` holds one count a rank.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

from balance_patcher.decided import decided
from balance_patcher.delta import (
    AddParameter,
    Anchor,
    CallThrough,
    Delta,
    InsertAfter,
    InsertBefore,
    Level,
    Prologue,
    Replace,
    Variant,
)
from balance_patcher.feature import (
    Agree,
    AskedOnce,
    CalledOnce,
    CallShape,
    Enabling,
    Example,
    Feature,
    LaunchPath,
    Ordered,
    Pure,
    Refusal,
    RuntimeClass,
    Sets,
)
from balance_patcher.watchdog import Watchdog, threshold

from . import balance_scaling, balance_seam, balance_sight
from .asking import NESTED, asked, kv_role, places, written
from .balance_ascend import PATCH_BALANCE_SCHEDULE, ascend_config, short_request_first
from .balance_counts import zero_counts
from .balance_seam import ASKED, SEAM

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULE = f"{SCHEDULER}.schedule"
ENGINE = "vllm.v1.engine.core"

# The tests of the ways in which engine cores are started.
LAUNCHES = "tests/engine/test_launches.py"

# The loop that admits waiting requests. It stands directly in an `if` of the function itself, so what is
# set before the loop is set whenever the loop runs, and a `break` in it ends admission.
WAITING_LOOP = (Level("waiting", "if $_", outermost=True), Level("loop", "while $_"))


# -- schedule() ------------------------------------------------------------------------------

DISABLED_PATH = Delta(
    name="balance.disabled-path",
    target=SCHEDULE,
    why="With balance off, upstream's own method runs, and the class costs one attribute test. "
    "`throttle_prefills` is accepted on every lane, so that callers need not know the version.",
    upstream="vllm/v1/core/sched/scheduler.py, Scheduler.schedule; the parameter came in 0.24.0",
    remove_when="balance scheduling is an option of vLLM itself",
    variants=(
        Variant(
            "early-return",
            edits=(
                AddParameter("throttle_prefills", default="False"),
                Prologue(
                    """
                    if not self._balance_enabled:
                        return super().schedule($$$PARAMETERS)
                    """
                ),
            ),
        ),
    ),
)

# The counts change only in the gather, so the flag is well defined for the whole step; the cap and
# the operator are those of upstream's own stop and follow it when it changes.
GATE = (
    InsertBefore(
        "balance_flag = self._balance_enabled and max(t.item() for t in self.balance_queue) <$OP> self.$CAP", at="loop"
    ),
    InsertAfter(
        """
        if balance_flag:
            break
        """
    ),
)

STOP = "if $COUNT <$OP> self.$CAP: break"

ADMISSION_GATE = Delta(
    name="balance.admission-gate",
    target=SCHEDULE,
    why="The gate itself: when any rank was at its cap at the end of the last step, nothing is admitted in this one.",
    upstream="the WAITING loop's own admission stop, the lone `break` on the cap of running requests",
    remove_when="upstream has a seam for the stop (`_should_stop_admitting_waiting`), or the gate itself",
    after=("balance.disabled-path",),
    variants=(
        Variant(
            "running cap",
            Anchor(
                "if len(self.running) <$OP> self.$CAP: break",
                inside=WAITING_LOOP,
                allow={"CAP": ("max_num_running_reqs",), "OP": ("==", ">=")},
            ),
            edits=GATE,
            exports={"_balance_count": "len(self.running)", "_balance_cap": "self.$CAP"},
            note="0.18 to 0.24: the stop counts the running requests",
        ),
        Variant(
            "running cap, counted",
            Anchor(
                STOP,
                inside=WAITING_LOOP,
                after="$COUNT = $VALUE",
                allow={"CAP": ("max_num_running_reqs",), "OP": ("==", ">=")},
            ),
            edits=GATE,
            exports={"_balance_count": "$VALUE", "_balance_cap": "self.$CAP"},
            note="0.25 to 0.30: paused streaming sessions are counted too",
        ),
        Variant(
            "active cap, counted",
            Anchor(
                STOP,
                inside=WAITING_LOOP,
                after="$COUNT = $VALUE",
                allow={"CAP": ("max_num_active_reqs",), "OP": ("==", ">=")},
            ),
            edits=GATE,
            exports={"_balance_count": "$VALUE", "_balance_cap": "self.$CAP"},
            note="from 0.31: upstream admits against a cap of its own, which may be lower",
        ),
        Variant(
            "upstream's seam",
            Anchor(ASKED, inside=WAITING_LOOP),
            status="absorbed",
            note="the loop asks a method; balance.admission-seam overrides it",
        ),
    ),
)

EMPTY_QUEUE_GUARD = Delta(
    name="balance.empty-queue-guard",
    target=SCHEDULE,
    why="A queue that turns out empty ends admission instead of stopping the engine.",
    upstream="the assert after _select_waiting_queue_for_scheduling(); the method went in 0.31.0",
    remove_when="the oldest supported vLLM is 0.31.0",
    variants=(
        Variant(
            "assert",
            Anchor(
                "assert $QUEUE is not None",
                inside=WAITING_LOOP,
                after="$QUEUE = self._select_waiting_queue_for_scheduling()",
            ),
            edits=(
                Replace(
                    """
                    if $QUEUE is None:
                        break
                    """
                ),
            ),
        ),
        Variant(
            "break on an empty queue",
            Anchor(
                """
                if not $QUEUE or $_: break
                $COUNT = $_
                if $COUNT <$OP> self.$CAP: break
                $_ = $QUEUE.peek_request()
                """,
                inside=WAITING_LOOP,
            ),
            status="absorbed",
            note="from 0.31: the loop looks for itself whether there is a request",
        ),
        Variant(
            "break on an empty queue, seam",
            Anchor(
                f"""
                if not $QUEUE or $_: break
                {ASKED}
                $_ = $QUEUE.peek_request()
                """,
                inside=WAITING_LOOP,
            ),
            status="absorbed",
            note="the same, where the loop asks a method whether it admits on",
        ),
    ),
)


# -- the engine core -------------------------------------------------------------------------

# After the synchronisation, because that is the one point of a step where every rank passes and
# all agree. In schedule() a drained rank never arrives; in _process_engine_step the ranks do not
# yet agree on running or idle. Both were tried, and hang.
GATHER = Delta(
    name="balance.gather",
    target=f"{ENGINE}:DPEngineCoreProc._has_global_unfinished_reqs",
    why="Each rank sends its count once per active step, to all ranks.",
    upstream="vllm/v1/engine/core.py, the busy loop's own synchronisation of the ranks",
    remove_when="balance scheduling is an option of vLLM itself",
    variants=(
        Variant(
            "after the synchronisation",
            edits=(
                CallThrough(
                    """
                    if getattr(self.scheduler, "_balance_enabled", False):
                        self.scheduler.balance_gather(self.dp_group)
                        if not balance_result:
                            self.scheduler.balance_rest()
                    """
                ),
            ),
        ),
    ),
)


# -- the class that carries it ---------------------------------------------------------------


KEY = "enable_balance_scheduling"


def balance_asked_by(vllm_config: Any) -> str | None:
    """Who asks for balance: vllm-ascend's configuration where it is installed, else ``additional_config``.

    The nested field comes before the older one at the top, also where vllm-ascend is so old that it knows only
    that one. It parses its environment variable itself; it is not read here.

    Args:
        vllm_config: A ``vllm.config.VllmConfig``.
    """
    names = [name for name, _ in written(vllm_config, KEY)]
    config = ascend_config(vllm_config)
    scheduler = getattr(config, "scheduler_config", None)
    if hasattr(scheduler, KEY):
        parsed = getattr(scheduler, KEY)
    elif hasattr(config, KEY) and f"{NESTED}.{KEY}" not in names:
        parsed = getattr(config, KEY)
    else:
        return asked(vllm_config, KEY)
    return next(iter(names), f"vllm_ascend.{KEY}") if parsed else None


def balance_excluded(engine: Any, vllm_config: Any) -> tuple[str, ...]:
    """What balance must not be combined with; each reason names both keys."""
    reasons = []
    role = kv_role(vllm_config)
    if role in ("kv_producer", "kv_consumer"):
        reasons.append(f"{KEY} and kv_transfer_config.kv_role={role} exclude each other (kv_both is allowed)")
    for key in ("profiling_chunk_config", "dyntra_lb_config"):
        settings = next((place[key] for _, place in places(vllm_config) if key in place), None)
        if isinstance(settings, dict) and settings.get("enabled"):
            reasons.append(f"{KEY} and {key}.enabled exclude each other")
    size = vllm_config.parallel_config.data_parallel_size
    if size > 1 and vllm_config.model_config.is_moe and not hasattr(engine, "_has_global_unfinished_reqs"):
        reasons.append(
            f"{KEY} with data_parallel_size={size} needs the data-parallel busy loop to gather in, "
            "which the in-process client and the external launcher do not run"
        )
    return tuple(reasons)


def balance_needless(_: Any, vllm_config: Any) -> str | None:
    """Why there is nothing to gather: one rank, or a dense model, whose ranks have no group."""
    if vllm_config.parallel_config.data_parallel_size <= 1:
        return "nothing to gather: there is one data-parallel rank"
    if not vllm_config.model_config.is_moe:
        return "nothing to gather: a dense model's ranks are independent and have no group"
    return None


def balance_observed(engine: Any) -> dict[str, object] | None:
    """The cap that this engine's gate compares with, read from the scheduler that it has built."""
    scheduler = getattr(engine, "scheduler", None)
    if not getattr(scheduler, "_balance_enabled", False):
        return None
    cap = getattr(scheduler, "_balance_cap", None)  # the method that the gate's own delta exports
    return {"cap": cap()} if cap is not None else {}


def balance_shared(vllm_config: Any, exports: Mapping[str, str]) -> dict[str, object]:
    """What all ranks must have alike: the cap of the gate, and the attribute that holds it.

    Args:
        vllm_config: A ``vllm.config.VllmConfig``; the scheduler does not exist yet.
        exports: What the deltas bound; the cap's is upstream's own attribute.
    """
    scheduler = vllm_config.scheduler_config
    attribute = exports["_balance_cap"].rpartition(".")[2]
    active = getattr(scheduler, "max_num_active_seqs", None) if attribute == "max_num_active_reqs" else None
    return {"cap": active or scheduler.max_num_seqs, "cap attribute": attribute}


def balance_started(engine: Any, peers: Any) -> None:
    """Watch the gathers of an engine that has been built, and know its ranks when the group is scaled.

    Args:
        engine: The engine core.
        peers: The :class:`~balance_patcher.joining.Peers` of its group.
    """
    scheduler = engine.scheduler
    scheduler._balance_engine = weakref.ref(engine)  # noqa: SLF001 - our own
    scheduler._balance_peers = peers  # noqa: SLF001 - our own
    scheduler._balance_watch = Watchdog("balance", engine, peers.names, threshold()).start()  # noqa: SLF001 - our own
    sight = scheduler._balance_sight  # noqa: SLF001 - our own
    sight.engine, sight.names, sight.watch = weakref.ref(engine), peers.names, scheduler._balance_watch  # noqa: SLF001


def balance_tells(engine: Any) -> dict[str, object]:
    """What the gate knows at this moment, for who asks the process; read while the engine is at work.

    Args:
        engine: The engine core.
    """
    import time

    scheduler = engine.scheduler
    # The property would make a new queue for a new group: that is left to the step.
    counted, group = scheduler._balance_group, getattr(engine, "dp_group", None)  # noqa: SLF001 - our own
    tensors = scheduler._balance_counts if counted is None or counted is group else ()  # noqa: SLF001 - our own
    counts = [int(count) for tensor in tensors for count in tensor.tolist()]
    cap = scheduler._balance_cap()  # noqa: SLF001 - what the gate's own delta exports
    # Since when requests wait at this rank because of another.
    since = scheduler._balance_sight.frozen_since  # noqa: SLF001 - our own
    told = {"cap": cap, "counts": counts, "frozen": max(counts, default=0) >= cap}
    return told if since is None else {**told, "frozen_for": round(time.monotonic() - since, 3)}


def balance_scheduler(upstream: type) -> type:
    """``BalanceScheduler``, a subclass of the installed ``Scheduler``; ``schedule`` is added by the patcher.

    Args:
        upstream: ``vllm.v1.core.sched.scheduler.Scheduler`` as it is in this process.
    """
    import torch
    import torch.distributed as dist

    class BalanceScheduler(upstream):  # type: ignore[misc]
        """vLLM's scheduler with a global admission gate.

        Attributes:
            balance_queue: One count per data-parallel rank, each an int tensor of shape ``(1,)`` on the
                CPU: the running requests at the end of the last step. Only there when balance is on. All zero when
                the engine has another group than the one on which they were gathered.
        """

        _balance_enabled = False
        _balance_engine: Any = None  # a weak reference, from the moment when the engine has been built
        _balance_watch: Watchdog | None = None
        _balance_sight: balance_sight.Sight | None = None  # only there when balance is on
        _balance_peers: Any = None
        _balance_group: Any = None  # the group of the last gather

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Upstream keeps its configuration; its parameters are not read, because others wrap `__init__`.
            decision = decided(self.vllm_config, "balance")
            asks = balance_asked_by(self.vllm_config) is not None
            self._balance_enabled = asks if decision is None else decision
            if self._balance_enabled:
                self._balance_sight = balance_sight.Sight()
                self._balance_reset(self.vllm_config.parallel_config.data_parallel_size)
            short_request_first(self)

        @property
        def balance_queue(self) -> list[torch.Tensor]:
            if self._balance_sight is not None:
                self._balance_sight.looked = True  # by the gate, in `schedule`
            return self._balance_current()

        @balance_queue.setter
        def balance_queue(self, counts: list[torch.Tensor]) -> None:
            self._balance_counts = counts
            (self._balance_own,) = zero_counts(1)  # balance may have been off until now

        def _balance_current(self) -> list[torch.Tensor]:
            engine = self._balance_engine() if self._balance_engine is not None else None
            # Fault recovery and elastic scaling put another group in place; of that nothing has been counted yet.
            counted = self._balance_group
            if engine is not None and counted is not None and counted is not engine.dp_group:
                self._balance_group = None
                self._balance_reset(engine.dp_group.size())
            return self._balance_counts

        def balance_rest(self) -> None:
            """All ranks have come to rest together; what happens until they go on again has not been counted."""
            self._balance_reset(len(self._balance_counts))
            if self._balance_sight is not None:
                self._balance_sight.rests()

        def _balance_reset(self, ranks: int) -> None:
            self._balance_counts = zero_counts(ranks)
            (self._balance_own,) = zero_counts(1)  # a new one too: a gather that failed may still hold the other

        def balance_gather(self, dp_group: Any = None) -> None:
            """Send this rank's count to all ranks and take theirs: one ``all_gather``.

            The queue follows the group's size, which elastic scaling changes. After a failed gather
            all counts are zero, so that nothing is frozen by what was true before.

            Args:
                dp_group: The data-parallel process group; without one, ``self.dp_group``.

            Raises:
                ValueError: If there is no group.
            """
            if not self._balance_enabled:
                return
            group = dp_group if dp_group is not None else getattr(self, "dp_group", None)
            if group is None:
                raise ValueError("balance_gather needs the data-parallel group: pass it, or set `dp_group`")
            # After a wait for other ranks everything that is touched here is out of the cache: as little as can be.
            anew = group is not self._balance_group
            if anew:
                self._balance_group = None  # else another thread that looks now would put a new queue in place
            if len(self._balance_counts) != group.size():
                self._balance_reset(group.size())
            count = self._balance_own.memory[0] = self._balance_count()
            watch, sight = self._balance_watch, self._balance_sight
            if sight is not None:
                sight.enters(self)
            if watch is not None:
                watch.enters(anew=anew)
            try:
                dist.all_gather(self._balance_counts, self._balance_own, group=group)
            except BaseException:
                self._balance_reset(group.size())
                raise
            finally:
                self._balance_group = group
                if watch is not None:
                    watch.leaves()
            if sight is not None:
                sight.leaves(count)

        def balance_scales(self, engine: Any, request: Any) -> None:
            """Elastic scaling was asked for: tell the ranks that join what runs here.

            Args:
                engine: The engine core.
                request: vLLM's ``ReconfigureDistributedRequest``.

            Raises:
                PatchError: BP707, if they cannot be asked what they run; nothing is scaled then.
            """
            if self._balance_peers is not None:  # installed by hand, ranks have not agreed on anything
                self._balance_peers.scales(
                    request.new_data_parallel_master_ip, getattr(request, "coord_store_port", 0),
                    engine.dp_group.size(), request.new_data_parallel_size,
                )  # fmt: skip

        def balance_fits(self, *, wait: bool = False) -> bool:
            """Whether a scaling may go on: its new ranks run what the old ones run."""
            return self._balance_peers is None or bool(self._balance_peers.fits(wait=wait))

        def balance_gives_up(self) -> bool:
            """Whether a scaling is to be given up, because a new rank does not fit."""
            return self._balance_peers is not None and bool(self._balance_peers.refused)

    init = BalanceScheduler.__init__
    init.__signature__ = inspect.signature(upstream.__init__)  # type: ignore[attr-defined, misc]
    return BalanceScheduler


FEATURE = Feature(
    name="balance",
    summary="Global admission gate for data-parallel serving: if any rank is at its cap, no rank admits.",
    deltas=(
        DISABLED_PATH,
        ADMISSION_GATE,
        balance_seam.OVERRIDE,
        EMPTY_QUEUE_GUARD,
        GATHER,
        *balance_scaling.SCALING,
    ),
    runtime=RuntimeClass(
        "BalanceScheduler",
        base=SCHEDULER,
        make=balance_scheduler,
        provides=frozenset({"_balance_enabled", "balance_queue", "balance_gather", "_balance_reset"}),
    ),
    invariants=(
        CalledOnce(
            "the busy loop calls the hook once on every path",
            target=f"{ENGINE}:DPEngineCoreProc.run_busy_loop",
            call="self._has_global_unfinished_reqs($$$_)",
            idle="if not $_ and not self.engines_running: continue",
            step="self._process_engine_step($$$_)",
        ),
        Ordered(
            "the stop comes before the one admission",
            target=SCHEDULE,
            first=(STOP, ASKED),
            then="self.running.append($_)",
        ),
        AskedOnce(
            "upstream's seam is asked in the loop, and nowhere else",
            target=SEAM,
            caller=SCHEDULE,
            call=Anchor(ASKED, inside=WAITING_LOOP),
        ),
        Ordered(
            "the data-parallel group is set up before the scheduler",
            target=f"{ENGINE}:EngineCoreProc.__init__",
            first="self._init_data_parallel($$$_)",
            then="super().__init__($$$_)",
        ),
        Sets(
            "the data-parallel group is an attribute of the engine core",
            target=f"{ENGINE}:DPEngineCoreProc._init_data_parallel",
            attribute="dp_group",
        ),
        Sets(
            "the store of the data-parallel group is an attribute of the engine core",
            target=f"{ENGINE}:DPEngineCoreProc._init_data_parallel",
            attribute="dp_store",
        ),
        Sets(
            "the scheduler is an attribute of the engine core",
            target=f"{ENGINE}:EngineCore.__init__",
            attribute="scheduler",
        ),
        Sets(
            "the scheduler keeps its configuration",
            target=f"{SCHEDULER}.__init__",
            attribute="vllm_config",
        ),
        Agree(
            "the gate compares as upstream's own stop does",
            target=SCHEDULE,
            one="balance_flag = $_ and max($_) <$OP> self.$CAP",
            other=STOP,
            holes=("OP", "CAP"),
            delta="balance.admission-gate",
        ),
        Agree(
            "the override compares as upstream's seam does",
            target=SEAM,
            one="max($_) <$OP> self.$CAP",
            other="return $COUNT <$OP> self.$CAP",
            holes=("OP", "CAP"),
            delta="balance.admission-seam",
        ),
        Pure("the stop only counts", delta="balance.admission-gate", hole="COUNT"),
        Pure("what is counted is only read", delta="balance.admission-gate", hole="VALUE"),
        Pure("what the seam counts is only read", delta="balance.admission-seam", hole="VALUE"),
    ),
    call_shapes=(
        CallShape(SCHEDULE, ""),
        CallShape(SCHEDULE, "True"),
        CallShape(SCHEDULE, "throttle_prefills=True"),
    ),
    enabling=Enabling(
        asked=balance_asked_by,
        excluded=balance_excluded,
        needless=balance_needless,
        observed=balance_observed,
        shared=balance_shared,
        started=balance_started,
        tells=balance_tells,
        example={"scheduler_config": {KEY: True}},
    ),
    stand_in=PATCH_BALANCE_SCHEDULE,
    measures=balance_sight.MEASURES,
    launches=(
        LaunchPath(
            "AsyncLLM", "tested", "internal balancing, spawned and forked", "tests/engine/test_engines.py::TestOn"
        ),
        LaunchPath("HTTP server", "tested", "internal balancing", f"{LAUNCHES}::TestEachWay"),
        LaunchPath("two API servers", "tested", "internal balancing", f"{LAUNCHES}::TestEachWay"),
        LaunchPath("headless second node", "tested", "two launches on loopback", f"{LAUNCHES}::TestEachWay"),
        LaunchPath(
            "external load balancer", "tested", "one command line a rank, on loopback", f"{LAUNCHES}::TestEachWay"
        ),
        LaunchPath("hybrid load balancer", "tested", "in make test-all", f"{LAUNCHES}::TestEachWay"),
        LaunchPath(
            "offline", "tested", "one process a rank, no coordinator, uneven prompts", f"{LAUNCHES}::TestEachWay"
        ),
        LaunchPath("Ray", "tested", "in make test-all, two actors on the CPU", f"{LAUNCHES}::TestEachWay"),
        LaunchPath(
            "in-process client", "refused", "with more than one rank: no busy loop", f"{LAUNCHES}::TestWithoutABusyLoop"
        ),
        LaunchPath(
            "external launcher", "refused", "with more than one rank: no busy loop", f"{LAUNCHES}::TestWithoutABusyLoop"
        ),
        LaunchPath("elastic scaling", "untested", "needs accelerators; upstream's own functions are driven over gloo"),
    ),
)


# -- what it does to a function, and what it refuses -----------------------------------------

_GATE_BEFORE = """
class Scheduler:
    def __init__(self):
        self.max_num_running_reqs = 8
        self.running = []

    def schedule(self):
        if self.open:
            while self.waiting:
                # The cap comes first.
                if len(self.running) == self.max_num_running_reqs:
                    break
                self.admit()
"""

EXAMPLES = (
    Example(
        "balance.disabled-path",
        before="""
class Scheduler:
    def schedule(self):
        return self.step()
""",
        after="""
class Scheduler:
    def schedule(self, throttle_prefills=False):
        if not self._balance_enabled:
            return super().schedule()
        return self.step()
""",
    ),
    Example(
        "balance.disabled-path",
        before='''
class Scheduler:
    def schedule(self, throttle_prefills: bool = False, *, budget=None):
        """Plan one step."""
        # Nothing is planned twice.
        return self.step(budget)
''',
        after='''
class Scheduler:
    def schedule(self, throttle_prefills: bool = False, *, budget=None):
        """Plan one step."""
        if not self._balance_enabled:
            return super().schedule(throttle_prefills, budget=budget)
        # Nothing is planned twice.
        return self.step(budget)
''',
    ),
    Example(
        "balance.admission-gate",
        before=_GATE_BEFORE,
        after="""
class Scheduler:
    def __init__(self):
        self.max_num_running_reqs = 8
        self.running = []

    def schedule(self):
        if self.open:
            balance_flag = self._balance_enabled and max(t.item() for t in self.balance_queue) == self.max_num_running_reqs
            while self.waiting:
                # The cap comes first.
                if len(self.running) == self.max_num_running_reqs:
                    break
                if balance_flag:
                    break
                self.admit()
""",
    ),
    Example(
        "balance.admission-gate",
        before="""
class Scheduler:
    def __init__(self):
        self.max_num_active_reqs = 8
        self.running, self.parked = [], 0

    def schedule(self):
        if self.open:
            while True:
                held = len(self.running) + self.parked
                if (held >= self.max_num_active_reqs):  # full
                    break
                self.admit()
""",
        after="""
class Scheduler:
    def __init__(self):
        self.max_num_active_reqs = 8
        self.running, self.parked = [], 0

    def schedule(self):
        if self.open:
            balance_flag = self._balance_enabled and max(t.item() for t in self.balance_queue) >= self.max_num_active_reqs
            while True:
                held = len(self.running) + self.parked
                if (held >= self.max_num_active_reqs):  # full
                    break
                if balance_flag:
                    break
                self.admit()
""",
    ),
    Example(
        "balance.empty-queue-guard",
        before="""
class Scheduler:
    def schedule(self):
        if self.open:
            while self.waiting:
                queue = self._select_waiting_queue_for_scheduling()
                assert queue is not None  # there was one
                queue.pop()
""",
        after="""
class Scheduler:
    def schedule(self):
        if self.open:
            while self.waiting:
                queue = self._select_waiting_queue_for_scheduling()
                # there was one
                if queue is None:
                    break
                queue.pop()
""",
    ),
    Example(
        "balance.gather",
        before="""
class DPEngineCoreProc:
    def __init__(self):
        self.scheduler, self.dp_group = None, None

    def _has_global_unfinished_reqs(self, local, every=32):
        return local
""",
        after="""
def upstream(balance_patcher_upstream):
    class DPEngineCoreProc:
        def _has_global_unfinished_reqs(self, local, every=None):
            balance_result = balance_patcher_upstream(self, local, every)
            if getattr(self.scheduler, "_balance_enabled", False):
                self.scheduler.balance_gather(self.dp_group)
                if not balance_result:
                    self.scheduler.balance_rest()
            return balance_result
    return DPEngineCoreProc
""",
    ),
    *balance_seam.EXAMPLES,
    *balance_scaling.EXAMPLES,
)

REFUSES = (
    Refusal("balance.disabled-path", "class Scheduler:\n    async def schedule(self):\n        pass\n", "BP108"),
    Refusal("balance.disabled-path", "class Scheduler:\n    def schedule(self):\n        yield 1\n", "BP109"),
    Refusal(
        "balance.disabled-path", "class Scheduler:\n    @wrapped\n    def schedule(self):\n        pass\n", "BP107"
    ),
    Refusal("balance.disabled-path", "class Scheduler:\n    def plan(self):\n        pass\n", "BP104"),
    Refusal("balance.admission-gate", _GATE_BEFORE.replace("max_num_running_reqs", "limit"), "BP101"),
    Refusal("balance.admission-gate", _GATE_BEFORE.replace(" == ", " > "), "BP112"),
    Refusal("balance.admission-gate", _GATE_BEFORE.replace("break", "continue"), "BP113"),
    Refusal(
        "balance.admission-gate", _GATE_BEFORE.replace("break", "self.full = True\n                    break"), "BP114"
    ),
    Refusal(
        "balance.admission-gate", _GATE_BEFORE.replace("break", "break\n                    self.full = True"), "BP114"
    ),
    Refusal("balance.admission-gate", _GATE_BEFORE.replace("if self.open", "with self.lock"), "BP117"),
    Refusal("balance.admission-gate", _GATE_BEFORE.replace("self.admit()", "balance_flag = self.admit()"), "BP301"),
    Refusal(
        "balance.empty-queue-guard",
        """
class Scheduler:
    def schedule(self):
        if self.open:
            while self.waiting:
                queue = self.pick()
                assert queue is not None
                queue.pop()
""",
        "BP117",
    ),
    Refusal(
        "balance.gather",
        """
class DPEngineCoreProc:
    def __init__(self):
        self.scheduler, self.group = None, None

    def _has_global_unfinished_reqs(self, local):
        return local
""",
        "BP303",
    ),
    *balance_seam.REFUSES,
    *balance_scaling.REFUSES,
)

"""What vllm-ascend's copy of ``Scheduler.schedule`` holds besides upstream's, and what it may lack.

Everything in it has its place: around it, beside it, and in the order of the text.
"""

from __future__ import annotations

from balance_patcher.delta import Level
from balance_patcher.standin import STALE, Cover

_WAITING = (Level("waiting", "if $_", outermost=True), Level("loop", "while $_"))
_FROZEN = "max(t.item() for t in self.balance_queue) == self.max_num_running_reqs"
_SELECTED = "request_queue = self._select_waiting_queue_for_scheduling()"
_OLDER = "upstream's older wording; the installed vLLM's own runs"


def covers(
    place: str, by: str, *patterns: str, inside: tuple[Level, ...] = (), after: str | None = None,
    before: str | None = None, role: str = "", why: str = "",
) -> tuple[Cover, ...]:  # fmt: skip
    return tuple(Cover(place, pattern, by, why, inside, after, before, role) for pattern in patterns)


def each(place: str, by: str, *patterns: str, inside: tuple[Level, ...] = (), why: str = "") -> tuple[Cover, ...]:
    """Covers that are needed wherever their place is, each for itself."""
    return tuple(Cover(place, pattern, by, why, inside, role=f"`{pattern}`") for pattern in patterns)


SCHEDULE = "BalanceScheduler.schedule"
_BOTH_OFF = "if not self._balance_enabled and not self._disable_preemption"
_OFF = "if not self._balance_enabled"
_RELEASE = "if vllm_version_is('0.23.0')"
DISABLED, DELEGATED = "the disabled path", "upstream's own schedule for the disabled path"
GATED = "the admission gate"

STEP = (
    *covers(
        SCHEDULE, "balance.disabled-path", _BOTH_OFF,
        before="scheduled_new_reqs: list[Request] = []", role=DISABLED,
    ),
    *covers(
        SCHEDULE, "balance.disabled-path", _RELEASE, inside=(Level("off", _BOTH_OFF, outermost=True),)
    ),
    *covers(
        SCHEDULE, "balance.disabled-path", "return super().schedule()",
        inside=(Level("off", _BOTH_OFF, outermost=True), Level("release", _RELEASE)),
    ),
    *covers(
        SCHEDULE, "balance.disabled-path", "return super().schedule(throttle_prefills)",
        inside=(Level("off", _BOTH_OFF, outermost=True),), role=DELEGATED,
    ),
    *covers(SCHEDULE, "balance.disabled-path", _OFF, before="self.current_step += 1", role=DISABLED),
    *covers(
        SCHEDULE, "balance.disabled-path", "return super().schedule(throttle_prefills)",
        inside=(Level("off", _OFF, outermost=True),), role=DELEGATED,
    ),
    *covers(
        SCHEDULE, "prefill_preemption.keep-running", "if self._disable_preemption: break",
        inside=(Level("retry", "while True"),), after="if new_blocks is not None: break",
        role="no preemption on prefill nodes",
    ),
    *covers(
        SCHEDULE, STALE, "if len(self.running) == self.max_num_running_reqs: break",
        inside=_WAITING, before=f"if {_FROZEN}: break", why="upstream's own stop before 0.25",
    ),
    *covers(
        SCHEDULE, "balance.admission-gate", f"if {_FROZEN}: break",
        inside=_WAITING, before=_SELECTED, role=GATED,
    ),
    *covers(SCHEDULE, "balance.admission-gate", "if self._balance_enabled", inside=_WAITING, before=_SELECTED),
    *covers(
        SCHEDULE, "balance.admission-gate", f"balance_flag = {_FROZEN}",
        inside=(*_WAITING, Level("on", "if self._balance_enabled")),
    ),
    *covers(
        SCHEDULE, "balance.admission-gate", "if balance_flag: break",
        inside=(*_WAITING, Level("on", "if self._balance_enabled")), after=f"balance_flag = {_FROZEN}", role=GATED,
    ),
    *covers(
        SCHEDULE, "balance.empty-queue-guard", "if request_queue is None: break", inside=_WAITING, after=_SELECTED
    ),
    *covers(
        SCHEDULE, STALE, "if defer_prefills and request.num_computed_tokens == 0",
        inside=(_WAITING[0], Level("loop", "while $_", direct=False)), why=_OLDER,
    ),
    *covers(SCHEDULE, STALE, "if self.need_mamba_block_aligned_split", inside=_WAITING, why=_OLDER),
    *covers(
        SCHEDULE, STALE, "limit_lookahead_tokens = load_kv_async and self.use_eagle", inside=_WAITING,
        before="effective_lookahead_tokens = 0 if limit_lookahead_tokens else self.num_lookahead_tokens", why=_OLDER,
    ),
    *covers(
        SCHEDULE, STALE,
        "effective_lookahead_tokens = 0 if request.num_computed_tokens == 0 else self.num_lookahead_tokens",
        inside=_WAITING, before="num_encoder_tokens = 0", why=_OLDER,
    ),
    *covers(SCHEDULE, STALE, "{req.request_id for req in preempted_reqs}", why=_OLDER),
    *covers(
        SCHEDULE, STALE, "meta: KVConnectorMetadata = self.connector.build_connector_meta(scheduler_output)",
        inside=(Level("connector", "if self.connector is not None", outermost=True),), why=_OLDER,
    ),
)  # fmt: skip

#: What the upstream beside 0.23.0, and beside 0.25.1rc1, leaves a loop or the function by, and their copies do not;
#: with what tells that a copy is as old as that.
STEP_LACKS = (
    (
        "self.current_step += 1",
        "if self.current_step < request.next_decode_eligible_step",
        (
            "if self.ec_connector is not None and request.mm_features and "
            "not self.ec_connector.ensure_cache_available(request, num_computed_tokens)"
        ),
    ),
    (
        "prefill_scheduled = False",
        (
            "if (self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None) and num_new_tokens == 1 "
            "and (scheduled_running_reqs and not prefill_scheduled)"
        ),
    ),
)

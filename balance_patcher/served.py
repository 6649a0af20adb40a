"""What a running server's metrics say of the gate: figures for each engine, and what became of them in between.

The counters count from the start of the engines; what happened between two readings is their difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .errors import refuse
from .exposition import Exposition, Sample

ENABLED, INFO = "vllm:balance_enabled", "vllm:balance_info"
STEPS, SECONDS = "vllm:balance_frozen_steps_total", "vllm:balance_frozen_seconds_total"
STALLS, HELD = "vllm:balance_stalls_total", "vllm:balance_requests_waiting_while_frozen"
GATHER = "vllm:balance_gather_seconds"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
#: When the server's process started; absent with several API servers.
STARTED = "process_start_time_seconds"

_ONLY_ONE = frozenset({RUNNING, WAITING, ENABLED, HELD})


@dataclass(frozen=True)
class Gather:
    """A histogram of the time in the gather.

    Attributes:
        count: How many gathers, one a step.
        seconds: All of them together.
        buckets: Upper bounds in seconds, each with how many gathers took no longer.
    """

    count: float = 0.0
    seconds: float = 0.0
    buckets: tuple[tuple[float, float], ...] = ()

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """An estimate, linear within its bucket as Prometheus makes it; infinity above the last bound."""
        whole = self.buckets[-1][1] if self.buckets else 0.0
        if not whole:
            return None
        rank, below, before = share * whole, 0.0, 0.0
        for bound, count in self.buckets:
            if count >= rank:
                if math.isinf(bound):
                    return math.inf
                return below + (bound - below) * ((rank - before) / (count - before) if count > before else 1.0)
            below, before = bound, count
        return math.inf

    def since(self, before: Gather) -> Gather:
        """What was added since then."""
        old = dict(before.buckets)
        buckets = tuple((bound, count - old.get(bound, 0.0)) for bound, count in self.buckets)
        return Gather(self.count - before.count, self.seconds - before.seconds, buckets)


@dataclass(frozen=True)
class EngineFigures:
    """One engine, as the metrics have it. What is ``None`` they do not tell.

    Attributes:
        model: vLLM's ``model_name``.
        engine: vLLM's ``engine``: the data-parallel rank.
        enabled: Whether the gate runs in it.
        reason: Why, or why not.
        source: Who asked for it.
        cap: At how many requests a rank is full.
        digest: Of the texts that run.
        patcher: The version of balance_patcher in the engine.
        frozen_steps: In which requests were kept out of this rank, which had room, by another that was full.
        frozen_seconds: How long they took.
        stalls: How often a step has waited so long that it was told.
        held: Requests that wait while admission is frozen, now.
        running: Requests that run now.
        waiting: Requests that wait now.
        gather: The time in the gather.
    """

    model: str
    engine: str
    enabled: bool | None = None
    reason: str = ""
    source: str = ""
    cap: int | None = None
    digest: str = ""
    patcher: str = ""
    frozen_steps: float | None = None
    frozen_seconds: float | None = None
    stalls: float | None = None
    held: float | None = None
    running: float | None = None
    waiting: float | None = None
    gather: Gather | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.engine

    @property
    def frozen_share(self) -> float | None:
        """Frozen steps among all that gathered."""
        steps = self.gather.count if self.gather is not None else 0.0
        return None if self.frozen_steps is None or not steps else self.frozen_steps / steps

    def since(self, before: EngineFigures) -> EngineFigures | None:
        """What was added since then, beside what is now; ``None`` if the engine was started anew in between."""
        added: dict[str, float | None] = {}
        for name in ("frozen_steps", "frozen_seconds", "stalls"):
            new, old = getattr(self, name), getattr(before, name)
            added[name] = None if new is None or old is None else new - old
        gather = self.gather.since(before.gather) if self.gather is not None and before.gather is not None else None
        counts = [value for value in added.values() if value is not None]
        counts += [gather.count] if gather is not None else []
        return None if any(value < 0 for value in counts) else replace(self, gather=gather, **added)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Served:
    """What a server told at one moment.

    Attributes:
        url: Where it was asked.
        engines: One for each engine of each model that balance was asked for in.
        seconds: How long the server's process has run; ``None`` where it does not tell.
        at: When it was asked, in seconds of ``time.monotonic()``.
    """

    url: str
    engines: tuple[EngineFigures, ...]
    seconds: float | None
    at: float

    @property
    def warnings(self) -> list[str]:
        return list(_warnings(self.engines))

    def as_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "seconds": self.seconds,
            "engines": [_as_dict(engine) for engine in self.engines],
            "warnings": self.warnings,
        }


def served(told: Exposition) -> Served:
    """The figures of the gate among all metrics of a server.

    Raises:
        PatchError: BP744, if there are none.
    """
    by_engine: dict[tuple[str, str], list[Sample]] = {}
    for sample in told.samples:
        if "engine" in sample.labels:
            key = sample.labels.get("model_name", ""), sample.labels["engine"]
            by_engine.setdefault(key, []).append(sample)
    engines = [_figures(key, samples) for key, samples in by_engine.items()]
    there = [engine for engine in engines if engine.enabled is not None or engine.digest or engine.reason]
    if not there:
        raise refuse(
            "BP744",
            f"{told.url} is vLLM's, and has none: balance was never asked for in this server, or balance_patcher is "
            "not armed there",
            next="`python -m balance_patcher status` with that server's Python says whether it would be armed; "
            "enable_balance_scheduling in additional_config asks for it; of a server that has just started, ask again",
        )
    start = [sample.value for sample in told.samples if sample.name == STARTED]
    return Served(told.url, tuple(sorted(there, key=_order)), told.clock - start[0] if start else None, told.at)


def _order(engine: EngineFigures) -> tuple[str, int, str]:
    return engine.model, int(engine.engine) if engine.engine.isdecimal() else -1, engine.engine


def _figures(key: tuple[str, str], samples: Sequence[Sample]) -> EngineFigures:
    enabled = _one(samples, ENABLED)
    # A process that is gone may have left its line behind; what is now is 1.
    info: Mapping[str, str] = next((s.labels for s in reversed(samples) if s.name == INFO and s.value == 1), {})
    cap = info.get("cap", "")
    return EngineFigures(
        *key,
        enabled=None if enabled is None else bool(enabled),
        reason=info.get("reason", ""),
        source=info.get("source", ""),
        cap=int(cap) if cap.isdecimal() else None,
        digest=info.get("digest", ""),
        patcher=info.get("patcher", ""),
        frozen_steps=_one(samples, STEPS),
        frozen_seconds=_one(samples, SECONDS),
        stalls=_one(samples, STALLS),
        held=_one(samples, HELD),
        running=_one(samples, RUNNING),
        waiting=_one(samples, WAITING),
        gather=_gather(samples),
    )


def _one(samples: Iterable[Sample], name: str) -> float | None:
    """One figure; of several processes' counters the sum, of what is now the highest."""
    values = [sample.value for sample in samples if sample.name == name]
    if not values:
        return None
    return max(values) if name in _ONLY_ONE else sum(values)


def _gather(samples: Sequence[Sample]) -> Gather | None:
    count, seconds = _one(samples, f"{GATHER}_count"), _one(samples, f"{GATHER}_sum")
    if count is None or seconds is None:
        return None
    buckets: dict[float, float] = {}
    for sample in samples:
        if sample.name == f"{GATHER}_bucket":
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return Gather(count, seconds, tuple(sorted(buckets.items())))


# -- between two readings --------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What happened between two readings.

    Attributes:
        seconds: From the one to the other.
        engines: For each engine what was added; ``None`` for one that was started anew or was not there before.
    """

    seconds: float
    engines: Mapping[tuple[str, str], EngineFigures | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        told = {
            f"{engine}": _as_dict(added) if added is not None else None for (_, engine), added in self.engines.items()
        }
        return {"seconds": round(self.seconds, 3), "engines": told}


def change(before: Served, now: Served) -> Change:
    """What happened from one reading to the next."""
    old = {engine.key: engine for engine in before.engines}
    added = {engine.key: engine.since(old[engine.key]) if engine.key in old else None for engine in now.engines}
    return Change(now.at - before.at, added)


def _as_dict(engine: EngineFigures) -> dict[str, Any]:
    gather = engine.gather
    told = asdict(replace(engine, gather=None)) | {"frozen_share": engine.frozen_share, "gather": None}
    if gather is not None:
        middle, high = gather.quantile(0.5), gather.quantile(0.99)
        told["gather"] = {"count": gather.count, "seconds": gather.seconds, "mean": gather.mean}
        # JSON has no infinity: above the last bound only that is known.
        told["gather"] |= {name: _finite(value) for name, value in (("p50", middle), ("p99", high))}
    return told


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# -- what it means ---------------------------------------------------------------------------


def _warnings(engines: Sequence[EngineFigures]) -> Iterable[str]:
    on = [engine for engine in engines if engine.enabled]
    for what, told in (("digest", "digests"), ("cap", "caps"), ("patcher", "versions of balance_patcher")):
        values = {engine.key: getattr(engine, what) for engine in on}
        for model in dict.fromkeys(engine.model for engine in on):
            here = {key[1]: value for key, value in values.items() if key[0] == model}
            if len(set(here.values())) > 1:
                yield f"the engines have different {told}: " + ", ".join(f"engine {e}: {v}" for e, v in here.items())
    if on and len(on) < len(engines):
        yield "the gate is on in some engines and off in others: those with it on would wait for the others"
    for engine in on:
        if engine.gather is None or engine.frozen_steps is None:
            yield f"engine {engine.engine} has the gate on and tells no figures of it"
        if engine.stalls:
            yield f"engine {engine.engine}: {engine.stalls:g} times a step waited so long that the log tells of it"


#: Shares of steps from which on the gate is said to hold back often, and most of the time.
OFTEN, MOSTLY = 0.1, 0.5


def judgement(now: Served, added: Change | None = None) -> str:
    """One sentence on what the gate does: in between two readings, else since the start."""
    on = [engine for engine in now.engines if engine.enabled]
    off = [engine for engine in now.engines if not engine.enabled]
    if not on:
        why = off[0].reason or "why, it does not tell"
        return f"Balance is asked for and off, so ranks admit as upstream's do: {why}."
    if added is not None:
        found = [one for key, one in added.engines.items() if one is not None and key in {engine.key for engine in on}]
        when = f"in these {added.seconds:.0f} s"
        if not found:
            return "The engines were started anew in between, so nothing can be told of the time between the readings."
    else:
        found, when = on, "since the start"
    steps = max((one.gather.count for one in found if one.gather is not None), default=0.0)
    share = max((one.frozen_share for one in found if one.frozen_share is not None), default=0.0)
    held = sum(engine.held or 0.0 for engine in on)
    full = [f"engine {e.engine}" for e in on if e.cap is not None and e.running is not None and e.running >= e.cap]
    if not steps:
        busy = sum(engine.running or 0.0 for engine in on)
        if busy and added is not None:
            hangs = "a rank may hang, and `status --pid` with the server's process says which"
            return f"No step was made {when} although {busy:g} requests run: {hangs}."
        return f"The gate is on, and no step was made {when}."
    at = f"{', '.join(full)} {'is' if len(full) == 1 else 'are'} at the cap, and " if full else ""
    if not share:
        if held:
            return f"The gate has begun to hold requests back: {at}{held:g} requests wait for that."
        why = "no rank with room had requests waiting while another was at its cap"
        return f"The gate is on and held nothing back {when}: {why}."
    often = "most of the time" if share >= MOSTLY else "often" if share >= OFTEN else "now and then"
    told = f"The gate held requests back {often} {when}, in up to {100 * share:.1f} % of the steps of an engine"
    if held:
        return f"{told}; it does so now: {at}{held:g} requests wait for that."
    # Whether first tokens come later for it depends on the load: full ranks that admit together may gain.
    more = "; some rank is full most of the time: more ranks or a higher cap would make room" if share >= MOSTLY else ""
    return f"{told}; nothing waits for it now{more}."

"""``schedule()`` per step: upstream's class, ours disabled, ours enabled, and a gate that looks at each loop turn.

A step admits so many requests and runs none besides: no step gives upstream less to do beside the gate. The counts
are below the cap, so that every variant does the same work. As in an engine, the counts are written first, then the
requests come in, then the step is scheduled. The caches are emptied in between, as a model's forward pass does it;
else the gate would look dearer where the step before was longer, and had more in them.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .ratios import difference, ratio, slope
from .results import Row, row
from .turns import Make, Sample, in_turns

RANKS = (2, 16, 64, 512)
ADMISSIONS = (1, 16, 128)
#: The step for which the targets are.
TARGET = (64, 128)
OFF, ON = 1.01, 1.02
#: Rounds of a step in one life of its processes, and lives; the step with the targets, whose margin is 1 %, gets more.
ROUNDS, LIVES, OF_TARGET = 50, 2, 8

UPSTREAM, AGAIN, DISABLED, ENABLED, NAIVE = "upstream", "upstream again", "off", "on", "naive"
#: How often a step reads a count: what a cost that does not depend on the admissions is made of.
READS = "reads"
#: Bytes that are written between two steps, and how far apart: more than a core's own caches hold, and each line of it.
CACHES, LINE = 4 << 20, 64

Tell = Callable[[str], None]


def measure(lane: str, tell: Tell, scale: float = 1.0) -> list[Row]:
    """Everything on ``schedule()``.

    Args:
        lane: Its name.
        tell: Is told what is measured now.
        scale: Of the number of rounds.
    """
    _classes()
    rows: list[Row] = []
    ranks = RANKS if scale >= 1 else (TARGET[0], RANKS[-1])
    for number in ranks:
        levels, bases, naive = [], [], []
        for admissions in ADMISSIONS if scale >= 1 else (1, TARGET[1]):
            step = (number, admissions)
            rounds, lives = max(3, int(scale * ROUNDS)), OF_TARGET if step == TARGET else LIVES
            lives = lives if scale >= 1 else 1
            tell(f"schedule(): {number} ranks, {admissions} admissions, {lives * rounds} rounds")
            kinds = (UPSTREAM, AGAIN, DISABLED, ENABLED, NAIVE)
            samples = in_turns({kind: _variant(kind, number, admissions) for kind in kinds}, rounds, lives)
            rows += _rows(lane, step, samples)
            reads = max(in_turns({READS: _variant(READS, number, admissions)}, 3)[READS])
            rows.append(Row("schedule", lane, f"{_name(step)}: counts read", "n", reads, reads, reads, limit=number))
            levels.append(samples[ENABLED])
            bases.append(samples[DISABLED])
            naive.append(samples[NAIVE])
        grown, naively = _micro(slope(levels, bases)), _micro(slope(naive, bases))
        what = f"gate, {number} ranks: {ADMISSIONS[-1]} admissions against 1"
        why = f"a gate that looks at each turn takes {naively.value:,.0f} µs more"
        rows.append(row("schedule", lane, what, "µs", grown, why=why))
    return rows


def _rows(lane: str, step: tuple[int, int], samples: dict[str, Sequence[float]] | dict[str, list[float]]) -> list[Row]:
    name = _name(step)
    base = samples[UPSTREAM]
    target = step == TARGET
    gate = _micro(difference(samples[ENABLED], samples[DISABLED]))
    of_off = _micro(difference(samples[DISABLED], base))
    step_time = sorted(base)[len(base) // 2] / 1000
    spent = f"the gate takes {gate.value:.1f} µs, the class {of_off.value:.1f} µs, upstream's step {step_time:.0f} µs"
    noise = ratio(samples[AGAIN], base)
    rows = [
        row("schedule", lane, f"{name}: upstream again / upstream", "x", noise, why="the noise: one thing twice"),
        row(
            "schedule", lane, f"{name}: off / upstream", "x", ratio(samples[DISABLED], base),
            limit=OFF if target else None, why=spent if target else "",
        ),
        row(
            "schedule", lane, f"{name}: on / upstream", "x", ratio(samples[ENABLED], base),
            limit=ON if target else None, why=spent if target else "",
        ),
        row("schedule", lane, f"{name}: naive gate / upstream", "x", ratio(samples[NAIVE], base)),
        row("schedule", lane, f"{name}: gate (on - off)", "µs", gate),
    ]  # fmt: skip
    if not target:
        rows = rows[1:]
    return rows


def _name(step: tuple[int, int]) -> str:
    ranks, admissions = step
    return f"{ranks} ranks, {admissions} admission{'s' * (admissions > 1)}"


def _micro(interval: Any) -> Any:
    return replace(interval, value=interval.value / 1e3, low=interval.low / 1e3, high=interval.high / 1e3)


# -- the variants ------------------------------------------------------------------------------------


@functools.cache
def _classes() -> dict[str, type]:
    """The scheduler class of each variant, made before any process is forked."""
    import harness

    from balance_patcher.build import build

    upstream, ours = harness.upstream_scheduler(), harness.balance_scheduler()
    naive = build(naive_feature()).classes[harness.TARGET]
    return {UPSTREAM: upstream, AGAIN: upstream, DISABLED: ours, ENABLED: ours, NAIVE: naive, READS: ours}


def naive_feature() -> Any:
    """The balance feature with another gate: the counts are read at each turn of the loop, where one would write it."""
    from balance_patcher.delta import InsertAfter
    from balance_patcher.registry import find_feature

    feature = find_feature("balance")
    gate = """
        if self._balance_enabled and max(t.item() for t in self.balance_queue) <$OP> self.$CAP:
            break
        """

    def naive(delta: Any) -> Any:
        edited = (replace(one, edits=(InsertAfter(gate),)) if one.edits else one for one in delta.variants)
        return replace(delta, variants=tuple(edited)) if delta.name == "balance.admission-gate" else delta

    deltas = [naive(delta) for delta in feature.deltas]
    # What they say of the gate's text is about ours.
    invariants = tuple(one for one in feature.invariants if getattr(one, "delta", "") != "balance.admission-gate")
    return replace(feature, deltas=tuple(deltas), invariants=invariants)


def _variant(kind: str, ranks: int, admissions: int) -> Make:
    def make() -> Sample:
        import harness
        from vllm.v1.request import RequestStatus

        shape = harness.Shape(seqs=256, tokens=8192, blocks=6000, ranks=ranks, prefix_caching=False, log_stats=False)
        enabled = kind in (ENABLED, NAIVE, READS)
        config = harness.enabled_config(shape) if enabled else harness.vllm_config(shape)
        scheduler = harness.new_scheduler(_classes()[kind], shape, config)
        numbers = itertools.count()
        read = _counting(type(scheduler.balance_queue[0])) if kind == READS else None
        caches = bytearray(CACHES)
        lines = bytes(CACHES // LINE)

        def sample() -> int:
            scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
            if enabled:
                harness.set_counts(scheduler, [1] * ranks)
            for _ in range(admissions):
                scheduler.add_request(harness.new_request(str(next(numbers)), 8, 4))
            caches[::LINE] = lines
            before = read() if read is not None else 0
            begin = time.thread_time_ns()
            scheduler.schedule()
            taken = time.thread_time_ns() - begin
            if len(scheduler.running) != admissions:
                raise RuntimeError(f"{kind}: {len(scheduler.running)} of {admissions} requests were admitted")
            return taken if read is None else read() - before

        return sample

    return make


def _counting(counts: Any) -> Callable[[], int]:
    """Gives how often a count of this class has been read, from now on."""
    read = counts.item
    number = 0

    def item(self: Any) -> Any:
        nonlocal number
        number += 1
        return read(self)

    counts.item = item
    return lambda: number

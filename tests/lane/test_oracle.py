"""Two hundred seeded traces against an oracle whose every line is upstream's.

The oracle is upstream's own class with its own admission cap lowered for the frozen steps
(``traces.oracle_class``). The tests after the traces prove that the traces exercise what they are
meant to, that lowering the cap is sound on this lane, and that wrong gates are found.
"""

import ast
import functools
import inspect
import textwrap
from collections import Counter

import harness
import pytest
import traces

SEEDS = range(200)


@functools.cache
def outcome(seed):
    """The first difference on ``seed`` or ``None``, and what the trace exercised."""
    coverage = Counter()
    found = traces.against_oracle(
        seed,
        harness.balance_scheduler(),
        harness.balance_scheduler(harness.async_scheduler()),
        coverage=coverage,
    )
    return found, coverage


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_equals_the_oracle(seed):
    found, _ = outcome(seed)
    assert found is None, found


# -- the traces exercise what they are meant to ---------------------------------------------------

ON_EVERY_LANE = [
    "aborts: RUNNING",
    "aborts: WAITING",
    "aborts: PREEMPTED",
    "aborts: WAITING_FOR_REMOTE_KVS",
    "aborts: WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
    "admissions",
    "async frozen steps",
    "async placeholders",
    "blocks to clear",
    "connector metadata",
    "empty waiting, frozen",
    "empty waiting, not frozen",
    "encoder inputs",
    "frozen by this rank alone",
    "frozen steps that scheduled running requests",
    "frozen steps with waiting requests and room",
    "grammar bitmasks",
    "grammar waits",
    "loads in the step",
    "lora skips",
    "paused sessions",
    "paused: all, with running requests",
    "paused: new, frozen",
    "paused: new, with waiting requests",
    "preempted by a cache reset",
    "preemptions in a frozen step",
    "preemptions: fcfs",
    "preemptions: priority",
    "prefix cache hits",
    "remote load waits",
    "remote loads",
    "remote loads failed: fail",
    "remote loads failed: recompute",
    "remote loads finished",
    "remote loads ready in a frozen step",
    "resumed requests",
    "second model runner",
    "sends finished",
    "session inputs",
    "speculative tokens",
    "speculative tokens in a frozen step",
    "steps with a rank one below the cap and admissions",
    "steps: fcfs",
    "steps: priority",
    "structured output steps",
    "undecided connector",
    "window groups",
]
WITH_A_THROTTLE = ["throttled steps", "prefills deferred by the throttle"]
WITH_AN_ACTIVE_CAP = ["cap below the running limit, frozen"]


@functools.cache
def exercised():
    return sum((outcome(seed)[1] for seed in SEEDS), Counter())


@pytest.mark.parametrize("what", [*ON_EVERY_LANE, *WITH_A_THROTTLE, *WITH_AN_ACTIVE_CAP])
def test_the_traces_exercise(what):
    on_this_lane = (
        harness.takes_throttle() if what in WITH_A_THROTTLE
        else harness.supports_active_cap() if what in WITH_AN_ACTIVE_CAP
        else True
    )  # fmt: skip
    seen = exercised()[what]
    assert seen > 0 if on_this_lane else seen == 0, f"{what}: {seen} in {len(SEEDS)} traces"


def test_upstream_reads_the_cap_only_where_the_oracle_expects_it():
    """Lowering the cap changes the admission stop and bounds a final assertion, nothing else."""
    cap = harness.cap_attribute()
    tree = ast.parse(textwrap.dedent(inspect.getsource(harness.upstream_scheduler().schedule)))

    def reads(node):
        return [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == cap]

    stops = [n for n in ast.walk(tree) if isinstance(n, ast.If) and isinstance(n.body[0], ast.Break) and reads(n.test)]
    asserted = [n for n in ast.walk(tree) if isinstance(n, ast.Assert) and reads(n.test)]
    assert len(stops) == 1
    assert len(reads(tree)) == len(reads(stops[0].test)) + sum(len(reads(n.test)) for n in asserted)
    assert isinstance(stops[0].test, ast.Compare)
    assert isinstance(stops[0].test.ops[0], (ast.Eq, ast.GtE))


# -- a wrong gate is found ------------------------------------------------------------------------


class Overruled:
    """A mutant: the counts are rewritten for one call, so that the gate decides something else."""

    def schedule(self, *args, **keywords):
        kept = [tensor.item() for tensor in self.balance_queue]
        harness.set_counts(self, self.rewrite(kept))
        try:
            return super().schedule(*args, **keywords)
        finally:
            harness.set_counts(self, kept)


class GateIgnored(Overruled):
    def rewrite(self, counts):
        return [0] * len(counts)


class FreezesOneTooEarly(Overruled):
    def rewrite(self, counts):
        cap = harness.admission_cap(self)
        return [cap if count >= cap - 1 else count for count in counts]


class OwnCountOnly(Overruled):
    def rewrite(self, counts):
        own = self.parallel_config.data_parallel_rank
        return [count if rank == own else 0 for rank, count in enumerate(counts)]


class OtherCountsOnly(Overruled):
    def rewrite(self, counts):
        own = self.parallel_config.data_parallel_rank
        return [0 if rank == own else count for rank, count in enumerate(counts)]


class FirstRankOnly(Overruled):
    def rewrite(self, counts):
        return [counts[0]] * len(counts)


class LowestCount(Overruled):
    def rewrite(self, counts):
        return [min(counts)] * len(counts)


class OneStepLate(Overruled):
    previous = None

    def rewrite(self, counts):
        late, self.previous = self.previous or [0] * len(counts), counts
        return late


class AlwaysFrozen(Overruled):
    def rewrite(self, counts):
        return [harness.admission_cap(self)] * len(counts)


class FreezesRunningToo:
    """A mutant: a freeze stops the whole step, as a pause of everything does."""

    def schedule(self, *args, **keywords):
        from vllm.v1.core.sched.interface import PauseState

        paused = self._pause_state
        if max(tensor.item() for tensor in self.balance_queue) == harness.admission_cap(self):
            self._pause_state = PauseState.PAUSED_ALL
        try:
            return super().schedule(*args, **keywords)
        finally:
            self._pause_state = paused


class AdmitsOneWhenFrozen(Overruled):
    """A mutant: the gate stands behind an admission instead of before it."""

    def rewrite(self, counts):
        return [0] * len(counts)

    def schedule(self, *args, **keywords):
        cap = harness.cap_attribute()
        allowed = getattr(self, cap)
        frozen = max(tensor.item() for tensor in self.balance_queue) == allowed
        if frozen and harness.admission_count(self) < allowed:
            setattr(self, cap, harness.admission_count(self) + 1)
        try:
            return super().schedule(*args, **keywords)
        finally:
            setattr(self, cap, allowed)


class AsksTheConnectorFirst:
    """A mutant: what waits is looked at before the freeze is."""

    def schedule(self, *args, **keywords):
        frozen = max(tensor.item() for tensor in self.balance_queue) == harness.admission_cap(self)
        if frozen and self.connector is not None and self.waiting:
            self.connector.get_num_new_matched_tokens(self.waiting.peek_request(), 0)
        return super().schedule(*args, **keywords)


class RunningLimitInsteadOfCap(Overruled):
    """A mutant: compares with ``max_num_running_reqs``, which no count reaches under a lower cap."""

    def rewrite(self, counts):
        cap, limit = harness.admission_cap(self), self.max_num_running_reqs
        return [count if count == limit else min(count, cap - 1) for count in counts]


MUTANTS = [
    GateIgnored,
    FreezesOneTooEarly,
    OwnCountOnly,
    OtherCountsOnly,
    FirstRankOnly,
    LowestCount,
    OneStepLate,
    AlwaysFrozen,
    FreezesRunningToo,
    AdmitsOneWhenFrozen,
    AsksTheConnectorFirst,
    RunningLimitInsteadOfCap,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_oracle_finds_a_wrong_gate(mutant, balance_class, balance_async_class):
    if mutant is RunningLimitInsteadOfCap and not harness.supports_active_cap():
        assert harness.cap_attribute() == "max_num_running_reqs"
        return
    wrong = [type(mutant.__name__, (mutant, class_), {}) for class_ in (balance_class, balance_async_class)]
    found = next((found for seed in SEEDS if (found := traces.against_oracle(seed, *wrong)) is not None), None)
    assert found is not None, f"{mutant.__name__} passed for correct on {len(SEEDS)} traces"
    assert found.startswith("seed ")
    assert " step " in found

"""Three features in one function: each step of a trace is that of exactly the features that are on.

What is expected is made without anything of ours. Balance is upstream's own code with its cap lowered for a frozen
step (``traces.oracle_class``). The two others are upstream's own ``schedule`` with a line or two written into its
text by hand, here, where upstream's comment on preemption stands. So the eight expected classes are made of three
independent parts, and not of our deltas with others left out.
"""

import functools
import inspect
import itertools
import textwrap

import fenced
import harness
import pytest
import traces
from fenced import FEATURES, FLAGS, scheduler

BALANCE, RETRY, PREFILL = FEATURES
COMBINATIONS = [on for size in range(4) for on in itertools.combinations(FEATURES, size)]

# The line of upstream's that says that a victim is wanted now.
PLACE = "# Preempt the lowest-priority request.\n"
BY_HAND = {
    PREFILL: "break\n",
    RETRY: """
by_priority = self.policy == SchedulingPolicy.PRIORITY
victim = max(self.running, key=lambda r: (r.priority, r.arrival_time)) if by_priority else self.running[-1]
if self.defer_block_free and victim.last_sched_seq > self.processed_step_seq:
    break
""",
}


@functools.cache
def by_hand(on):
    """Upstream's ``Scheduler`` with what is written by hand for these features in its ``schedule``."""
    upstream = harness.upstream_scheduler()
    written = "".join(BY_HAND[name] for name in (PREFILL, RETRY) if name in on)
    if not written:
        return upstream
    text = textwrap.dedent(inspect.getsource(upstream.schedule))
    assert text.count(PLACE) == 1
    (line,) = [line for line in text.splitlines(keepends=True) if PLACE in line]
    text = text.replace(line, line + textwrap.indent(written, line[: len(line) - len(line.lstrip())]))
    namespace = {}
    exec(compile(text, "<by hand>", "exec"), vars(inspect.getmodule(upstream)), namespace)  # noqa: S102 - upstream's own
    return type("ByHand", (upstream,), {"schedule": namespace["schedule"]})


def expected(on, shape):
    base = fenced.over(by_hand(frozenset(on) - {BALANCE}), shape)
    class_ = traces.oracle_class(base) if BALANCE in on else base
    return harness.new_scheduler(class_, shape)


@functools.cache
def scripts():
    """Traces in which blocks run out; in two of three a step is in flight, and blocks are fenced."""
    want = {True: 24, False: 12}
    found = {True: [], False: []}
    for seed in itertools.count():
        script = traces.trace(seed)
        tight = script.shape.blocks <= 14 and not any(step.preempt_all for step in script.steps)
        fences = script.shape.connector and script.shape.asynchronous
        if tight and len(found[fences]) < want[fences]:
            found[fences].append(script)
        if all(len(found[kind]) == number for kind, number in want.items()):
            return (*found[True], *found[False])
    raise AssertionError


def told(on):
    """How the counts of the ranks reach a scheduler of ours, and one that is made by hand."""
    return (harness.set_counts, traces.tell_oracle) if BALANCE in on else (traces.ignore_counts,) * 2


@pytest.mark.parametrize("on", COMBINATIONS, ids=lambda on: "+".join(on) or "none")
def test_each_step_is_that_of_exactly_the_features_that_are_on(on):
    ours, theirs = told(on)
    for script in scripts():
        found = traces.compare(
            script,
            traces.World(scheduler(FEATURES, on, script.shape), script, ours),
            traces.World(expected(on, script.shape), script, theirs),
            without=FLAGS,
        )
        assert found is None, found


@functools.cache
def steps(on):
    """What is scheduled and who is preempted in each step of each trace, as expected."""
    found = []
    for script in scripts():
        world = traces.World(expected(on, script.shape), script, told(on)[1])
        for number, step in enumerate(script.steps):
            world.before(number, step)
            output, _ = world.schedule(step)
            found.append((dict(output.num_scheduled_tokens), set(output.preempted_req_ids or ())))
            world.answer(number)
    return found


def test_the_traces_tell_the_combinations_apart():
    """Else equal traces would show nothing. Where nobody is preempted at all, a retry that looks first is no other."""
    for one, other in itertools.combinations(COMBINATIONS, 2):
        alike = PREFILL in one and PREFILL in other and set(one) ^ set(other) == {RETRY}
        assert (steps(one) == steps(other)) is alike, (one, other)


def test_the_retry_leaves_out_preemptions_and_prefill_all_of_them():
    number = {on: sum(len(preempted) for _, preempted in steps(on)) for on in COMBINATIONS}
    assert number[()] > number[RETRY,] > 0
    assert number[BALANCE,] > number[BALANCE, RETRY] > 0
    assert {number[on] for on in COMBINATIONS if PREFILL in on} == {0}

"""No preemption on a prefill node: nobody loses blocks, waiting ones go on, and the features compose.

Three requests fill the cache while they run. Upstream preempts one of them for another; with the feature
on, the one that finds no blocks waits.
"""

import functools
from dataclasses import replace

import harness
import pytest
import traces
from harness import Shape

from balance_patcher.build import build
from balance_patcher.compose import compose
from balance_patcher.decided import record
from balance_patcher.registry import find_feature

SHAPE = Shape(seqs=3, tokens=256, blocks=9, prefix_caching=False, reserve_full=False)
FEATURES = ("balance", "prefill_preemption")


@functools.cache
def patched(*names):
    """The scheduler class with these features in it, none of them bound."""
    return build(compose([find_feature(name) for name in names])).classes[harness.TARGET]


def scheduler(names, on, shape=SHAPE, base=None):
    """One scheduler of the class with ``names`` in it and those of ``on`` decided on."""
    config = harness.vllm_config(shape)
    for name in FEATURES:
        record(config, name, active=name in on)
    class_ = patched(*names)
    if base is not None:
        class_ = type(f"Patched{base.__name__}", (base, class_), {})
    return harness.new_scheduler(class_, shape, config)


class Node:
    """A scheduler that three growing requests fill up."""

    def __init__(self, subject, shape=SHAPE):
        self.scheduler = subject
        self.world = traces.World(subject, traces.Trace(0, shape, []), traces.ignore_counts)
        for number in range(3):
            prompt = range(3 + 40 * number, 3 + 40 * number + 30)
            request = harness.new_request(f"r{number}", prompt, 15, arrival=float(number), priority=number)
            subject.add_request(request)

    def run(self, steps=200):
        """Every output until nothing is left, or for that many steps."""
        outputs = []
        for number in range(steps):
            if not self.scheduler.has_requests():
                break
            output, _ = self.world.schedule(traces.Step())
            outputs.append((output, dict(output.num_scheduled_tokens), set(output.preempted_req_ids or ())))
            self.world.answer(number)
        return outputs


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
class TestAlone:
    def shape(self, policy):
        return replace(SHAPE, policy=policy)

    def test_upstream_preempts_in_this_trace(self, policy):
        shape = self.shape(policy)
        node = Node(harness.new_scheduler(harness.upstream_scheduler(), shape), shape)
        assert any(preempted for *_, preempted in node.run())

    def test_off_it_preempts_as_upstream_does(self, policy):
        shape = self.shape(policy)
        ours = Node(scheduler(["prefill_preemption"], [], shape), shape).run()
        theirs = Node(harness.new_scheduler(harness.upstream_scheduler(), shape), shape).run()
        assert [step[1:] for step in ours] == [step[1:] for step in theirs]

    def test_on_nobody_is_preempted_and_all_are_answered(self, policy):
        shape = self.shape(policy)
        node = Node(scheduler(["prefill_preemption"], ["prefill_preemption"], shape), shape)
        outputs = node.run()
        assert not any(preempted for *_, preempted in outputs)
        assert not node.scheduler.has_requests()

    def test_on_one_without_blocks_waits_and_keeps_what_it_has(self, policy):
        shape = self.shape(policy)
        node = Node(scheduler(["prefill_preemption"], ["prefill_preemption"], shape), shape)
        outputs = node.run()
        waited = [tokens for _, tokens, _ in outputs if len(tokens) < 3]
        assert waited
        # Each of its tokens is computed once: nothing that it had was thrown away.
        total = sum(sum(tokens.values()) for _, tokens, _ in outputs)
        assert total == 3 * (30 + 15 - 1)


class TestCacheReset:
    def test_with_running_requests_it_is_refused_and_says_why(self):
        node = Node(scheduler(["prefill_preemption"], ["prefill_preemption"]))
        node.run(2)
        with pytest.raises(RuntimeError, match="3 running requests: preemption is switched off"):
            node.scheduler.reset_prefix_cache(reset_running_requests=True)
        with pytest.raises(RuntimeError, match="drain or abort"):
            node.scheduler.reset_prefix_cache(True)
        assert len(node.scheduler.running) == 3

    def test_without_running_requests_it_is_upstreams(self):
        subject = scheduler(["prefill_preemption"], ["prefill_preemption"])
        assert subject.reset_prefix_cache(reset_running_requests=True) is True

    def test_that_leaves_running_requests_alone_it_is_upstreams(self):
        node = Node(scheduler(["prefill_preemption"], ["prefill_preemption"]))
        node.run(2)
        node.scheduler.reset_prefix_cache()
        assert len(node.scheduler.running) == 3

    def test_off_it_preempts_as_upstream_does(self):
        node = Node(scheduler(["prefill_preemption"], []))
        node.run(2)
        assert node.scheduler.reset_prefix_cache(reset_running_requests=True) is True
        assert not node.scheduler.running


class TestTogether:
    """With several features in one function, each trace is that of exactly the features that are on."""

    SEEDS = range(20)

    @pytest.mark.parametrize("on", [(), ("balance",), ("prefill_preemption",), FEATURES], ids="+".join)
    def test_every_step_equals_that_of_the_features_that_are_on(self, on):
        seen = 0
        for seed in self.SEEDS:
            script = traces.trace(seed)
            if any(step.preempt_all for step in script.steps):
                continue  # refused with the feature on: see above
            base = harness.async_scheduler() if script.shape.asynchronous else None
            subject = scheduler(FEATURES, on, script.shape, base)
            counts = harness.set_counts if "balance" in on else traces.ignore_counts
            if len(on) == 2:
                # There is no class with both that is not composed: balance off in the counts is prefill alone.
                expected, counts = scheduler(["prefill_preemption"], ["prefill_preemption"], script.shape, base), None
            elif on:
                expected = scheduler(on, on, script.shape, base)
            else:
                expected = harness.new_scheduler(base or harness.upstream_scheduler(), script.shape)
            set_subject = counts or (lambda s, c: harness.set_counts(s, [0] * len(c)))
            set_expected = counts or traces.ignore_counts
            found = traces.compare(
                script,
                traces.World(subject, script, set_subject),
                traces.World(expected, script, set_expected),
                without={"_balance_enabled", "_disable_preemption"},
            )
            assert found is None, found
            seen += 1
        assert seen > len(self.SEEDS) / 2

    def test_both_on_a_full_rank_freezes_and_nobody_is_preempted(self):
        shape = replace(SHAPE, seqs=4)
        subject = scheduler(FEATURES, FEATURES, shape)
        node = Node(subject, shape)
        node.run(2)
        subject.add_request(harness.new_request("late", range(400, 410), 3))
        harness.set_counts(subject, [4, 3])
        output, _ = node.world.schedule(traces.Step())
        node.world.answer(0)
        assert not output.scheduled_new_reqs
        harness.set_counts(subject, [3, 3])
        outputs = node.run()
        assert any("late" in tokens for _, tokens, _ in outputs)
        assert not any(preempted for *_, preempted in outputs)
        assert not subject.has_requests()

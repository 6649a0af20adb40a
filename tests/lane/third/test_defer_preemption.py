"""Case 4 (vllm-ascend #16315, vllm #49674): three run, all of them fenced, no block is free, and each needs one."""

import functools
import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import fenced
import harness
import pytest
from fenced import FEATURES, OUTPUT, SHAPE, Node, changes, memory, scheduler

from balance_patcher import decision, installation, readback
from balance_patcher.build import build
from balance_patcher.errors import PatchError
from balance_patcher.registry import find_feature

RETRY = "defer_preemption"
KEY = "defer_aware_preemption"
# What vLLM writes down of every step, whatever happens in it.
STEP = ["scheduler.prev_step_scheduled_req_ids", "scheduler.current_step"]

both_policies = pytest.mark.parametrize("policy", ["fcfs", "priority"])
# Which features are in the function, and which are on besides; balance with counts that freeze nobody.
company = pytest.mark.parametrize(
    ("names", "on", "counts"),
    [
        ((RETRY,), (), None),
        (FEATURES, (), None),
        (FEATURES, ("balance",), [0, 0]),
        (FEATURES, ("balance",), [3, 2]),
    ],
    ids=["alone", "beside balance off", "beside balance on", "beside balance on and frozen"],
)


def node(names, on, policy="fcfs", counts=None, **other):
    shape = replace(SHAPE, policy=policy, **other)
    made = Node(scheduler(names, on, shape), shape, counts)
    assert made.fenced() == [True] * len(made.scheduler.running)
    assert len(made.scheduler.running) == 3
    assert made.free == 0
    return made


def upstream(policy="fcfs", **other):
    shape = replace(SHAPE, policy=policy, **other)
    return Node(harness.new_scheduler(fenced.over(harness.upstream_scheduler(), shape), shape), shape)


@both_policies
class TestCascade:
    def test_upstream_preempts_all_of_them_for_nothing(self, policy):
        made = upstream(policy)
        output = made.step()
        assert set(output.preempted_req_ids) == {"r0", "r1", "r2"}
        assert output.total_num_scheduled_tokens == 0
        assert made.free == 0
        assert not made.scheduler.running
        assert {r.num_computed_tokens for r in made.scheduler.requests.values()} == {0}

    def test_and_goes_on_so_and_answers_nobody(self, policy):
        made = upstream(policy)
        steps = list(made.run(100))
        assert len(steps) == 100
        assert sum(len(tokens) for _, tokens in steps) == 0
        assert sum(output.total_num_scheduled_tokens for output, _ in steps) > 1000
        assert len(made.scheduler.requests) == 3

    @pytest.mark.parametrize("on", [(), ("balance",)], ids=["all off", "balance on"])
    def test_with_the_feature_off_so_do_we(self, policy, on):
        made = node(FEATURES, on, policy, [0, 0] if on else None)
        output = made.step()
        assert set(output.preempted_req_ids) == {"r0", "r1", "r2"}
        theirs = upstream(policy)
        theirs.step()
        names = sorted(set(harness.state_names(theirs.scheduler)) - fenced.FLAGS)
        assert harness.state(made.scheduler, names) == harness.state(theirs.scheduler, names)


@both_policies
@company
class TestFenced:
    def test_nobody_is_preempted_and_nothing_is_changed(self, policy, names, on, counts):
        made = node(names, (RETRY, *on), policy, counts)
        before = memory(made.scheduler)
        output = made.step()
        assert output.total_num_scheduled_tokens == 0
        assert not output.preempted_req_ids
        assert not output.num_scheduled_tokens
        assert changes(before, memory(made.scheduler)) == STEP

    def test_however_often_it_is_asked(self, policy, names, on, counts):
        made = node(names, (RETRY, *on), policy, counts)
        before = memory(made.scheduler)
        for _ in range(5):
            assert made.step().total_num_scheduled_tokens == 0
            made.drop()
        assert changes(before, memory(made.scheduler)) == STEP

    def test_when_the_fence_has_moved_it_preempts_as_upstream_does(self, policy, names, on, counts):
        made = node(names, (RETRY, *on), policy, counts)
        made.step()
        made.drop()
        made.answer()
        assert made.fenced() == [False, False, False]
        output = made.step()
        # One gives its two blocks, and the others get one each.
        assert set(output.preempted_req_ids) == {"r2"}
        assert output.num_scheduled_tokens == {"r0": 1, "r1": 1}
        assert made.free == 0

    def test_all_are_answered_and_only_one_is_computed_again(self, policy, names, on, counts):
        made = node(names, (RETRY, *on), policy, counts)
        if counts is not None:
            harness.set_counts(made.scheduler, [0, 0])  # who is preempted comes back from WAITING
        steps = list(made.run(100))
        assert not made.scheduler.has_requests()
        assert [set(output.preempted_req_ids or ()) for output, _ in steps if output.preempted_req_ids] == [{"r2"}]
        assert sum(len(tokens) for _, tokens in steps) == 3 * (OUTPUT - 1)


def test_what_a_step_changes_is_what_an_empty_step_of_upstream_changes():
    """The control of the comparison: a step in which everything is paused, and one with the cascade."""
    from vllm.v1.core.sched.interface import PauseState

    made = upstream()
    made.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    before = memory(made.scheduler)
    assert made.step().total_num_scheduled_tokens == 0
    assert changes(before, memory(made.scheduler)) == STEP
    made.scheduler.set_pause_state(PauseState.UNPAUSED)
    before = memory(made.scheduler)
    made.step()
    changed = changes(before, memory(made.scheduler))
    assert {"scheduler.running", "scheduler.deferred_frees", "requests.r0.num_preemptions"} < set(changed)


class TestWaiting:
    """The pass over running requests ends; the waiting ones are looked at as in any step without preemptions."""

    def asked(self, made):
        made.add("late", 5, 20)
        made.step()
        return [name for name, *_ in made.world.in_flight[-1][0].kv_connector_metadata.asked]

    def test_they_are_looked_at_with_the_feature_on(self):
        assert self.asked(node(FEATURES, (RETRY,), seqs=4)) == ["late"]

    def test_they_are_not_where_somebody_was_preempted(self):
        assert self.asked(node(FEATURES, (), seqs=4)) == []

    def test_they_are_not_where_balance_has_frozen_them(self):
        assert self.asked(node(FEATURES, (RETRY, "balance"), counts=[4, 3], seqs=4)) == []
        assert self.asked(node(FEATURES, (RETRY, "balance"), counts=[3, 3], seqs=4)) == ["late"]


@both_policies
def test_a_victim_that_is_not_fenced_is_preempted_though_others_are(policy):
    made = node((RETRY,), (RETRY,), policy)
    # As if it had had no part in the step in flight.
    made.scheduler.requests["r2"].last_sched_seq = made.scheduler.processed_step_seq
    output = made.step()
    assert set(output.preempted_req_ids) == {"r2"}
    assert output.num_scheduled_tokens == {"r0": 1, "r1": 1}


def test_without_fences_it_is_upstream_to_the_last_field():
    shape = replace(SHAPE, connector=False)
    nodes = [
        Node(scheduler((RETRY,), (RETRY,), shape), shape),
        Node(harness.new_scheduler(fenced.over(harness.upstream_scheduler(), shape), shape), shape),
    ]
    for made in nodes:
        assert made.scheduler.defer_block_free is False
        assert set(made.step().preempted_req_ids) == {"r2"}
    names = sorted(set(harness.state_names(nodes[1].scheduler)) - fenced.FLAGS)
    assert harness.state(nodes[0].scheduler, names) == harness.state(nodes[1].scheduler, names)


class TestProven:
    """What was read of upstream's fences must be what runs."""

    @pytest.mark.parametrize("name", ["_free_request_blocks", "_preempt_request"])
    def test_fences_that_somebody_has_replaced_are_refused_by_name(self, name, monkeypatch):
        def frees_at_once(self, request, *args, **kwargs):
            self.kv_cache_manager.free(request)

        monkeypatch.setattr(harness.upstream_scheduler(), name, frees_at_once)
        with pytest.raises(PatchError) as caught:
            build(RETRY)
        (failure,) = caught.value.failures
        assert failure.code == "BP603"
        assert "frees_at_once" in str(failure)
        assert "test_defer_preemption.py" in str(failure)

    def test_one_who_looks_on_does_no_harm(self, monkeypatch):
        upstream_class = harness.upstream_scheduler()
        inner = upstream_class._free_request_blocks

        @functools.wraps(inner)
        def looks_on(self, request):
            return inner(self, request)

        monkeypatch.setattr(upstream_class, "_free_request_blocks", looks_on)
        assert build(RETRY).classes


# -- in an engine -----------------------------------------------------------------------------


def module():
    from vllm.v1.core.sched import scheduler as found

    return found


@pytest.fixture
def nothing_is_left():
    harness.async_scheduler()
    before = module().Scheduler, harness.async_scheduler().__bases__
    yield
    for name in FEATURES:
        installation.uninstall(name)
    assert (module().Scheduler, harness.async_scheduler().__bases__) == before


def config(**asked):
    return harness.vllm_config(SHAPE, asked)


def made(vllm_config):
    return {one.feature: one for one in decision.decide(harness.Loop(), vllm_config)}


@pytest.mark.usefixtures("nothing_is_left")
class TestEngine:
    @pytest.mark.parametrize("asked", [{KEY: True}, {"scheduler_config": {KEY: True}}], ids=["top", "nested"])
    def test_it_runs_where_the_configuration_asks_for_it(self, asked, caplog):
        vllm_config = config(**asked)
        made(vllm_config)
        assert installation.installed(RETRY) is not None
        subject = harness.new_scheduler(harness.async_scheduler(), SHAPE, vllm_config)
        assert subject._defer_preemption is True
        with caplog.at_level(logging.INFO, "vllm.balance_patcher"):
            readback.confirm(SimpleNamespace(scheduler=subject), vllm_config)
        (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith(RETRY)]
        assert line.startswith(f"{RETRY}: ON rank 0/2")
        assert " fences=True source=additional_config." in line
        assert "deltas=disabled-path,retry" in line

    def test_it_is_not_on_because_it_is_there(self):
        before = module().Scheduler
        vllm_config = config()
        assert not made(vllm_config)[RETRY].active
        assert installation.bound(RETRY) is None
        assert module().Scheduler is before

    def test_an_engine_that_does_not_ask_has_upstreams_retry_beside_one_that_does(self):
        asks, silent = config(**{KEY: True}), config()
        assert made(asks)[RETRY].active
        assert not made(silent)[RETRY].active
        subject = harness.new_scheduler(harness.async_scheduler(), SHAPE, silent)
        assert len(Node(subject).step().preempted_req_ids) == 3
        subject = harness.new_scheduler(harness.async_scheduler(), SHAPE, asks)
        assert not Node(subject).step().preempted_req_ids

    def test_installed_one_after_the_other_all_orders_make_one_text_and_are_taken_out_again(self):
        upstream_class = module().Scheduler
        texts = set()
        for order in itertools.permutations(FEATURES):
            for name in order:
                done = installation.install_together([find_feature(name)])
            assert done.feature.name == "+".join(FEATURES)
            texts.add(tuple(sorted((name, text) for name, text in done.built.texts.items())))
            for name in order:
                installation.uninstall(name)
            assert module().Scheduler is upstream_class
        assert len(texts) == 1

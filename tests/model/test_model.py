"""The protocol explored: the shipped gather adds no deadlock, each misplaced one has one, and the search can fail."""

from dataclasses import replace

import pytest

from tests.model.cluster import Cluster
from tests.model.matrix import EVENTS, LESSONS, REQUESTS, name, quick, upstream
from tests.model.search import explore
from tests.model.setup import (
    AFTER_SYNC,
    BEFORE_GATE,
    BEFORE_SYNC,
    GENERATIONS,
    IN_SCHEDULE,
    IN_STEP,
    NOWHERE,
    SCHEDULING,
    SKIP_DRAINED,
    SKIP_EARLY,
    SKIP_SYNCED,
    Setup,
)
from tests.model.story import story, title
from tests.model.verdict import complaints, shapes

generations = pytest.mark.parametrize("generation", GENERATIONS)
scheduling = pytest.mark.parametrize("scheduling", SCHEDULING)


def models(setups):
    return pytest.mark.parametrize("setup", setups, ids=[name(setup) for setup in setups])


class TestAfterTheSync:
    @models([setup for setup in REQUESTS if quick(setup)])
    def test_every_state_comes_to_rest_and_the_ranks_have_gathered_equally_often(self, setup):
        result = explore(setup)
        assert result.sound, (complaints(result), story(result))

    @models([setup for setup in EVENTS if quick(setup)])
    def test_no_abort_pause_or_fault_leads_to_a_deadlock_that_upstream_has_not(self, setup):
        result = explore(setup)
        assert not complaints(result), story(result)

    @models([setup for setup in EVENTS if quick(setup) and setup.generation == "engines"])
    def test_and_to_none_at_all_where_upstream_has_none(self, setup):
        assert explore(upstream(setup)).sound
        assert explore(setup).sound


class TestLessons:
    @models([setup for setup in LESSONS if setup.placement == IN_SCHEDULE])
    def test_in_schedule_a_rank_without_requests_never_gathers(self, setup):
        result = explore(setup)
        print("\n".join([title(result), *story(result)]))
        assert {ending(result, state) for state in result.stuck} == {("forward", "gather")}
        assert len(result.trace) <= 9

    @models([setup for setup in LESSONS if setup.placement == IN_STEP])
    def test_in_the_engine_step_a_rank_steps_once_more_when_the_wave_is_over(self, setup):
        result = explore(setup)
        print("\n".join([title(result), *story(result)]))
        assert {ending(result, state) for state in result.stuck} == {("gather", "input")}
        assert any("steps once more" in line for line in story(result))
        assert len(result.trace) <= 14

    @generations
    def test_in_the_engine_step_synchronous_scheduling_hangs_only_if_a_last_step_synchronises(self, generation):
        """One in 32 does, so it survives many waves of random requests. Asynchronous scheduling does not."""
        assert explore(Setup(IN_STEP, generation, requests=1)).stuck
        assert explore(Setup(IN_STEP, generation, requests=1, flushed=True)).sound
        assert explore(Setup(IN_STEP, generation, SCHEDULING[1], requests=1, flushed=True)).stuck

    @scheduling
    @pytest.mark.parametrize("placement", [IN_SCHEDULE, IN_STEP])
    def test_a_request_is_never_answered(self, placement, scheduling):
        result = explore(Setup(placement, scheduling=scheduling))
        clusters = [Cluster(result.setup, state) for state in result.stuck]
        assert any(rank.waiting or rank.active or rank.mail for cluster in clusters for rank in cluster.ranks)

    @pytest.mark.parametrize("placement", [IN_SCHEDULE, IN_STEP])
    def test_three_ranks_hang_as_two_do(self, placement):
        assert explore(Setup(placement, ranks=3, requests=1)).stuck


class TestMutants:
    """Of the shipped placement."""

    @scheduling
    def test_a_gather_before_the_sync_and_the_gate_hangs(self, scheduling):
        result = explore(Setup(BEFORE_GATE, scheduling=scheduling))
        assert result.stuck
        assert complaints(result)

    @scheduling
    def test_a_gather_skipped_by_a_drained_rank_hangs(self, scheduling):
        result = explore(Setup(SKIP_DRAINED, scheduling=scheduling))
        assert result.stuck
        assert complaints(result)

    @scheduling
    @pytest.mark.parametrize("placement", [SKIP_EARLY, SKIP_SYNCED])
    def test_a_gather_skipped_on_one_return_hangs_nobody_but_steps_go_without(self, placement, scheduling):
        """All ranks take the same return, so they skip together. What is lost is that each step has its counts."""
        result = explore(Setup(placement, scheduling=scheduling))
        assert not result.doomed
        assert not result.errors
        assert result.miscounts
        assert complaints(result)

    @scheduling
    def test_without_the_gather_after_a_sync_a_wave_begins_frozen_by_the_last_one(self, scheduling):
        assert explore(Setup(SKIP_SYNCED, scheduling=scheduling)).stale
        assert not explore(Setup(AFTER_SYNC, scheduling=scheduling)).stale

    @pytest.mark.parametrize("generation", ["eager", "engines"])
    @scheduling
    def test_a_gather_before_the_sync_but_in_the_hook_is_as_good(self, generation, scheduling):
        """Ranks enter the hook in step, so the order of two collectives in it is the same for all.

        Not a mutant that could be caught, then: what protects is the hook, not the side of the sync.
        """
        before, after = (explore(Setup(placement, generation, scheduling)) for placement in (BEFORE_SYNC, AFTER_SYNC))
        assert before.sound
        assert before.states == after.states


class TestSearch:
    """It can fail, and what it leaves out makes no difference."""

    @pytest.mark.parametrize("broken", ["sync", "dummy", "gate", "start"])
    @pytest.mark.parametrize("placement", [NOWHERE, AFTER_SYNC])
    def test_an_upstream_with_something_taken_out_hangs(self, broken, placement):
        result = explore(Setup(placement, requests=1, broken=broken))
        assert result.stuck
        assert not result.sound

    def test_a_sync_that_always_says_to_go_on_is_a_livelock(self):
        result = explore(Setup(NOWHERE, requests=1, broken="end"))
        assert result.livelocks
        assert not result.stuck

    def test_collectives_of_two_kinds_that_meet_are_an_error(self):
        assert any("meet" in error for error in explore(Setup(BEFORE_GATE, scheduling=SCHEDULING[1])).errors)

    @generations
    def test_upstream_itself_is_sound_for_requests(self, generation):
        assert explore(Setup(NOWHERE, generation)).sound

    @pytest.mark.parametrize("generation", ["eager", "told"])
    @pytest.mark.parametrize("event", ["aborts", "pauses", "faults"])
    def test_upstreams_own_deadlocks_are_found(self, generation, event):
        """An idle rank that has been left out of the start of a wave, or has ignored it: 0.33 changed just that."""
        result = explore(Setup(NOWHERE, generation, requests=1, **{event: 1}))
        assert {at for state in result.stuck for at in ending(result, state)} == {"forward", "input"}
        assert shapes(result)

    @generations
    @pytest.mark.parametrize("placement", [NOWHERE, AFTER_SYNC, IN_SCHEDULE, IN_STEP, BEFORE_GATE, SKIP_DRAINED])
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_the_reductions_change_no_verdict(self, generation, placement, ranks):
        setup = Setup(placement, generation, SCHEDULING[1], ranks, requests=1)
        reduced, full = explore(setup), explore(replace(setup, reduced=False))
        assert reduced.states < full.states or placement == IN_SCHEDULE
        assert verdict(reduced) == verdict(full)

    def test_uneven_gathers_at_rest_would_be_seen(self):
        setup = Setup()
        cluster = Cluster(setup, Cluster.start(setup))
        assert cluster.at_rest()
        assert not cluster.uneven()
        cluster.ranks[0].gathers = 1
        assert cluster.uneven()


def ending(result, state):
    """Where the ranks are, in a deadlock, in alphabetical order."""
    return tuple(sorted(rank.kind or rank.at for rank in Cluster(result.setup, state).ranks))


def verdict(result):
    ends = {tuple(sorted({(rank.kind or rank.at) for rank in Cluster(result.setup, s).ranks})) for s in result.stuck}
    return result.sound, bool(result.errors), bool(result.miscounts), result.uneven, bool(result.stale), ends

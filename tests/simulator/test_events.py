"""The events: everything is answered, time is the slowest rank's, and the gate does what it says."""

from collections import Counter
from types import SimpleNamespace

import pytest
from standin import StandInGate, StandInRank

from tools.simulator import traces
from tools.simulator.dispatch import LeastLoaded, Recorded, RoundRobin, Skewed
from tools.simulator.events import Answered, StalledError, Work, simulate
from tools.simulator.figures import figures
from tools.simulator.steptime import StepTime
from tools.simulator.traces import Arrival, Load

ANY = Arrival(0, 1, 1)
MODEL = StepTime(base=1.0, prefill=0.01, decode=0.1)


def simulated(trace, ranks=2, cap=4, *, freezes=False, front=RoundRobin, closed=0):
    gate = StandInGate(freezes=freezes)
    group = [StandInRank(cap, gate) for _ in range(ranks)]
    return simulate(group, trace, front(group), MODEL, gate, cap, closed=closed), group, gate


@pytest.mark.parametrize("front", [RoundRobin, LeastLoaded])
@pytest.mark.parametrize("freezes", [False, True], ids=["off", "on"])
def test_every_request_ends_with_its_tokens(freezes, front):
    trace = traces.made(Load(300, 3.0, prompt=20, output=15))
    run, group, _ = simulated(trace, 4, freezes=freezes, front=front)
    assert list(run.tokens) == [one.output for one in trace]
    assert all(one.at < first <= last for one, first, last in zip(trace, run.first, run.finish, strict=True))
    assert sum(run.prefill) == sum(one.prompt for one in trace)
    assert sum(run.decode) == sum(one.output - 1 for one in trace)
    assert sum(run.admitted) == len(trace)
    assert max(rank.most for rank in group) <= 4
    assert list(run.counts(len(run.end) - 1)) == [0] * 4
    assert run.waiting[-1] == 0


def test_the_slowest_rank_sets_the_step():
    run, *_ = simulated([Arrival(0, 10, 3), Arrival(0, 200, 1)])
    # both prefill, 200 tokens being slower; then one decodes
    assert list(run.seconds) == pytest.approx([3.0, 1.1, 1.1])
    assert list(run.first) == pytest.approx([3.0, 3.0])
    assert list(run.finish) == pytest.approx([5.2, 3.0])


def test_a_request_waits_for_the_step_that_it_comes_in_and_an_idle_group_for_the_request():
    run, _, gate = simulated([Arrival(5, 100, 1), Arrival(5.5, 100, 1), Arrival(50, 100, 1)])
    assert list(run.first) == pytest.approx([7.0, 9.0, 52.0])
    assert [0, 0] in gate.seen


def test_no_rank_admits_in_a_step_in_which_a_count_is_at_the_cap_with_the_gate_on():
    trace = traces.made(Load(300, 5.0, prompt=20, output=15))
    at_cap = {}
    for freezes in (False, True):
        run, *_ = simulated(trace, 4, freezes=freezes)
        at_cap[freezes] = sum(n for n, leader in zip(run.admitted, run.leader, strict=True) if leader >= run.cap)
        frozen = [count for count, leader in zip(run.frozen, run.leader, strict=True) if count]
        assert bool(frozen) is freezes
    assert at_cap[False] > 0
    assert at_cap[True] == 0


@pytest.mark.parametrize("closed", [1, 5, 40])
def test_in_a_closed_loop_one_is_sent_when_another_is_answered(closed):
    trace = [one._replace(at=0.0) for one in traces.made(Load(60, 3.0, prompt=20, output=15))]
    run, *_ = simulated(trace, 2, closed=closed)
    ends = sorted(run.finish)
    # The first ones at once; each other at the very moment at which so many were answered that it is its turn.
    assert list(run.sent) == pytest.approx([0.0] * min(closed, 60) + ends[: 60 - closed])
    assert list(run.tokens) == [one.output for one in trace]
    assert figures("off", run, 1, "0.32.0").ttft_mean == pytest.approx(sum(run.first) / 60 - sum(run.sent) / 60)


def test_a_step_that_nobody_waits_for_takes_no_time():
    work = iter([Work(0, 0, 1, 0, awaited=False), Work(100, 0, 0, 0)])
    answers = iter([Answered((), ()), Answered([0], [(0, 1)])])
    rank = SimpleNamespace(
        count=0, waiting=0, add=lambda *_: None, step=lambda: next(work), answer=lambda: next(answers)
    )
    run = simulate([rank], [Arrival(3, 100, 1)], RoundRobin([rank]), MODEL, StandInGate(freezes=False), 4)
    assert list(run.seconds) == [0, 2.0]
    assert list(run.first) == [5.0]


def test_what_can_never_run_is_told_and_not_waited_for():
    rank = SimpleNamespace(
        count=0, waiting=1, add=lambda *_: None, step=lambda: Work(0, 0, 0, 0), answer=lambda: Answered((), ())
    )
    with pytest.raises(StalledError, match="1 requests wait"):
        simulate([rank], [Arrival(0, 1, 1)], RoundRobin([rank]), MODEL, StandInGate(freezes=False), 4)


def test_the_dispatchers_choose_as_they_say():
    ranks = [SimpleNamespace(count=count, waiting=waiting) for count, waiting in ((2, 2), (3, 0), (0, 3))]
    assert [RoundRobin(ranks).choose(0, ANY)] == [0]
    front = RoundRobin(ranks)
    assert [front.choose(number, ANY) for number in range(5)] == [0, 1, 2, 0, 1]
    front = LeastLoaded(ranks)
    assert [front.choose(number, ANY) for number in range(3)] == [1, 1, 2]
    front = Skewed(ranks)
    assert Counter(front.choose(number, ANY) for number in range(70)) == {0: 30, 1: 20, 2: 20}
    front = Recorded(ranks)
    assert [front.choose(number, ANY._replace(rank=rank)) for number, rank in enumerate((2, -1, 2, -1))] == [2, 0, 2, 1]


def test_the_figures_are_those_of_a_run_that_can_be_done_by_hand():
    trace = [Arrival(0, 10, 3), Arrival(0, 200, 1)]
    run, *_ = simulated(trace)
    found = figures("off", run, 1, "0.32.0")
    assert found.seconds == pytest.approx(5.2)
    assert found.throughput == pytest.approx(4 / 5.2)
    assert found.ttft_50 == found.ttft_99 == pytest.approx(3.0)
    assert found.tpot_mean == pytest.approx(1.1)
    assert found.prefill_share == pytest.approx(3 / 5.2)
    # one runs on rank 0 and none on rank 1, until the last step has ended
    assert found.imbalance == pytest.approx(4.1 / 5.2)
    assert (found.steps, found.frozen_steps, found.output_tokens) == (3, 0, 4)

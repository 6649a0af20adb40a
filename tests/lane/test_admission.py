"""The gate in single steps: who is admitted, who goes on running, and when a freeze ends."""

import harness
import pytest
import traces
from harness import Shape

SHAPE = Shape(seqs=4, ranks=3, rank=1, tokens=256)
CAP = SHAPE.cap


class Rank:
    """An enabled scheduler that is this rank, with what it runs and what waits for it."""

    def __init__(self, class_, shape=SHAPE, *, running=1, waiting=2):
        self.scheduler = harness.new_scheduler(class_, shape, harness.enabled_config(shape))
        self.number = 0
        self.arrive(running)
        self.step([0] * shape.ranks)
        assert self.running() == running
        self.arrive(waiting)

    def arrive(self, number):
        for _ in range(number):
            # No two prompts share a block, so that prefix caching decides nothing here.
            prompt = range(3 + 40 * self.number, 23 + 40 * self.number)
            self.scheduler.add_request(harness.new_request(f"r{self.number}", prompt, 50))
            self.number += 1

    def step(self, counts):
        """One step of schedule and answer under ``counts``; the ``SchedulerOutput``."""
        if counts is not None:
            harness.set_counts(self.scheduler, counts)
        world = traces.World(self.scheduler, TRACE, traces.ignore_counts)
        output, _ = world.schedule(traces.Step())
        world.answer(0)
        return output

    def running(self):
        return len(self.scheduler.running)

    def waiting(self):
        return self.scheduler.get_request_counts()[1]


TRACE = traces.Trace(0, SHAPE, [])


def admitted(output):
    return [new.req_id for new in output.scheduled_new_reqs] + sorted(output.scheduled_cached_reqs.resumed_req_ids)


def test_below_the_cap_a_lagging_rank_admits(balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    assert admitted(rank.step([2, 1, 3])) == ["r1", "r2"]


@pytest.mark.parametrize("at_cap", range(SHAPE.ranks), ids=["first", "own", "last"])
def test_one_rank_at_the_cap_freezes_admission(at_cap, balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    counts = [0] * SHAPE.ranks
    counts[at_cap] = CAP
    output = rank.step(counts)
    assert admitted(output) == []
    assert (rank.running(), rank.waiting()) == (1, 2)


@pytest.mark.parametrize("near", range(SHAPE.ranks), ids=["first", "own", "last"])
def test_one_below_the_cap_does_not_freeze(near, balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    counts = [0] * SHAPE.ranks
    counts[near] = CAP - 1
    assert admitted(rank.step(counts)) == ["r1", "r2"]


def test_every_rank_one_below_the_cap_does_not_freeze(balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    assert admitted(rank.step([CAP - 1] * SHAPE.ranks)) == ["r1", "r2"]


def test_a_frozen_rank_goes_on_with_what_it_runs(balance_class):
    rank = Rank(balance_class, running=2, waiting=2)
    for _ in range(3):
        output = rank.step([CAP, 2, 0])
        assert output.num_scheduled_tokens == {"r0": 1, "r1": 1}
    assert all(request.num_output_tokens == 4 for request in rank.scheduler.running)


def test_a_frozen_rank_finishes_a_prefill_it_has_begun(balance_class):
    shape = Shape(seqs=4, ranks=3, rank=1, tokens=32)
    rank = Rank(balance_class, shape, running=1, waiting=0)
    rank.scheduler.add_request(harness.new_request("long", range(400, 470), 5))
    assert admitted(rank.step([0, 1, 0])) == ["long"]
    output = rank.step([CAP, 2, 0])
    assert output.num_scheduled_tokens == {"r0": 1, "long": 31}


def test_a_freeze_ends_in_the_step_after_the_count_falls(balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    assert admitted(rank.step([CAP, 1, 0])) == []
    assert admitted(rank.step([CAP, 1, 0])) == []
    assert admitted(rank.step([CAP - 1, 1, 0])) == ["r1", "r2"]


def test_a_freeze_lasts_until_the_queue_is_written_again(balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    assert admitted(rank.step([0, 1, CAP])) == []
    for _ in range(3):
        assert admitted(rank.step(None)) == []
    assert [tensor.item() for tensor in rank.scheduler.balance_queue] == [0, 1, CAP]


def test_schedule_does_not_write_the_queue(balance_class):
    rank = Rank(balance_class, running=1, waiting=2)
    before = list(rank.scheduler.balance_queue)
    rank.step([2, 3, 1])
    assert [tensor.item() for tensor in before] == [2, 3, 1]
    assert all(one is other for one, other in zip(before, rank.scheduler.balance_queue, strict=True))


@pytest.mark.parametrize("counts", [[0, 0, 0], [CAP, 0, 0]], ids=["free", "frozen"])
def test_an_empty_rank_schedules_nothing_and_does_not_stumble(counts, balance_class):
    rank = Rank(balance_class, running=0, waiting=0)
    output = rank.step(counts)
    assert output.total_num_scheduled_tokens == 0
    assert admitted(output) == []


@pytest.mark.parametrize("counts", [[0, 0, 0], [CAP, 0, 0]], ids=["free", "frozen"])
def test_with_nothing_waiting_running_requests_are_scheduled(counts, balance_class):
    rank = Rank(balance_class, running=2, waiting=0)
    assert rank.step(counts).num_scheduled_tokens == {"r0": 1, "r1": 1}


def test_a_drained_rank_stays_frozen_while_another_is_at_the_cap(balance_class):
    rank = Rank(balance_class, running=0, waiting=3)
    assert rank.step([CAP, 0, 0]).total_num_scheduled_tokens == 0
    assert admitted(rank.step([0, 0, 0])) == ["r0", "r1", "r2"]


def test_a_preempted_request_is_not_resumed_while_frozen(balance_class):
    rank = Rank(balance_class, running=2, waiting=0)
    rank.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (rank.running(), rank.waiting()) == (0, 2)
    assert rank.step([0, 0, CAP]).total_num_scheduled_tokens == 0
    assert sorted(rank.step([0, 0, 0]).num_scheduled_tokens) == ["r0", "r1"]


def test_a_frozen_step_asks_the_connector_nothing(balance_class):
    shape = Shape(seqs=4, ranks=3, rank=1, connector=True)
    rank = Rank(balance_class, shape, running=1, waiting=0)
    rank.scheduler.add_request(harness.new_request("remote", 60, 5, transfer={"load": "async"}))
    frozen = rank.step([CAP, 1, 0]).kv_connector_metadata
    assert (frozen.asked, frozen.loads) == ([], [])
    free = rank.step([0, 1, 0]).kv_connector_metadata
    assert [load[0] for load in free.loads] == ["remote"]


def test_a_queue_that_turns_out_empty_ends_admission(balance_class):
    """Upstream asserts that there is a queue, up to the release that looks for itself."""
    choose = "_select_waiting_queue_for_scheduling"
    if not hasattr(harness.upstream_scheduler(), choose):
        assert choose not in harness.schedule_names()
        return
    without_queue = type("WithoutQueue", (balance_class,), {choose: lambda self: None})
    rank = Rank(balance_class, running=1, waiting=2)
    rank.scheduler.__class__ = without_queue
    output = rank.step([0, 1, 0])
    assert (admitted(output), output.num_scheduled_tokens) == ([], {"r0": 1})


def test_the_freeze_follows_the_admission_cap(balance_class):
    """Where the cap can be set apart from the running limit, the lower one is upstream's stop."""
    if not harness.supports_active_cap():
        assert harness.cap_attribute() == "max_num_running_reqs"
        return
    shape = Shape(seqs=4, active=3, ranks=3, rank=1)
    rank = Rank(balance_class, shape, running=1, waiting=2)
    assert admitted(rank.step([2, 1, 2])) == ["r1", "r2"]
    rank = Rank(balance_class, shape, running=1, waiting=2)
    assert admitted(rank.step([3, 1, 0])) == []


@pytest.mark.parametrize("seed", range(2000, 2060))
def test_enabled_with_every_rank_below_the_cap_decides_like_upstream(seed, balance_class, balance_async_class):
    trace = traces.trace(seed)
    shape = trace.shape

    def below(scheduler, counts):
        harness.set_counts(scheduler, [min(count, shape.cap - 1) for count in counts])

    ours = balance_async_class if shape.asynchronous else balance_class
    theirs = harness.async_scheduler() if shape.asynchronous else harness.upstream_scheduler()
    config = harness.enabled_config(shape)
    subject = traces.World(harness.new_scheduler(ours, shape, config), trace, below)
    upstream = traces.World(harness.new_scheduler(theirs, shape, config), trace, traces.ignore_counts)
    assert (found := traces.compare(trace, subject, upstream)) is None, found

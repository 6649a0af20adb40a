"""The simulator drives a lane's real schedulers: nothing is lost, the gate gates, off is upstream's own class."""

from dataclasses import replace

import harness
import pytest

from balance_patcher.installation import uninstall
from tools.simulator import cache, fronts, gates, lane, traces
from tools.simulator.events import simulate
from tools.simulator.steptime import StepTime
from tools.simulator.traces import Load

SEQS, RANKS, TOKENS = 4, 4, 64
#: More than the ranks can take for some time; prompts are often longer than a step, and some have one token.
TRACE = traces.made(Load(120, 40.0, prompt=40, output=12, spread=1.2, longest=256, seed=3))
SPACE = lane.Shape(SEQS, TOKENS, 256, 16, cache.needed_blocks(TRACE, SEQS, 16))
FEW_BLOCKS = lane.Shape(SEQS, TOKENS, 256, 16, 17)
MODES = {"synchronous": False, "asynchronous": True}


@pytest.fixture(autouse=True, scope="module")
def clean():
    yield
    uninstall("balance")


def simulated(gate, shape=SPACE, front="vllm", class_=None):
    group = lane.group(RANKS, gate, shape, class_)
    return simulate(group.ranks, TRACE, fronts.dispatcher(front, group.ranks), StepTime(), group.gate, group.cap), group


def told(run):
    """Everything that a run says but how long it took to make."""
    return {name: list(value) for name, value in vars(run).items() if hasattr(value, "typecode")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("few", [False, True], ids=["space", "few blocks"])
@pytest.mark.parametrize("gate", lane.GATES)
def test_every_request_ends_with_its_tokens(gate, few, mode):
    shape = replace(FEW_BLOCKS if few else SPACE, asynchronous=MODES[mode])
    run, group = simulated(gate, shape)
    assert list(run.tokens) == [one.output for one in TRACE]
    assert all(one.at < first <= last for one, first, last in zip(TRACE, run.first, run.finish, strict=True))
    # A request that is preempted computes its prompt, and its answer so far, again.
    prompts = sum(one.prompt for one in TRACE)
    again = sum(run.preempted)
    assert (again > 0) is few
    assert sum(run.admitted) == len(TRACE) + again
    if again == 0:
        assert sum(run.prefill) == prompts
        assert sum(run.decode) == sum(one.output - 1 for one in TRACE)
    else:
        assert sum(run.prefill) > prompts
    assert max(run.running) == group.cap == SEQS
    assert list(run.counts(len(run.end) - 1)) == [0] * RANKS
    pools = [rank.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for rank in group.ranks]
    assert set(pools) == {shape.blocks - 1}


def test_with_the_gate_on_no_rank_admits_in_a_step_in_which_a_count_is_at_the_cap():
    at_cap = {}
    for gate in lane.GATES:
        run, _ = simulated(gate)
        at_cap[gate] = sum(n for n, leader in zip(run.admitted, run.leader, strict=True) if leader >= run.cap)
        assert any(run.frozen) is (gate == "on")
    assert at_cap["on"] == 0
    assert at_cap["off"] > 0
    assert at_cap["catch-up"] > 0


def test_the_tensors_are_those_that_the_gather_would_leave():
    group = lane.group(RANKS, "on", SPACE)
    gates.Tensors(group.ranks).gathered([3, 0, 1, 2])
    for rank in group.ranks:
        queue = rank.scheduler.balance_queue
        assert [(count.shape, str(count.dtype), count.item()) for count in queue] == [
            ((1,), "torch.int32", value) for value in (3, 0, 1, 2)
        ]


def test_the_largest_count_alone_is_as_good_to_the_gate_as_all_tensors(monkeypatch):
    one, _ = simulated("on")
    monkeypatch.setitem(lane.GATES, "on", gates.Tensors)
    all_, _ = simulated("on")
    assert told(one) == told(all_)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gate", lane.GATES)
def test_a_cache_that_never_fills_decides_as_the_lanes_own_with_room_enough(gate, mode):
    own, group = simulated(gate, replace(SPACE, asynchronous=MODES[mode]))
    endless, _ = simulated(gate, replace(SPACE, asynchronous=MODES[mode], endless=True))
    assert told(own) == told(endless)
    assert all(rank.scheduler.kv_cache_manager.usage == 0 for rank in group.ranks)


def test_a_cache_that_never_fills_is_used_as_much_as_the_lanes_own():
    ranks = [lane.group(2, "off", replace(SPACE, endless=endless)).ranks[0] for endless in (False, True)]
    for number, arrival in enumerate(TRACE[:SEQS]):
        for rank in ranks:
            rank.add(number, arrival)
    seen = set()
    for _ in range(8):
        for rank in ranks:
            rank.step()
        assert ranks[0].usage == pytest.approx(ranks[1].usage)
        seen.add(ranks[0].usage)
        for rank in ranks:
            rank.answer()
    assert len(seen) > 2


def test_asynchronous_scheduling_is_the_lanes_own_class_one_step_ahead():
    _, group = simulated("on", replace(SPACE, asynchronous=True))
    assert {type(rank.scheduler) for rank in group.ranks} == {harness.async_scheduler()}
    rank = lane.group(2, "on", replace(SPACE, asynchronous=True)).ranks[0]
    rank.add(0, TRACE[0]._replace(prompt=8, output=2))
    assert rank.step() == (0, 0, 1, 0, False)
    assert rank.answer() == ((), ())
    assert rank.step() == (8, 0, 0, 0, True)
    assert rank.answer() == ([0], [])
    assert rank.step() == (0, 1, 0, 0, True)
    assert rank.answer() == ([], [(0, 2)])


def test_off_is_upstreams_own_class():
    ours, _ = simulated("off")
    theirs, group = simulated("off", class_=harness.upstream_scheduler())
    assert {type(rank.scheduler) for rank in group.ranks} == {harness.upstream_scheduler()}
    assert told(ours) == told(theirs)
    assert told(ours) != told(simulated("on")[0])


def test_a_rank_above_the_mean_is_held_in_the_counter_example():
    group = lane.group(2, "catch-up", SPACE)
    ahead, behind = group.ranks
    for number in range(3):
        ahead.add(number, TRACE[0]._replace(prompt=4))
        behind.add(number + 3, TRACE[0]._replace(prompt=4))
    group.gate.gathered([2, 1])
    assert [rank.step().admitted for rank in group.ranks] == [0, 3]
    for rank in group.ranks:
        rank.answer()
    group.gate.gathered([1, 1])
    assert ahead.step().admitted == 3
    assert getattr(ahead.scheduler, harness.cap_attribute()) == SEQS


@pytest.mark.parametrize("front", ["vllm", "round-robin", "least-loaded"])
def test_every_dispatcher_uses_every_rank(front):
    run, group = simulated("off", front=front)
    assert set(run.rank) == set(range(RANKS))
    dispatcher = fronts.dispatcher(front, group.ranks)
    assert len({dispatcher.choose(number, TRACE[0]) for number in range(RANKS)}) == RANKS

"""Groups that change, and ranks that come to rest: the queue follows, and no step is frozen by what was before.

Real processes on gloo, each with upstream's own engine core, busy loop, elastic scaling and fault recovery
(``ranks.py``); the test plays the client and the coordinator (``front.py``).
"""

import importlib.util
import itertools
from types import SimpleNamespace

import pytest
from front import Front, until

CAP = 2
PACE = 0.01
# More tokens than a request gets before it is aborted.
LONG = 1900

pytestmark = pytest.mark.timeout(900)
tolerant = pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.fault_tolerance") is None,
    reason="the vLLM of this lane ends an engine core in which a step fails",
)


def gathered(rank):
    """The vectors that a rank has gathered: one list for each group, in order."""
    gathers = [note for kind, note in rank.notes() if kind == "gather"]
    groups = itertools.groupby(gathers, key=lambda note: note["group"])
    return [[note["counts"] for note in notes] for _, notes in groups]


def gathers_agree(front):
    """Wait until both ranks have gathered equally often and seen the same; one may have to write down its last."""
    one, two = front.ranks
    until(lambda: gathered(one) == gathered(two), "equal gathers")


def stale(rank):
    """The steps whose gate looked at something else than the gather right before them, on their group.

    The first step after a stop has none before it: there all counts are zero.
    """
    found, before = [], None
    for kind, note in rank.notes():
        if kind == "gather":
            before = note
            continue
        follows = before is not None and before["group"] == note["group"] and note["counter"] > 0
        if note["queue"] != (before["counts"] if follows else [0] * note["size"]):
            found.append(note)
        before = None
    return found


def first_with_work(rank, since=0, group=None):
    """The first step of a rank in which a request waited: since so many notes, on the group of that number."""
    steps = [note for kind, note in rank.notes()[since:] if kind == "step" and note["waiting"]]
    step = next(step for step in steps if group in (None, step["group"]))
    return step["queue"], step["admitted"]


def number(rank):
    """The number of the last step of a rank in which it had requests; -1 before the first."""
    step = rank.state()[-1]
    return -1 if step is None else step["number"]


def wait_for_step(rank, since, condition, what):
    """Wait until the last step of a rank is later than one and is as it should be."""

    def found():
        step = rank.state()[-1]
        return step is not None and step["number"] > since and condition(step)

    until(found, what)


def is_frozen(step):
    return step["waiting"] and not step["admitted"]


def busy(front, full, starved, output=LONG):
    """One rank at its cap, and another with a request that is frozen by it; the requests of both."""
    since = [number(rank) for rank in front.ranks]
    running = front.add(full, CAP, output)
    wait_for_step(front.ranks[full], since[full], lambda step: step["queue"][full] == CAP, "rank at its cap")
    waiting = front.add(starved, 1, 4)
    wait_for_step(front.ranks[starved], since[starved], is_frozen, "frozen step")
    return running, waiting


def works(front):
    """Whether each rank answers a request."""
    names = [front.add(at, 1, 4) for at in range(len(front.ranks))]
    reasons = [rank.finished(some) for rank, some in zip(front.ranks, names, strict=True)]
    front.idle()
    return all(set(reason.values()) == {"length"} for reason in reasons)


# -- elastic scaling ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scaled():
    """2 → 3 → 2 → 4 → 2 ranks, at each change with one rank at its cap; before each scale-up one that is refused."""
    seen = SimpleNamespace(left=[], worked=[])
    with Front(2, seqs=CAP, pace=PACE) as front:
        seen.other = front.refused(3, seqs=CAP + 1).ended()
        seen.worked.append(works(front))
        grow_and_shrink(front, 3, seen)
        for rank in front.ranks:
            rank.send("patience", 2.0)
        front.refused(3, balance=False).kill()
        seen.worked.append(works(front))
        for rank in front.ranks:
            rank.send("patience", 120.0)
        grow_and_shrink(front, 4, seen)
        seen.ranks = front.ranks
        yield seen


def grow_and_shrink(front, size, seen):
    requests = []
    front.up(size, before=lambda: requests.extend(busy(front, 0, 1)))
    running, waiting = requests
    front.ranks[1].finished(waiting)
    front.abort(0, running)
    front.idle()
    _, waiting = busy(front, size - 1, 1)
    seen.left.append(gathered(front.ranks[size - 1]))
    front.down(2)
    front.ranks[1].finished(waiting)
    front.idle()


def test_the_queue_has_one_count_for_each_rank_of_the_group_at_hand(scaled):
    for rank in scaled.ranks:
        assert [{len(counts) for counts in vectors} for vectors in gathered(rank)] == [{2}, {3}, {2}, {4}, {2}]


def test_ranks_of_a_group_gather_equally_often_and_see_the_same(scaled):
    gathers_agree(scaled)


def test_ranks_that_joined_saw_what_the_others_saw(scaled):
    groups = gathered(scaled.ranks[0])
    for (vectors,), group in zip(scaled.left, (groups[1], groups[3]), strict=True):
        assert vectors == group[: len(vectors)]
        assert vectors[-1][-1] == CAP


def test_no_step_is_frozen_by_a_vector_of_another_group(scaled):
    assert [stale(rank) for rank in scaled.ranks] == [[], []]
    for group, size in enumerate((3, 2, 4, 2), 1):
        assert first_with_work(scaled.ranks[1], group=group) == ([0] * size, 1)


def test_a_rank_that_joins_with_another_cap_ends_and_is_told_why(scaled):
    assert "BP704" in scaled.other
    assert "cap is not the same" in scaled.other


def test_the_old_ranks_go_on_when_one_that_joins_is_refused_or_silent(scaled):
    assert scaled.worked == [True, True]


# -- faults, and the recovery from them -----------------------------------------------------------


@pytest.fixture(scope="module")
def recovered():
    """A fault in the model of both ranks, recovery, a gather that fails on one of them, recovery."""
    seen = SimpleNamespace()
    with Front(2, seqs=CAP, pace=PACE, tolerant=True) as front:
        busy(front, 0, 1)
        soon = front.ranks[0].state()[-1]["counter"] + 50
        for rank, part in zip(front.ranks, ("model", "dummy"), strict=True):
            rank.send("timeout", 6)
            rank.send("fault", part, soon)
        front.recover()
        front.ranks[1].finished(front.add(1, 1, 4))
        front.idle()
        seen.first = first_with_work(front.ranks[1], group=1)
        busy(front, 0, 1)
        # The other rank waits for this one in the gather, until its collective times out.
        front.ranks[1].send("fault", "dummy", 0)
        until(lambda: front.ranks[0].status() == "unhealthy", "gather that failed")
        seen.failed = front.ranks[0].state()[0]
        front.recover()
        # A rank answers that it tries again, and is at rest a little later; no step in between goes by old counts.
        nothing = [[0, 0], [0, 0]]
        until(lambda: [rank.state()[0] for rank in front.ranks] == nothing, "counts that are zero")
        seen.zero = [rank.state()[0] for rank in front.ranks]
        running, waiting = busy(front, 1, 0)
        front.abort(1, running)
        front.ranks[0].finished(waiting)
        front.idle()
        seen.ranks = front.ranks
        yield seen


@tolerant
def test_after_a_fault_in_the_model_nothing_is_frozen_by_the_last_good_vector(recovered):
    assert recovered.first == ([0, 0], 1)
    assert [stale(rank) for rank in recovered.ranks] == [[], []]


@tolerant
def test_after_a_failed_gather_and_after_the_recovery_all_counts_are_zero(recovered):
    assert recovered.failed == [0, 0]
    assert recovered.zero == [[0, 0], [0, 0]]


@tolerant
def test_after_each_recovery_counts_are_equal_again(recovered):
    gathers_agree(recovered)
    first, second, third = gathered(recovered.ranks[0])
    assert [CAP, 0] in first
    assert [CAP, 0] in second
    assert [0, CAP] in third


# -- pause, sleep, wake, resume -----------------------------------------------------------------


@pytest.fixture(scope="module")
def resting():
    with Front(2, seqs=CAP, pace=PACE) as front:
        yield front


def rest(front, *call, output=LONG):
    """Let all ranks rest in the middle of a wave, with one of them at its cap; its requests, and the frozen one."""
    requests = busy(front, 0, 1, output)
    front.call(*call)
    front.rests()
    return requests


def go_on(front, call, names):
    """Let them go on: the first step with work admits, and all ranks gather equally often and see the same."""
    since = len(front.ranks[1].notes())
    front.call(call)
    front.ranks[1].finished(names)
    front.idle()
    assert first_with_work(front.ranks[1], since) == ([0, 0], 1)
    assert [stale(rank) for rank in front.ranks] == [[], []]
    gathers_agree(front)


@pytest.mark.parametrize(("call", "back"), [(("pause_scheduler",), "resume_scheduler"), (("sleep", 1), "wake_up")])
class TestRest:
    def test_that_aborts_requests(self, call, back, resting):
        running, waiting = rest(resting, *call, "abort")
        assert set(resting.ranks[0].finished(running).values()) == {"abort"}
        assert set(resting.ranks[1].finished(waiting).values()) == {"abort"}
        go_on(resting, back, resting.add(1, 1, 4))

    def test_that_waits_for_requests(self, call, back, resting):
        running, waiting = rest(resting, *call, "wait", output=30)
        assert set(resting.ranks[0].finished(running).values()) == {"length"}
        go_on(resting, back, waiting)

    def test_that_keeps_requests(self, call, back, resting):
        running, waiting = rest(resting, *call, "keep", output=60)
        go_on(resting, back, waiting)
        assert set(resting.ranks[0].finished(running).values()) == {"length"}

    def test_that_keeps_requests_which_are_then_aborted(self, call, back, resting):
        running, waiting = rest(resting, *call, "keep")
        resting.abort(0, running)
        go_on(resting, back, waiting)

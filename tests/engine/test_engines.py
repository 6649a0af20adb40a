"""Two real data-parallel engine cores on CPU: the gate runs by itself, ranks gather alike, off is upstream."""

import pytest

# Found on the path that conftest.py sets.
from settings import ASYNC, CAP, ENDS, FORK, FORK_READS, FORKED, OFF

from balance_patcher.npu.counter import KINDS
from balance_patcher.npu.figures import OURS as PLACES
from balance_patcher.npu.figures import seen

ON = {"ends": ENDS, "bursts": 40, "seed": 0}
DRAINS = {"drains": 20, "seed": 3, "incidents": [["kill", 1]]}
DENSE = {"bursts": 2}

OURS = ("<balance_patcher vllm.v1.core.sched.scheduler>", "<balance_patcher vllm.v1.engine.core:")

pytestmark = pytest.mark.timeout(1000)


CROWDED = {"synchronous": (ON, None), "asynchronous": (ASYNC, None), "forked": (FORKED, FORK_READS)}
EVERY = {**CROWDED, "one drains first": (DRAINS, None)}


@pytest.fixture(params=EVERY)
def asked(request):
    return EVERY[request.param]


class TestOn:
    def test_every_request_is_answered(self, engines, asked):
        run = engines(*asked)
        assert run.result.get("ok"), run.log[-4000:]
        assert run.result["sent"] > sum(asked[0].get(shape, 0) for shape in ("ends", "bursts", "drains"))

    def test_the_ranks_gather_equally_often_and_see_the_same_counts(self, engines, asked):
        run = engines(*asked)
        first, second = run.result["gathers"]
        assert first == second > 100
        counts = [[step["counts"] for step in steps[:first]] for steps in run.steps]
        assert counts[0] == counts[1]

    @pytest.mark.parametrize("asked", CROWDED, indirect=True)
    def test_admission_freezes_while_one_rank_is_at_its_cap_and_goes_on_afterwards(self, engines, asked):
        run = engines(*asked)
        first, second = (steps[: run.result["gathers"][0]] for steps in run.steps)
        frozen = [
            at
            for at, steps in enumerate(zip(first, second, strict=True))
            if max(steps[0]["counts"]) >= CAP and any(s["waiting"] and s["running"] < CAP for s in steps)
        ]
        assert frozen
        assert max(first[-1]["counts"]) < CAP

    def test_ours_runs_in_the_engine_cores(self, engines, asked):
        facts = engines(*asked).facts
        assert [fact["start"] for fact in facts] == [asked[1]["ENGINE_START"] if asked[1] else "spawn"] * 2
        for fact in facts:
            assert fact["schedule file"] == OURS[0]
            assert fact["hook file"].startswith(OURS[1])
            assert fact["enabled"] is True

    def test_the_scheduler_keeps_its_kind(self, engines, asked):
        for fact in engines(*asked).facts:
            names = [name.rpartition(".")[2] for name in fact["classes"]]
            assert ("AsyncScheduler" in names) is asked[0].get("asynchronous", False)
            assert names.index("BalanceScheduler") < names.index("Scheduler")

    def test_each_engine_says_in_one_line_that_it_is_on(self, engines, asked):
        lines = engines(*asked).lines("balance: ON")
        assert sorted(line.partition("ON rank ")[2][:3] for line in lines) == ["0/2", "1/2"]
        assert all(f" cap={CAP} source=" in line for line in lines)
        assert len({line.rpartition("digest=")[2] for line in lines}) == 1

    def test_nothing_is_left_running(self, engines, asked):
        assert engines(*asked).left == []


class TestOneRankDrainsFirst:
    def test_it_gathers_on_while_the_other_has_requests(self, engines):
        drained = [step for step in engines(DRAINS).steps[0] if step["counts"][0] == 0 and step["counts"][1]]
        assert len(drained) > DRAINS["drains"] * 20


class TestOneEngineCoreIsKilled:
    def test_the_driver_sees_an_error_and_the_other_ends(self, engines):
        run = engines(DRAINS)
        assert run.result["kill"]["errors"] == ["EngineDeadError"], run.log[-4000:]
        assert run.result["kill"]["ended"] < 30


class TestControls:
    """Both lessons for real: where the gather must not stand, and that the driver sees a hang as one.

    The drives are those that the shipped placement passes above, and nothing is left to luck. A rank without
    requests never enters `schedule`. And a wave whose last request ends on the step in which the ranks agree
    to rest leaves one rank with something to clear away: it enters `_process_engine_step` once more, alone.
    With every length in turn, one of them ends there.
    """

    def test_a_gather_at_the_top_of_schedule_hangs_in_the_first_wave(self, engines):
        run = engines({**ON, "limit": 10}, {"ENGINE_CONTROL": "schedule", **FORK})
        assert run.result.get("why") == "hang", run.log[-4000:]
        assert (run.result["shape"], run.result["wave"]) == ("ends", 0)

    def test_a_gather_at_the_top_of_the_engine_step_hangs_with_asynchronous_scheduling(self, engines):
        run = engines({**ASYNC, "limit": 10}, {"ENGINE_CONTROL": "step", **FORK})
        assert run.result.get("why") == "hang", run.log[-4000:]
        assert run.result["shape"] == "ends"
        assert all(fact["enabled"] for fact in run.facts)


class TestOff:
    def test_every_request_is_answered(self, engines):
        assert engines(OFF, FORK_READS).result.get("ok"), engines(OFF, FORK_READS).log[-4000:]

    def test_classes_and_methods_are_upstreams_own(self, engines):
        assert len(engines(OFF, FORK_READS).facts) == 2
        for fact in engines(OFF, FORK_READS).facts:
            upstreams_own(fact)

    def test_nothing_is_gathered(self, engines):
        assert engines(OFF, FORK_READS).steps == [[], []]

    def test_nothing_is_left_running(self, engines):
        assert engines(OFF, FORK_READS).left == []

    def test_each_engine_says_in_one_line_that_it_is_off(self, engines):
        assert len(engines(OFF, FORK_READS).lines("balance: OFF because the configuration does not ask for it")) == 2
        assert engines(OFF, FORK_READS).lines("could not be switched on") == []


class TestReads:
    """What makes the host wait, in real engine cores and their workers: nothing in balance's places, off or on."""

    def test_the_counter_counts_in_every_process(self, engines):
        for run in (engines(OFF, FORK_READS), engines(FORKED, FORK_READS)):
            assert {name.partition("-")[0] for name in run.reads} == {"rank", "worker"}
            assert all(first["sound"] for first, *_ in run.reads.values())
            assert seen(run.reads).steps > 100

    def test_balance_adds_none(self, engines):
        off, on = (seen(engines(*asked).reads) for asked in ((OFF, FORK_READS), (FORKED, FORK_READS)))
        assert off.a_step(KINDS, PLACES) == on.a_step(KINDS, PLACES) == 0
        # Upstream's own agreement of the ranks reads one number: so the counter is no mute one.
        assert off.a_step(places=["agree"]) > 0
        assert on.a_step(places=["agree"]) > 0

    def test_workers_are_counted_in_every_step(self, engines):
        for run in (engines(OFF, FORK_READS), engines(FORKED, FORK_READS)):
            workers = [lines for name, (_, *lines) in run.reads.items() if name.startswith("worker")]
            assert all(sum(line["steps"] for line in lines if line["phase"] == "count") > 20 for lines in workers)


class TestDenseModel:
    """Its ranks are independent and have no group: one warning from each, and the engine as upstream's."""

    def test_every_request_is_answered_by_upstreams_own(self, engines, dense_model):
        run = engines({**DENSE, "model": dense_model}, FORK)
        assert run.result.get("ok"), run.log[-4000:]
        assert len(run.facts) == 2
        for fact in run.facts:
            upstreams_own(fact)

    def test_each_engine_warns_once(self, engines, dense_model):
        run = engines({**DENSE, "model": dense_model}, FORK)
        assert len([line for line in run.lines("balance: nothing to gather") if "WARNING" in line]) == 2
        assert run.lines("balance: ON") == []

    def test_nothing_is_left_running(self, engines, dense_model):
        assert engines({**DENSE, "model": dense_model}, FORK).left == []


def upstreams_own(fact):
    assert not any("balance" in name.lower() for name in fact["classes"])
    assert fact["schedule file"].endswith("vllm/v1/core/sched/scheduler.py")
    assert fact["hook file"].endswith("vllm/v1/engine/core.py")
    assert fact["scheduler name"] == "Scheduler"
    assert fact["queue"] is False

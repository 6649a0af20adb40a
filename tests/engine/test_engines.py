"""Two real data-parallel engine cores on CPU: the gate runs by itself, ranks gather alike, off is upstream."""

import pytest

ON = {"waves": 40, "seed": 0}
OFF = {"waves": 3, "seed": 0, "balance": False}
ASYNC = {"waves": 20, "seed": 5, "asynchronous": True}
CAP = 4

OURS = ("<balance_patcher vllm.v1.core.sched.scheduler>", "<balance_patcher vllm.v1.engine.core:")


@pytest.fixture(params=[ON, ASYNC], ids=["synchronous", "asynchronous"])
def settings(request, engines):
    if request.param is ASYNC and "_StreamPlaceholder' object has no attribute" in engines(ASYNC).log:
        pytest.skip("this lane's CPU worker has no stand-in for the device stream that asynchronous scheduling uses")
    return request.param


@pytest.mark.timeout(500)
class TestOn:
    def test_every_request_is_answered(self, engines, settings):
        run = engines(settings)
        assert run.result.get("ok"), run.log[-4000:]
        assert run.result["sent"] > settings["waves"]

    def test_the_ranks_gather_equally_often_and_see_the_same_counts(self, engines, settings):
        first, second = engines(settings).steps
        assert len(first) == len(second) > 100
        assert [step["counts"] for step in first] == [step["counts"] for step in second]

    def test_admission_freezes_while_one_rank_is_at_its_cap_and_goes_on_afterwards(self, engines, settings):
        first, second = engines(settings).steps
        frozen = [
            at
            for at, steps in enumerate(zip(first, second, strict=True))
            if max(steps[0]["counts"]) >= CAP and any(s["waiting"] and s["running"] < CAP for s in steps)
        ]
        assert frozen
        assert max(first[-1]["counts"]) < CAP

    def test_ours_runs_in_the_engine_cores(self, engines, settings):
        for facts in engines(settings).facts:
            assert facts["schedule file"] == OURS[0]
            assert facts["hook file"].startswith(OURS[1])
            assert facts["enabled"] is True

    def test_the_scheduler_keeps_its_kind(self, engines, settings):
        for facts in engines(settings).facts:
            names = [name.rpartition(".")[2] for name in facts["classes"]]
            assert ("AsyncScheduler" in names) is settings.get("asynchronous", False)
            assert names.index("BalanceScheduler") < names.index("Scheduler")

    def test_each_engine_says_in_one_line_that_it_is_on(self, engines, settings):
        lines = [line for line in engines(settings).log.splitlines() if "balance: ON rank" in line]
        assert sorted(line.partition("rank ")[2][:3] for line in lines) == ["0/2", "1/2"]
        assert len({line.rpartition("digest=")[2] for line in lines}) == 1

    def test_nothing_is_left_running(self, engines, settings):
        assert engines(settings).left == []


@pytest.mark.timeout(500)
class TestControls:
    """Both lessons for real: where the gather must not stand, and that the driver sees a hang as one."""

    def test_a_gather_at_the_top_of_schedule_hangs_in_the_first_waves(self, engines):
        run = engines({**ON, "limit": 15}, {"ENGINE_CONTROL": "schedule"})
        assert run.result.get("why") == "hang", run.log[-4000:]
        assert run.result["wave"] < 5

    def test_a_gather_at_the_top_of_the_engine_step_hangs_with_asynchronous_scheduling(self, engines):
        run = engines({**ASYNC, "limit": 15}, {"ENGINE_CONTROL": "step"})
        if "_StreamPlaceholder' object has no attribute" in run.log:
            pytest.skip("this lane's CPU worker cannot schedule asynchronously")
        assert run.result.get("why") == "hang", run.log[-4000:]


@pytest.mark.timeout(500)
class TestOff:
    def test_every_request_is_answered(self, engines):
        assert engines(OFF).result.get("ok"), engines(OFF).log[-4000:]

    def test_classes_and_methods_are_upstreams_own(self, engines):
        for facts in engines(OFF).facts:
            assert not any("balance" in name.lower() for name in facts["classes"])
            assert facts["schedule file"].endswith("vllm/v1/core/sched/scheduler.py")
            assert facts["hook file"].endswith("vllm/v1/engine/core.py")
            assert facts["scheduler name"] == "Scheduler"
            assert facts["queue"] is False

    def test_nothing_is_gathered(self, engines):
        assert engines(OFF).steps == [[], []]

    def test_nothing_is_left_running(self, engines):
        assert engines(OFF).left == []

    def test_each_engine_says_in_one_line_that_it_is_off(self, engines):
        assert engines(OFF).log.count("balance: OFF because the configuration does not ask for it") == 2

"""Engine cores of which one is slow, stands still or is killed, or which are all paused, while requests run.

What comes out is nothing, a line that names who is waited for and one when it is over, an error, and the answers
that were asked for. Two starts: one with the threshold that everybody has, one with a short one.
"""

import re
from itertools import product

import pytest

from balance_patcher.inquiry import Inquiry
from balance_patcher.terminal_inquiry import judged

CAP = 4
THRESHOLD = 3
FORK = {"ENGINE_START": "fork"}
LONG = {"bursts": 5, "seed": 1, "incidents": [["stop", 1, 25], ["kill", 0]]}, FORK
SHORT = (
    {
        "bursts": 5, "seed": 2, "asynchronous": True,
        "incidents": [["slow", 0, 4], ["pauses", 20, THRESHOLD + 1], ["stop", 0, 5], ["stop_worker", 1, 5]],
    },
    {**FORK, "BALANCE_PATCHER_STALL": str(THRESHOLD)},
)  # fmt: skip

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture
def long(engines):
    run = engines(*LONG)
    assert run.result.get("ok"), run.log[-4000:]
    return run


@pytest.fixture
def short(engines):
    run = engines(*SHORT)
    assert run.result.get("ok"), run.log[-4000:]
    return run


def said(run, incident):
    """What our package said during an incident: the engine core's process, and the text."""
    return [
        (int(found[1]), found[2])
        for line in run.during(incident)
        if (found := re.search(r"pid=(\d+)\) .*?(balance: .*)", line))
    ]


def inquired(run, incident):
    """What was said to who asked all processes, in the middle of an incident."""
    told = run.result[incident]["asked"]
    return Inquiry(
        told["asked"], tuple(told["processes"]), (), {int(pid): word for pid, word in told["silent"].items()}
    )


def named(run, rank):
    return rf"rank {rank} \(host=\S+ pid={run.facts[rank]['pid']}\)"


class TestOneRankIsSlow:
    """All its steps together take longer than the threshold, each of them a third of it."""

    def test_nothing_is_said(self, short):
        assert short.result["slow"]["seconds"] > THRESHOLD
        assert said(short, "slow") == []
        assert [line for line in short.during("slow") if "ERROR" in line] == []

    def test_every_request_is_answered(self, short):
        assert short.result["slow"]["answers"] == {"answered": 6}


class TestOneEngineCoreStandsStill:
    @pytest.fixture(params=["long", "short"])
    def case(self, request):
        """The run, which rank stood still, and for how long one is waited for there until it is said."""
        run = request.getfixturevalue(request.param)
        return (run, 1, 20) if request.param == "long" else (run, 0, THRESHOLD)

    def test_the_other_says_once_who_is_waited_for_and_once_that_it_went_on(self, case):
        run, rank, threshold = case
        lines = said(run, "stop")
        assert [pid for pid, _ in lines] == [run.facts[1 - rank]["pid"]] * 2, lines
        (_, stall), (_, over) = lines
        step = rf"step {run.result['stop']['step']} of wave (\d+)"
        waits = re.fullmatch(
            rf"balance: {step} has waited {threshold} s in the gather; "
            rf"arrived: {named(run, 1 - rank)}; missing: {named(run, rank)}, which says nothing",
            stall,
        )
        assert waits, stall
        went_on = re.fullmatch(rf"balance: {step} went on after (\d+\.\d) s", over)
        assert went_on, over
        assert went_on[1] == waits[1]
        assert 1.2 * threshold < float(went_on[2])

    def test_nothing_moves_until_it_goes_on_and_then_every_request_is_answered(self, case):
        run, _, _ = case
        assert run.result["stop"]["still"]
        assert run.result["stop"]["answers"] == {"answered": 6}

    def test_asked_meanwhile_the_other_says_that_it_waits_in_the_gather(self, case):
        run, rank, threshold = case
        said = inquired(run, "stop")
        (answer,) = said.answers
        assert answer["pid"] == run.facts[1 - rank]["pid"]
        (engine,) = answer["engines"]
        assert (engine["rank"], engine["ranks"], engine["step"]) == (1 - rank, 2, run.result["stop"]["step"])
        assert engine["engines_running"] is True
        assert engine["running"] + engine["waiting"] > 0
        balance = engine["features"]["balance"]
        assert balance["watchdog"]["in_gather_for"] > threshold
        assert f"missing: rank {rank} " in balance["watchdog"]["stall"]
        assert [said for said in run.lines("balance: ON rank") if balance["line"] in said]
        assert (balance["tells"]["cap"], len(balance["tells"]["counts"])) == (CAP, 2)
        assert {int(rank): peer["pid"] for rank, peer in balance["ranks"].items()} == {
            rank: fact["pid"] for rank, fact in enumerate(run.facts)
        }
        assert engine["errors"] == []

    def test_and_the_one_that_stands_still_is_told_to_be_stopped(self, case):
        run, rank, _ = case
        said, pid = inquired(run, "stop"), run.facts[rank]["pid"]
        assert run.result["stop"]["asked"]["code"] == 3
        assert said.silent == {pid: "stopped"}
        assert run.result["stop"]["asked"]["failures"][0]["code"] == "BP752"
        assert judged(said) == f"rank {1 - rank} waits in the gather for rank {rank} (pid {pid}, stopped)."


class TestOneWorkerStandsStill:
    """As a device that hangs: the ranks wait in the model, before their gather."""

    def test_each_rank_says_that_nobody_has_come_to_the_gather(self, short):
        lines = said(short, "stop_worker")
        assert sorted(pid for pid, _ in lines) == sorted(2 * [fact["pid"] for fact in short.facts]), lines
        for fact in short.facts:
            stall, over = (text for pid, text in lines if pid == fact["pid"])
            assert re.fullmatch(
                rf"balance: step \d+ of wave \d+ has not come to its gather here for {THRESHOLD} s; "
                rf"arrived: none; missing: {named(short, 0)}, {named(short, 1)}",
                stall,
            ), stall
            assert "went on after" in over

    def test_every_request_is_answered(self, short):
        assert short.result["stop_worker"]["still"]
        assert short.result["stop_worker"]["answers"] == {"answered": 6}

    def test_asked_meanwhile_both_say_that_they_have_not_come_to_their_gather(self, short):
        said = inquired(short, "stop_worker")
        assert [answer["pid"] for answer in said.answers] == [fact["pid"] for fact in short.facts]
        assert short.result["stop_worker"]["asked"]["code"] == 0
        assert judged(said).startswith("rank 0 and rank 1 have not come to their gather for more than 5 s: ")


class TestTheEngineCoreOfRankZeroIsKilled:
    """It holds the store in which the others look up who has arrived."""

    def test_the_driver_sees_an_error_and_the_other_ends(self, long):
        assert long.result["kill"]["errors"] == ["EngineDeadError"], long.log[-4000:]
        assert long.result["kill"]["ended"] < 30

    def test_nothing_is_left_running(self, long):
        assert long.left == []


class TestPauses:
    """Sleep is as far as a CPU has it: the scheduler pauses, the executor sleeps, and the worker keeps its memory."""

    @pytest.fixture
    def rounds(self, short):
        assert len(short.result["pauses"]) == 20
        return short.result["pauses"]

    def test_every_way_to_pause_was_taken(self, rounds):
        ways = {(one["mode"], str(one.get("clear_cache", one.get("level")))) for one in rounds}
        assert ways >= set(product(("abort", "wait", "keep"), ("True", "False", "0", "1")))

    def test_nothing_runs_while_all_are_paused(self, rounds):
        assert all(one["paused"] and one["still"] for one in rounds)

    def test_the_ranks_have_gathered_equally_often_at_every_pause(self, rounds):
        assert all(first == second for first, second in (one["gathers"] for one in rounds))

    def test_requests_are_aborted_where_that_was_asked_for_and_else_answered(self, rounds):
        for one in rounds:
            assert sum(one["answers"].values()) == 12
            assert set(one["answers"]) <= ({"abort", "answered"} if one["mode"] == "abort" else {"answered"}), one
            assert one["late"] == {"answered": 2}
        assert all(one["answers"].get("abort", 0) > 4 for one in rounds if one["mode"] == "abort")

    def test_the_executors_fell_asleep_and_woke_up(self, short, rounds):
        sleeps = 2 * sum(one.get("level", 0) > 0 for one in rounds)
        assert len([line for line in short.during("pauses") if "seconds to fall asleep" in line]) == sleeps > 0
        assert len([line for line in short.during("pauses") if "seconds to wake up" in line]) == sleeps

    def test_no_step_is_frozen_by_counts_from_before_the_pause(self, short):
        """What a rank knows of the others when it resumes is true of one of them, and its first step admits."""
        resumed = [[step for step in steps if "resumed" in step] for steps in short.steps]
        assert [len(steps) for steps in resumed] == [20, 20]
        admitted = 0
        for pair in zip(*resumed, strict=True):
            full = max(step["resumed"]["running"] for step in pair) >= CAP
            for step in pair:
                assert (max(step["resumed"]["counts"]) >= CAP) <= full, step
                if step["resumed"]["waiting"] and not full:
                    admitted += 1
                    assert step["running"] > 0, step
        assert admitted > 10

    def test_a_pause_is_no_stall(self, short):
        assert said(short, "pauses") == []


class TestAfterAllOfIt:
    def test_the_ranks_have_gathered_equally_often_and_seen_the_same_counts(self, short):
        first, second = short.result["gathers"]
        assert first == second > 1000
        counts = [[step["counts"] for step in steps[:first]] for steps in short.steps]
        assert counts[0] == counts[1]

    def test_nothing_is_left_running(self, short):
        assert short.left == []

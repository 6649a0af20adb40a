"""Real engines of a vLLM that has upstream's seam: the gate is an override there, and it freezes as it should."""

import pytest
from processes import with_another_scheduler

from balance_patcher.source import InstalledSource, Lane
from tools.upstream_seam import seam_of

ON = {"bursts": 12, "seed": 7}
FORK = {"ENGINE_START": "fork"}
CAP = 4

pytestmark = pytest.mark.timeout(1000)


@pytest.fixture(scope="module")
def with_the_seam(tmp_path_factory):
    text = seam_of(Lane("installed", InstalledSource())).text
    return with_another_scheduler(tmp_path_factory.mktemp("vllm"), lambda _: text)


@pytest.fixture
def run(engines, with_the_seam):
    return engines(ON, FORK, with_the_seam)


def test_every_request_is_answered_and_nothing_is_left(run):
    assert run.result.get("ok"), run.log[-4000:]
    assert run.result["sent"] > ON["bursts"]
    assert run.left == []


def test_each_engine_says_that_the_gate_goes_through_the_seam(run):
    lines = run.lines("balance: ON")
    assert len(lines) == 2
    for line in lines:
        deltas = line.partition("deltas=")[2].partition(" ")[0].split(",")
        assert "admission-seam" in deltas
        assert "admission-gate" not in deltas
        assert f" cap={CAP} source=" in line
    assert len({line.rpartition("digest=")[2] for line in lines}) == 1


def test_the_ranks_gather_alike_and_freeze(run):
    first, second = run.result["gathers"]
    assert first == second > 0
    counts = [[step["counts"] for step in steps[:first]] for steps in run.steps]
    assert counts[0] == counts[1]
    frozen = [
        at
        for at, steps in enumerate(zip(*(steps[:first] for steps in run.steps), strict=True))
        if max(steps[0]["counts"]) >= CAP and any(step["waiting"] and step["running"] < CAP for step in steps)
    ]
    assert frozen
    assert max(run.steps[0][first - 1]["counts"]) < CAP

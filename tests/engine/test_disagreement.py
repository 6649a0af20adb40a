"""Real engines of which one rank does not fit the others: it is named and they stop, before weights are loaded.

In each way to start them in which ranks can be given different configurations. The rank that has balance off, or does
not have our package, does nothing for this. It ends with its group, in upstream's own time: at once where one command
has started all ranks, and else within seconds, or when torch has waited half an hour for the other workers.
"""

from __future__ import annotations

import re
from dataclasses import replace

import cluster
import launches
import pytest
from disagreements import LOADING, SHORT, SLACK, UNLIKE, Refused, between, came_to_nothing, in_the_meantime, refused
from launches import CAP

pytestmark = pytest.mark.timeout(900)

#: How it is started, what is unlike, and when it is run. Ranks of one command with and without our package have to
#: be spawned, which takes long.
EVERY = {
    ("internal", "cap"): "each lane",
    ("headless", "without"): "one lane",
    ("external", "cap"): "one lane",
    ("internal", "off"): "rest",
    ("internal", "without"): "rest",
    ("headless", "off"): "rest",
    ("headless", "cap"): "rest",
    ("external", "off"): "rest",
    ("external", "without"): "rest",
}
STARTED: dict[tuple[str, str], Refused] = {}


def ways(*kinds):
    """Parameters of the fixture ``run``; a module-wide fixture keeps the tests of one start together."""
    return [
        pytest.param(way, id=", ".join(way), marks=pytest.mark.launch(when))
        for way, when in EVERY.items()
        if way[1] in kinds
    ]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Start in one of the ways, once. Only for those that are silent the patience counts."""

    def start(way):
        if way not in STARTED:
            launch, kind = way
            commands = getattr(launches, launch)({1: UNLIKE[kind]})
            patience, alone = (None, False) if kind == "cap" else (SHORT, len(commands) > 1)
            STARTED[way] = refused(tmp_path_factory.mktemp("refused"), commands, 1, patience=patience, alone=alone)
            cluster.STARTED[f"refused: {', '.join(way)}"] = STARTED[way].launched
        return STARTED[way]

    return start


@pytest.fixture(scope="module", autouse=True)
def meanwhile(request, tmp_path_factory):
    """What test_patience.py looks at takes a minute, and does nothing in it: it begins now."""
    if any(item.path.name == "test_patience.py" for item in request.session.items):
        in_the_meantime(tmp_path_factory)


@pytest.fixture(scope="module", params=ways("off", "without"))
def silent(request, started):
    return started(request.param)


@pytest.fixture(scope="module", params=ways("cap"))
def another_cap(request, started):
    return started(request.param)


class TestASilentRank:
    def test_it_is_named_on_the_other(self, silent):
        said = [text for _, text in silent.said[silent.enabled]]
        assert "balance: OFF because it cannot run" in said, silent.launched.log[-4000:]
        assert (
            f"BP705 rank is silent: rank 1 of 2: it said nothing for {SHORT} s; balance is off there, "
            "or balance_patcher is not installed"
        ) in said

    def test_it_does_nothing_for_this(self, silent):
        assert silent.told(silent.odd, "BP") == []
        assert len(silent.told(silent.odd, "balance: ")) <= 1  # that it is off, where our package is

    def test_it_comes_to_nothing(self, silent):
        came_to_nothing(silent)
        (named, *_) = silent.told(silent.enabled, "BP705")
        assert between(named, silent.ends[0]) < 60


class TestAnotherCap:
    def test_it_is_named_on_each_with_both(self, another_cap):
        for rank in (0, 1):
            said = [text for _, text in another_cap.said[rank]]
            assert "BP704 ranks differ: cap is not the same on all ranks of balance" in said
            for other, cap in ((0, CAP), (1, 2 * CAP)):
                row = rf"  rank {other} +{cap}   host=\S+ pid={another_cap.pids[other]}"
                assert any(re.fullmatch(row, text) for text in said), said

    def test_nobody_is_waited_for(self, another_cap):
        times = [at for rank in (0, 1) for at in another_cap.told(rank, "BP704")]
        assert between(times[0], times[-1]) < SLACK
        assert max(between(times[0], end) for end in another_cap.ends.values()) < 60

    def test_it_comes_to_nothing(self, another_cap):
        came_to_nothing(another_cap)


@pytest.fixture(scope="module")
def another_vllm(tmp_path_factory, another_stop):
    first, second = launches.external()
    commands = [first, replace(second, places=(another_stop,))]
    run = refused(tmp_path_factory.mktemp("refused"), commands, 1)
    cluster.STARTED["refused: external, another vLLM"] = run.launched
    return run


@pytest.mark.launch("one lane")
class TestAnotherVllm:
    """The gate finds no anchor in the vLLM of one rank, which has a command of its own."""

    def test_it_stops_with_its_reason_and_is_named_on_the_other_at_once(self, another_vllm):
        run = another_vllm
        (broken, *_) = run.told(1, "BP101 anchor not found: delta 'balance.admission-gate' cannot be placed")
        (named, *_) = run.told(
            0,
            f"BP706 another rank cannot: rank 1 (host={_host(run)} pid={run.pids[1]}) does not run balance: "
            "BP101 anchor not found: delta 'balance.admission-gate' cannot be placed",
        )
        assert between(named, broken) < SLACK

    def test_it_comes_to_nothing(self, another_vllm):
        came_to_nothing(another_vllm)


@pytest.fixture(scope="module")
def holder(tmp_path_factory):
    """Rank 0 of two nodes is off. Its worker waits half an hour for the other one, and its server does not miss that.

    So it is ended here, and does not always heed SIGTERM.
    """
    commands = launches.headless({0: UNLIKE["off"]})
    run = refused(tmp_path_factory.mktemp("refused"), commands, 0, patience=SHORT, alone=True)
    cluster.STARTED["refused: headless, rank 0 off"] = run.launched
    return run


@pytest.mark.launch("rest")
class TestASilentRankThatHoldsTheStore:
    def test_it_is_named_on_the_other_which_ends(self, holder):
        assert holder.told(1, f"BP705 rank is silent: rank 0 of 2: it said nothing for {SHORT} s")
        assert list(holder.ends) == [1]

    def test_it_does_nothing_for_this_and_loads_nothing(self, holder):
        assert holder.told(0, "BP") == []
        assert holder.launched.lines(LOADING) == []


def _host(run: Refused) -> str:
    (line, *_) = run.launched.lines("BP706 another rank cannot: rank 1 (host=")
    return line.partition("(host=")[2].partition(" ")[0]

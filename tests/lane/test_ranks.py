"""Ranks that decide together, over upstream's own group and store: all of them run the same, or none runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import deciding
import harness
import pytest
import vllm  # noqa: F401 - where it is
from deciding import ASKED, Rank

OFF = {"BALANCE_PATCHER_ON_FAILURE": "off"}
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: A rank is named at once if that takes less than this, on a loaded machine; those that are silent have 60 s.
SOON = 30

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def processes():
    made = deciding.Processes()
    yield made
    made.end()


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """This vLLM at another path, in a process that is not forked, with other hashes of strings; it takes its time."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "vllm").symlink_to(Path(sys.modules["vllm"].__file__).parent)
    paths = os.pathsep.join(map(str, (place, ROOT, HERE)))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "deciding.py")], cwd=place, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": paths, "BALANCE_PATCHER": "auto"},
    )  # fmt: skip
    yield SimpleNamespace(place=place, process=process)
    process.kill()
    process.communicate()


@pytest.fixture
def decide(processes):
    return processes.decide


def named(rank):
    return rf"rank {rank} \(host=\S+ pid=\d+\)"


def errors(found):
    return [line for level, line in found.lines if level == "ERROR"]


def upstreams_own(found):
    return "BalanceScheduler" not in found.scheduler and found.hook.endswith("vllm/v1/engine/core.py")


class TestAlike:
    def test_all_have_it_on_and_know_each_other(self, decide):
        both = decide(Rank(), Rank())
        for found in both:
            assert found.codes == []
            assert found.active == ["balance"]
            assert "BalanceScheduler" in found.scheduler
            assert found.seconds < SOON
            assert [re.fullmatch(named(rank), name) is not None for rank, name in found.names.items()] == [True, True]
            assert [f"pid={other.pid})" in found.names[rank] for rank, other in enumerate(both)] == [True, True]

    def test_the_engine_that_is_built_has_what_was_agreed_on(self, decide):
        for found in decide(Rank(twists=("confirms",)), Rank(twists=("confirms",))):
            assert found.confirmed == "confirmed"
            assert any(f": ON rank {rank}/2 " in line for _, line in found.lines for rank in (0, 1))

    def test_a_cap_that_was_changed_between_is_noticed_where_it_was(self, decide):
        one, other = decide(Rank(twists=("confirms",)), Rank(twists=("confirms_another_cap",)))
        assert one.confirmed == "confirmed"
        assert other.confirmed.startswith("BP702 ")
        assert "the ranks agreed on cap=4 for balance, and the engine has 5" in other.confirmed

    def test_what_a_rank_says_is_the_same_in_another_place_with_another_hash_and_start(self, decide, elsewhere):
        (mine, _) = decide(Rank(), Rank())
        out, log = elsewhere.process.communicate(timeout=200)
        assert elsewhere.process.returncode == 0, log[-4000:]
        told = json.loads(out.splitlines()[-1])
        assert told["vllm"].startswith(str(elsewhere.place))
        assert told["facts"] == mine.facts
        assert {"vLLM", "digest of the deltas", "digest of what runs", "cap", "cap attribute"} < mine.facts.keys()


class TestDifferent:
    def test_another_cap_is_named_with_both_on_each_and_nothing_is_installed(self, decide):
        both = decide(Rank(seqs=4), Rank(seqs=8))
        for found in both:
            assert found.codes == ["BP704"]
            assert found.whats == ["cap is not the same on all ranks of balance"]
            assert [row.partition(" ")[0] for row in found.fields[0].values()] == ["4", "8"]
            assert all(f"pid={both[rank].pid}" in found.fields[0][f"rank {rank}"] for rank in (0, 1))
            assert found.seconds < SOON
            assert upstreams_own(found)
            assert "balance: OFF because it cannot run" in errors(found)

    def test_another_cap_of_what_is_admitted_is_too(self, decide):
        if not harness.supports_active_cap():
            pytest.skip("the vLLM of this lane has one cap")
        for found in decide(Rank(active=3), Rank(active=2)):
            assert found.codes == ["BP704"]
            assert [row.partition(" ")[0] for row in found.fields[0].values()] == ["3", "2"]

    def test_another_switch_is(self, decide):
        stops, goes_on = decide(Rank(), Rank(environment=OFF))
        assert stops.codes == ["BP704"]
        assert stops.whats == ["BALANCE_PATCHER_ON_FAILURE is not the same on all ranks of balance"]
        assert (goes_on.codes, goes_on.active) == ([], [])
        assert any(stops.whats[0] in line for line in errors(goes_on))

    def test_another_feature_on_the_same_function_is(self, decide):
        for found in decide(Rank(), Rank(twists=("both",))):
            assert found.codes == ["BP704", "BP704"]
            assert [what.partition(" is ")[0] for what in found.whats] == [
                "features on one function", "digest of what runs",
            ]  # fmt: skip

    def test_what_the_ranks_need_not_agree_on_is_had_without_it(self, decide):
        twists = ("both",)
        for found in decide(Rank(twists=twists, environment=OFF), Rank(twists=twists, environment=OFF, seqs=8)):
            assert (found.codes, found.active) == ([], ["prefill_preemption"])
            assert "PrefillScheduler" in found.scheduler
            assert upstreams_own(found)

    def test_where_all_may_go_on_without_it_all_of_them_do(self, decide):
        for found in decide(*(Rank(environment=OFF, seqs=seqs) for seqs in (4, 4, 8))):
            assert (found.codes, found.active) == ([], [])
            assert upstreams_own(found)
            assert found.seconds < SOON
            assert any("cap is not the same on all ranks" in line for line in errors(found))


class TestOff:
    def test_it_is_named_on_all_others_when_it_has_been_silent(self, decide):
        *others, off = decide(Rank(patience=5), Rank(patience=5), Rank(asks=None))
        assert off.seconds < SOON
        for found in others:
            assert found.codes == ["BP705"]
            assert found.whats[0].startswith("rank 2 of 3: it said nothing for 5 s; balance is off there, or ")
            assert 5 <= found.seconds < SOON
            assert upstreams_own(found)

    def test_it_says_nothing_itself(self, decide):
        on, off = decide(Rank(patience=0.5), Rank(asks=None))
        assert (on.spoke, off.spoke) == (True, False)
        assert (off.codes, off.active, errors(off)) == ([], [], [])
        assert upstreams_own(off)

    def test_where_the_others_may_go_on_without_it_they_do(self, decide):
        on, _ = decide(Rank(patience=0.5, environment=OFF), Rank(asks=None))
        assert (on.codes, on.active) == ([], [])
        assert upstreams_own(on)

    def test_all_off_is_nothing(self, decide):
        for found in decide(Rank(asks=None), Rank(asks=None)):
            assert (found.codes, found.active, found.spoke, errors(found)) == ([], [], False, [])


BROKEN = {
    "an anchor that is not there": (Rank(twists=("moved_anchor",)), "BP101", "balance.admission-gate"),
    "a value that is none": (Rank(asks={"enable_balance_scheduling": "yes"}), "BP703", "enable_balance_scheduling"),
    "what excludes it": (
        Rank(asks={**ASKED, "profiling_chunk_config": {"enabled": True}}), "BP701", "profiling_chunk_config.enabled"
    ),
    "a switch that is none": (Rank(environment={"BALANCE_PATCHER_STALL": "soon"}), "BP006", "BALANCE_PATCHER_STALL"),
}  # fmt: skip


class TestOneThatCannot:
    """It says so, and is not waited for: whoever waits has 60 s."""

    @pytest.mark.parametrize("case", BROKEN)
    @pytest.mark.parametrize("rank", [0, 1])
    def test_it_is_named_on_the_others_at_once_with_why(self, decide, case, rank):
        broken, code, what = BROKEN[case]
        both = decide(*([broken, Rank()] if rank == 0 else [Rank(), broken]))
        assert both[rank].codes == [code]
        (other,) = [found for found in both if found is not both[rank]]
        assert other.codes == ["BP706"]
        assert re.match(rf"{named(rank)} does not run balance: {code} ", other.whats[0])
        assert what in other.whats[0]
        assert max(found.seconds for found in both) < SOON
        assert all(map(upstreams_own, both))

    def test_where_they_may_go_on_without_it_all_do(self, decide):
        broken, other = decide(Rank(twists=("moved_anchor",), environment=OFF), Rank(environment=OFF))
        for found in (broken, other):
            assert (found.codes, found.active) == ([], [])
            assert found.seconds < SOON
            assert upstreams_own(found)
        assert any(line.startswith("BP101 ") for line in errors(broken))
        assert any(line.startswith("BP706 ") for line in errors(other))

    def test_one_that_runs_another_copy_is_named_too_and_goes_on(self, decide):
        own, other = decide(Rank(twists=("own_copy",)), Rank())
        assert (own.codes, own.active) == ([], [])
        assert other.codes == ["BP706"]
        assert other.whats[0].endswith("does not run balance: OFF because the host's own balance runs")
        assert other.seconds < SOON

    def test_where_none_can_each_stops_with_its_own_reason(self, decide):
        for found in decide(Rank(twists=("moved_anchor",)), Rank(twists=("moved_anchor",))):
            assert found.codes == ["BP101"]
            assert found.seconds < SOON


class TestLate:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_one_that_comes_when_the_others_have_given_up_does_not_go_on(self, decide, rank):
        both = [Rank(patience=0.5), Rank(patience=0.5)]
        both[rank] = Rank(late="given up")
        found = decide(*both)
        assert found[1 - rank].codes == ["BP705"]
        assert found[1 - rank].whats[0].startswith(f"rank {rank} of 2: it said nothing for 0.5 s")
        assert found[rank].codes == ["BP706"]
        assert "has refused" in found[rank].whats[0] or "does not run balance: BP705" in found[rank].whats[0]
        assert all(map(upstreams_own, found))

    @pytest.mark.parametrize("rank", [0, 1])
    def test_where_they_may_go_on_without_it_none_has_it(self, decide, rank):
        both = [Rank(patience=0.5, environment=OFF), Rank(patience=0.5, environment=OFF)]
        both[rank] = Rank(late="given up", environment=OFF)
        for found in decide(*both):
            assert (found.codes, found.active) == ([], [])
            assert upstreams_own(found)


class TestOneThatEndsOrStops:
    def test_when_it_has_spoken_it_is_named(self, decide):
        other, _ = decide(Rank(patience=5), Rank(twists=("dies_when_it_has_spoken",)), without=[1])
        assert other.codes == ["BP706"]
        assert re.fullmatch(rf"{named(1)} does not run balance: it did not answer for 5 s", other.whats[0])

    def test_when_it_held_the_store_it_is_named(self, decide):
        _, other = decide(Rank(twists=("dies_when_it_has_spoken",)), Rank(late="lost"), without=[0])
        assert other.codes == ["BP705"]
        assert re.match(r"rank 0 of 2: the store of the group is lost \(\w+: ", other.whats[0])
        assert other.seconds < SOON

    def test_when_it_holds_the_store_and_stands_still_the_other_does_not(self, decide):
        other = Rank(late="lost", patience=1, twists=("has_little_patience_with_the_store",))
        _, found = decide(Rank(twists=("stands_still_when_it_has_spoken",)), other, without=[0])
        assert found.codes == ["BP705"]
        assert found.whats[0] == "rank 0 of 2: the store of the group is lost (no answer for 2 s)"
        assert found.seconds < SOON

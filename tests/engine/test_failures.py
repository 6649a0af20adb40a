"""Real engines that cannot have what they are asked for: they stop before the model loads, or say so and serve.

The vLLM is a copy of the lane's whose admission stop is written in another way, so that the gate finds no anchor.
"""

import pytest

OFF = {"bursts": 2, "balance": False}
ON = {"bursts": 2}
FORK = {"ENGINE_START": "fork"}
FALLBACK = {"BALANCE_PATCHER_ON_FAILURE": "off", "ENGINE_REMIND": "0.5", **FORK}
PRODUCER = {
    "kv_connector": "ToyConnector",
    "kv_connector_module_path": "toy_connector",
    "kv_role": "kv_producer",
}
LOADING = "Starting to load model"
BROKEN = "BP101 anchor not found: delta 'balance.admission-gate' cannot be placed; nothing was patched."

pytestmark = pytest.mark.timeout(1000)


class TestAnotherStopAndBalanceOff:
    @pytest.fixture
    def run(self, engines, another_stop):
        return engines(OFF, FORK, another_stop)

    def test_it_serves(self, run):
        assert run.result.get("ok"), run.log[-4000:]
        assert run.left == []

    def test_each_engine_warns_in_one_line(self, run):
        warned = [line for line in run.lines("WARNING") if "BP1" in line]
        assert len(warned) == 2
        assert all("could not be switched on with this vLLM, and is off" in line and BROKEN in line for line in warned)
        assert len(run.lines("BP101")) == 2


class TestAnotherStopAndBalanceOn:
    @pytest.fixture
    def run(self, engines, another_stop):
        return engines(ON, None, another_stop)

    def test_it_stops_with_an_exit_status_before_anything_is_loaded(self, run):
        assert run.code not in (0, -1)
        assert run.result == {}
        assert run.lines(LOADING) == []
        assert run.left == []

    def test_what_started_it_sees_the_whole_refusal(self, run):
        assert run.lines(BROKEN)
        for row in ("  target ", "  anchor ", "  nearest ", "  declared ", "  next "):
            assert run.lines(row), row
        assert run.lines("self.admission_cap()")
        assert run.lines("balance: ON") == []


class TestAnotherStopAndServingAnyway:
    @pytest.fixture
    def run(self, engines, another_stop):
        return engines(ON, FALLBACK, another_stop)

    def test_it_serves_as_upstream(self, run):
        assert run.result.get("ok"), run.log[-4000:]
        assert len(run.facts) == 2
        assert not any("balance" in name.lower() for fact in run.facts for name in fact["classes"])

    def test_it_says_so_with_the_whole_refusal(self, run):
        assert len(run.lines("balance: OFF because it cannot run")) == 2
        assert len([line for line in run.lines(BROKEN) if "still" not in line]) == 2
        assert run.lines("balance: ON") == []

    def test_it_says_so_again_and_again(self, run):
        said = [line for line in run.lines("balance: still OFF because it cannot run: BP101") if "ERROR" in line]
        assert len(said) > 3

    def test_what_says_so_keeps_nothing_alive(self, run):
        assert run.code == 0
        assert run.left == []


class TestPrefillNode:
    """Balance on a prefill node hung in six different ways; it does not start."""

    @pytest.fixture
    def run(self, engines):
        return engines({**ON, "extra": {"kv_transfer_config": PRODUCER}}, FORK)

    def test_it_stops_before_anything_is_loaded(self, run):
        assert run.code not in (0, -1)
        assert run.result == {}
        assert run.lines(LOADING) == []
        assert run.left == []

    def test_what_started_it_sees_both_keys(self, run):
        (said, *_) = run.lines("BP701")
        assert "enable_balance_scheduling" in said
        assert "kv_transfer_config.kv_role=kv_producer" in said
        assert run.lines("ExcludedError: BP701")

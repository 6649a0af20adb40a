"""The other released wheels of vllm-ascend, each on its vLLM: taken over rightly, or declined by name.

Each carries another version of the module that we stand in for, so nothing here is assumed of it: what is not
covered has to be said, and what is taken over has to leave everything else of vllm-ascend as it was.
"""

import pytest
from ascend_fixtures import DECLARED, LANE

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(LANE.name not in DECLARED, reason=f"no vllm-ascend is declared beside lane {LANE.name!r}"),
    pytest.mark.timeout(1600),
]

TAKEN = {"ascend-24": True, "ascend-25": True, "ascend-26": False, "release": True}
taken = pytest.mark.skipif(not TAKEN.get(LANE.name), reason="this release is declined")
declined = pytest.mark.skipif(TAKEN.get(LANE.name) is not False, reason="this release is taken over")


@taken
def test_it_is_taken_over_and_its_copy_is_never_executed(ascend):
    found, log = ascend("patched")
    assert found["executed"] == []
    assert found["scheduler"] == found["run_engine_core"] == "balance_patcher"
    assert found["class"]
    assert found["parent"]
    assert found["hook"]
    assert log.count("balance: stands in for vllm_ascend.patch.platform.patch_balance_schedule") == 1


@declined
def test_it_is_declined_and_everything_that_is_not_covered_is_named(ascend):
    found, log = ascend("patched")
    assert found["executed"] == ["<module>"]
    assert found["scheduler"] == found["run_engine_core"] == "the copy"
    assert log.count("vllm-ascend's own vllm_ascend.patch.platform.patch_balance_schedule runs") == 1
    assert "class BalanceScheduler(KVDeliveryScheduler)" in log
    assert "if not self._use_consumer_partial_group_hits and self.has_mamba_layers" in log


def test_everything_else_of_it_is_as_without_us(ascend):
    ours, theirs = ascend("patched")[0], ascend("patched", BALANCE_PATCHER="off")[0]
    assert theirs["scheduler"] == "the copy"
    assert ours["patches"] == theirs["patches"]
    assert ours["platform"] == theirs["platform"]
    assert ours["schedulers"] == {
        name: "balance_patcher" if where == "the copy" and TAKEN[LANE.name] else where
        for name, where in theirs["schedulers"].items()
    }


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("configuration", ["environment", "nested", "top-level", "off"])
def test_gate_and_hook_are_both_on_or_both_off(ascend, method, configuration):
    found, log = ascend("engines")
    one = found[f"{method} {configuration}"]
    on = configuration != "off"
    assert "gate" in one, f"{one}\n{log[-6000:]}"
    assert one["gate"] is one["queue"] is on
    if TAKEN[LANE.name]:
        assert one["schedule"] == "balance_patcher"
        assert (one["hook"] == "balance_patcher") is on
        assert any(reason.startswith(f"balance: {'ON' if on else 'OFF'} ") for reason in one["reasons"])
        assert one["executed"] == []
    else:
        assert any(r.startswith("balance: OFF because vllm-ascend's own copy runs (") for r in one["reasons"])


@taken
def test_what_its_unit_tests_pin_holds(ascend):
    found, _ = ascend("pinned")
    for text in (
        "if not self._balance_enabled:",
        "super().schedule(throttle_prefills)",
        "max(t.item() for t in self.balance_queue)",
        "self.max_num_running_reqs",
        "if request_queue is None:",
    ):
        assert text in found["source"]
    assert found["init"][0] == found["init"][1]
    assert found["schedule"][0] == found["schedule"][1]
    for name in ("engine", "run", "genuine", "builds by name", "asked there"):
        assert found[name] is True, name
    assert found["without a configuration"] is False

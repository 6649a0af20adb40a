"""Features that share ``schedule`` in one process: bound as one, completed, taken apart again."""

import sys
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import decision, installation
from balance_patcher.errors import PatchError
from balance_patcher.registry import find_feature

BALANCE, PREFILL = "balance", "prefill_preemption"
KEY = "disable_preemption_on_prefill_node"


def module():
    harness.async_scheduler()
    return sys.modules["vllm.v1.core.sched.scheduler"]


def hook_owner():
    from vllm.v1.engine.core import DPEngineCoreProc

    return DPEngineCoreProc


def state():
    """What can be told from outside: the class by its name, the hook, what ``AsyncScheduler`` derives from."""
    return (
        module().Scheduler,
        vars(hook_owner())["_has_global_unfinished_reqs"],
        harness.async_scheduler().__bases__,
        vars(module().Scheduler)["schedule"],
    )


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = state()
    yield
    for name in (BALANCE, PREFILL):
        installation.uninstall(name)
    assert state() == before


def together(*names, then=None):
    return installation.install_together([find_feature(name) for name in names], then)


def test_both_at_once_are_one_class():
    done = together(BALANCE, PREFILL)
    assert installation.bound(BALANCE) is installation.bound(PREFILL) is done
    assert done.feature.name == f"{BALANCE}+{PREFILL}"
    assert module().Scheduler is done.built.classes[harness.TARGET]
    assert {"BalanceScheduler", "PrefillScheduler"} < {cls.__name__ for cls in harness.async_scheduler().__mro__}
    assert harness.async_scheduler().schedule is vars(module().Scheduler)["schedule"]


def test_a_second_one_joins_the_first_and_both_are_bound():
    first = together(BALANCE)
    both = together(PREFILL)
    assert both is not first
    assert installation.installed(BALANCE) is installation.installed(PREFILL) is both
    assert [(b.owner, vars(b.owner)[b.name]) for b in both.bindings] == [(b.owner, b.after) for b in both.bindings]
    assert "_has_global_unfinished_reqs" in [binding.name for binding in both.bindings]


def test_twice_is_once():
    both = together(BALANCE, PREFILL)
    after = state()
    assert together(PREFILL) is together(BALANCE) is together(PREFILL, BALANCE) is both
    assert state() == after


def test_what_cannot_join_leaves_the_first_as_it_was(monkeypatch):
    together(BALANCE)
    hooked = vars(hook_owner())["_has_global_unfinished_reqs"]

    def stop(bound, _):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        together(PREFILL, then=stop)
    assert installation.installed(BALANCE) is not None
    assert installation.bound(PREFILL) is None
    assert module().Scheduler.__name__ == "BalanceScheduler"
    assert hooked.__code__ == vars(hook_owner())["_has_global_unfinished_reqs"].__code__


def test_a_class_that_was_derived_in_a_failed_transaction_is_given_back():
    upstream = module().Scheduler
    derived = []

    def stop(bound, _):
        derived.append(type("Derived", (module().Scheduler,), {}))
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        together(BALANCE, then=stop)
    assert derived[0].__bases__ == (upstream,)
    assert derived[0].schedule is upstream.schedule


class TestDecided:
    """Two engines of one process, each with its own configuration."""

    def prefill_config(self):
        from vllm.config import KVTransferConfig

        config = harness.vllm_config(harness.Shape(), {KEY: True})
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ToyConnector", kv_connector_module_path="toy_connector", kv_role="kv_producer"
        )
        return config

    def engine(self):
        return SimpleNamespace(_has_global_unfinished_reqs=lambda _: True)

    def active(self, config):
        return {made.feature for made in decision.decide(self.engine(), config) if made.active}

    def test_each_has_what_it_asked_for(self):
        balanced, prefill = harness.enabled_config(harness.Shape()), self.prefill_config()
        assert self.active(balanced) == {BALANCE}
        assert self.active(prefill) == {PREFILL}
        class_ = module().Scheduler
        one = harness.new_scheduler(class_, harness.Shape(), balanced)
        other = harness.new_scheduler(class_, harness.Shape(), prefill)
        assert (one._balance_enabled, one._disable_preemption) == (True, False)
        assert (other._balance_enabled, other._disable_preemption) == (False, True)

    def test_it_is_for_prefill_nodes_only(self):
        config = harness.vllm_config(harness.Shape(), {KEY: True})
        with pytest.raises(PatchError, match=f"{KEY} needs kv_transfer_config.kv_role=kv_producer, and it is None"):
            decision.decide(self.engine(), config)

    def test_balance_on_a_prefill_node_is_refused_with_both_keys(self):
        config = self.prefill_config()
        config.additional_config = {KEY: True, "enable_balance_scheduling": True}
        with pytest.raises(PatchError, match=r"enable_balance_scheduling and kv_transfer_config\.kv_role=kv_producer"):
            decision.decide(self.engine(), config)


@pytest.mark.parametrize("order", [(BALANCE, PREFILL), (PREFILL, BALANCE)])
def test_installed_by_hand_one_joins_the_other_and_leaves_it_again(order):
    before = state()
    for name in order:
        both = installation.install(name)
    assert installation.installed(BALANCE) is installation.installed(PREFILL) is both
    assert both.feature.name == f"{BALANCE}+{PREFILL}"
    first, second = order
    installation.uninstall(first)
    assert installation.bound(first) is None
    alone = installation.installed(second)
    assert alone.feature.name == second
    assert module().Scheduler is alone.built.classes[harness.TARGET]
    installation.uninstall(second)
    assert state() == before


def test_what_is_returned_is_told_in_a_line():
    assert repr(installation.install(BALANCE)).startswith("<Installation of balance: ")
    assert len(repr(installation.bound(BALANCE).built)) < 400

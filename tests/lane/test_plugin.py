"""Arm, decide, install in one process: what an engine core's constructor does before upstream's own."""

import sys
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import decision, guards, plugin
from balance_patcher.errors import PatchError
from balance_patcher.installation import installed, uninstall


def config(additional=None, *, ranks=2, **transfer):
    made = harness.vllm_config(harness.Shape(ranks=ranks), additional)
    if transfer:
        made.kv_transfer_config = SimpleNamespace(**transfer)
    return made


ON = {"enable_balance_scheduling": True}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    harness.engine_core()  # imported while nothing arms itself
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    original, finders = harness.engine_core().__init__, list(sys.meta_path)
    yield
    plugin.disarm()
    uninstall("balance")
    assert harness.engine_core().__init__ is original
    assert sys.meta_path == finders


def decide(additional, **more):
    made = decision.decide(harness.Loop(), config(additional, **more))
    return next(each for each in made if each.feature == "balance")


def test_arming_twice_calls_through_once():
    original = harness.engine_core().__init__
    plugin.arm()
    ours = harness.engine_core().__init__
    plugin.arm()
    assert harness.engine_core().__init__ is ours is not original
    assert plugin.armed()
    plugin.disarm()
    assert harness.engine_core().__init__ is original
    assert not plugin.armed()


def test_a_wrapper_around_ours_is_not_thrown_away():
    plugin.arm()
    ours = harness.engine_core().__init__

    def theirs(self, *args):
        ours(self, *args)

    harness.engine_core().__init__ = theirs
    assert plugin.armed()
    with pytest.raises(PatchError, match="BP606"):
        plugin.disarm()
    assert harness.engine_core().__init__ is theirs
    harness.engine_core().__init__ = ours


def test_the_decision_is_made_before_upstreams_constructor():
    order = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            harness.engine_core(), "__init__", lambda self, vllm_config, *more: order.append(("upstream", more))
        )
        patch.setattr(guards, "decide", lambda engine, vllm_config, process: order.append(("decide", vllm_config)))
        plugin.arm()
        harness.engine_core()("config", 1, 2)
        plugin.disarm()
    assert order == [("decide", "config"), ("upstream", (1, 2))]


def test_arming_before_the_engine_core_is_imported_guards_it_on_import(monkeypatch):
    module = sys.modules[plugin.ENGINE.module]
    monkeypatch.setattr(sys.modules[plugin.ENGINE.module.rpartition(".")[0]], "core", module)  # put back afterwards
    monkeypatch.delitem(sys.modules, plugin.ENGINE.module)
    plugin.arm()
    assert plugin.armed()
    again = __import__(plugin.ENGINE.module, fromlist=["EngineCore"])
    assert again is not module
    assert again.EngineCore.__init__.__code__ is guards.CALL_THROUGH
    assert again.__spec__.loader is again.__loader__
    assert plugin.ENGINE.module not in guards._AWAITED
    assert any(isinstance(finder, guards.Finder) for finder in sys.meta_path) == bool(guards._AWAITED)
    monkeypatch.undo()


def test_switched_off_nothing_is_armed(monkeypatch):
    original, finders = harness.engine_core().__init__, list(sys.meta_path)
    monkeypatch.setenv("BALANCE_PATCHER", "off")
    plugin.arm()
    assert harness.engine_core().__init__ is original
    assert sys.meta_path == finders


def test_an_unknown_switch_is_refused_with_its_values(monkeypatch):
    monkeypatch.setenv("BALANCE_PATCHER", "perhaps")
    with pytest.raises(PatchError, match=r"BP006.*perhaps") as caught:
        plugin.arm()
    assert "auto, off" in str(caught.value)


@pytest.mark.parametrize(
    "additional",
    [None, {}, {"enable_balance_scheduling": False}, {"scheduler_config": {"enable_balance_scheduling": False}, **ON}],
    ids=["none", "empty", "top-level off", "nested off wins"],
)
def test_not_asked_for_nothing_is_bound(additional):
    decision = decide(additional)
    assert not decision.active
    assert "OFF because the configuration does not ask for it" in decision.reason
    assert installed("balance") is None


@pytest.mark.parametrize(
    ("additional", "source"),
    [
        (ON, "additional_config.enable_balance_scheduling"),
        ({"scheduler_config": ON}, "additional_config.scheduler_config.enable_balance_scheduling"),
    ],
    ids=["top-level", "nested"],
)
def test_asked_for_it_is_installed_and_says_by_whom(additional, source):
    decision = decide(additional)
    assert decision.active
    assert "ON rank 1/2 host=" in decision.reason
    assert f"source={source} " in decision.reason
    assert installed("balance") is not None


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_prefill_and_decode_roles_are_refused_naming_both_keys(role):
    with pytest.raises(PatchError) as caught:
        decide(ON, kv_role=role)
    assert "enable_balance_scheduling" in str(caught.value)
    assert f"kv_role={role}" in str(caught.value)
    assert installed("balance") is None


def test_a_mixed_role_is_allowed():
    assert decide(ON, kv_role="kv_both").active


def test_profiling_chunks_are_refused_naming_both_keys():
    with pytest.raises(PatchError, match="profiling_chunk_config"):
        decide({**ON, "profiling_chunk_config": {"enabled": True}})


def test_several_ranks_without_the_busy_loop_are_refused():
    with pytest.raises(PatchError, match="busy loop"):
        decision.decide(SimpleNamespace(), config(ON))


def test_one_rank_has_nothing_to_gather():
    decision = decide(ON, ranks=1)
    assert not decision.active
    assert "nothing to gather" in decision.reason
    assert installed("balance") is None


def test_a_scheduler_class_with_a_schedule_of_its_own_is_refused_with_class_and_file():
    class Other(harness.upstream_scheduler()):
        def schedule(self):
            return None

    wanted = config(ON)
    wanted.scheduler_config.scheduler_cls = Other
    with pytest.raises(PatchError, match="BP702") as caught:
        decision.decide(harness.Loop(), wanted)
    assert "Other" in str(caught.value)
    assert __file__ in str(caught.value)


def test_on_failure_off_serves_without(monkeypatch):
    monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
    decision = decide(ON, kv_role="kv_producer")
    assert not decision.active
    assert [failure.code for failure in decision.failures] == ["BP701"]


def test_every_engine_of_a_process_has_a_decision():
    before = len(decision.decisions())
    decide(ON)
    decide(None)
    assert [made[0].active for made in decision.decisions()[before:]] == [True, False]

"""What is asked for never goes missing in silence, and what nobody asks for never stops an engine."""

import importlib
import logging
import sys
from dataclasses import replace
from types import MappingProxyType

import harness
import pytest

from balance_patcher import decision, entry, guards, plugin, readback, registry, source, status, wanted
from balance_patcher.decided import decided
from balance_patcher.errors import Failure, PatchError
from balance_patcher.installation import bound, installed, uninstall
from balance_patcher.registry import find_feature

KEY = "enable_balance_scheduling"
ON = {KEY: True}
SHAPE = harness.Shape(ranks=2)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    owner = harness.engine_core()
    original = owner.__init__
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    yield
    plugin.disarm()
    uninstall("balance")
    assert owner.__init__ is original


@pytest.fixture
def rule(monkeypatch):
    """Put other functions into balance's enabling rule."""

    def put(**functions):
        feature = find_feature("balance")
        changed = replace(feature, enabling=replace(feature.enabling, **functions))
        others = [known for known in registry.features() if known.name != "balance"]
        for module in (decision, wanted):
            monkeypatch.setattr(module, "features", lambda: (changed, *others))

    return put


def raising(*_):
    raise OSError("libsomething.so: cannot open shared object file")


def balance(made):
    return next(each for each in made if each.feature == "balance")


class TestRulesThatRaise:
    def test_whether_it_is_asked_for_cannot_be_read(self, rule, caplog):
        caplog.set_level(logging.DEBUG, "vllm.balance_patcher")
        rule(asked=raising)
        made = balance(decision.decide(harness.Loop(), harness.vllm_config(SHAPE)))
        assert not made.active
        assert "whether it is asked for cannot be read: OSError" in made.reason
        assert any(record.levelname == "ERROR" for record in caplog.records)

    @pytest.mark.parametrize("which", ["excluded", "needless"])
    def test_once_it_is_asked_for_the_switch_decides(self, rule, which, monkeypatch):
        rule(**{which: raising})
        with pytest.raises(PatchError, match=r"BP599.*libsomething"):
            decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        assert not balance(decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))).active

    @pytest.mark.parametrize("value", ["false", "True", "0", [], {"enabled": False}, 2])
    def test_a_value_that_says_neither_yes_nor_no_is_refused(self, value):
        for additional in ({KEY: value}, {"scheduler_config": {KEY: value}}):
            with pytest.raises(PatchError, match=f"BP703.*{KEY}"):
                decision.decide(harness.Loop(), harness.vllm_config(SHAPE, additional))
        assert installed("balance") is None

    @pytest.mark.parametrize(
        ("additional", "active"),
        [
            ({KEY: 1}, True),
            ({KEY: 0}, False),
            ({"scheduler_config": {KEY: None}, KEY: True}, True),
            ({"scheduler_config": MappingProxyType({KEY: True})}, True),
        ],
        ids=["one", "zero", "nothing is not no", "any mapping"],
    )
    def test_what_does_is_taken(self, additional, active):
        config = harness.vllm_config(SHAPE)
        config.additional_config = additional
        assert balance(decision.decide(harness.Loop(), config)).active is active

    def test_a_scheduler_class_that_cannot_be_had_is_no_riddle(self):
        config = harness.vllm_config(SHAPE, ON)
        config.scheduler_config.scheduler_cls = "nowhere.Scheduler"
        with pytest.raises(PatchError, match=r"BP702.*'nowhere\.Scheduler' cannot be had"):
            decision.decide(harness.Loop(), config)

    def test_a_bad_switch_is_told_before_it_is_needed(self, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "sometimes")
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE))
        with pytest.raises(PatchError, match=r"BP006.*sometimes"):
            decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
        assert installed("balance") is None


class TestBrokenFile:
    """A file of ours that cannot be imported declares nothing, and yet may be asked for."""

    @pytest.fixture(autouse=True)
    def broken(self, monkeypatch):
        failure = Failure(
            "BP002", "deltas/balance.py cannot be imported", "mend", (("declared", "deltas/balance.py:1"),)
        )
        others = tuple(feature for feature in registry.features() if feature.name != "balance")
        for module in (decision, registry):
            monkeypatch.setattr(module, "broken", lambda: (failure,))
            monkeypatch.setattr(module, "features", lambda: others)

    @pytest.mark.parametrize("additional", [ON, {"scheduler_config": ON}], ids=["top", "nested"])
    def test_asked_for_it_stops(self, additional, monkeypatch):
        with pytest.raises(PatchError, match=r"BP002.*cannot be imported"):
            decision.decide(harness.Loop(), harness.vllm_config(SHAPE, additional))
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE, additional))

    @pytest.mark.parametrize("additional", [None, {"another_key": True}])
    def test_not_asked_for_it_stops_nobody(self, additional):
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE, additional))

    def test_an_installed_text_that_cannot_be_read_stops_nobody(self, monkeypatch):
        monkeypatch.setattr(source, "InstalledSource", raising)
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE))


class TestEngineThatDidNotAsk:
    """vLLM runs the general plugins in the engine core's constructor: the last moment to notice."""

    def build(self, additional):
        """An engine core whose constructor runs them, as upstream's does, and nothing else."""

        def construct(self, vllm_config):
            entry.general()

        return type("Late", (harness.engine_core(),), {"__init__": construct})(harness.vllm_config(SHAPE, additional))

    def test_armed_too_late_and_asked_for_it_stops(self):
        with pytest.raises(PatchError, match=r"BP611.*balance is asked for by an engine core that did not ask us"):
            self.build(ON)

    def test_not_asked_for_it_stops_nobody(self):
        self.build(None)

    def test_switched_off_it_stops_nobody(self, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER", "off")
        self.build(ON)

    def test_a_constructor_that_was_replaced_after_arming_is_noticed(self, monkeypatch):
        import functools

        owner = harness.engine_core()
        plugin.arm()
        ours = owner.__init__

        @functools.wraps(ours)
        def theirs(self, *args, **kwargs):
            entry.general()

        with monkeypatch.context() as patch:
            patch.setattr(owner, "__init__", theirs)
            with pytest.raises(PatchError, match="BP611"):
                owner(harness.vllm_config(SHAPE, ON))

    def test_one_that_asked_is_not_stopped(self, monkeypatch):
        owner = harness.engine_core()
        with monkeypatch.context() as patch:
            patch.setattr(owner, "__init__", lambda self, vllm_config: entry.general())
            patch.setattr(guards, "confirm", lambda *_: None)
            plugin.arm()
            engine = owner.__new__(owner)
            engine._has_global_unfinished_reqs = lambda _: True
            engine.__init__(harness.vllm_config(SHAPE, ON))
            plugin.disarm()
        assert installed("balance") is not None


class TestEngineThatWasNotBuilt:
    def test_what_was_decided_on_is_not_called_active(self, monkeypatch):
        owner = harness.engine_core()
        config = harness.vllm_config(SHAPE, ON)
        with monkeypatch.context() as patch:
            patch.setattr(owner, "__init__", raising)
            plugin.arm()
            engine = owner.__new__(owner)
            engine._has_global_unfinished_reqs = lambda _: True
            with pytest.raises(OSError, match="libsomething"):
                engine.__init__(config)
            plugin.disarm()
        made = balance(decision.decisions()[-1])
        assert not made.active
        assert "OFF because the engine was not built: OSError" in made.reason
        assert status().feature("balance").decisions[-1].active is False
        assert decided(config, "balance") is False

    def test_upstream_says_what_its_constructor_misses(self):
        plugin.arm()
        with pytest.raises(TypeError, match="vllm_config"):
            harness.engine_core()()


class TestAnotherConfiguration:
    def test_a_scheduler_that_enabled_itself_against_the_decision_is_refused(self, monkeypatch):
        config = harness.vllm_config(SHAPE)
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
        engine = harness.Loop()
        decision.decide(engine, config)
        engine.scheduler = harness.new_scheduler(
            sys.modules["vllm.v1.core.sched.scheduler"].Scheduler, SHAPE, harness.vllm_config(SHAPE, ON)
        )
        assert engine.scheduler._balance_enabled
        assert bound("balance") is not None
        with pytest.raises(PatchError, match=r"BP702.*was decided to be off, and runs"):
            readback.confirm(engine, config)


class TestFinder:
    def test_another_finder_that_asks_all_finders_is_no_recursion(self, monkeypatch):
        module = sys.modules[plugin.ENGINE.module]
        parent = sys.modules[plugin.ENGINE.module.rpartition(".")[0]]
        monkeypatch.setattr(parent, "core", module)
        monkeypatch.delitem(sys.modules, plugin.ENGINE.module)
        plugin.arm()

        class Theirs:
            def find_spec(self, fullname, path=None, target=None):
                for finder in sys.meta_path:
                    found = finder.find_spec(fullname, path, target) if finder is not self else None
                    if found is not None:
                        return found
                return None

        monkeypatch.setattr(sys, "meta_path", [Theirs(), *sys.meta_path])
        again = importlib.import_module(plugin.ENGINE.module)
        assert again.EngineCore.__init__.__code__ is guards.CALL_THROUGH

    def test_its_loader_can_do_what_the_real_one_can(self, monkeypatch):
        monkeypatch.delitem(sys.modules, plugin.ENGINE.module)
        plugin.arm()
        spec = importlib.util.find_spec(plugin.ENGINE.module)
        assert "class EngineCore" in spec.loader.get_source(plugin.ENGINE.module)
        assert spec.loader.get_code(plugin.ENGINE.module) is not None

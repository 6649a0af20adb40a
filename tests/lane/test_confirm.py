"""What is decided is looked at again on the engine that was built; what nobody asks for stops nobody."""

import gc
import logging
import threading
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import decision, guards, plugin, readback, reminder
from balance_patcher.errors import PatchError
from balance_patcher.installation import installed, uninstall

ON = {"enable_balance_scheduling": True}
SHAPE = harness.Shape(ranks=2)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    harness.engine_core()  # imported while nothing arms itself
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    yield
    plugin.disarm()
    uninstall("balance")


@pytest.fixture
def said(caplog):
    """The lines of our logger so far, with their level."""
    name = "vllm.balance_patcher"
    caplog.set_level(logging.DEBUG, name)
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records if record.name == name]


def built(config):
    """An engine with the scheduler that its configuration chooses."""
    engine = harness.Loop()
    decision.decide(engine, config)
    engine.scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
    return engine


def on_lines(said):
    return [line for _, line in said() if ": ON " in line]


class TestOn:
    def test_nothing_is_called_on_before_the_engine_is_built(self, said):
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
        assert installed("balance") is not None
        assert on_lines(said) == []

    def test_a_built_engine_is_called_on_in_one_line_with_the_cap_that_it_has(self, said):
        config = harness.vllm_config(SHAPE, ON)
        engine = built(config)
        readback.confirm(engine, config)
        (line,) = on_lines(said)
        assert line.startswith("balance: ON rank 1/2 host=")
        cap = harness.admission_cap(engine.scheduler)
        assert f" cap={cap} source=additional_config.enable_balance_scheduling deltas=" in line
        assert line.endswith(f"digest={installed('balance').digest}")

    def test_the_constructor_confirms_when_upstream_is_done(self, monkeypatch):
        order = []
        with monkeypatch.context() as patch:
            patch.setattr(harness.engine_core(), "__init__", lambda *_: order.append("upstream"))
            patch.setattr(guards, "decide", lambda *_: order.append("decide"))
            patch.setattr(guards, "confirm", lambda _, config, process: order.append(("confirm", config)))
            plugin.arm()
            harness.engine_core()("config")
            plugin.disarm()
        assert order == ["decide", "upstream", ("confirm", "config")]

    def test_a_scheduler_in_which_it_does_not_run_is_refused(self, said):
        config = harness.vllm_config(SHAPE, ON)
        engine = built(config)
        engine.scheduler._balance_enabled = False
        with pytest.raises(PatchError, match="BP702"):
            readback.confirm(engine, config)
        assert on_lines(said) == []

    def test_a_binding_that_was_overwritten_meanwhile_is_refused(self, said, monkeypatch):
        from vllm.v1.engine.core import DPEngineCoreProc

        config = harness.vllm_config(SHAPE, ON)
        engine = built(config)
        with monkeypatch.context() as patch:
            patch.setattr(DPEngineCoreProc, "_has_global_unfinished_reqs", lambda _self, _local: True)
            with pytest.raises(PatchError, match=r"BP606.*_has_global_unfinished_reqs"):
                readback.confirm(engine, config)
        assert on_lines(said) == []

    def test_an_engine_that_was_decided_off_is_not_called_on(self, said):
        built(harness.vllm_config(SHAPE, ON))
        config = harness.vllm_config(SHAPE)
        readback.confirm(built(config), config)
        assert on_lines(said) == []


class TestNotAskedFor:
    """The gate's place is looked up all the same: who switches it on tomorrow should know today."""

    def test_where_it_could_be_had_nothing_is_said_of_it(self, said):
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE))
        assert [level for level, _ in said() if level != "INFO"] == []

    def test_nothing_is_looked_up_of_what_was_asked_for(self, monkeypatch):
        looked = []
        monkeypatch.setattr(decision, "make_plan", lambda _, feature: looked.append(feature.name) or Sound())
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
        assert "balance" not in looked
        decision.decide(harness.Loop(), harness.vllm_config(SHAPE))
        assert looked.count("balance") == 1

    def test_what_goes_wrong_while_looking_stops_nobody_and_is_one_warning(self, said, monkeypatch):
        def broken(*_):
            raise RecursionError("too deep")

        monkeypatch.setattr(decision, "make_plan", broken)
        made = decision.decide(harness.Loop(), harness.vllm_config(SHAPE))
        assert not any(each.active or each.failures for each in made)
        ((level, line),) = [entry for entry in said() if entry[0] != "INFO"]
        assert level == "WARNING"
        assert "balance: BP599 unexpected error: RecursionError: too deep" in line
        assert "\n" not in line


class Sound:
    all_failures = ()


class TestFailure:
    def test_what_the_configuration_excludes_is_a_value_error_too(self):
        config = harness.vllm_config(SHAPE, ON)
        config.kv_transfer_config = SimpleNamespace(kv_role="kv_producer")
        with pytest.raises(ValueError, match=r"enable_balance_scheduling and kv_transfer_config\.kv_role=kv_producer"):
            decision.decide(harness.Loop(), config)

    def test_what_the_vllm_cannot_have_is_none(self, monkeypatch):
        monkeypatch.setattr(decision, "install_together", unplaceable)
        with pytest.raises(PatchError) as caught:
            decision.decide(harness.Loop(), harness.vllm_config(SHAPE, ON))
        assert not isinstance(caught.value, ValueError)

    def test_served_without_it_is_said_again_until_the_engine_is_gone(self, said, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        monkeypatch.setattr(decision, "install_together", unplaceable)
        monkeypatch.setattr(reminder, "INTERVAL", 0.01)
        engine = harness.Loop()
        (made, *_) = decision.decide(engine, harness.vllm_config(SHAPE, ON))
        assert (made.active, made.source) == (False, "additional_config.enable_balance_scheduling")
        again = ("ERROR", "balance: still OFF because it cannot run: BP599 unexpected error: KeyError: 'scheduler'")
        pause = threading.Event()
        while said().count(again) < 3:
            pause.wait(0.01)
        del engine
        gc.collect()
        pause.wait(0.1)
        before = said().count(again)
        pause.wait(0.2)
        assert said().count(again) == before


def unplaceable(*_):
    raise KeyError("scheduler")

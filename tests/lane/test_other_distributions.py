"""Features of other distributions in an engine's process: by name or not at all, and together with ours."""

import importlib
import itertools
import logging
import sys
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import byname, decision, distributions, installation, plugin, readback, wanted
from balance_patcher.compose import at_work
from balance_patcher.errors import PatchError
from balance_patcher.installation import bound, installed
from balance_patcher.registry import features, find_feature
from balance_patcher.source import InstalledSource, Lane
from tests.distributions import put, put_example

ON = {"enable_balance_scheduling": True}
SHAPE = harness.Shape(ranks=2)
TALLY = "step_tally"

#: A feature that writes a line when requests are aborted; NAME, what it says of others, and its variants vary.
TOY = """
from balance_patcher.delta import Anchor, CallThrough, Delta, InsertAfter, Variant
from balance_patcher.feature import Feature

TARGET = "vllm.v1.engine.core:EngineCore.abort_requests"
THERE, NOWHERE = "self.scheduler.finish_requests($$$_)", "self.scheduler.forget_requests($$$_)"

def delta(name, *variants, **more):
    return Delta(f"NAME.{name}", TARGET, "why", "upstream", "never", variants, **more)

VALID = Variant("valid", Anchor(THERE), (InsertAfter("logger.debug('NAME')"),))
SUPERSEDED = Variant("superseded", Anchor(THERE), status="absorbed")
BROKEN = Variant("broken", Anchor(NOWHERE), (InsertAfter("logger.debug('NAME')"),))
THROUGH = Variant("through", edits=(CallThrough("logger.debug('NAME')"),))

FEATURE = Feature("NAME", "A toy.", deltas=(DELTAS,), SAID)
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    harness.dp_engine_core()
    harness.async_scheduler()
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    monkeypatch.delenv(byname.FEATURES, raising=False)
    before = state()
    yield
    byname._HOSTS.clear()
    plugin.disarm()
    for held in list(installation._INSTALLED):
        installation.uninstall(held)
    assert state() == before


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Install distributions into a folder that is on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def make(*toys, example=False):
        if example:
            put_example(tmp_path)
        for name, deltas, said in toys:
            text = TOY.replace("NAME", name).replace("DELTAS", deltas).replace("SAID", said)
            put(tmp_path, f"dist-{name}", {name: name}, {f"{name}.py": text})
        importlib.invalidate_caches()
        distributions.offers.cache_clear()

    distributions.load.cache_clear()
    yield make
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    distributions.offers.cache_clear()
    distributions.load.cache_clear()


@pytest.fixture
def ask(monkeypatch):
    return lambda *names: monkeypatch.setenv(byname.FEATURES, ",".join(names))


def state():
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.engine import core

    kept = (core.EngineCore, core.DPEngineCoreProc, harness.upstream_scheduler())
    return (
        scheduler.Scheduler,
        async_scheduler.AsyncScheduler.__bases__,
        [{name: id(value) for name, value in vars(cls).items()} for cls in kept],
    )


def decide(additional=None):
    return {made.feature: made for made in decision.decide(harness.Loop(), harness.vllm_config(SHAPE, additional))}


def active(made):
    return {name for name, decided in made.items() if decided.active}


class TestInstalled:
    @pytest.mark.parametrize("additional", [None, ON], ids=["off", "on"])
    def test_one_that_nobody_asks_for_changes_nothing_and_is_not_imported(self, site, additional):
        without = decide(additional)
        digest = installed("balance").digest if additional else None
        distributions.offers.cache_clear()
        site(("noisy", 'delta("a", VALID)', ""), example=True)
        assert decide(additional) == without
        assert not {TALLY, "noisy"} & set(sys.modules)
        assert (installed("balance").digest if additional else None) == digest
        assert bound(TALLY) is None

    def test_nobody_even_looks_for_it(self, site, monkeypatch):
        site(example=True)
        monkeypatch.setattr("balance_patcher.registry.offers", lambda: pytest.fail("it was looked for"))
        config = harness.vllm_config(SHAPE, ON)
        decision.decide(harness.Loop(), config)
        wanted.asked_for(config)

    def test_one_that_is_broken_is_nothing_either(self, site, caplog):
        site(("noisy", "nonsense(", ""))
        with caplog.at_level(logging.WARNING, "vllm.balance_patcher"):
            assert active(decide(ON)) == {"balance"}
        assert "noisy" not in caplog.text


class TestAskedFor:
    @pytest.mark.parametrize("way", ["operator", "configuration", "host"])
    def test_it_runs_and_is_told_whoever_asks(self, way, site, ask, caplog):
        site(example=True)
        if way == "operator":
            ask(TALLY)
        if way == "host":
            byname.ask(TALLY, by="their platform")
        named = {"balance_patcher": {"features": [TALLY]}} if way == "configuration" else None
        config = harness.vllm_config(SHAPE, named)
        engine = harness.Loop()
        made = {each.feature: each for each in decision.decide(engine, config)}
        assert active(made) == {TALLY}
        engine.scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
        with caplog.at_level(logging.INFO, "vllm.balance_patcher"):
            readback.confirm(engine, config)
        (line,) = [record.getMessage() for record in caplog.records if ": ON " in record.getMessage()]
        who = {
            "operator": "BALANCE_PATCHER_FEATURES",
            "configuration": "additional_config.balance_patcher.features",
            "host": "the plugin of their platform",
        }[way]
        assert line.startswith("step_tally: ON rank 1/2 ")
        assert f"steps=0 requests=0 source={who} deltas=disabled-path,count-step,count-request digest=" in line

    def test_both_of_its_functions_are_edited(self, site, ask):
        from vllm.v1.engine.core import EngineCore

        site(example=True)
        ask(TALLY)
        config = harness.vllm_config(SHAPE)
        decision.decide(harness.Loop(), config)
        scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
        off = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, harness.vllm_config(SHAPE))
        for each in (scheduler, off):
            request = harness.new_request("r", range(100, 110), 3)
            request.abort_immediately = False
            vars(EngineCore)["add_request"](SimpleNamespace(scheduler=each), request)
            assert each.schedule().num_scheduled_tokens == {"r": 10}
        assert (scheduler.tally, off.tally) == ({"steps": 1, "requests": 1}, {"steps": 0, "requests": 0})

    def test_with_balance_each_engine_has_what_it_asked_for(self, site, ask):
        site(example=True)
        ask(TALLY)
        assert active(decide(ON)) == {"balance", TALLY}
        assert installed("balance") is installed(TALLY)

    def test_an_engine_class_of_upstreams_that_calls_its_bases_runs_ours(self, site, ask):
        owner = harness.dp_engine_core()
        assert "add_request" in vars(owner)
        site(example=True)
        ask(TALLY)
        config = harness.vllm_config(SHAPE)
        (made,) = [d for d in decision.decide(owner.__new__(owner), config) if d.feature == TALLY]
        assert made.active

    @pytest.mark.parametrize("calls", [True, False])
    def test_one_of_somebody_else_is_refused_by_file_and_line(self, calls, site, ask):
        class Theirs(harness.dp_engine_core()):
            def add_request(self, *args):
                return super().add_request(*args) if calls else None

        site(example=True)
        ask(TALLY)
        with pytest.raises(PatchError, match=r"BP702.*Theirs runs add_request of .*Theirs, not ours") as caught:
            decision.decide(Theirs.__new__(Theirs), harness.vllm_config(SHAPE))
        assert f"({__file__}:{Theirs.add_request.__code__.co_firstlineno})" in str(caught.value)

    def test_ours_may_be_asked_for_by_name_too(self, ask):
        ask("balance")
        config = harness.vllm_config(SHAPE)
        (made, *_) = decision.decide(harness.Loop(), config)
        assert (made.active, made.source) == (True, "BALANCE_PATCHER_FEATURES")
        scheduler = harness.new_scheduler(config.scheduler_config.get_scheduler_cls(), SHAPE, config)
        assert scheduler._balance_enabled
        assert wanted.asked_for(config) == ("balance",)

    def test_its_own_rule_does_not_ask_for_it(self, site, monkeypatch):
        site(example=True)
        from dataclasses import replace

        feature = find_feature(TALLY)
        always = replace(feature, enabling=replace(feature.enabling, asked=lambda _: "always"))
        assert wanted.who_asks(always, harness.vllm_config(SHAPE)) is None


class TestCannotBeHad:
    @pytest.mark.parametrize(
        ("deltas", "code"), [("nonsense(", "BP002"), ('delta("a", BROKEN)', "BP101")], ids=["declared", "placed"]
    )
    def test_asked_for_it_stops_the_engine_and_is_told_by_its_name(self, deltas, code, site, ask):
        site(("noisy", deltas, ""))
        ask("noisy")
        with pytest.raises(PatchError, match=f"{code}.*noisy") as caught:
            decide()
        assert ("dist-noisy 1.0 in " in str(caught.value)) is (code == "BP002")

    def test_one_that_nobody_brings_stops_it_too(self, ask):
        ask("nobodys")
        with pytest.raises(PatchError, match=r"BP003.*'nobodys'"):
            decide()

    def test_served_without_it_the_sound_ones_run(self, site, ask, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        site(("noisy", "nonsense(", ""), ("lost", 'delta("a", BROKEN)', ""), example=True)
        ask("noisy", "lost", "nobodys", TALLY)
        made = decide(ON)
        assert active(made) == {"balance", TALLY}
        codes = {name: made[name].failures[0].code for name in ("noisy", "lost", "nobodys")}
        assert codes == {"noisy": "BP002", "lost": "BP101", "nobodys": "BP003"}

    @pytest.mark.parametrize("value", ["a,,b", ","])
    def test_what_is_no_list_of_names_stops_it(self, value, monkeypatch):
        monkeypatch.setenv(byname.FEATURES, value)
        with pytest.raises(PatchError, match="BP006"):
            decide()


class TestOfEachOther:
    def test_what_is_needed_has_to_be_asked_for_too(self, site, ask):
        site(
            ("one", 'delta("a", VALID)', "needs={'two': 'it reads what two writes'}"),
            ("two", 'delta("a", THROUGH)', ""),
        )
        ask("one")
        with pytest.raises(
            PatchError, match=r"BP708.*'one' needs 'two', which nobody asks for: it reads what two writes"
        ):
            decide()
        ask("one", "two")
        assert active(decide()) == {"one", "two"}

    def test_what_needs_one_that_cannot_run_cannot_either(self, site, ask, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        site(("one", 'delta("a", VALID)', "needs={'two': 'why'}"), ("two", 'delta("a", BROKEN)', ""))
        ask("one", "two")
        made = decide()
        assert active(made) == set()
        assert [made[name].failures[0].code for name in ("one", "two")] == ["BP708", "BP101"]
        assert bound("one") is None

    def test_two_that_exclude_each_other_are_both_named_and_neither_runs(self, site, ask, monkeypatch):
        site(
            ("one", 'delta("a", VALID)', "conflicts={'two': 'two clocks'}"),
            ("two", 'delta("a", THROUGH)', ""),
            example=True,
        )
        ask("one", "two", TALLY)
        with pytest.raises(PatchError, match=r"BP709.*'one' and 'two' are both asked for: two clocks") as caught:
            decide()
        assert "one.py:" in str(caught.value)
        assert "two.py:" in str(caught.value)
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        assert active(decide(ON)) == {"balance", TALLY}
        ask("one")
        assert active(decide()) == {"one"}

    def test_two_edits_at_one_point_are_refused_with_both_lines(self, site, ask):
        site(("one", 'delta("a", VALID)', ""), ("two", 'delta("a", VALID)', ""))
        ask("one", "two")
        with pytest.raises(PatchError, match=r"BP118.*'one\.a' and 'two\.a' edit at one point") as caught:
            decide()
        rows = dict(caught.value.failures[0].fields)
        assert "one.py:" in rows["one"]
        assert "two.py:" in rows["other"]

    def test_with_an_order_they_run_in_it(self, site, ask):
        site(("one", 'delta("a", VALID)', "after=('two',)"), ("two", 'delta("a", VALID)', ""))
        ask("one", "two")
        assert active(decide()) == {"one", "two"}
        (text,) = installed("one").built.texts.values()
        assert text.index("logger.debug('two')") < text.index("logger.debug('one')")


class TestCase10:
    """AMD-AGI/Hyperloom #511: one superseded member must not abort the valid ones, nor a broken one pass."""

    def test_superseded_and_valid_the_valid_is_installed(self, site, ask):
        site(("one", 'delta("a", SUPERSEDED), delta("b", VALID)', ""))
        ask("one")
        assert active(decide()) == {"one"}
        (text,) = installed("one").built.texts.values()
        assert text.count("# bp: one.") == text.count("# bp: one.b") == 1

    def test_broken_and_valid_in_one_feature_nothing_is_installed(self, site, ask, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        site(("one", 'delta("a", BROKEN), delta("b", VALID)', ""))
        ask("one")
        before = state()
        assert active(decide()) == set()
        assert state() == before

    def test_broken_and_valid_in_two_features_each_by_itself(self, site, ask, monkeypatch):
        monkeypatch.setenv("BALANCE_PATCHER_ON_FAILURE", "off")
        site(("one", 'delta("a", BROKEN)', ""), ("two", 'delta("a", VALID)', ""))
        ask("one", "two")
        made = decide()
        assert active(made) == {"two"}
        assert [failure.code for failure in made["one"].failures] == ["BP101"]
        (text,) = installed("two").built.texts.values()
        assert "# bp: one." not in text


class TestEveryOrder:
    def test_installed_in_every_order_the_text_of_each_target_is_the_same(self, site):
        site(example=True)
        chosen = [find_feature(name) for name in ("balance", "prefill_preemption", TALLY)]
        texts = set()
        for order in itertools.permutations(chosen):
            for feature in order:
                installation.install_together([feature])
            one, *others = (installed(feature.name) for feature in chosen)
            assert [each is one for each in others] == [True, True]
            texts.add(tuple(sorted(one.built.texts.items())))
            installation.uninstall(TALLY)
        assert len(texts) == 1
        (only,) = texts
        assert {name for name, _ in only} >= {"<balance_patcher vllm.v1.core.sched.scheduler>"}

    def test_so_it_is_with_every_feature_of_this_repository_that_edits_the_scheduler(self, site):
        site(example=True)
        edit_it = [f for f in (*features(), find_feature(TALLY)) if any("Scheduler." in t for t in f.targets)]
        chosen = at_work(edit_it, Lane("installed", InstalledSource()))
        assert len(chosen) > 1
        digests = {installation.install_together(order[::step]).digest for order in [chosen] for step in (1, -1)}
        assert len(digests) == 1

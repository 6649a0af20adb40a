"""`status` on a real vLLM: what runs, what was there before and who put it there, who wraps it now."""

import re
import sys
from pathlib import Path
from types import ModuleType

import harness
import pytest

from balance_patcher import decision, install, outcome, plugin, status, uninstall
from balance_patcher.installation import installed

SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler.schedule"
HOOK = "vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs"
NAME = HOOK.rpartition(".")[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins
    from vllm.v1.core.sched import async_scheduler  # noqa: F401 - a subclass to be rebased

    harness.dp_engine_core()
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setattr(outcome, "_OUTCOMES", [])
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    yield
    uninstall("balance")
    plugin.disarm()


def decide(additional):
    decision.decide(harness.Loop(), harness.vllm_config(harness.Shape(), additional))


def balance():
    return status().feature("balance")


def target(name):
    return next(target for target in balance().targets if target.name == name)


def binding(place):
    return next(binding for binding in balance().bindings if binding.place == place)


def test_before_anything_is_installed_upstreams_own_stands_there():
    for name in (SCHEDULE, HOOK):
        found = target(name)
        assert found.imported
        assert found.around == ()
        assert (found.now.file, found.now.line) == (found.file, found.line)
        assert found.now.file.endswith(".py")
    assert balance().bindings == ()
    assert "engine core is imported, and nobody armed it" in balance().why


def test_the_vllm_that_is_told_is_the_one_that_runs():
    import vllm

    assert status().vllm.imported
    assert vllm.__file__.startswith(status().vllm.place)
    assert status().vllm.version == vllm.__version__


def test_armed_is_not_decided():
    plugin.arm()
    assert status().armed.armed
    assert balance().armed
    assert "no engine core has been built" in balance().why


def test_installed_by_hand_is_not_active():
    install("balance")
    found = balance()
    assert found.installed
    assert not found.active
    assert "no engine of this process has asked" in found.why
    assert found.running == installed("balance").digest


def test_what_the_readme_shows_is_what_happens(capsys):
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "install, status" in part]
    exec(block, {})  # noqa: S102 - the README is ours
    (shown,) = re.findall(r"print\(.*\)  # (.*)", block)
    assert capsys.readouterr().out.strip() == shown
    assert installed("balance") is None


def test_decided_on_is_active_with_the_reason():
    decide({"enable_balance_scheduling": True})
    found = balance()
    assert found.active
    assert found.why.startswith("balance: ON rank 1/2")
    assert [made.active for made in found.decisions] == [True]


def test_decided_off_is_not_active_and_says_why():
    decide(None)
    found = balance()
    assert not found.active
    assert not found.installed
    assert found.why == "balance: OFF because the configuration does not ask for it"


def test_deltas_have_their_variant_and_upstreams_line():
    placements = install("balance").built.plan.placements
    found = balance().deltas
    assert [(d.name, d.status, d.line) for d in found] == [(p.delta.name, p.status, p.line) for p in placements]
    assert [d.variant for d in found] == [p.variant and p.variant.name for p in placements]
    assert {d.file for d in found if d.status != "not-applicable"} == {
        harness_file("scheduler"),
        sys.modules[harness.dp_engine_core().__module__].__file__,
        sys.modules["vllm.distributed.elastic_ep.elastic_state"].__file__,
    }


def harness_file(name):
    return sys.modules[f"vllm.v1.core.sched.{name}"].__file__


def test_they_are_the_same_before_installing_as_after():
    before = balance().deltas
    install("balance")
    assert balance().deltas == before


def test_each_binding_says_what_was_there_and_what_is_there_now():
    install("balance")
    found = binding(HOOK)
    assert found.state == "ours"
    assert found.before.name == HOOK.replace(":", ".")
    assert found.before.file == sys.modules[harness.dp_engine_core().__module__].__file__
    assert found.after == found.now
    assert found.now.file.startswith("<balance_patcher ")
    cls = binding("vllm.v1.core.sched.scheduler.Scheduler")
    assert cls.before.name == "vllm.v1.core.sched.scheduler.Scheduler"
    assert cls.before.line
    assert cls.now.name.endswith("BalanceScheduler")
    assert cls.now.file.endswith("balance.py")
    assert [b.state for b in balance().bindings] == ["ours"] * 6  # two of the class, the gather, and three of scaling


def test_rebased_classes_are_named():
    install("balance")
    told = [text for text in balance().rebased if ".AsyncScheduler: " in text]
    assert told == ["vllm.v1.core.sched.async_scheduler.AsyncScheduler: Scheduler → BalanceScheduler"]


def test_somebody_elses_wrapper_before_ours_is_named_with_file_and_line(monkeypatch):
    upstream = vars(harness.dp_engine_core())[NAME]

    def theirs(self, *args):
        return upstream(self, *args)

    monkeypatch.setattr(harness.dp_engine_core(), NAME, theirs)
    (around,) = target(HOOK).around
    assert (around.file, around.line) == (__file__, theirs.__code__.co_firstlineno)
    assert around.name.endswith(".theirs")
    monkeypatch.undo()


def test_a_wrapper_around_ours_is_told_and_does_not_make_it_inactive(monkeypatch):
    decide({"enable_balance_scheduling": True})
    ours = vars(harness.dp_engine_core())[NAME]

    def theirs(self, *args):
        return ours(self, *args)

    monkeypatch.setattr(harness.dp_engine_core(), NAME, theirs)
    found = binding(HOOK)
    assert (found.state, [origin.file for origin in found.around]) == ("wrapped", [__file__])
    assert balance().active
    monkeypatch.undo()


def test_an_overwritten_binding_is_told_and_it_is_not_active(monkeypatch):
    decide({"enable_balance_scheduling": True})
    monkeypatch.setattr(harness.dp_engine_core(), NAME, lambda self, local: local)
    found = balance()
    assert not found.active
    assert [failure.code for failure in found.failures] == ["BP606"]
    assert binding(HOOK).state == "overwritten"
    assert binding(HOOK).now.file == __file__
    assert "not there any more" in found.why
    monkeypatch.undo()


def test_names_that_still_mean_what_was_replaced_are_listed(monkeypatch):
    holder = ModuleType("holder")
    holder.theirs, holder.hook = harness.upstream_scheduler(), vars(harness.dp_engine_core())[NAME]
    monkeypatch.setitem(sys.modules, "holder", holder)
    install("balance")
    assert {"holder.theirs", "holder.hook"} <= set(balance().stale)
    assert "vllm.v1.core.sched.async_scheduler.Scheduler" in balance().stale
    uninstall("balance")
    assert balance().stale == ()


def test_a_status_changes_nothing_and_a_second_one_says_the_same():
    install("balance")
    before = {**vars(harness.dp_engine_core())}
    assert status() == status()
    assert {**vars(harness.dp_engine_core())} == before

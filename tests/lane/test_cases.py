"""Cases from public reports (vllm-ascend, sglang, NeMo-RL, verl and others), one test each.

Those that have a place of their own:

* 5, an import of the patch that was dropped: ``test_live.py``, "declared but not installed";
* 6, several wrappers on ``run_engine_core``: ``tests/test_launch.py`` and ``test_vllm_ascend.py``;
* 9, an edit that changes nothing: ``tests/test_plan.py``, and here on this lane's own text;
* 10, superseded, broken and valid ones, in one feature and in two: ``test_other_distributions.py``;
* 11, the class keeps asynchronous scheduling: ``test_install.py`` and ``tests/engine``;
* 13, names that are gone upstream: ``tests/test_names.py``, and here on this lane's own text;
* 16, somebody else's wrapper: here, and composed with by name in ``test_foreign.py``;
* 17, prefill and decode roles: ``test_plugin.py``;
* 18, the gather in the wrong place: ``tests/engine``;
* 20, dense models: ``test_plugin.py`` (one rank) and here.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest

from balance_patcher import decision, guards, install, plugin, uninstall
from balance_patcher.errors import PatchError
from balance_patcher.installation import installed

ROOT = Path(__file__).resolve().parents[2]
HOOK = "_has_global_unfinished_reqs"
ON = {"enable_balance_scheduling": True}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    import vllm.plugins

    harness.dp_engine_core()
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: None)
    monkeypatch.setenv("BALANCE_PATCHER", "auto")
    yield
    plugin.disarm()
    uninstall("balance")


def decide():
    return decision.decide(harness.Loop(), harness.vllm_config(harness.Shape(), ON))


def fresh(code):
    """What a fresh process of this lane prints as JSON, last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BALANCE_PATCHER": "auto"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["async_scheduler", "scheduler"])
def test_case_7_the_target_was_imported_before_the_patch(first):
    """sglang #21388, vllm-ascend #15815: it is effective, whichever module was imported first."""
    code = (
        f"import importlib, json; importlib.import_module('vllm.v1.core.sched.{first}')\n"
        "from balance_patcher import install\n"
        "(ours,) = install('balance').built.classes.values()\n"
        "from vllm.v1.core.sched.async_scheduler import AsyncScheduler\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "effective = AsyncScheduler.schedule is ours.schedule\n"
        "print(json.dumps([Scheduler is ours, AsyncScheduler.__mro__[1] is ours, effective]))"
    )
    assert fresh(code) == [True, True, True]


def test_case_8_two_patches_overwrite_each_other_and_nothing_is_logged_as_applied(caplog, monkeypatch):
    """NVIDIA-NeMo/RL #4155: what is not read back is not logged, and the engine that asked for it stops."""
    install("balance")
    monkeypatch.setattr(harness.dp_engine_core(), HOOK, lambda self, local: local)
    with caplog.at_level(logging.DEBUG, "vllm.balance_patcher"), pytest.raises(PatchError) as caught:
        decide()
    assert [failure.code for failure in caught.value.failures] == ["BP606"]
    assert __file__ in str(caught.value)
    assert "ON rank" not in caplog.text
    monkeypatch.undo()


def test_case_8_the_other_order_is_refused_too(caplog, monkeypatch):
    monkeypatch.setattr(harness.dp_engine_core(), HOOK, lambda self, local: local)
    with caplog.at_level(logging.DEBUG, "vllm.balance_patcher"), pytest.raises(PatchError) as caught:
        decide()
    assert [failure.code for failure in caught.value.failures] == ["BP603"]
    assert "ON rank" not in caplog.text
    assert installed("balance") is None
    monkeypatch.undo()


def planned(path, old, new, tmp_path):
    """Balance on this lane's text with one piece exchanged; the lane itself stays as it is."""
    import vllm

    from balance_patcher.build import compile_plan
    from balance_patcher.plan import make_plan
    from balance_patcher.registry import find_feature
    from balance_patcher.source import DirSource, Lane

    root = Path(vllm.__file__).parent
    folder = tmp_path / "vllm"
    feature = find_feature("balance")
    for module in {"vllm.version", *(target.partition(":")[0] for target in feature.targets)}:
        file = f"{module.partition('.')[2].replace('.', '/')}.py"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        text = (root / file).read_text()
        assert file != path or old in text
        (folder / file).write_text(text.replace(old, new) if file == path else text)
    lane = Lane("changed", DirSource(f"dir:{tmp_path}", tmp_path))
    return lambda changed=feature: compile_plan(make_plan(lane, changed))


def test_case_9_an_edit_that_changes_nothing_is_an_error(tmp_path):
    """genesis-vllm-patches #12: "applied", and the file unchanged."""
    from dataclasses import replace

    from balance_patcher.delta import Anchor, Delta, Replace, Variant
    from balance_patcher.registry import find_feature

    place = planned("", "", "", tmp_path)
    balance = find_feature("balance")
    stop = "token_budget = self.max_num_scheduled_tokens"
    idle = Variant("idle", Anchor(stop), edits=(Replace(stop),))
    delta = Delta("balance.idle", f"{harness.TARGET}.schedule", "why", "upstream", "never", (idle,))
    with pytest.raises(PatchError, match=r"BP111.*balance\.idle"):
        place(replace(balance, deltas=(*balance.deltas, delta)))
    place()


@pytest.mark.parametrize(
    ("path", "old", "refused"),
    [
        ("v1/engine/core.py", "dp_group", {"BP303"}),
        ("v1/core/sched/scheduler.py", None, {"BP101", "BP113", "BP117"}),
    ],
    ids=["an attribute", "the cap"],
)
def test_case_13_what_was_renamed_upstream_is_refused_before_anything_runs(path, old, refused, tmp_path):
    """unsloth #1641, #2093, #1181: no SyntaxError that is swallowed, and no NameError at the first request."""
    place = planned(path, old or harness.cap_attribute(), "renamed", tmp_path)
    with pytest.raises(PatchError) as caught:
        place()
    assert refused & {failure.code for failure in caught.value.failures}


def test_case_15_uninstalling_leaves_no_trace():
    """Liger-Kernel #242: every attribute is the identical object afterwards, and every base."""
    from vllm.v1.core.sched import async_scheduler, scheduler
    from vllm.v1.engine import core

    def traces():
        places = (scheduler, core, scheduler.Scheduler, async_scheduler.AsyncScheduler, core.DPEngineCoreProc)
        kept = {place: {name: id(value) for name, value in vars(place).items()} for place in places}
        return kept, async_scheduler.AsyncScheduler.__bases__, list(sys.meta_path), core.EngineCore.__init__

    before = traces()
    plugin.arm()
    decide()
    assert traces() != before
    plugin.disarm()
    uninstall("balance")
    assert traces() == before


class Engine:
    """An engine core in a step in which upstream does not synchronise."""

    def __init__(self):
        self.gathered = []
        self.scheduler = SimpleNamespace(_balance_enabled=True, balance_gather=self.gathered.append)
        self.dp_group = object()
        self.step_counter, self.dp_sync_interval = 1, 32
        self.pending_pause = self.ignore_start_dp_wave = False


def around(function):
    def theirs(self, *args):
        return function(self, *args)

    return theirs


def test_case_16_a_wrapper_after_ours_leaves_one_gather_a_step(monkeypatch):
    """verl #7837: patched again by somebody else in a spawned engine."""
    decide()
    monkeypatch.setattr(harness.dp_engine_core(), HOOK, around(vars(harness.dp_engine_core())[HOOK]))
    decide()  # a second engine of this process
    engine = Engine()
    vars(harness.dp_engine_core())[HOOK](engine, True)
    assert engine.gathered == [engine.dp_group]
    monkeypatch.undo()


def test_case_16_a_wrapper_before_ours_is_refused_by_name_and_nothing_is_gathered(monkeypatch):
    monkeypatch.setattr(harness.dp_engine_core(), HOOK, around(vars(harness.dp_engine_core())[HOOK]))
    with pytest.raises(PatchError, match="BP602") as caught:
        decide()
    assert __file__ in str(caught.value)
    engine = Engine()
    vars(harness.dp_engine_core())[HOOK](engine, True)
    assert engine.gathered == []
    monkeypatch.undo()


@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_case_16_wrappers_of_the_constructor_leave_one_decision(order, monkeypatch):
    from vllm.v1.engine.core import EngineCore

    made, built = [], []
    monkeypatch.setattr(guards, "decide", lambda engine, config, process: made.append(config))
    monkeypatch.setattr(guards, "confirm", lambda *_: None)
    original = EngineCore.__init__
    EngineCore.__init__ = lambda self, config: built.append(config)
    bottom = EngineCore.__init__
    try:
        if order != "after":
            EngineCore.__init__ = around(EngineCore.__init__)
        plugin.arm()
        if order != "before":
            EngineCore.__init__ = around(EngineCore.__init__)
        plugin.arm()  # as the second of our two plugins does
        EngineCore("config")
    finally:
        EngineCore.__init__ = original
    assert bottom is not original
    assert (made, built) == (["config"], ["config"])


def test_case_20_a_dense_model_has_nothing_to_gather_and_one_warning(caplog, monkeypatch):
    """vllm #28224: its ranks are independent and have no group."""
    config = harness.vllm_config(harness.Shape(), ON)
    monkeypatch.setattr(type(config.model_config), "is_moe", property(lambda _: False))
    with caplog.at_level(logging.WARNING, "vllm.balance_patcher"):
        (made, *_) = decision.decide(harness.Loop(), config)
    assert not made.active
    (told,) = [record.message for record in caplog.records if record.name == "vllm.balance_patcher"]
    assert told.startswith("balance: nothing to gather: a dense model's ranks are independent and have no group")
    assert installed("balance") is None


@pytest.mark.timeout(300)
def test_case_22_nothing_heavy_is_imported_early():
    """vllm #18326, vllm-ascend #4068: arming imports nothing of vLLM, so that no circle can come of it."""
    code = (
        "import json, sys\n"
        "import balance_patcher; from balance_patcher import entry\n"
        "light = len(sys.modules); entry.platform(); entry.general()\n"
        "heavy = [n for n in sys.modules if n.partition('.')[0] in ('torch', 'vllm', 'typer', 'rich', 'asyncio')]\n"
        "from balance_patcher import plugin\n"
        "print(json.dumps([heavy, plugin.armed()]))"
    )
    assert fresh(code) == [[], True]


@pytest.mark.timeout(300)
def test_case_22_a_process_that_asks_for_its_platform_has_imported_no_scheduler():
    """The platform plugin runs when vLLM first asks for its platform; that is in every process, also in the API's."""
    code = (
        "import json, sys\n"
        "from importlib import metadata\n"
        "from balance_patcher import entry, plugin\n"
        "point = type('Point', (), {'name': 'balance_patcher', 'value': 'x', 'load': lambda self: entry.platform})()\n"
        "real = metadata.entry_points\n"
        "metadata.entry_points = lambda **k: [point] if k == {'group': 'vllm.platform_plugins'} else real(**k)\n"
        "from vllm.platforms import current_platform; current_platform.device_type\n"
        "late = ('vllm.v1.core', 'vllm.v1.engine', 'vllm.model_executor.models')\n"
        "early = [name for name in sys.modules if name.startswith(late)]\n"
        "print(json.dumps([early, plugin.armed()]))"
    )
    assert fresh(code) == [[], True]

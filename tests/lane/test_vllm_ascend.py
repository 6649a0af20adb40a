"""The unmodified wheel of vllm-ascend beside this lane's vLLM: it gets ours, and its own copy never runs.

The wheel lies in a folder of its own (``tools/lanes.py`` puts it there), so that no other test can import it;
``torch_npu`` is a stub. Each job of ``ascend_driver.py`` is a process of its own, and is run once.
"""

import re
import subprocess

import pytest
from ascend_fixtures import DECLARED, LANE, ROOT, WHEELS

pytestmark = [
    pytest.mark.skipif(
        LANE.name not in DECLARED, reason=f"no vllm-ascend is released for the vLLM of lane {LANE.name!r}"
    ),
    pytest.mark.timeout(1600),
]


# -- after vllm-ascend's own global patches


def test_the_copy_is_never_executed_and_the_scheduler_is_ours(ascend):
    found, _ = ascend("patched")
    assert found["executed"] == []
    assert found["scheduler"] == "balance_patcher"
    assert found["class"]


def test_switched_off_the_copy_is_executed_and_nothing_of_ours_is_there(ascend):
    found, _ = ascend("patched", BALANCE_PATCHER="off")
    assert found["executed"] == ["<module>"]
    assert found["scheduler"] == "the copy"
    assert found["run_engine_core"] == "the copy"
    assert found["init"] == "vllm.v1.engine.core:EngineCore.__init__"
    assert not [finder for finder in found["finders"] if finder.startswith("balance_patcher")]


def test_the_module_is_known_to_python_as_any_other(ascend):
    found, _ = ascend("patched")
    assert found["parent"]
    assert found["spec"] == "vllm_ascend.patch.platform.patch_balance_schedule"


def test_the_engine_core_class_is_untouched_until_balance_is_decided(ascend):
    assert ascend("patched")[0]["hook"]


def test_run_engine_core_is_the_same_kind_of_attribute_and_pickles_by_the_hosts_module(ascend):
    found, _ = ascend("patched")
    assert found["kind"] == ["staticmethod", "staticmethod"]
    assert "vllm_ascend.patch.platform.patch_balance_schedule" in found["pickled"]
    assert "_balance_run_engine_core" in found["pickled"]
    assert found["genuine"]


def test_its_other_patches_are_in_place(ascend):
    ours, theirs = ascend("patched")[0], ascend("patched", BALANCE_PATCHER="off")[0]
    assert ours["patches"] == theirs["patches"]
    assert len(ours["patches"]) > 20
    assert ours["platform"] == theirs["platform"]


def test_its_schedulers_resolve_as_before(ascend):
    ours, theirs = ascend("patched")[0]["schedulers"], ascend("patched", BALANCE_PATCHER="off")[0]["schedulers"]
    assert ours == {name: "balance_patcher" if where == "the copy" else where for name, where in theirs.items()}
    assert "vllm_ascend.core.recompute_scheduler:RecomputeScheduler" in ours.values()


def test_what_was_taken_over_is_logged_once(ascend):
    _, log = ascend("patched")
    assert log.count("balance: stands in for vllm_ascend.patch.platform.patch_balance_schedule") == 1


def test_imported_again_the_module_is_ours_again(ascend):
    found, _ = ascend("again")
    assert found["executed"] == []
    assert found["new"]
    assert found["declined"] == [None]
    assert found["names"] == found["same"] == []
    assert found["placed"]


def test_run_engine_core_is_upstreams_own_with_and_without_the_module(ascend):
    found, _ = ascend("again")
    assert found["genuine"]
    assert found["runs"] == ["'vllm_config'", "'vllm_config'"]


# -- real engine cores, as far as their executor


METHODS = ["spawn", "fork"]


def engine(ascend, child, **environment):
    found, log = ascend("engines", **environment)
    assert "gate" in found[child], f"{found[child]}\n{log[-6000:]}"
    return found[child]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("configuration", ["environment", "nested", "top-level"])
def test_gate_and_hook_are_both_on(ascend, method, configuration):
    found = engine(ascend, f"{method} {configuration}")
    assert found["gate"]
    assert found["queue"]
    assert found["hook"] == found["schedule"] == "balance_patcher"
    assert found["executed"] == []
    assert any(reason.startswith("balance: ON rank 0/2") for reason in found["reasons"])


@pytest.mark.parametrize("method", METHODS)
def test_gate_and_hook_are_both_off(ascend, method):
    found = engine(ascend, f"{method} off")
    assert not found["gate"]
    assert not found["queue"]
    assert found["schedule"] == "balance_patcher"
    assert found["hook"] == f"vllm.v1.engine.core:DPEngineCoreProc.{'_has_global_unfinished_reqs'}"
    assert found["executed"] == []
    assert "balance: OFF because the configuration does not ask for it" in found["reasons"]


# -- the other order


def test_loaded_before_us_the_copy_is_refused_by_name_when_balance_is_on(ascend):
    found, _ = ascend("late")
    assert found["theirs"] == "the copy"
    assert any("BP603" in failure and "patch_balance_schedule.py:" in failure for failure in found["refused"])


def test_loaded_before_us_nothing_happens_when_balance_is_off(ascend):
    found, _ = ascend("late")
    assert not any(found["off"])
    assert found["untouched"]


# -- what vllm-ascend's own unit tests pin


def test_the_source_of_schedule_holds_what_they_look_for(ascend):
    source = ascend("pinned")[0]["source"]
    for text in (
        "self._balance_enabled",
        "super().schedule(",
        "max(t.item() for t in self.balance_queue)",
        "self.max_num_running_reqs",
        "if request_queue is None:",
    ):
        assert text in source


def test_the_constructor_shows_upstreams_parameters(ascend):
    ours, upstreams = ascend("pinned")[0]["init"]
    assert ours == upstreams


def test_the_names_mean_what_they_meant(ascend):
    found, _ = ascend("pinned")
    assert found["engine"]
    assert found["run"]
    assert found["genuine"]
    assert found["builds by name"]


def test_the_configuration_is_looked_up_in_the_module(ascend):
    found, _ = ascend("pinned")
    assert found["asked there"] is True
    assert found["without a configuration"] is False


# -- the integration that the README shows


def replaced(folder, text):
    """The wheel's package with another ``patch_balance_schedule.py``; everything else is linked."""
    subprocess.run(["cp", "-rs", str(WHEELS / "vllm_ascend"), str(folder)], check=True)
    patch = folder / "vllm_ascend" / "patch" / "platform" / "patch_balance_schedule.py"
    patch.unlink()
    patch.write_text(text)
    return str(folder)


@pytest.fixture(scope="session")
def merged(tmp_path_factory):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "stand_in(__name__)" in block]
    return replaced(tmp_path_factory.mktemp("merged"), text)


@pytest.mark.parametrize("plugins", ["balance_patcher,ascend_kv_connector", "ascend_kv_connector"])
def test_the_integration_of_the_readme_does_what_the_take_over_does(ascend, merged, plugins):
    found, _ = ascend("patched", first=merged, VLLM_PLUGINS=plugins)
    taken, _ = ascend("patched")
    assert found["executed"] == ([] if plugins.startswith("balance_patcher") else ["<module>"])
    for what in ("scheduler", "class", "hook", "run_engine_core", "kind", "genuine", "patches", "schedulers", "init"):
        assert found[what] == taken[what], what


def test_the_integration_of_the_readme_changes_nothing_when_switched_off(ascend, merged):
    found, _ = ascend("patched", first=merged, BALANCE_PATCHER="off")
    assert found["scheduler"] == "vllm.v1.core.sched.scheduler:Scheduler.schedule"
    assert found["run_engine_core"] == "vllm.v1.engine.core:EngineCoreProc.run_engine_core"
    assert found["init"] == "vllm.v1.engine.core:EngineCore.__init__"
    assert found["class"]


# -- anything that is not covered


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """The wheel's package whose patch has one line more."""
    text = (WHEELS / "vllm_ascend" / "patch" / "platform" / "patch_balance_schedule.py").read_text()
    stop = "                if request_queue is None:\n"
    assert text.count(stop) == 1
    changed = text.replace(stop, f"                self.something_new = True\n{stop}")
    return replaced(tmp_path_factory.mktemp("foreign"), changed)


def test_a_copy_with_something_new_runs_unmodified_with_one_warning(ascend, foreign):
    found, log = ascend("patched", first=foreign)
    assert found["executed"] == ["<module>"]
    assert found["scheduler"] == "the copy"
    assert found["hook"]
    assert log.count("vllm-ascend's own vllm_ascend.patch.platform.patch_balance_schedule runs") == 1
    assert "self.something_new = True` is not covered" in log


def test_an_engine_that_is_left_to_the_copy_starts_and_says_so(ascend, foreign):
    for method in METHODS:
        one = engine(ascend, f"{method} top-level", first=foreign, ASCEND_CONFIGURATIONS="top-level")
        assert one["gate"]
        assert one["schedule"] == "the copy"
        assert any(r.startswith("balance: OFF because vllm-ascend's own copy runs (") for r in one["reasons"])

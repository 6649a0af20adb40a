"""The process target that arms: it is found by its name in a child, calls upstream's, and is put back exactly.

The engine core here is a toy package on the path, so that nothing of vLLM is needed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from balance_patcher import guards, launch, plugin
from balance_patcher.errors import PatchError
from tests.conftest import ROOT

CORE = """
CALLS = []


class EngineCore:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config


class EngineCoreProc(EngineCore):
    KIND
    def run_engine_core(*args, dp_rank=0, **kwargs):
        CALLS.append((args, dp_rank, kwargs))
"""

TELLING = """
    @staticmethod
    def run_engine_core(**kwargs):
        from balance_patcher import plugin
        print("child", plugin.armed(), kwargs, flush=True)
"""

CHILD = """
import multiprocessing
from balance_patcher import plugin
from balance_patcher.launch import run_engine_core

if __name__ == "__main__":
    child = multiprocessing.get_context("METHOD").Process(target=run_engine_core, kwargs={"vllm_config": "config"})
    child.start()
    child.join(60)
    print("parent", plugin.armed(), child.exitcode)
"""


def write(folder: Path, core: str) -> None:
    (folder / "vllm" / "v1" / "engine").mkdir(parents=True)
    for package in ("vllm", "vllm/v1", "vllm/v1/engine"):
        (folder / package / "__init__.py").write_text("")
    (folder / "vllm/v1/engine/core.py").write_text(core)


@pytest.fixture(params=["@staticmethod", ""], ids=["static", "plain"])
def core(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    write(tmp_path, CORE.replace("KIND", request.param))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(guards, "decide", lambda *_: None)
    import vllm.v1.engine.core as module

    try:
        yield module
    finally:
        monkeypatch.setattr(launch, "_BOUND", [])
        plugin.disarm()
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def attribute(core: ModuleType) -> Any:
    return vars(core.EngineCoreProc)["run_engine_core"]


def test_it_is_pickled_by_its_own_module_and_name() -> None:
    assert pickle.loads(pickle.dumps(launch.run_engine_core)) is launch.run_engine_core  # noqa: S301
    assert launch.run_engine_core.__module__ == "balance_patcher.launch"
    assert not hasattr(launch.run_engine_core, "__wrapped__")
    assert launch.run_engine_core.__closure__ is None


def test_it_arms_and_then_calls_upstreams_with_everything(core: ModuleType) -> None:
    launch.run_engine_core(1, dp_rank=3, vllm_config="config")
    assert core.CALLS == [((1,), 3, {"vllm_config": "config"})]
    assert plugin.armed()


def test_bound_in_place_it_calls_upstreams_and_not_itself(core: ModuleType) -> None:
    launch.bind()
    core.EngineCoreProc.run_engine_core(vllm_config="config")
    assert len(core.CALLS) == 1


def test_binding_keeps_the_kind_and_unbinding_gives_the_identical_attribute_back(core: ModuleType) -> None:
    before = attribute(core)
    launch.bind()
    launch.bind()
    assert launch.bound()
    assert isinstance(attribute(core), staticmethod) is isinstance(before, staticmethod)
    launch.unbind()
    assert attribute(core) is before
    assert not launch.bound()
    launch.unbind()
    assert attribute(core) is before


def test_nothing_is_bound_by_arming(core: ModuleType) -> None:
    before = attribute(core)
    plugin.arm()
    assert attribute(core) is before
    assert not launch.bound()


def test_somebody_elses_wrapper_is_called_through_and_never_bound_over(core: ModuleType) -> None:
    upstream = core.EngineCoreProc.run_engine_core

    def theirs(*args: Any, **kwargs: Any) -> None:
        upstream(*args, **kwargs)

    core.EngineCoreProc.run_engine_core = staticmethod(theirs)
    assert launch.upstream_run_engine_core() is upstream
    with pytest.raises(PatchError, match="BP602") as caught:
        launch.bind()
    assert "theirs" in str(caught.value)
    assert __file__ in str(caught.value)


def test_a_wrapper_around_ours_is_not_lost_by_unbinding(core: ModuleType) -> None:
    before = attribute(core)
    launch.bind()
    ours = core.EngineCoreProc.run_engine_core

    def theirs(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)

    core.EngineCoreProc.run_engine_core = theirs
    core.EngineCoreProc.run_engine_core(vllm_config="config")
    assert len(core.CALLS) == 1
    with pytest.raises(PatchError, match="BP606"):
        launch.unbind()
    core.EngineCoreProc.run_engine_core = staticmethod(ours) if isinstance(before, staticmethod) else ours
    launch.unbind()
    assert attribute(core) is before


def test_a_replacement_that_keeps_nothing_of_upstreams_is_refused(core: ModuleType) -> None:
    def theirs(**_: Any) -> None:
        raise AssertionError

    core.EngineCoreProc.run_engine_core = staticmethod(theirs)
    with pytest.raises(PatchError, match="BP603") as caught:
        launch.run_engine_core(vllm_config="config")
    assert "theirs" in str(caught.value)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_is_armed_by_its_target_alone(method: str, tmp_path: Path) -> None:
    """No entry point is there, and the parent is not armed."""
    write(tmp_path, CORE[: CORE.index("    KIND")] + TELLING)
    script = tmp_path / "script.py"
    script.write_text(CHILD.replace("METHOD", method))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "BALANCE_PATCHER": "auto"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["child True {'vllm_config': 'config'}", "parent False 0"], done.stderr

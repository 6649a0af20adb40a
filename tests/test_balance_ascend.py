"""What stands in for vllm-ascend's module, where vllm-ascend is there and cannot be used, and where it is called."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from balance_patcher.deltas import balance_ascend

CONFIG = SimpleNamespace(additional_config={})


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A ``vllm_ascend`` with nothing but the file that holds its parser."""
    before = [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]
    assert not before
    (tmp_path / "vllm_ascend").mkdir()
    (tmp_path / "vllm_ascend" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(balance_ascend, "_TOLD", set())
    yield tmp_path / "vllm_ascend" / "ascend_config.py"
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]


@pytest.mark.parametrize("error", ["OSError('libascendcl.so: cannot open')", "RuntimeError('another torch_npu')"])
def test_an_import_that_fails_is_one_warning_and_no_configuration(
    host: Path, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    host.write_text(f"raise {error}\n")
    with caplog.at_level(logging.WARNING):
        assert balance_ascend.ascend_config(CONFIG) is None
        assert balance_ascend.ascend_config(CONFIG) is None
    (record,) = caplog.records
    kind, _, rest = error.partition("(")
    told = "vllm_ascend cannot be used here, so its configuration is not: "
    assert record.getMessage() == f"{told}{kind}: {rest[1:-2]}"


def test_where_it_is_not_installed_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert balance_ascend.ascend_config(CONFIG) is None
    assert not caplog.records


def test_its_own_parser_is_asked(host: Path) -> None:
    host.write_text("def init_ascend_config(config):\n    return ('parsed', config)\n")
    assert balance_ascend.ascend_config(CONFIG) == ("parsed", CONFIG)


# -- filling a module, with something like vLLM's engine core


def upstreams(*args: Any, **kwargs: Any) -> Any:
    return "upstream", args, kwargs


class Scheduler:
    pass


class OurScheduler(Scheduler):
    pass


@pytest.fixture
def engine_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``vllm.v1.engine.core`` with the two classes that are looked at."""
    core: Any = ModuleType("vllm.v1.engine.core")
    core.EngineCoreProc = type("EngineCoreProc", (), {"run_engine_core": staticmethod(upstreams)})
    core.DPEngineCoreProc = type("DPEngineCoreProc", (core.EngineCoreProc,), {})
    engine: Any = ModuleType("vllm.v1.engine")
    engine.core = core
    for name, module in {
        "vllm": ModuleType("vllm"), "vllm.v1": ModuleType("vllm.v1"), "vllm.v1.engine": engine, core.__name__: core,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Scheduler, "__module__", "vllm.v1.core.sched.scheduler")
    monkeypatch.setattr(balance_ascend, "_GENUINE", [])
    for function in (
        balance_ascend._balance_run_engine_core, balance_ascend._balance_scheduling_enabled,
        balance_ascend._disable_preemption_on_prefill_node,
    ):  # fmt: skip
        monkeypatch.setattr(function, "__module__", function.__module__)
    return core


def fill(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType(balance_ascend.MODULE)
    monkeypatch.setitem(sys.modules, balance_ascend.MODULE, module)
    balance_ascend.fill(module, OurScheduler, setattr)
    return module


CALLED = ("upstream", (1,), {"dp_rank": 2, "local_dp_rank": 0})


def test_a_module_that_is_imported_anew_has_upstreams_function_again(
    engine_core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fill(monkeypatch), fill(monkeypatch)
    assert one is not two
    assert one._OriginalRunEngineCore is two._OriginalRunEngineCore is two._ORIGINAL_RUN_ENGINE_CORE is upstreams
    assert engine_core.EngineCoreProc.run_engine_core is balance_ascend._balance_run_engine_core
    assert engine_core.EngineCoreProc.run_engine_core(1, dp_rank=2) == CALLED


def test_a_wrapper_around_ours_is_not_what_ours_calls(engine_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch)
    ours = engine_core.EngineCoreProc.run_engine_core

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    wrapper.__wrapped__ = ours  # type: ignore[attr-defined]
    engine_core.EngineCoreProc.run_engine_core = staticmethod(wrapper)
    assert fill(monkeypatch)._OriginalRunEngineCore is upstreams
    assert engine_core.EngineCoreProc.run_engine_core is wrapper
    assert engine_core.EngineCoreProc.run_engine_core(1, dp_rank=2) == CALLED


def test_without_its_module_it_still_calls_upstreams(engine_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch)
    monkeypatch.delitem(sys.modules, balance_ascend.MODULE)
    assert engine_core.EngineCoreProc.run_engine_core(1, dp_rank=2) == CALLED


def test_what_is_put_into_the_module_is_called(engine_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(monkeypatch)._OriginalRunEngineCore = lambda *_, **__: "theirs"
    assert engine_core.EngineCoreProc.run_engine_core(1, dp_rank=2) == "theirs"

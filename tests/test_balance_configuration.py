"""Who asks for balance, and what it excludes: with and without vllm-ascend's own configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from balance_patcher.deltas.balance import KEY, balance_asked_by, balance_excluded
from balance_patcher.deltas.balance_ascend import FILLED, MODULE, _balance_scheduling_enabled, short_request_first

NESTED, TOP = f"additional_config.scheduler_config.{KEY}", f"additional_config.{KEY}"
Parser = Callable[[Any], Any]


def config(additional: Any = None, **more: Any) -> Any:
    return SimpleNamespace(
        additional_config=additional,
        parallel_config=SimpleNamespace(data_parallel_size=2),
        model_config=SimpleNamespace(is_moe=True),
        **more,
    )


def nested(value: object) -> dict[str, object]:
    return {"scheduler_config": {KEY: value}}


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Parser], ModuleType]:
    """A vllm-ascend whose parser is the given one."""

    def make(parser: Parser) -> ModuleType:
        package, module = ModuleType("vllm_ascend"), ModuleType("vllm_ascend.ascend_config")
        module.init_ascend_config = parser  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm_ascend", package)
        monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_config", module)
        return module

    return make


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(MODULE)
    setattr(module, FILLED, True)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def new(value: bool) -> Parser:  # noqa: FBT001 - what it says
    return lambda _: SimpleNamespace(scheduler_config=SimpleNamespace(**{KEY: value}))


def old(value: bool) -> Parser:  # noqa: FBT001 - what it says
    return lambda _: SimpleNamespace(**{KEY: value})


@pytest.mark.parametrize(
    ("additional", "source"),
    [
        (None, None),
        ({}, None),
        ("text", None),
        ({KEY: True}, TOP),
        ({KEY: False}, None),
        (nested(True), NESTED),
        ({**nested(False), KEY: True}, None),
        ({**nested(True), KEY: False}, NESTED),
        ({"scheduler_config": 3, KEY: True}, TOP),
    ],
)
def test_without_vllm_ascend_the_nested_key_goes_before_the_one_at_the_top(additional: Any, source: str | None) -> None:
    assert balance_asked_by(config(additional)) == source


def test_vllm_ascends_variable_is_never_read_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_BALANCE_SCHEDULING", "1")
    assert balance_asked_by(config()) is None


@pytest.mark.parametrize("parser", [new, old])
def test_its_own_configuration_decides_where_nothing_is_written(
    ascend: Callable[[Parser], ModuleType], parser: Callable[[bool], Parser]
) -> None:
    ascend(parser(True))
    assert balance_asked_by(config()) == f"vllm_ascend.{KEY}"
    ascend(parser(False))
    assert balance_asked_by(config({KEY: True})) is None


def test_a_parser_that_does_not_know_the_nested_key_does_not_hide_it(ascend: Callable[[Parser], ModuleType]) -> None:
    ascend(old(False))
    assert balance_asked_by(config(nested(True))) == NESTED
    ascend(old(True))
    assert balance_asked_by(config(nested(False))) is None


def test_a_parser_that_knows_it_has_the_last_word(ascend: Callable[[Parser], ModuleType]) -> None:
    ascend(new(False))
    assert balance_asked_by(config(nested(True))) is None
    ascend(new(True))
    assert balance_asked_by(config(nested(True))) == NESTED


def test_a_parser_that_refuses_is_told_and_the_plain_configuration_read(
    ascend: Callable[[Parser], ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(_: Any) -> Any:
        raise ValueError("these two exclude each other")

    ascend(refusing)
    assert balance_asked_by(config({KEY: True})) == TOP
    assert "these two exclude each other" in caplog.text


def test_where_we_stand_in_the_parser_is_the_one_of_that_module(
    ascend: Callable[[Parser], ModuleType], filled: ModuleType
) -> None:
    ascend(new(False))
    asked = []

    def parser(wanted: Any) -> Any:
        asked.append(wanted)
        return new(True)(wanted)

    filled.init_ascend_config = parser  # type: ignore[attr-defined]
    wanted = config()
    assert _balance_scheduling_enabled(wanted)
    assert asked == [wanted]
    assert not _balance_scheduling_enabled(None)
    assert asked == [wanted]


@pytest.mark.parametrize("key", ["profiling_chunk_config", "dyntra_lb_config"])
@pytest.mark.parametrize("place", ["nested", "top"])
def test_what_excludes_balance_is_named_with_both_keys(key: str, place: str) -> None:
    setting = {key: {"enabled": True}}
    additional = {"scheduler_config": setting} if place == "nested" else setting
    engine = SimpleNamespace(_has_global_unfinished_reqs=None)
    (reason,) = balance_excluded(engine, config(additional))
    assert KEY in reason
    assert f"{key}.enabled" in reason
    assert balance_excluded(engine, config({key: {"enabled": False}})) == ()


# -- short requests first


def test_short_requests_go_first_by_the_hosts_own_function(monkeypatch: pytest.MonkeyPatch, filled: ModuleType) -> None:
    calls = []
    module = ModuleType("vllm_ascend.core.short_request_first_scheduler")
    module.install_short_request_first_waiting_queue = (  # type: ignore[attr-defined]
        lambda scheduler, **settings: calls.append((scheduler, settings))
    )
    for name in ("vllm_ascend", "vllm_ascend.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    wanted = SimpleNamespace(enabled=True, threshold=256, long_max_wait_ms=0.5)
    filled.init_ascend_config = lambda _: SimpleNamespace(  # type: ignore[attr-defined]
        scheduler_config=SimpleNamespace(short_request_first_config=wanted)
    )
    scheduler = SimpleNamespace(vllm_config=config())
    short_request_first(scheduler)
    assert calls == [(scheduler, {"threshold": 256, "long_max_wait_ms": 0.5})]
    wanted.enabled = False
    short_request_first(scheduler)
    assert len(calls) == 1


@pytest.mark.parametrize("parsed", [None, SimpleNamespace(), SimpleNamespace(scheduler_config=None)])
def test_a_host_without_that_setting_is_left_as_it_is(filled: ModuleType, parsed: Any) -> None:
    filled.init_ascend_config = lambda _: parsed  # type: ignore[attr-defined]
    short_request_first(SimpleNamespace(vllm_config=config()))


def test_where_we_do_not_stand_in_nobody_is_asked(ascend: Callable[[Parser], ModuleType]) -> None:
    def never(_: Any) -> Any:
        raise AssertionError

    ascend(never)
    short_request_first(SimpleNamespace(vllm_config=config()))

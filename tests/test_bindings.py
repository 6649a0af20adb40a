"""Whose method an object runs, read from ``__mro__``: an override of upstream's own may call its base's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from balance_patcher.bindings import holders, runs

HERE = __name__


class Base:
    def step(self) -> int:
        return 1


class Calls(Base):
    def step(self) -> int:
        return super().step() + 1


class CallsAnother(Base):
    def step(self) -> int:
        return super().other()  # type: ignore[misc, no-any-return]


class Replaces(Base):
    def step(self) -> int:
        return 2


class Twice(Calls):
    def step(self) -> int:
        return super().step()


class Inherits(Calls):
    pass


class Other(Base):
    step = len  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (Base, [Base]),
        (Calls, [Calls, Base]),
        (Inherits, [Calls, Base]),
        (Twice, [Twice, Calls, Base]),
        (Replaces, [Replaces]),
        (CallsAnother, [CallsAnother]),
        (Other, [Other]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_first_and_whom_it_calls_by_super(cls: type, found: list[type]) -> None:
    assert list(holders(cls, "step", HERE)) == found


def test_in_another_module_than_the_targets_a_call_is_not_taken_for_one() -> None:
    assert list(holders(Calls, "step", "upstream")) == [Calls]


def test_a_function_of_another_module_in_upstreams_class_is_not_upstreams() -> None:
    from types import FunctionType

    class Patched(Base):
        pass

    Patched.step = FunctionType(Calls.step.__code__, {"__name__": "theirs"}, closure=Calls.step.__closure__)  # type: ignore[method-assign]
    assert list(holders(Patched, "step", HERE)) == [Patched]


def test_where_nobody_has_it_nobody_holds_it() -> None:
    assert list(holders(Base, "stop", HERE)) == []


def _wrapper(ours: Any) -> Any:
    @functools.wraps(ours)
    def schedule(self: object) -> object:
        return ours(self)

    return schedule


def _copy(ours: Any) -> Any:
    @functools.wraps(ours)
    def schedule(_: object) -> str:
        return "a copy"

    return schedule


def _copy_that_keeps(ours: Any) -> Any:
    def schedule(_: object) -> str:
        return "a copy"

    schedule.original = ours  # type: ignore[attr-defined]
    return schedule


def _partial(ours: Any) -> Any:
    return functools.partial(ours)


def _by_default(ours: Any) -> Any:
    def schedule(self: object, upstream: Any = ours) -> object:
        return upstream(self)

    return schedule


def _ours(_: object) -> str:
    return "ours"


@pytest.mark.parametrize("stands", [_wrapper, _partial, _by_default])
def test_what_calls_ours_runs_it(stands: Callable[[Any], Any]) -> None:
    assert runs(stands(_ours), _ours)
    assert runs(_wrapper(stands(_ours)), _ours)


@pytest.mark.parametrize("stands", [_copy, _copy_that_keeps])
def test_a_copy_that_only_keeps_ours_does_not_run_it(stands: Callable[[Any], Any]) -> None:
    assert not runs(stands(_ours), _ours)
    assert not runs(_wrapper(stands(_ours)), _ours)

"""Whose method an object runs, read from ``__mro__``: an override of upstream's own may call its base's."""

from __future__ import annotations

import pytest

from balance_patcher.bindings import holders

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

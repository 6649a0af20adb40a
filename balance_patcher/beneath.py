"""What stands beneath bindings of ours that are being replaced: upstream's, as it was before they were made.

Features that are bound anew, as one, are built and bound while the old ones still run: an engine that is in the middle
of a step must not find upstream's function for a moment. So whoever builds is shown what stood there before, in its
own thread only, and nothing that is live is changed for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .origins import MISSING


@dataclass(frozen=True)
class Replaced:
    """What is not looked at.

    Attributes:
        attributes: What stood in an attribute, by the identity of its owner and its name.
        bases: The bases that a class had, by its identity.
        classes: Our own classes that will be nobody's base any more.
    """

    attributes: Mapping[tuple[int, str], object] = field(default_factory=dict)
    bases: Mapping[int, tuple[type, ...]] = field(default_factory=dict)
    classes: tuple[type, ...] = ()


_REPLACED: ContextVar[Replaced] = ContextVar("replaced", default=Replaced())  # noqa: B039 - it is frozen


@contextmanager
def beneath(replaced: Replaced) -> Iterator[None]:
    """Look beneath these bindings, in this thread, until the end of the block."""
    token = _REPLACED.set(replaced)
    try:
        yield
    finally:
        _REPLACED.reset(token)


def member(owner: Any, name: str) -> Any:
    """What a class or module itself holds under a name; ``MISSING`` for nothing."""
    found = _REPLACED.get().attributes
    return found[id(owner), name] if (id(owner), name) in found else vars(owner).get(name, MISSING)


def attribute(owner: Any, name: str) -> Any:
    """An attribute, inherited ones too; ``MISSING`` for none."""
    found = _REPLACED.get().attributes
    return found[id(owner), name] if (id(owner), name) in found else getattr(owner, name, MISSING)


def bases(cls: type) -> tuple[type, ...]:
    """The bases of a class."""
    return _REPLACED.get().bases.get(id(cls), cls.__bases__)


def replaced() -> tuple[type, ...]:
    """Our classes that are being replaced."""
    return _REPLACED.get().classes

"""What was decided for an engine, by its configuration object: one answer for everything that runs in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_MADE: list[tuple[Callable[[], Any], str, bool]] = []


def record(config: Any, feature: str, *, active: bool) -> None:
    """Store a decision; a later one for the same configuration and feature replaces it."""
    _MADE[:] = [made for made in _MADE if made[0]() is not None and not (made[0]() is config and made[1] == feature)]
    try:
        reference: Callable[[], Any] = weakref.ref(config)
    except TypeError:

        def reference() -> Any:
            return config

    _MADE.append((reference, feature, active))


def decided(config: Any, feature: str) -> bool | None:
    """Whether a feature runs under this configuration; ``None`` where nothing was decided."""
    return next((active for reference, name, active in _MADE if reference() is config and name == feature), None)

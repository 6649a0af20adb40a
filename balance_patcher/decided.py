"""What was decided for an engine, by its configuration object: one answer for everything that runs in it.

The object also carries what was decided in the engine core's process to the processes of its workers: it is pickled
for them, with all of its attributes. What they were told so is not a decision of theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MADE: list[tuple[Callable[[], Any], str, bool]] = []
_CARRIED = "_balance_patcher_decided"


def record(config: Any, feature: str, *, active: bool, refused: bool = False) -> None:
    """Store a decision; a later one for the same configuration and feature replaces it.

    Args:
        config: The configuration object.
        feature: The feature's name.
        active: Whether it runs.
        refused: Whether it does not because it cannot, for the processes that the object is sent to.
    """
    _MADE[:] = [made for made in _MADE if made[0]() is not None and not (made[0]() is config and made[1] == feature)]
    _MADE.append((weakly(config), feature, active))
    with suppress(Exception):  # an odd object may have no place for it; then nothing is known where it is sent to
        said = vars(config).get(_CARRIED, {})
        object.__setattr__(config, _CARRIED, {**said, feature: "on" if active else "refused" if refused else "off"})


def weakly(config: Any) -> Callable[[], Any]:
    """A reference to a configuration that does not keep it, where that can be had."""
    try:
        return weakref.ref(config)
    except TypeError:
        return lambda: config


def decided(config: Any, feature: str) -> bool | None:
    """Whether a feature runs under this configuration; ``None`` where nothing was decided."""
    return next((active for reference, name, active in _MADE if reference() is config and name == feature), None)


def carried(config: Any, feature: str) -> str | None:
    """What was decided wherever this object was before: ``on``, ``off`` or ``refused``; ``None`` where nothing was."""
    said = getattr(config, "__dict__", {}).get(_CARRIED)
    return said.get(feature) if isinstance(said, dict) else None


def running(but: Any) -> set[str]:
    """The features that run under other configurations of this process, as far as those are still there."""
    return {name for reference, name, active in _MADE if active and reference() is not None and reference() is not but}

"""Ask for a feature by its name: an operator, the configuration, or the plugin of a host project may.

A package that is merely installed asks for nothing. What others bring is asked for in one of these three
places and in no other, so that installing it changes nothing at all: it is not even imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import PatchError, refuse

#: The operator's: names with commas between them.
FEATURES = "BALANCE_PATCHER_FEATURES"
#: The operator's: functions of others that are to be kept and edited, ``module:Qual.name``.
COMPOSE = "BALANCE_PATCHER_COMPOSE"
KEY = "balance_patcher"
#: The configuration's: a list of names.
PLACE = f"additional_config.{KEY}.features"

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.(<locals>|[A-Za-z_]\w*))*")
_NAME = re.compile(r"[\w.+-]+")
_HOSTS: dict[str, str] = {}


def ask(name: str, *, by: str) -> None:
    """Ask for a feature in every engine of this process, from the plugin of a host project.

    Args:
        name: The feature's name.
        by: The project that asks, for the log.
    """
    _HOSTS[name] = by


def asked_by_name(vllm_config: Any) -> dict[str, str]:
    """Each feature that is asked for by its name, with who asks; the configuration goes before the others.

    Raises:
        PatchError: BP006, if what is written in one of the places is no list of names.
    """
    found = {name: f"the plugin of {by}" for name, by in _HOSTS.items()}
    found |= dict.fromkeys(operators(), FEATURES)
    return found | dict.fromkeys(_configured(vllm_config), PLACE)


def operators() -> tuple[str, ...]:
    """The names in the environment variable."""
    value = os.environ.get(FEATURES, "").strip()
    # A comma at the end is no name that was left out; one beside another is.
    return _names(f"{FEATURES}={value}", value.removesuffix(",").split(",")) if value else ()


def composed_with() -> frozenset[str]:
    """The functions of others that an operator wants to be composed with, see :mod:`balance_patcher.foreign`.

    Raises:
        PatchError: BP006, if one of them is not written ``module:Qual.name``.
    """
    names = [name.strip() for name in os.environ.get(COMPOSE, "").split(",") if name.strip()]
    wrong = next((name for name in names if not _FUNCTION.fullmatch(name)), None)
    if wrong is not None:
        raise refuse("BP006", f"{COMPOSE}={wrong}", next="write module:Qual.name, as the refusal names the function")
    return frozenset(names)


def composable(name: str) -> bool:
    """Whether an operator can ask for a function by this name: each process has to find it there."""
    return _FUNCTION.fullmatch(name) is not None and not name.startswith("__main__:")


def _configured(vllm_config: Any) -> tuple[str, ...]:
    extra = getattr(vllm_config, "additional_config", None)
    ours = extra.get(KEY) if isinstance(extra, Mapping) else None
    if ours is None:
        return ()
    unknown = sorted(map(str, ours.keys() - {"features"})) if isinstance(ours, Mapping) else [str(ours)]
    if unknown:
        raise _wrong(f"additional_config.{KEY}={ours!r}", f"it has one key, `features`, and not `{unknown[0]}`")
    names = ours.get("features", ())
    if isinstance(names, (str, Mapping)) or not isinstance(names, Iterable):
        raise _wrong(f"{PLACE}={names!r}", "it is a list of names")
    return _names(f"{PLACE}={names!r}", names)


def _names(written: str, names: Iterable[object]) -> tuple[str, ...]:
    found = [name.strip() if isinstance(name, str) else "" for name in names]
    if not all(found):
        raise _wrong(written, "it is a list of names")
    strange = next((name for name in found if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise _wrong(written, f"`{strange}` is no name; several stand with commas between them")
    return tuple(dict.fromkeys(found))


def _wrong(written: str, why: str) -> PatchError:
    return refuse("BP006", f"{written}: {why}", next="write the names of features there, as `status` shows them")

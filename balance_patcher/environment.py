"""What is around a process before anything is patched: the vLLM that is there, the switches, the entry points.

Everything is found and nothing is imported, so that it can be asked in a fresh process and in an engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

from .answering import VARIABLE as ANSWER
from .byname import COMPOSE, FEATURES, composed_with, operators
from .errors import PatchError
from .source import InstalledSource, Lane
from .watchdog import VARIABLE, threshold

PLATFORM, GENERAL = "vllm.platform_plugins", "vllm.general_plugins"
GROUPS = (PLATFORM, GENERAL)


@dataclass(frozen=True)
class Vllm:
    """The vLLM of this Python.

    Attributes:
        version: As its own ``_version.py`` says; ``None`` where there is none or it does not say.
        place: The folder of the package; ``None`` where it is not installed.
        imported: Whether this process has imported it.
    """

    version: str | None
    place: str | None
    imported: bool


@dataclass(frozen=True)
class Switch:
    """An environment variable that decides what happens here.

    Attributes:
        name: The variable.
        value: Its value; ``None`` where it is not set.
        means: What that does, in words.
    """

    name: str
    value: str | None
    means: str


@dataclass(frozen=True)
class EntryPoint:
    """One of our plugin entry points, as vLLM would find it.

    Attributes:
        group: ``vllm.platform_plugins`` or ``vllm.general_plugins``.
        name: What ``VLLM_PLUGINS`` would have to name.
        value: ``module:function``.
        distribution: Name and version of the distribution that brings it.
        place: Where that is installed.
        filtered: Whether ``VLLM_PLUGINS`` keeps vLLM from loading it.
    """

    group: str
    name: str
    value: str
    distribution: str
    place: str | None
    filtered: bool


def installed_vllm() -> Vllm:
    """The vLLM that this Python would import, or has imported."""
    imported = "vllm" in sys.modules
    try:
        source = InstalledSource()
    except PatchError:
        return Vllm(None, None, imported)
    version = None
    with suppress(PatchError):
        version = Lane("installed", source).version
    return Vllm(version, source.display("vllm"), imported)


_MEANINGS: dict[str, dict[str, str]] = {
    "BALANCE_PATCHER": {
        "auto": "engine cores of this environment ask for a decision",
        "off": "nothing of ours is armed",
        "verify": "for the command line only; nothing of ours is armed",
    },
    "BALANCE_PATCHER_ON_FAILURE": {
        "stop": "an engine that asks for a feature and cannot have it stops",
        "off": "an engine that asks for a feature and cannot have it serves without",
    },
    ANSWER: {
        "on": "an engine's process in which a feature is on answers `status --pid`",
        "off": "no engine's process answers `status --pid`",
    },
}
_DEFAULTS = {"BALANCE_PATCHER": "auto", "BALANCE_PATCHER_ON_FAILURE": "stop", ANSWER: "on"}


def switches() -> tuple[Switch, ...]:
    """Our own switches and vLLM's choice of plugins; a wrong value is told, not refused."""
    return tuple(_switches())


def _switches() -> Iterator[Switch]:
    for name, meanings in _MEANINGS.items():
        value = os.environ.get(name)
        chosen = (value or "").strip().lower() or _DEFAULTS[name]
        wrong = f"no value of it (BP006); it has {', '.join(meanings)}"
        yield Switch(name, value, meanings.get(chosen, wrong))
    yield _stall()
    yield _listed(FEATURES, operators, "features asked for by name")
    yield _listed(COMPOSE, composed_with, "functions of others that are kept and edited")
    chosen_plugins = _plugins()
    if chosen_plugins is None:
        yield Switch("VLLM_PLUGINS", None, "vLLM loads every plugin")
    else:
        named = ", ".join(filter(None, chosen_plugins)) or "none"
        yield Switch("VLLM_PLUGINS", os.environ["VLLM_PLUGINS"], f"vLLM loads only these plugins: {named}")


def _stall() -> Switch:
    try:
        seconds = threshold()
        means = f"a gather that waits {seconds:g} s is told" if seconds else "no gather that waits is told"
    except PatchError:
        means = "no value of it (BP006); it has a number of seconds, 0 for never"
    return Switch(VARIABLE, os.environ.get(VARIABLE), means)


def _listed(variable: str, read: Callable[[], Collection[str]], what: str) -> Switch:
    try:
        means = f"{what}: {', '.join(sorted(read())) or 'none'}"
    except PatchError as error:
        means = f"no value of it (BP006): {error.failures[0].next}"
    return Switch(variable, os.environ.get(variable), means)


def _plugins() -> list[str] | None:
    """As vLLM reads it: an empty text names one plugin without a name."""
    value = os.environ.get("VLLM_PLUGINS")
    return None if value is None else value.split(",")


def entry_points() -> tuple[EntryPoint, ...]:
    """Our entry points in both groups, of every distribution that has them."""
    chosen = _plugins()
    found = []
    for group in GROUPS:
        for point in metadata.entry_points(group=group):
            if point.value.partition(":")[0].partition(".")[0] == __package__:
                distribution = point.dist
                told = f"{distribution.name} {distribution.version}" if distribution is not None else "?"
                place = str(distribution.locate_file("")) if distribution is not None else None
                filtered = chosen is not None and point.name not in chosen
                found.append(EntryPoint(group, point.name, point.value, told, place, filtered))
    return tuple(found)


def would_arm(points: Sequence[EntryPoint]) -> tuple[bool, str]:
    """Whether importing vLLM here would arm an engine core, and why.

    The platform plugin decides: the general plugins run inside the constructor that is to be called through.
    """
    value = os.environ.get("BALANCE_PATCHER", "").strip().lower() or "auto"
    if value != "auto":
        return False, f"BALANCE_PATCHER={value}"
    if not points:
        return False, "no distribution of this Python has our entry points; install balance_patcher into it"
    if all(point.filtered for point in points):
        return False, f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves {points[0].name} out; name it there too"
    if not any(point.group == PLATFORM and not point.filtered for point in points):
        return False, f"the entry point in {PLATFORM} is missing; the general plugins alone come too late"
    return True, f"the entry point in {PLATFORM} is found"

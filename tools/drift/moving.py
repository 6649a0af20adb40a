"""A target whose module is not where it was: in which file of the package it is now.

A module that was moved is a file that was not there, or that was another one. A file with the very bytes of the old one
is it; else all that came or changed are read, and the one that defines the function counts, if it is the only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from balance_patcher.errors import Failure, PatchError
from balance_patcher.targets import find_target

from .columns import NotingLane

_MOST = 600  # files that are read; between two releases more change than that, and those that came are read


def moved_to(target: str, good: NotingLane, bad: NotingLane) -> list[str]:
    """The targets of the same qualified name in other modules; more than one, where the text does not say which.

    Args:
        target: What was there, ``module:Qual.name``.
        good: The last place that has it.
        bad: The first one that does not have its module.
    """
    module, _, qualname = target.partition(":")
    try:
        old, new = good.place.files(), bad.place.files()
        stem = module.replace(".", "/")
        was = old.get(f"{stem}.py") or old.get(f"{stem}/__init__.py")
        return [name for path in _likely(was, old, new) for name in _defined(bad, path, qualname)]
    except PatchError:
        return []  # what cannot be listed or read is told elsewhere


def _likely(was: str | None, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The files in which it may be."""
    came = [path for path in new if path.endswith(".py") and path not in old]
    same = [path for path in came if new[path] == was]
    changed = [path for path in old if path.endswith(".py") and old[path] != new.get(path, old[path])]
    if same:
        return same
    return next((some for some in ([*came, *changed], came) if len(some) <= _MOST), [])


def _defined(lane: NotingLane, path: str, qualname: str) -> Iterator[str]:
    """The target in a file, if it is there."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    text = lane.module(module)
    # A file that does not say the last of the names need not be parsed.
    if text is None or text.path != path or not all(map(text.mentions, qualname.split("."))):
        return
    try:
        if not isinstance(find_target(lane, f"{module}:{qualname}"), Failure):
            yield f"{module}:{qualname}"
    except PatchError:
        return

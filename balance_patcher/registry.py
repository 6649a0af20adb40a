"""Find the declared features: every module in ``deltas/`` that has a ``FEATURE``, and what others bring.

A file that cannot be imported, or that takes another's names, is a failure of its own. It does not keep
the features of sound files from being used. Those of other distributions are looked at only by who asks for
one of them, or for all: the command line does, an engine does not.
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from .distributions import Offer, load, offers
from .errors import Failure, PatchError, did_you_mean
from .feature import Feature


@lru_cache(maxsize=1)
def _loaded() -> tuple[tuple[ModuleType, ...], tuple[Failure, ...]]:
    package = importlib.import_module(f"{__package__}.deltas")
    modules: list[ModuleType] = []
    failures: list[Failure] = []
    names: dict[str, str] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        place = f"deltas/{info.name}.py"
        try:
            module = importlib.import_module(f"{package.__name__}.{info.name}")
        except PatchError as error:
            failures += error.failures
            continue
        except Exception as error:  # noqa: BLE001 - whatever a wrong declaration raises
            failures.append(_broken(info.name, error))
            continue
        feature = getattr(module, "FEATURE", None)
        if isinstance(feature, Feature):
            double = names.setdefault(feature.name, place)
            if double != place:
                next_step = "give one of them another name"
                failures.append(Failure("BP002", f"{double} and {place} both declare {feature.name!r}", next_step))
            else:
                modules.append(module)
    return tuple(modules), tuple(failures)


def _broken(name: str, error: Exception) -> Failure:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(f"{name}.py")]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    return Failure(
        "BP002",
        f"deltas/{name}.py cannot be imported: {type(error).__name__}: {error}",
        "mend the declaration; nothing was patched",
        (("declared", f"deltas/{name}.py:{line or 1}"),),
    )


def delta_modules() -> tuple[ModuleType, ...]:
    """The modules of ``deltas/`` that declare a feature, by name; those that are broken are left out."""
    return _loaded()[0]


def broken() -> tuple[Failure, ...]:
    """Why files in ``deltas/`` are left out (BP001, BP002)."""
    return _loaded()[1]


def suspected(words: Collection[str]) -> tuple[Failure, ...]:
    """Those of :func:`broken` whose file speaks of one of these words, as a whole text in quotes."""
    package = importlib.import_module(f"{__package__}.deltas")
    found = []
    for failure in broken():
        place = dict(failure.fields).get("declared", failure.what).partition(".py")[0].rpartition("/")[2]
        files = [Path(folder, f"{place}.py") for folder in package.__path__]
        text = "".join(file.read_text("utf-8", errors="replace") for file in files if file.is_file())
        if any(f'"{word}"' in text or f"'{word}'" in text for word in words):
            found.append(failure)
    return tuple(found)


def features() -> tuple[Feature, ...]:
    """Every feature of this repository, by module name; see :func:`broken` for those that are left out."""
    return tuple(module.FEATURE for module in delta_modules())


def all_features() -> tuple[Feature, ...]:
    """Every feature, those of other distributions behind ours; see :func:`all_broken` for what is left out."""
    others, _ = _of_others(offers())
    return (*features(), *others)


def all_broken() -> tuple[Failure, ...]:
    """Why files in ``deltas/``, and features of other distributions, are left out."""
    _, lost = _of_others(offers())
    return (*broken(), *(failure for failures in lost.values() for failure in failures))


def of_others(names: Iterable[str]) -> tuple[tuple[Feature, ...], dict[str, tuple[Failure, ...]]]:
    """Those of some features that are not of this repository, and why others of them cannot be used.

    Nothing is looked for where all of them are ours.

    Args:
        names: What somebody asks for.
    """
    ours = {feature.name for feature in features()}
    asked = [name for name in dict.fromkeys(names) if name not in ours]
    if not asked:
        return (), {}
    found, lost = _of_others([offer for offer in offers() if offer.name in asked])
    known = {feature.name for feature in found} | lost.keys()
    return found, lost | {name: (_unknown(name),) for name in asked if name not in known}


def _of_others(found: Iterable[Offer]) -> tuple[tuple[Feature, ...], dict[str, tuple[Failure, ...]]]:
    ours = {feature.name: feature for feature in features()}
    sound: list[Feature] = []
    lost: dict[str, tuple[Failure, ...]] = {}
    for offer in found:
        try:
            if offer.name in ours:
                raise PatchError(offer.broken("balance_patcher has one of that name", ours[offer.name].declared))
            sound.append(load(offer))
        except PatchError as error:
            lost[offer.name] = (*lost.get(offer.name, ()), *error.failures)
    return tuple(sound), lost


def find_feature(name: str) -> Feature:
    """The feature of that name, ours or another distribution's.

    Raises:
        PatchError: BP003, naming those that there are, and what is wrong with files that are left out; BP002, if
            another distribution brings it and it cannot be used.
    """
    for feature in features():
        if feature.name == name:
            return feature
    found, lost = of_others([name])
    if found:
        return found[0]
    raise PatchError(*lost[name], *broken())


def _unknown(name: str) -> Failure:
    known = known_names()
    next_step = did_you_mean(name, known, f"use one of: {', '.join(known)}")
    return Failure("BP003", f"there is no feature {name!r}", next_step)


def known_names() -> list[str]:
    """What can be asked for by name, ours first; nothing is imported for it."""
    return [*(feature.name for feature in features()), *(offer.name for offer in offers())]

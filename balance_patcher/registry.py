"""Find the declared features: every module in ``deltas/`` that has a ``FEATURE``.

A file that cannot be imported, or that takes another's names, is a failure of its own. It does not keep
the features of sound files from being used.
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from .errors import Failure, PatchError, refuse
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
    """Every declared feature, by module name; see :func:`broken` for those that are left out."""
    return tuple(module.FEATURE for module in delta_modules())


def find_feature(name: str) -> Feature:
    """The feature of that name.

    Raises:
        PatchError: BP003, naming those that there are, and what is wrong with files that are left out.
    """
    for feature in features():
        if feature.name == name:
            return feature
    known = ", ".join(feature.name for feature in features())
    unknown = refuse("BP003", f"there is no feature {name!r}", next=f"use one of: {known}")
    raise PatchError(*unknown.failures, *broken())

"""Find the declared features: every module in ``deltas/`` that has a ``FEATURE``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from types import ModuleType

from .errors import refuse
from .feature import Feature


@lru_cache(maxsize=1)
def delta_modules() -> tuple[ModuleType, ...]:
    """The modules of ``deltas/`` that declare a feature, by name."""
    package = importlib.import_module(f"{__package__}.deltas")
    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}")
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name)
    ]
    return tuple(module for module in modules if isinstance(getattr(module, "FEATURE", None), Feature))


def features() -> tuple[Feature, ...]:
    """Every declared feature, by module name."""
    return tuple(module.FEATURE for module in delta_modules())


def find_feature(name: str) -> Feature:
    """The feature of that name.

    Raises:
        PatchError: BP003, naming those that there are.
    """
    for feature in features():
        if feature.name == name:
            return feature
    known = ", ".join(feature.name for feature in features())
    raise refuse("BP003", f"there is no feature {name!r}", next=f"use one of: {known}")

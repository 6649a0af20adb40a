"""Let a feature stand in for a host's module when that is imported, or leave the module alone and say why.

The host imports its patch module at a place of its own choosing, and later patches of it build on what they
find. So the name is taken over there and then: the module that Python makes for it is filled with ours, and
the host's text is read, never run. Python puts the module into ``sys.modules`` and onto its parent itself,
and its ``__spec__`` is its own.

If anything in the text is not declared as covered, or the feature cannot be built, the host's own text runs
as if we were not there, and one warning says what stood against it.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from .compose import at_work, compose
from .coverage import Coverage, read_module
from .errors import PatchError, refuse
from .feature import Feature
from .finders import WrappedLoader, WrappingFinder, put, take_out
from .installation import Installation, install
from .registry import features
from .source import InstalledSource, Lane, installed_lane, module_text
from .standin import Bind, StandIn

_LOCK = threading.RLock()
_logger = logging.getLogger("vllm.balance_patcher")


@dataclass(frozen=True)
class TakeOver:
    """What became of one module that a feature stands in for.

    Attributes:
        feature: The feature's name.
        stand_in: What is declared about the module.
        file: The host's file, if there is one.
        coverage: What was found in it.
        declined: Why ours does not stand in; ``None`` where it does.
        failed: What its own text raised when it was run instead; then nothing of it is there to rely on.
    """

    feature: str
    stand_in: StandIn
    file: str | None
    coverage: Coverage | None = None
    declined: str | None = None
    failed: str | None = None

    def left_to_host(self, feature: str) -> bool:
        """Whether a feature is the host's job: its own text runs, and that text does what the feature does.

        Only what was found in this very file counts. Another release of it may do more, or less.
        """
        if self.declined is None or self.failed is not None:
            return False
        return feature in {self.feature, *(self.coverage.features() if self.coverage is not None else ())}


_DONE: dict[str, TakeOver] = {}


def take_overs() -> tuple[TakeOver, ...]:
    """What became of the modules that were imported so far."""
    return tuple(_DONE.values())


def left_alone(feature: str) -> str | None:
    """Why a feature is left to its host, whose own module was loaded instead; ``None`` where it is not."""
    for done in _DONE.values():
        if done.left_to_host(feature):
            return f"{done.stand_in.owner}'s own copy runs ({done.declined})"
    return None


def declared() -> dict[str, tuple[Feature, StandIn]]:
    """Every module that a feature stands in for, by name."""
    return {feature.stand_in.module: (feature, feature.stand_in) for feature in features() if feature.stand_in}


# -- watching for the import -----------------------------------------------------------------


class Finder(WrappingFinder):
    """Takes the place of the declared modules when they are executed."""

    def __init__(self) -> None:
        super().__init__()
        self._declared = declared()

    def wanted(self, fullname: str) -> bool:
        return fullname in self._declared

    def wrap(self, fullname: str, loader: Any) -> WrappedLoader:
        return loader if isinstance(loader, _InPlaceOf) else _InPlaceOf(loader, *self._declared[fullname])


def watch() -> None:
    """Take the declared modules over when they are imported; twice is once."""
    with _LOCK:
        put(Finder)


def unwatch() -> None:
    """Leave the declared modules to their hosts again."""
    with _LOCK:
        take_out(Finder)


class _InPlaceOf(WrappedLoader):
    """Fills the module of a host's loader, or lets that loader execute it."""

    def __init__(self, loader: Any, feature: Feature, stand_in: StandIn) -> None:
        super().__init__(loader)
        self._feature, self._stand_in = feature, stand_in

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        file = spec.origin if spec is not None else None
        fresh = dict(vars(module))
        coverage, declined = None, None
        try:
            coverage = self._read(file)
            declined = _uncovered(coverage)
            if declined is None:
                fill(module, self._feature, self._stand_in, coverage.features())
        except Exception as error:  # noqa: BLE001 - the host's import must not fail because of us
            declined = _why(error)
        done = TakeOver(self._feature.name, self._stand_in, file, coverage, declined)
        if declined is None:
            _DONE[self._stand_in.module] = done
            _sign(module, self._stand_in)
            _logger.info("%s", _told(done))
            return
        _logger.warning("%s", _told(done))
        vars(module).clear()
        vars(module).update(fresh)
        try:
            self.execute(module)
        except BaseException as error:
            failed = f"{type(error).__name__}: {error}"
            told = f"{declined}; and running its own text failed: {failed}"
            _DONE[self._stand_in.module] = replace(done, declined=told, failed=failed)
            raise
        _DONE[self._stand_in.module] = done

    def _read(self, file: str | None) -> Coverage:
        module = self._stand_in.module
        get_data = getattr(self._loader, "get_data", None)
        if file is None or get_data is None or not file.endswith(".py"):
            raise refuse("BP514", f"{module} is no source file: {file}", next="install it from a wheel or a checkout")
        text = module_text(module, file, file, get_data(file))
        return read_module(self._stand_in, text, Lane("installed", InstalledSource()))


def _sign(module: ModuleType, stand_in: StandIn) -> None:
    """Let the module say whose text it was filled from: that is what a person should be shown."""
    source = sys.modules[stand_in.fill.__module__]
    module.__file__, module.__doc__ = source.__file__, source.__doc__
    if module.__spec__ is not None:
        module.__spec__.origin, module.__spec__.cached = source.__file__, None
    vars(module).pop("__cached__", None)


def _uncovered(coverage: Coverage) -> str | None:
    if coverage.failures:
        return coverage.failures[0].headline
    first, *more = coverage.uncovered or (None,)
    if first is None:
        return None
    also = f", and {len(more)} more" if more else ""
    return f"{first} is not covered{also}"


def _why(error: Exception) -> str:
    return error.failures[0].headline if isinstance(error, PatchError) else f"{type(error).__name__}: {error}"


def _told(done: TakeOver) -> str:
    name = done.stand_in.module
    coverage = done.coverage
    if done.declined is None:
        behind = len(coverage.behind) if coverage else 0
        return (
            f"{done.feature}: stands in for {name}; its text was read and not run, {behind} lines are behind upstream"
        )
    rows = [f"{done.feature}: {done.stand_in.owner}'s own {name} runs, because {done.declined}"]
    rows += [
        f"  {finding.where}  {finding.text}{f'  ({finding.why})' if finding.why else ''}"
        for finding in (coverage.uncovered if coverage else ())
    ]
    return "\n".join(rows)


# -- filling it ------------------------------------------------------------------------------


def stand_in(module: ModuleType, also: Sequence[str] = (), *, change: bool) -> None:
    """Fill a module that asks for it itself.

    Args:
        module: The host's module, which is being executed.
        also: Features to bind besides the one that stands in.
        change: Whether anything but the module may be changed; if not, its class is upstream's own.

    Raises:
        PatchError: BP003, if no feature stands in for a module of that name; what :func:`fill` raises.
    """
    name = module.__name__
    if name not in declared():
        known = ", ".join(declared()) or "none"
        raise refuse("BP003", f"no feature stands in for {name}", next=f"call it from one of: {known}")
    feature, declaration = declared()[name]
    if change:
        fill(module, feature, declaration, also)
    elif feature.runtime is not None:
        holder, _, cls = feature.runtime.base.partition(":")
        declaration.fill(module, getattr(importlib.import_module(holder), cls), lambda *_: None)


def fill(module: ModuleType, feature: Feature, stand_in: StandIn, also: Sequence[str] = ()) -> None:
    """Bind the feature's classes and give a module the names that others take from it.

    Args:
        module: The host's module, fresh or filled before.
        feature: The feature that stands in for it.
        stand_in: Its declaration.
        also: The features that the host's text needs; all are bound together.

    Raises:
        PatchError: With every reason; then nothing was changed.
    """
    chosen = compose(at_work(features_to_bind(feature, also), installed_lane()))
    if feature.runtime is None:
        raise refuse("BP002", f"{feature.name} stands in and has no class", next="give it a runtime class")
    base = feature.runtime.base

    def names(installation: Installation, bind: Bind) -> None:
        stand_in.fill(module, installation.built.classes[base], bind)
        installation.stands_in = module.__name__

    install(chosen, classes_only=True, then=names)


def features_to_bind(feature: Feature, also: Sequence[str]) -> list[Feature]:
    """The feature that stands in, and those that the host's text needs besides.

    Raises:
        PatchError: BP003, if one of them is not here: then what it covers would be lost.
    """
    known = {known.name: known for known in features()}
    names = dict.fromkeys([feature.name, *also])
    missing = [name for name in names if name not in known]
    if missing:
        raise refuse("BP003", f"there is no feature {missing[0]!r}", next="install it, or let the host's own run")
    return [known[name] for name in names]

"""Bind what was built in this process, all or nothing, and put everything back exactly.

A feature is installed as a transaction: each step knows how to undo itself, the result is read back, and
a failure at any step rolls all of them back. Installing twice is once.

Where a feature stands in for a host's module, its classes are bound at that module's place in the import
order, and its functions once an engine has asked for it: two transactions, one installation.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from .bindings import Binding, Installation, Mark, bypassed, kept_by_others, named, overwritten, runs, stale, wrapped
from .build import build
from .compose import compose, overlapping
from .errors import Failure, PatchError, refuse
from .feature import Feature
from .origins import MISSING, genuine
from .registry import find_feature
from .standin import Bind

__all__ = [
    "Installation",
    "bound",
    "install",
    "install_together",
    "installed",
    "overwritten",
    "stale",
    "uninstall",
    "wrapped",
]

_LOCK = threading.RLock()
_INSTALLED: dict[str, Installation] = {}
#: The names of all that was ever bound here: a second `uninstall` of one that is declared nowhere is no error.
_WAS_HERE: set[str] = set()
#: A last step of a transaction, given the installation and what binds an attribute in it.
Then = Callable[[Installation, Bind], None]


def bound(name: str) -> Installation | None:
    """The installation that a feature is in, alone or as a part; its functions need not be bound yet."""
    return next((i for i in _INSTALLED.values() if name in (i.feature.name, *(p.name for p in i.feature.parts))), None)


def features_bound() -> tuple[Feature, ...]:
    """Every feature that is bound, each by itself; one that was installed by hand may be declared nowhere else."""
    return tuple(part for holder in _INSTALLED.values() for part in holder.feature.parts or (holder.feature,))


def installed(name: str) -> Installation | None:
    """The installation of a feature in this process, if all of the feature is bound."""
    found = bound(name)
    return found if found is not None and found.hooked.issuperset(found.hooks(name)) else None


def install(feature: Feature | str, *, classes_only: bool = False, then: Then | None = None) -> Installation:
    """Build a feature and bind it in this process; what is bound already stays as it is.

    One that edits functions in common with what is bound joins it: both are bound anew, as one.

    Args:
        feature: The feature or its name. One that is a part of what is installed is completed there.
        classes_only: Bind its runtime classes, and leave its functions to a later call.
        then: A last step of the same transaction, which may bind more attributes.

    Raises:
        PatchError: With every reason; then nothing was changed. BP003 and BP007, if it is no feature.
    """
    with _LOCK:
        if not isinstance(feature, (Feature, str)):
            raise _no_feature(feature)
        feature = find_feature(feature) if isinstance(feature, str) else feature
        if not classes_only and bound(feature.name) is None and _sharing([feature]):
            return install_together([feature], then)
        return _install(feature, classes_only=classes_only, then=then)


def _no_feature(given: object) -> PatchError:
    """Why something that is neither a feature nor a name cannot be installed, and what was meant instead (BP007)."""
    if isinstance(given, os.PathLike):
        follow = f"load it first: install(feature_of_file({os.fspath(given)!r})), of balance_patcher.loading"
    elif isinstance(given, (list, tuple, set, frozenset)):
        follow = "call install() for each of them; those that share a function are bound as one"
    else:
        follow = 'write install("NAME"), or give it a Feature'
    return refuse("BP007", f"install() takes a feature or its name, not {type(given).__name__}", next=follow)


def _sharing(features: Sequence[Feature]) -> list[Installation]:
    """What is bound and edits functions in common with them."""
    return [holder for holder in _INSTALLED.values() if len(overlapping([*features, holder.feature])) == 1]


def _install(feature: Feature, *, classes_only: bool = False, then: Then | None = None) -> Installation:
    with _LOCK:
        done = bound(feature.name)
        if done is not None:
            _refuse_any([*overwritten(done), *bypassed(done)])
        installation = done or Installation(build(feature))
        mark = installation.mark
        try:
            steps = [*([] if done else _class_steps(installation))]
            steps += [] if classes_only else _hook_steps(installation, feature.name)
            for step in steps:
                step()
            if then is not None:
                then(installation, partial(_bind, installation))
            if installation.mark != mark:
                _refuse_any(overwritten(installation))
            _INSTALLED[installation.feature.name] = installation
            _WAS_HERE.update(part.name for part in installation.feature.parts or (installation.feature,))
        except BaseException:
            if done is None:
                _INSTALLED.pop(installation.feature.name, None)
                _let_go(installation)
            _roll_back(installation, mark)
            raise
        return installation


def install_together(features: Sequence[Feature], then: Then | None = None) -> Installation:
    """Bind features that edit functions in common, as one; one that is bound alone is bound anew with the others.

    Args:
        features: One group of :func:`~balance_patcher.compose.overlapping`.
        then: A last step of the same transaction.

    Raises:
        PatchError: With every reason; then what was bound before is bound, and nothing else.
    """
    with _LOCK:
        holders = _sharing(features)
        if len(holders) == 1 and all(bound(feature.name) is holders[0] for feature in features):
            return _complete(holders[0], features, then)
        _refuse_any(_standing_in(holder, features) for holder in holders if holder.stands_in)
        parts = [part for holder in holders for part in (holder.feature.parts or (holder.feature,))]
        gone: list[Feature] = []
        try:
            for holder in holders:
                _take_out(holder)
                gone.append(holder.feature)
            return _install(compose([*features, *parts]), then=then)
        except BaseException:
            for feature in gone:
                _install(feature)
            raise


def _standing_in(holder: Installation, features: Sequence[Feature]) -> Failure:
    names = " and ".join(repr(feature.name) for feature in features if bound(feature.name) is not holder)
    return Failure(
        "BP610", f"{names} would have to share a function with {holder.feature.name!r}, which stands in for "
        f"{holder.stands_in}", next=f"name it there, where that module is filled: stand_in(__name__, {names})",
    )  # fmt: skip


def _complete(installation: Installation, features: Sequence[Feature], then: Then | None) -> Installation:
    """Bind what is left of features that are parts of one installation."""
    mark = installation.mark
    try:
        for feature in features:
            install(feature)
        if then is not None:
            then(installation, partial(_bind, installation))
    except BaseException:
        _roll_back(installation, mark)
        raise
    return installation


def uninstall(feature: Feature | str) -> None:
    """Put everything back that :func:`install` changed: the identical objects and bases.

    Features with which it was bound as one are bound anew without it.

    Raises:
        PatchError: BP606 and BP607, if somebody has changed it since; then nothing is put back. BP003, if there is
            no feature of that name; of one that is not installed there is nothing to put back.
    """
    name = feature.name if isinstance(feature, Feature) else feature
    with _LOCK:
        installation = bound(name)
        if installation is None:
            if name not in _WAS_HERE:
                find_feature(name)
            return
        rest = [part for part in installation.feature.parts if part.name != name]
        _take_out(installation)
        if name == installation.feature.name or not rest or installation.stands_in:
            return
        try:
            _install(compose(rest))
        except BaseException:
            _install(installation.feature)
            raise


def _take_out(installation: Installation) -> None:
    _refuse_any([*overwritten(installation), *wrapped(installation), *kept_by_others(installation)])
    del _INSTALLED[installation.feature.name]
    _roll_back(installation, (0, 0, frozenset()))


def _refuse_any(problems: Iterable[Failure]) -> None:
    found = tuple(problems)
    if found:
        raise PatchError(*found)


# -- steps -----------------------------------------------------------------------------------


def _class_steps(installation: Installation) -> Iterator[Callable[[], None]]:
    for base, ours in installation.built.classes.items():
        module, _, name = base.partition(":")
        yield partial(_rebase, installation, base)
        yield partial(_bind, installation, importlib.import_module(module), name, ours)


def _hook_steps(installation: Installation, feature: str) -> Iterator[Callable[[], None]]:
    for target in installation.hooks(feature):
        if target not in installation.hooked:
            yield partial(_hook, installation, target)


def _hook(installation: Installation, target: str) -> None:
    module, _, qualname = target.partition(":")
    *owners, name = qualname.split(".")  # of a module-level function there is no owner but the module
    found: Any = importlib.import_module(module)
    for part in owners:
        found = getattr(found, part)
    found = genuine(found)
    installation.hooked.add(target)
    if target in installation.built.added:
        _change(installation, found, name, MISSING, installation.built.added[target])
        return
    before = vars(found)[name]
    ours = _like(before, installation.built.functions[target])
    for owner in (found, *_actors(found, name, before)):
        _bind(installation, owner, name, ours)


def _actors(owner: Any, name: str, before: object) -> list[type]:
    """The classes that Ray has made of subclasses: each holds a copy of every method that it inherits."""
    classes: list[type] = [owner] if isinstance(owner, type) else []
    for cls in classes:
        classes += cls.__subclasses__()
    return [
        cls
        for cls in classes[1:]
        if "__ray_actor_class__" in vars(cls)
        and _resolved(cls.__mro__[1], name) is owner
        and name in vars(cls)
        and runs(vars(cls)[name], before)
    ]


def _like(before: object, function: Any) -> object:
    """The function in the kind of attribute that stood there: static, class or plain method."""
    return type(before)(function) if isinstance(before, (staticmethod, classmethod)) else function


def _bind(installation: Installation, owner: Any, name: str, value: object) -> None:
    _change(installation, owner, name, vars(owner)[name], value)


def _change(installation: Installation, owner: Any, name: str, before: object, value: object) -> None:
    # Noted before it is done: an interrupt between the two must not leave it behind.
    installation.bindings.append(Binding(owner, name, before, value))
    setattr(owner, name, value)


def _rebase(installation: Installation, base: str) -> None:
    """Let every loaded direct subclass of upstream's class derive from ours, or none of them."""
    upstream, ours = installation.upstream[base], installation.built.classes[base]
    above = installation.ours(base)
    resolved = []
    loaded: list[type] = upstream.__subclasses__()
    for subclass in loaded:
        if subclass in above:
            continue
        before = {name: _resolved(subclass, name) for cls in above for name in vars(cls)}
        bases = subclass.__bases__
        after = tuple(ours if cls is upstream else cls for cls in bases)
        installation.rebased.append((subclass, bases, after))
        try:
            subclass.__bases__ = after
        except TypeError as error:
            raise refuse(
                "BP605", f"{subclass.__module__}.{subclass.__qualname__} cannot derive from {ours.__name__}: {error}",
                next="let that class derive from the plain scheduler without __slots__, or switch the feature off",
            ) from error  # fmt: skip
        resolved.append((subclass, before))
    for subclass, before in resolved:
        for name, owner in before.items():
            now = _resolved(subclass, name)
            if now is not owner and not (now in above and (owner is None or owner in upstream.__mro__)):
                what = f"{subclass.__qualname__}.{name} came from {named(owner)}, now from {named(now)}"
                raise refuse("BP605", what, next="report this with the class")


def _resolved(cls: type, name: str) -> type | None:
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def _let_go(installation: Installation) -> None:
    """Give classes that were derived from ours while it was bound, by an import for example, upstream's again."""
    rebased = {id(subclass) for subclass, _, _ in installation.rebased}
    for base, ours in installation.built.classes.items():
        later: list[type] = ours.__subclasses__()
        for subclass in later:
            if id(subclass) not in rebased and subclass not in installation.own:
                upstream = installation.upstream[base]
                subclass.__bases__ = tuple(upstream if cls is ours else cls for cls in subclass.__bases__)


def _roll_back(installation: Installation, mark: Mark) -> None:
    """Undo every step since a mark, the last first; one that fails does not keep the others from being undone."""
    failed: list[BaseException] = []
    bindings, rebased, hooked = mark
    for binding in reversed(installation.bindings[bindings:]):
        try:
            if binding.before is MISSING:
                delattr(binding.owner, binding.name)
            else:
                setattr(binding.owner, binding.name, binding.before)
        except BaseException as error:  # noqa: BLE001 - raised below, when the rest is back
            failed.append(error)
    for subclass, bases, _ in reversed(installation.rebased[rebased:]):
        try:
            if subclass.__bases__ != bases:
                subclass.__bases__ = bases
        except BaseException as error:  # noqa: BLE001 - raised below, when the rest is back
            failed.append(error)
    del installation.bindings[bindings:], installation.rebased[rebased:]
    installation.hooked = set(hooked)
    if failed:
        raise failed[0]

"""Bind what was built in this process, all or nothing, and put everything back exactly.

A feature is installed as a transaction: each step knows how to undo itself, the result is read back, and
a failure at any step rolls all of them back. Installing twice is once.

Where a feature stands in for a host's module, its classes are bound at that module's place in the import
order, and its functions once an engine has asked for it: two transactions, one installation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from .beneath import Replaced, beneath
from .bindings import Installation, bypassed, kept_by_others, overwritten, retire, stale, wrapped
from .build import build, show
from .compose import compose, overlapping
from .errors import Failure, PatchError, refuse
from .feature import Feature
from .registry import find_feature
from .standin import Bind
from .steps import NOTHING, bind, class_steps, cover_again, hook_steps, let_go, roll_back, uncover

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

#: Held while anything is bound; who looks at what is bound, and goes by it, holds it too.
LOCK = threading.RLock()
_INSTALLED: dict[str, Installation] = {}
#: The names of all that was ever bound here: a second `uninstall` of one that is declared nowhere is no error.
_WAS_HERE: set[str] = set()
#: The features that somebody has installed by a call of his own; all others were, for an engine that asked for them.
_CALLED: set[str] = set()
#: A last step of a transaction, given the installation and what binds an attribute in it.
Then = Callable[[Installation, Bind], None]


def bound(name: str) -> Installation | None:
    """The installation that a feature is in, alone or as a part; its functions need not be bound yet."""
    held = list(_INSTALLED.values())
    return next((i for i in held if name in (i.feature.name, *(p.name for p in i.feature.parts))), None)


def features_bound() -> tuple[Feature, ...]:
    """Every feature that is bound, each by itself; one that was installed by hand may be declared nowhere else."""
    held = list(_INSTALLED.values())
    return tuple(part for holder in held for part in holder.feature.parts or (holder.feature,))


def installed(name: str) -> Installation | None:
    """The installation of a feature in this process, if all of the feature is bound."""
    found = bound(name)
    return found if found is not None and found.hooked.issuperset(found.hooks(name)) else None


def bound_features() -> tuple[Feature, ...]:
    """The features that are wholly bound, each by itself."""
    return tuple(feature for feature in features_bound() if installed(feature.name) is not None)


def in_place() -> tuple[Feature, ...]:
    """Those of them that have no class of their own: they run in every engine of this process."""
    return tuple(feature for feature in bound_features() if feature.runtime is None)


def called(name: str) -> bool:
    """Whether somebody has installed a feature by a call of his own, :func:`install`."""
    return name in _CALLED


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
    with LOCK:
        if not isinstance(feature, (Feature, str)):
            raise _no_feature(feature)
        feature = find_feature(feature) if isinstance(feature, str) else feature
        if not classes_only and bound(feature.name) is None and _sharing([feature]):
            installation = install_together([feature], then)
        else:
            installation = _install(feature, classes_only=classes_only, then=then)
        if not classes_only:
            _CALLED.add(feature.name)
        return installation


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
    with LOCK:
        done = bound(feature.name)
        if done is not None:
            _refuse_any([*overwritten(done), *bypassed(done)])
        installation = done or Installation(build(feature))
        mark = installation.mark
        try:
            steps = [*([] if done else class_steps(installation))]
            steps += [] if classes_only else hook_steps(installation, feature.name)
            for step in steps:
                step()
            if then is not None:
                then(installation, partial(bind, installation))
            if installation.mark != mark:
                _refuse_any(overwritten(installation))
            _INSTALLED[installation.feature.name] = installation
            _WAS_HERE.update(part.name for part in installation.feature.parts or (installation.feature,))
        except BaseException:
            if done is None:
                _INSTALLED.pop(installation.feature.name, None)
                let_go(installation)
            roll_back(installation, mark)
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
    with LOCK:
        holders = _sharing(features)
        if len(holders) == 1 and all(bound(feature.name) is holders[0] for feature in features):
            return _complete(holders[0], features, then)
        _refuse_any(_standing_in(holder, features) for holder in holders if holder.stands_in)
        parts = [part for holder in holders for part in (holder.feature.parts or (holder.feature,))]
        together = compose([*features, *parts])
        return _exchange(holders, together, then) if holders else _install(together, then=then)


def _exchange(gone: Sequence[Installation], feature: Feature, then: Then | None = None) -> Installation:
    """Bind a feature in the place of what is bound; an engine that runs meanwhile finds the one or the other.

    It is built while the others are still bound, and each place goes from theirs to the new one's directly.
    """
    _refuse_any(problem for holder in gone for problem in _lost_with(holder))
    with beneath(_hidden(gone)):
        installation = Installation(build(feature))
        try:
            for step in [*class_steps(installation), *hook_steps(installation, feature.name)]:
                step()
            if then is not None:
                then(installation, partial(bind, installation))
            uncover(gone, installation)
            _refuse_any(overwritten(installation))
        except BaseException:
            cover_again(gone, installation)
            for filename, text in ((name, text) for holder in gone for name, text in holder.built.texts.items()):
                show(filename, text)
            raise
    _INSTALLED[feature.name] = installation
    _WAS_HERE.update(part.name for part in installation.feature.parts or (installation.feature,))
    for holder in gone:
        retire(holder)
        if holder.feature.name != feature.name:
            del _INSTALLED[holder.feature.name]
    return installation


def _hidden(gone: Sequence[Installation]) -> Replaced:
    return Replaced(
        {(id(b.owner), b.name): b.before for holder in gone for b in reversed(holder.bindings)},
        {id(subclass): bases for holder in gone for subclass, bases, _ in reversed(holder.rebased)},
        tuple(cls for holder in gone for base in holder.built.classes for cls in holder.ours(base)),
    )


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
            _install(feature)
        if then is not None:
            then(installation, partial(bind, installation))
    except BaseException:
        roll_back(installation, mark)
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
    with LOCK:
        installation = bound(name)
        if installation is None:
            if name not in _WAS_HERE:
                find_feature(name)
            return
        rest = [part for part in installation.feature.parts if part.name != name]
        gone = [name]
        if name == installation.feature.name or not rest or installation.stands_in:
            _refuse_any(_lost_with(installation))
            del _INSTALLED[installation.feature.name]
            roll_back(installation, NOTHING)
            gone = [part.name for part in installation.feature.parts or (installation.feature,)]
        else:
            _exchange([installation], compose(rest))
        _CALLED.difference_update(gone)


def _lost_with(installation: Installation) -> list[Failure]:
    """What somebody has done since, and would be lost if it was put back."""
    return [*overwritten(installation), *wrapped(installation), *kept_by_others(installation)]


def _refuse_any(problems: Iterable[Failure]) -> None:
    found = tuple(problems)
    if found:
        raise PatchError(*found)

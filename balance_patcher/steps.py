"""The steps of a transaction: rebase upstream's subclasses, bind an attribute, hook a function; and undo them.

Each step notes what it does before it does it, so that an interrupt between the two leaves nothing behind. What stands
somewhere is looked up beneath bindings that are being replaced (:mod:`balance_patcher.beneath`): what is noted as
having been there is upstream's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from . import beneath
from .bindings import Binding, Installation, Mark, named, retire, retired, runs
from .errors import refuse
from .origins import MISSING, genuine

#: Before the first step.
NOTHING: Mark = (0, 0, frozenset())


def class_steps(installation: Installation) -> Iterator[Callable[[], None]]:
    for base, ours in installation.built.classes.items():
        module, _, name = base.partition(":")
        yield partial(_rebase, installation, base)
        yield partial(bind, installation, importlib.import_module(module), name, ours)


def hook_steps(installation: Installation, feature: str) -> Iterator[Callable[[], None]]:
    for target in installation.hooks(feature):
        if target not in installation.hooked:
            yield partial(_hook, installation, target)


def _hook(installation: Installation, target: str) -> None:
    module, _, qualname = target.partition(":")
    *owners, name = qualname.split(".")  # of a module-level function there is no owner but the module
    found: Any = importlib.import_module(module)
    for part in owners:
        found = beneath.attribute(found, part)
    found = genuine(found)
    installation.hooked.add(target)
    if target in installation.built.added:
        _change(installation, found, name, MISSING, installation.built.added[target])
        return
    before = beneath.member(found, name)
    ours = _like(before, installation.built.functions[target])
    for owner in (found, *_actors(found, name, before)):
        bind(installation, owner, name, ours)


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
        and runs(beneath.member(cls, name), before)
    ]


def _like(before: object, function: Any) -> object:
    """The function in the kind of attribute that stood there: static, class or plain method."""
    return type(before)(function) if isinstance(before, (staticmethod, classmethod)) else function


def bind(installation: Installation, owner: Any, name: str, value: object) -> None:
    """Bind an attribute that is there."""
    _change(installation, owner, name, beneath.member(owner, name), value)


def _change(installation: Installation, owner: Any, name: str, before: object, value: object) -> None:
    # Noted before it is done: an interrupt between the two must not leave it behind.
    installation.bindings.append(Binding(owner, name, before, value))
    setattr(owner, name, value)


def _rebase(installation: Installation, base: str) -> None:
    """Let every loaded direct subclass of upstream's class derive from ours, or none of them.

    Not our own of before: a scheduler that is an object of one goes on as it is, with what its engine asked for.
    """
    upstream, ours = installation.upstream[base], installation.built.classes[base]
    above, old = installation.ours(base), beneath.replaced()
    resolved = []
    loaded: dict[int, type] = {id(each): each for each in _derived(upstream, *old)}
    for subclass in loaded.values():
        if subclass in above or retired(subclass):
            continue
        bases = beneath.bases(subclass)
        if not set(old).isdisjoint(bases):  # else it stays the very tuple, which is put back
            bases = tuple(upstream if cls in old else cls for cls in bases)
        before = {name: _resolved(subclass, name) for cls in above for name in vars(cls)}
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


def _derived(*classes: type) -> Iterator[type]:
    """The loaded direct subclasses of some classes."""
    for cls in classes:
        derived: list[type] = cls.__subclasses__()
        yield from derived


def _resolved(cls: type, name: str) -> type | None:
    """Whose attribute an object of the class has, or would have without what is being replaced."""
    old = beneath.replaced()
    return next((base for base in cls.__mro__ if base not in old and name in vars(base)), None)


def let_go(installation: Installation, heirs: Mapping[str, type] | None = None) -> None:
    """Give classes that were derived from ours while it was bound, by an import for example, another base.

    Args:
        installation: What is bound no more.
        heirs: What they derive from instead, by upstream's class; upstream's own without it.
    """
    rebased = {id(subclass) for subclass, _, _ in installation.rebased}
    for base, ours in installation.built.classes.items():
        heir = (heirs or {}).get(base, installation.upstream[base])
        for subclass in _derived(ours):
            if id(subclass) not in rebased and subclass not in installation.own:
                subclass.__bases__ = tuple(heir if cls is ours else cls for cls in subclass.__bases__)


def roll_back(installation: Installation, mark: Mark) -> None:
    """Undo every step since a mark, the last first; one that fails does not keep the others from being undone."""
    failed: list[BaseException] = []
    bindings, rebased, hooked = mark
    if not bindings:
        retire(installation)
    for binding in reversed(installation.bindings[bindings:]):
        try:
            put(binding.owner, binding.name, binding.before)
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


def uncover(gone: Sequence[Installation], installation: Installation) -> None:
    """Take out what only replaced installations have bound, when another is bound in their place."""
    bound = {(id(binding.owner), binding.name) for binding in installation.bindings}
    rebased = {id(subclass) for subclass, _, _ in installation.rebased}
    for holder in gone:
        for binding in reversed(holder.bindings):
            if (id(binding.owner), binding.name) not in bound:
                put(binding.owner, binding.name, binding.before)
        for subclass, bases, _ in reversed(holder.rebased):
            if id(subclass) not in rebased:
                subclass.__bases__ = bases
        let_go(holder, installation.built.classes)


def cover_again(gone: Sequence[Installation], installation: Installation) -> None:
    """Let replaced installations be bound again, and what was bound in their place not; upstream's is not seen."""
    values = {(id(b.owner), b.name): b.after for holder in gone for b in holder.bindings}
    bases = {id(subclass): after for holder in gone for subclass, _, after in holder.rebased}
    for binding in reversed(installation.bindings):
        put(binding.owner, binding.name, values.get((id(binding.owner), binding.name), binding.before))
    for subclass, before, _ in reversed(installation.rebased):
        subclass.__bases__ = bases.get(id(subclass), before)
    let_go(installation, {base: cls for holder in gone for base, cls in holder.built.classes.items()})
    retire(installation)
    for holder in gone:
        for binding in holder.bindings:
            put(binding.owner, binding.name, binding.after)
        for subclass, _, after in holder.rebased:
            subclass.__bases__ = after


def put(owner: Any, name: str, value: object) -> None:
    """Let an attribute be this again; ``MISSING`` for nothing."""
    if value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)

"""Bind what was built in this process, all or nothing, and put everything back exactly.

A feature is installed as a transaction: each step knows how to undo itself, the result is read
back from ``__dict__`` and ``__mro__`` (ABC caches make ``issubclass`` lie after a rebase), and a
failure at any step rolls all of them back. Installing twice is once.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .build import Built, build
from .errors import Failure, PatchError, refuse
from .feature import Feature
from .registry import find_feature

_LOCK = threading.RLock()
_INSTALLED: dict[str, Installation] = {}
# What Python itself puts on a class, or changes there, while it is used.
_PYTHONS_OWN = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__doc__"})


@dataclass(frozen=True)
class Binding:
    """One attribute that was changed: whose, what was there, what is there now."""

    owner: Any
    name: str
    before: object
    after: object

    @property
    def place(self) -> str:
        owner = self.owner
        prefix = owner.__name__ if not isinstance(owner, type) else f"{owner.__module__}:{owner.__qualname__}"
        return f"{prefix}.{self.name}"


@dataclass
class Installation:
    """A feature that is bound in this process.

    Attributes:
        built: What was built.
        bindings: Every attribute that was changed, in order.
        rebased: Every class whose bases were changed, with the bases that it had and those that it got.
        own: The attributes of each runtime class as it was built.
    """

    built: Built
    bindings: list[Binding] = field(default_factory=list)
    rebased: list[tuple[type, tuple[type, ...], tuple[type, ...]]] = field(default_factory=list)
    own: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = {base: dict(vars(ours)) for base, ours in self.built.classes.items()}

    @property
    def feature(self) -> Feature:
        return self.built.feature

    @property
    def digest(self) -> str:
        """Twelve hex digits over the texts that run: equal on ranks that run the same thing."""
        texts = [f"{name}\n{result.text}" for name, result in sorted(self.built.rewrites.items())]
        texts += [f"{p.delta.name} {p.status} {p.exports}" for p in self.built.plan.placements]
        return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def installed(name: str) -> Installation | None:
    """The installation of a feature in this process, if there is one."""
    return _INSTALLED.get(name)


def install(feature: Feature | str) -> Installation:
    """Build a feature and bind it in this process; a second call returns what is there.

    Raises:
        PatchError: With every reason; then nothing was changed.
    """
    with _LOCK:
        feature = find_feature(feature) if isinstance(feature, str) else feature
        done = _INSTALLED.get(feature.name)
        if done is not None:
            _refuse_any(overwritten(done))
            return done
        installation = Installation(build(feature))
        try:
            for step in _steps(installation):
                step()
            _refuse_any(overwritten(installation))
            _INSTALLED[feature.name] = installation
        except BaseException:
            _INSTALLED.pop(feature.name, None)
            _roll_back(installation)
            raise
        return installation


def uninstall(name: str) -> None:
    """Put everything back that :func:`install` changed: the identical objects and bases.

    Raises:
        PatchError: BP606 and BP607, if somebody has changed it since; then nothing is put back.
    """
    with _LOCK:
        installation = _INSTALLED.get(name)
        if installation is None:
            return
        _refuse_any([*overwritten(installation), *_kept_by_others(installation)])
        del _INSTALLED[name]
        _roll_back(installation)


def _refuse_any(problems: Iterable[Failure]) -> None:
    found = tuple(problems)
    if found:
        raise PatchError(*found)


# -- steps -----------------------------------------------------------------------------------


def _steps(installation: Installation) -> Iterator[Callable[[], None]]:
    built = installation.built
    for base, ours in built.classes.items():
        module, _, name = base.partition(":")
        upstream = ours.__bases__[0]
        yield lambda u=upstream, o=ours: _rebase(installation, u, o)  # type: ignore[misc]
        yield lambda m=module, n=name, o=ours: _bind(installation, importlib.import_module(m), n, o)  # type: ignore[misc]
    for target, function in built.functions.items():
        owner, _, name = target.rpartition(".")
        if owner in built.classes:
            continue
        module, _, qualname = owner.partition(":")
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
        value = _like(vars(found)[name], function)
        yield lambda f=found, n=name, v=value: _bind(installation, f, n, v)  # type: ignore[misc]


def _like(before: object, function: Any) -> object:
    """The function in the kind of attribute that stood there: static, class or plain method."""
    return type(before)(function) if isinstance(before, (staticmethod, classmethod)) else function


def _bind(installation: Installation, owner: Any, name: str, value: object) -> None:
    # Noted before it is done: an interrupt between the two must not leave it behind.
    installation.bindings.append(Binding(owner, name, vars(owner)[name], value))
    setattr(owner, name, value)


def _rebase(installation: Installation, upstream: type, ours: type) -> None:
    """Let every loaded direct subclass of upstream's class derive from ours, or none of them."""
    resolved = []
    loaded: list[type] = upstream.__subclasses__()
    for subclass in loaded:
        if subclass is ours:
            continue
        before = {name: _resolved(subclass, name) for name in vars(ours)}
        bases = subclass.__bases__
        after = tuple(ours if base is upstream else base for base in bases)
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
            if now is not owner and not (now is ours and (owner is None or owner in upstream.__mro__)):
                what = f"{subclass.__qualname__}.{name} came from {_named(owner)}, now from {_named(now)}"
                raise refuse("BP605", what, next="report this with the class")


def _resolved(cls: type, name: str) -> type | None:
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def _named(cls: type | None) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if cls is not None else "nowhere"


def _roll_back(installation: Installation) -> None:
    """Undo every step, the last first; one that fails does not keep the others from being undone."""
    failed: list[BaseException] = []
    for binding in reversed(installation.bindings):
        try:
            setattr(binding.owner, binding.name, binding.before)
        except BaseException as error:  # noqa: BLE001 - raised below, when the rest is back
            failed.append(error)
    for subclass, bases, _ in reversed(installation.rebased):
        try:
            if subclass.__bases__ != bases:
                subclass.__bases__ = bases
        except BaseException as error:  # noqa: BLE001 - raised below, when the rest is back
            failed.append(error)
    if failed:
        raise failed[0]


# -- reading back ----------------------------------------------------------------------------


def overwritten(installation: Installation) -> Iterator[Failure]:
    """Every place where what was bound is not what is there (BP606)."""
    for binding in installation.bindings:
        now = vars(binding.owner).get(binding.name)
        if now is not binding.after:
            yield _changed(installation, binding.place, now)
    for subclass, _, after in installation.rebased:
        if subclass.__bases__ != after:
            yield _changed(installation, f"the bases of {_named(subclass)}", subclass.__bases__[0])
    for base, ours in installation.built.classes.items():
        upstream = ours.__bases__[0] if ours.__bases__ else None
        loaded: list[type] = upstream.__subclasses__() if upstream else []
        for subclass in loaded:
            if subclass is not ours:
                yield _changed(installation, f"{base}: subclass {_named(subclass)}", upstream)
        for name, value in installation.own[base].items():
            if name not in _PYTHONS_OWN and vars(ours).get(name) is not value:
                yield _changed(installation, f"{_named(ours)}.{name}", vars(ours).get(name))


def _changed(installation: Installation, place: str, now: object) -> Failure:
    code = getattr(now, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    module = getattr(now, "__module__", type(now).__module__)
    what = f"{module}.{getattr(now, '__qualname__', type(now).__qualname__)}{where}"
    return Failure(
        "BP606", f"{place} is {what}, not what feature {installation.feature.name!r} put there",
        next="find out who changed it; import that patch before balance_patcher, or let it call through",
    )  # fmt: skip


def _kept_by_others(installation: Installation) -> Iterator[Failure]:
    """Attributes that others put on our classes and that taking them away would lose (BP607)."""
    for base, ours in installation.built.classes.items():
        for name in sorted(set(vars(ours)) - set(installation.own[base]) - _PYTHONS_OWN):
            yield Failure(
                "BP607", f"{_named(ours)}.{name} was put there by somebody else",
                next="take that patch out first; uninstalling now would lose it",
            )  # fmt: skip
        rebased = {id(subclass) for subclass, _, _ in installation.rebased}
        later: list[type] = ours.__subclasses__()
        for subclass in later:
            if id(subclass) not in rebased:
                yield Failure(
                    "BP607", f"{_named(subclass)} derives from {ours.__name__} since it was installed",
                    next="leave the feature installed, or take that class away first",
                )  # fmt: skip


def stale(installation: Installation) -> list[str]:
    """Names in loaded modules that still mean what was replaced: ``module.name``."""
    replaced = {id(b.before): b for b in installation.bindings if not isinstance(b.owner, type)}
    found = []
    for module_name, module in sorted(sys.modules.items()):
        for name, value in list(vars(module).items()) if module is not None else ():
            binding = replaced.get(id(value))
            if binding is not None and not (module is binding.owner and name == binding.name):
                found.append(f"{module_name}.{name}")
    return found

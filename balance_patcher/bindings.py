"""What is bound in this process, and reading it back: is what was put there still there, or still reached?

Read from ``__dict__`` and ``__mro__``: ABC caches make ``issubclass`` lie after a rebase.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from .beneath import attribute, replaced
from .build import Built
from .errors import Failure
from .feature import Feature
from .origins import MISSING, is_ours
from .proof import inner_functions

#: How many bindings and rebased classes there are, and which targets are hooked.
Mark = tuple[int, int, "frozenset[str]"]
# What Python itself puts on a class, or changes there, while it is used.
_PYTHONS_OWN = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__doc__"})


@dataclass(frozen=True)
class Binding:
    """One attribute that was changed: whose, what was there (``MISSING`` for nothing), what is there now."""

    owner: Any
    name: str
    before: object
    after: object

    @property
    def place(self) -> str:
        owner = self.owner
        prefix = owner.__name__ if not isinstance(owner, type) else f"{owner.__module__}:{owner.__qualname__}"
        return f"{prefix}.{self.name}"


@dataclass(repr=False)
class Installation:
    """A feature that is bound in this process.

    Attributes:
        built: What was built.
        bindings: Every attribute that was changed, in order.
        rebased: Every class whose bases were changed, with the bases that it had and those that it got.
        upstream: The live class that each runtime class extends.
        own: The attributes of each of our classes as it was built.
        hooked: The targets outside of the runtime classes whose functions are bound.
        stands_in: The module of a host project that was filled with it; empty if none was.
    """

    built: Built
    bindings: list[Binding] = field(default_factory=list)
    rebased: list[tuple[type, tuple[type, ...], tuple[type, ...]]] = field(default_factory=list)
    upstream: dict[str, type] = field(default_factory=dict)
    own: dict[type, dict[str, object]] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)
    stands_in: str = ""

    def __post_init__(self) -> None:
        for base in self.built.classes:
            module, _, name = base.partition(":")
            self.upstream[base] = attribute(importlib.import_module(module), name)
            self.own |= {cls: dict(vars(cls)) for cls in self.ours(base)}

    def __repr__(self) -> str:
        return f"<Installation of {self.feature.name}: {len(self.bindings)} bindings, digest {self.digest}>"

    @property
    def feature(self) -> Feature:
        return self.built.feature

    @property
    def digest(self) -> str:
        """Twelve hex digits over the texts that run: equal on ranks that run the same thing."""
        texts = [f"{name}\n{text}" for name, text in sorted(self.built.texts.items())]
        texts += [f"{p.delta.name} {p.status} {p.exports}" for p in self.built.plan.placements]
        return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:12]

    def ours(self, base: str) -> tuple[type, ...]:
        """The classes that were put above upstream's: the runtime class, and those that it joins."""
        mro = self.built.classes[base].__mro__
        upstream = self.upstream[base]
        return mro[: mro.index(upstream)] if upstream in mro else mro[:1]

    def hooks(self, feature: str) -> tuple[str, ...]:
        """The places outside of the runtime classes that a feature fills: what it adds, then the targets that it edits.

        The feature is the installed one or a part of it.
        """
        found = next((f for f in (self.feature, *self.feature.parts) if f.name == feature), None)
        if found is None:
            return ()
        added = tuple(place for addition in found.adds for place in addition.places if place in self.built.added)
        targets = [t for t in found.targets if t in self.built.functions]
        return (*added, *(t for t in targets if t.rpartition(".")[0] not in self.built.classes))

    @property
    def mark(self) -> Mark:
        """How far it is bound, so that a transaction can be rolled back to it."""
        return len(self.bindings), len(self.rebased), frozenset(self.hooked)


# Our classes that are bound no more. A scheduler may be an object of one, and it goes on deriving from upstream's.
_RETIRED: weakref.WeakSet[type] = weakref.WeakSet()


def retire(installation: Installation) -> None:
    """Note that the classes of an installation are bound no more."""
    _RETIRED.update(installation.own)


def retired(cls: type) -> bool:
    """Whether it is a class of ours that is bound no more, or is being replaced."""
    return cls in _RETIRED or cls in replaced()


# -- reading back ----------------------------------------------------------------------------


def named(cls: type | None) -> str:
    """How a class is called in a message."""
    return f"{cls.__module__}.{cls.__qualname__}" if cls is not None else "nowhere"


def runs(now: object, ours: object) -> bool:
    """Whether what stands in a place now is ours, or calls ours, or derives from it."""
    if now is ours:
        return True
    if isinstance(ours, type):
        return isinstance(now, type) and ours in now.__mro__
    function, there = _plain(ours), _plain(now)
    reached = there is function or any(inner is function for inner in inner_functions(there))
    return isinstance(function, FunctionType) and reached


def holders(cls: type, name: str, module: str) -> Iterator[type]:
    """The classes whose method of that name an object runs: the first that has one, and whom that calls by ``super()``.

    A call of the base's is taken for one only in upstream's own module, where the method was read with the target, and
    in our own classes.

    Args:
        cls: The object's class.
        name: The method's name.
        module: The module of the target.
    """
    for base in (base for base in cls.__mro__ if name in vars(base)):
        yield base
        method = _plain(vars(base)[name])
        names = {"super", name}
        if not isinstance(method, FunctionType) or not names.issubset(method.__code__.co_names):
            return
        if not is_ours(base) and (method.__globals__.get("__name__") != module or base.__module__ != module):
            return


def _plain(value: object) -> object:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _places(installation: Installation) -> Iterator[tuple[str, object, object]]:
    """Every place that was bound: its name, what was put there, what is there now."""
    for binding in installation.bindings:
        # Of an addition that is None, and that somebody has deleted, nothing else would tell.
        yield binding.place, binding.after, vars(binding.owner).get(binding.name, MISSING)
    for cls, own in installation.own.items():
        for name in own.keys() - _PYTHONS_OWN:
            yield f"{named(cls)}.{name}", own[name], vars(cls).get(name)


def overwritten(installation: Installation) -> Iterator[Failure]:
    """Every place where what was bound is neither there nor reached from what is there (BP606)."""
    for place, ours, now in _places(installation):
        if not runs(now, ours):
            yield _changed(installation, place, now)
    for subclass, _, after in installation.rebased:
        if subclass.__bases__ != after:
            yield _changed(installation, f"the bases of {named(subclass)}", subclass.__bases__[0])
    for base, upstream in installation.upstream.items():
        above = installation.ours(base)
        loaded: list[type] = upstream.__subclasses__()
        for subclass in loaded:
            if subclass not in above and not retired(subclass):
                yield _changed(installation, f"{base}: subclass {named(subclass)}", upstream)


def bypassed(installation: Installation) -> Iterator[Failure]:
    """What somebody has put on upstream's own class since: ours stands in front and never calls it (BP606)."""
    for target, before in installation.built.originals.items():
        base, _, name = target.rpartition(".")
        upstream = installation.upstream.get(base)
        if upstream is not None and vars(upstream).get(name) is not before:
            yield _changed(installation, target, vars(upstream).get(name))


def wrapped(installation: Installation) -> Iterator[Failure]:
    """Every place where somebody else's stands and reaches ours: it runs, and undoing would lose theirs (BP606)."""
    for place, ours, now in _places(installation):
        if now is not ours and runs(now, ours):
            yield _changed(installation, place, now)


def _changed(installation: Installation, place: str, now: object) -> Failure:
    if now is MISSING:
        return Failure(
            "BP606", f"{place}, which feature {installation.feature.name!r} put there, is gone",
            next="find out who deleted it; import that patch before balance_patcher",
        )  # fmt: skip
    code = getattr(_plain(now), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    module = getattr(now, "__module__", type(now).__module__)
    what = f"{module}.{getattr(now, '__qualname__', type(now).__qualname__)}{where}"
    return Failure(
        "BP606", f"{place} is {what}, not what feature {installation.feature.name!r} put there",
        next="find out who changed it; import that patch before balance_patcher, or let it call through",
    )  # fmt: skip


def kept_by_others(installation: Installation) -> Iterator[Failure]:
    """Attributes that others put on our classes and that taking them away would lose (BP607)."""
    rebased = {id(subclass) for subclass, _, _ in installation.rebased}
    for cls, own in installation.own.items():
        for name in sorted(set(vars(cls)) - set(own) - _PYTHONS_OWN):
            yield Failure(
                "BP607", f"{named(cls)}.{name} was put there by somebody else",
                next="take that patch out first; uninstalling now would lose it",
            )  # fmt: skip
        later: list[type] = cls.__subclasses__()
        for subclass in later:
            if id(subclass) not in rebased and subclass not in installation.own:
                yield Failure(
                    "BP607", f"{named(subclass)} derives from {cls.__name__} since it was installed",
                    next="leave the feature installed, or take that class away first",
                )  # fmt: skip


def stale(installation: Installation) -> list[str]:
    """Names in loaded modules that still mean what was replaced, a class or a function: ``module.name``."""
    real = [binding for binding in installation.bindings if binding.before is not MISSING]
    replaced = {id(before): b for b in real for before in (b.before, _plain(b.before))}
    found = []
    for module_name, module in sorted(sys.modules.items()):
        # What stands there need not be a module, other threads import while this looks, and of the values only
        # the identity is asked for: some warn when they are touched.
        for name, value in list((getattr(module, "__dict__", None) or {}).items()):
            binding = replaced.get(id(value))
            if binding is not None and not (module is binding.owner and name == binding.name):
                found.append(f"{module_name}.{name}")
    return found

"""What belongs to a feature besides its deltas: its class at run time, its invariants, when it runs.

Frozen declarations, checked when they are made, like those of :mod:`balance_patcher.delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .addition import Addition
from .delta import APART, TARGET, Anchor, Delta, Override, There, bad, check_target, declared_here, is_private, need_all
from .errors import refuse
from .measures import Measures
from .pattern import compile_pattern
from .standin import StandIn

#: The package whose classes are looked up by their names whenever an engine core builds its scheduler. Every other
#: object of vLLM is built before anything is decided, or by a name that its user has imported long before.
SCHEDULERS = "vllm.v1.core.sched"


@dataclass(frozen=True)
class RuntimeClass:
    """The subclass that carries a feature at run time: of vLLM's scheduler, or of a scheduler of another project.

    Attributes:
        name: Its name, ``BalanceScheduler``.
        base: ``module:Class`` of upstream; rewritten methods of that class go on ours. Of vLLM's classes only the
            schedulers can be extended; a method of any other is edited in its place, by a feature without a class.
        make: Called with upstream's live class; returns the new class, whose first base it is.
        provides: The instance attributes that it brings, for the check of attribute names.
        composed: It joins the classes of several features; each of them extends upstream's.
    """

    name: str
    base: str
    make: Callable[[type], type]
    provides: frozenset[str] = frozenset()
    composed: bool = False

    def __post_init__(self) -> None:
        if not TARGET.fullmatch(self.base):
            raise bad(f"the base of {self.name} is not written `module:Class`: {self.base!r}")
        if private := sorted(filter(is_private, self.provides)):
            raise bad(
                f"{self.name} provides {private[0]}, which would be another name in upstream's class than in ours"
            )
        if self.base.startswith("vllm.") and not self.base.startswith(f"{SCHEDULERS}."):
            raise bad(
                f"{self.name} extends {self.base}, and of vLLM's classes only those of {SCHEDULERS} can be "
                "extended: edit the method in its place, without a runtime class"
            )

    def extend(self, upstream: type) -> type:
        """The new class over upstream's live one.

        Raises:
            PatchError: BP002, if its first base is another; of a composed one its parts are looked at.
        """
        made = self.make(upstream)
        if not self.composed and (not made.__bases__ or made.__bases__[0] is not upstream):
            raise refuse(
                "BP002", f"{self.name}: its first base is not {self.base}",
                next="let `make` derive from what it is given",
            )  # fmt: skip
        return made


def _nobody(_: Any) -> str | None:
    return None


def _nothing(*_: Any) -> tuple[str, ...]:
    return ()


def _has_work(*_: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Enabling:
    """When a feature runs in an engine. Each function gets the live ``VllmConfig``.

    Attributes:
        asked: Who asks for it, in words for the log; ``None`` when nobody does. It may be asked for by name besides
            (:mod:`balance_patcher.byname`); a feature of another distribution only so, and this is not called.
        excluded: Why it must not run although it is asked for; empty when nothing stands against it. Gets the
            engine core that is being built, too.
        needless: Why it would do nothing; ``None`` when it has something to do. Gets the engine core, too.
        observed: What a finished engine shows of it, for the line in the log, by name; ``None`` when it does not run
            in that engine after all. Gets the engine core. Without it nothing is looked at.
        shared: What has to be equal on all data-parallel ranks besides the code, by name; gets the configuration
            and the feature's exports. What :attr:`observed` shows under the same name must be equal to it. Without
            it the ranks need not agree, and are not asked.
        started: Told of a finished engine in which it runs; gets the engine core, and its ranks
            (:class:`~balance_patcher.joining.Peers`).
        tells: What it tells of a running engine to ``status --pid``, by name, as JSON has it. Gets the engine core, in
            another thread, while that is at work: it reads, changes nothing, takes no lock, and is called when asked.
        example: An ``additional_config`` that asks for it; ``verify --live`` starts engine cores with it. Empty
            where it is asked for in another way.
        process: Where it is decided: as an ``engine`` core is built, or as a ``worker`` is, which may be in a process
            of its own. What is said here of an engine core is said of the worker then.
    """

    asked: Callable[[Any], str | None] = _nobody
    excluded: Callable[[Any, Any], tuple[str, ...]] = _nothing
    needless: Callable[[Any, Any], str | None] = _has_work
    observed: Callable[[Any], dict[str, object] | None] | None = None
    shared: Callable[[Any, Mapping[str, str]], dict[str, object]] | None = None
    started: Callable[[Any, Any], None] | None = None
    tells: Callable[[Any], Mapping[str, object]] | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    process: str = "engine"

    def __post_init__(self) -> None:
        if self.process not in ("engine", "worker"):
            raise bad(f"a feature is decided in an `engine` or a `worker`, not in {self.process!r}")
        if self.process == "worker" and self.shared is not None:
            raise bad("workers have no store in which ranks could agree: `shared` is for an engine's features")
        if self.process == "worker" and self.tells is not None:
            raise bad("only engine cores are asked how they stand: `tells` is for an engine's features")


@dataclass(frozen=True)
class CallShape:
    """A way in which a target must be callable: ``CallShape(TARGET, "throttle_prefills=True")``."""

    target: str
    arguments: str


@dataclass(frozen=True)
class CalledOnce:
    """In each turn of the target's outermost loop the hook is called exactly once on every path that ends it.

    Attributes:
        target: The function that holds the loop.
        call: A pattern of the call.
        idle: A pattern of the statement whose ``continue`` may skip the call.
        step: A pattern of the call that is made once before it; empty if there is none.
    """

    name: str
    target: str
    call: str
    idle: str
    step: str = ""

    def __post_init__(self) -> None:
        _check_invariant(self.name, self.target, self.call, self.idle, *filter(None, [self.step]))


@dataclass(frozen=True)
class AskedOnce:
    """Where upstream has the target, one call of it is all that its module has, and that stands in the caller.

    What overrides the target then decides there and nowhere else; and it does decide.

    Attributes:
        target: A method.
        caller: The function that calls it.
        call: The statement that does, and where it stands.
    """

    name: str
    target: str
    caller: str
    call: Anchor

    def __post_init__(self) -> None:
        _check_invariant(self.name, self.target)
        _check_invariant(self.name, self.caller)


@dataclass(frozen=True)
class Ordered:
    """In the target, ``first`` is executed on every path before ``then`` is.

    Attributes:
        first: A pattern, or several of which one stands there: upstream's shapes.
    """

    name: str
    target: str
    first: str | tuple[str, ...]
    then: str

    def __post_init__(self) -> None:
        _check_invariant(self.name, self.target, *self.firsts, self.then)

    @property
    def firsts(self) -> tuple[str, ...]:
        return (self.first,) if isinstance(self.first, str) else self.first


@dataclass(frozen=True)
class Sets:
    """The target assigns ``self.<attribute>``."""

    name: str
    target: str
    attribute: str

    def __post_init__(self) -> None:
        _check_invariant(self.name, self.target)


@dataclass(frozen=True)
class Agree:
    """In the rewritten target both patterns match exactly once and bind the named holes alike.

    Attributes:
        delta: Where it is named, there is nothing to compare unless that delta is applied. Of a target that it
            overrides, upstream's method and ours are looked at as one.
    """

    name: str
    target: str
    one: str
    other: str
    holes: tuple[str, ...]
    delta: str = ""

    def __post_init__(self) -> None:
        _check_invariant(self.name, self.target, self.one, self.other)
        missing = set(self.holes) - (compile_pattern(self.one).holes & compile_pattern(self.other).holes)
        if missing or not self.holes:
            raise bad(f"invariant {self.name!r} needs holes that both patterns bind: {sorted(missing)}")


@dataclass(frozen=True)
class Pure:
    """What a delta bound to a hole has no effect of its own: no walrus, await, yield or foreign call."""

    name: str
    delta: str
    hole: str
    calls: tuple[str, ...] = ("len",)


@dataclass(frozen=True)
class LaunchPath:
    """One way in which vLLM starts its engine cores, and what is known of a feature there.

    Attributes:
        name: What a person calls it.
        standing: ``tested`` with real engine cores, ``refused`` when it is asked for, or ``untested``.
        note: What was seen, or why it is refused or was not tested.
        test: The test that shows it, as pytest names it; empty where there is none.
    """

    name: str
    standing: str
    note: str
    test: str = ""

    def __post_init__(self) -> None:
        if self.standing not in ("tested", "refused", "untested") or (self.standing == "untested") != (not self.test):
            raise bad(f"launch path {self.name!r} is tested or refused, with its test, or untested without one")


Invariant = AskedOnce | CalledOnce | Ordered | Sets | Agree | Pure


@dataclass(frozen=True)
class Feature:
    """The deltas that only make sense together; all or nothing.

    Attributes:
        name: Short, for the command line.
        summary: One sentence.
        deltas: In declaration order.
        runtime: The subclass that carries it, if it needs one.
        invariants: What must hold upstream besides the anchors.
        call_shapes: How the rewritten targets must be callable.
        enabling: When it runs in an engine; without one it has to be asked for by name.
        parts: The features that it is composed of; empty for a declared one.
        stand_in: The module of a host project that it stands in for.
        launches: The ways in which engine cores are started, and what is known of it there.
        needs: Other features, by name, that must run where it runs, each with the reason.
        conflicts: Other features, by name, that must not run where it runs, each with the reason.
        after: Features whose edits come before its own where both edit at one point.
        distribution: The distribution that brings it; empty for one of this repository. The registry sets it.
        adds: Names that it gives to upstream's own modules and classes.
        measures: The figures that engine cores in which it runs send to the server.
    """

    name: str
    summary: str
    deltas: tuple[Delta, ...]
    runtime: RuntimeClass | None = None
    invariants: tuple[Invariant, ...] = ()
    call_shapes: tuple[CallShape, ...] = ()
    enabling: Enabling | None = None
    parts: tuple[Feature, ...] = ()
    stand_in: StandIn | None = None
    launches: tuple[LaunchPath, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    distribution: str = field(default="", compare=False)
    adds: tuple[Addition, ...] = ()
    measures: Measures | None = None

    def __post_init__(self) -> None:
        need_all("deltas", self.deltas, Delta)
        self._check_relations()
        if self.measures is not None and self.process == "worker":
            raise bad(f"feature {self.name!r} is decided in workers, and statistics are sent by engine cores")
        names = [delta.name for delta in self.deltas]
        strange = [name for name in names if not name.startswith(f"{self.name}.")]
        if strange and not self.parts:
            raise bad(f"delta {strange[0]!r} of feature {self.name!r} is not called `{self.name}.WHAT`")
        if not names or len(set(names)) < len(names):
            raise bad(f"feature {self.name!r} needs deltas with names of their own")
        need_all("adds", self.adds, Addition)
        places = [place for addition in self.adds for place in addition.places]
        if len(set(places)) < len(places):
            raise bad(f"feature {self.name!r} adds {max(places, key=places.count)} twice")
        known = set(names)
        for invariant in self.invariants:
            if isinstance(invariant, Pure):
                self._check_pure(invariant)
            if isinstance(invariant, Agree) and invariant.delta and invariant.delta not in known:
                raise bad(f"invariant {invariant.name!r} speaks of the unknown delta {invariant.delta!r}")
        if self.runtime is not None and self.process == "worker":
            raise bad(
                f"feature {self.name!r} is decided in workers, and {self.runtime.name} would be a scheduler, which "
                "they have not: edit the worker's methods in their place, without a runtime class"
            )
        base = self.runtime.base if self.runtime is not None else ""
        for delta in self.deltas:
            overrides = any(isinstance(edit, Override) for variant in delta.variants for edit in variant.edits)
            if overrides and delta.target.rpartition(".")[0] != base:
                raise bad(f"delta {delta.name!r} overrides {delta.target}, which no class of the feature extends")
        after = {delta.name: known.intersection(delta.after) - {delta.name} for delta in self.deltas}
        while ready := {name for name, waits in after.items() if not waits}:
            after = {name: waits - ready for name, waits in after.items() if name not in ready}
        if after:
            raise bad(f"feature {self.name!r}: {' and '.join(map(repr, sorted(after)))} come after each other")

    def _check_relations(self) -> None:
        need_all("after", self.after, str)
        for label, named in (("needs", self.needs), ("conflicts", self.conflicts)):
            reasons = named.values() if isinstance(named, Mapping) else [None]
            if not all(isinstance(why, str) and why.strip() for why in reasons):
                raise bad(f"`{label}` of feature {self.name!r} is {{'other': 'the reason'}}, not {named!r}")
        both = sorted(self.needs.keys() & self.conflicts.keys())
        if self.name in {*self.needs, *self.conflicts, *self.after} or both:
            what = f"needs {both[0]!r} and conflicts with it" if both else "speaks of itself as another"
            raise bad(f"feature {self.name!r} {what}")

    def _check_pure(self, invariant: Pure) -> None:
        variants = [variant for delta in self.deltas if delta.name == invariant.delta for variant in delta.variants]
        if not variants:
            raise bad(f"invariant {invariant.name!r} speaks of the unknown delta {invariant.delta!r}")
        if not any(variant.anchor and invariant.hole in variant.anchor.holes for variant in variants):
            raise bad(f"invariant {invariant.name!r}: {invariant.delta!r} does not bind ${invariant.hole}")

    @property
    def may_be_idle(self) -> bool:
        """Whether there is a known vLLM that needs nothing of it: each delta has a shape without edits."""
        return all(any(variant.status != "applied" for variant in delta.variants) for delta in self.deltas)

    @property
    def process(self) -> str:
        """Where it is decided, ``engine`` or ``worker``; one that nothing can ask for is the engine's."""
        return self.enabling.process if self.enabling is not None else "engine"

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of its deltas, each once, in order."""
        return tuple(dict.fromkeys(delta.target for delta in self.deltas))

    @property
    def edited(self) -> frozenset[str]:
        """Those of them whose text it edits; what is called through or overridden keeps its own."""
        texts = [d.target for d in self.deltas for v in d.variants for e in v.edits if not isinstance(e, APART)]
        return frozenset(texts)

    @property
    def read(self) -> frozenset[str]:
        """The functions of which its invariants and its variants say something."""
        spoken = [i for i in self.invariants if not isinstance(i, Pure)]
        callers = [i.caller for i in spoken if isinstance(i, AskedOnce)]
        given = [g.target for d in self.deltas for v in d.variants for g in v.given if isinstance(g, There)]
        return frozenset([*(i.target for i in spoken), *callers, *given])

    @property
    def declared(self) -> str:
        """The file that declares it, with the line of its first delta."""
        return self.deltas[0].declared

    @property
    def remove_when(self) -> tuple[str, ...]:
        """What must be true upstream so that it can go: all that its deltas wait for, each once."""
        return tuple(dict.fromkeys(delta.remove_when for delta in self.deltas))


@dataclass(frozen=True)
class Example:
    """A module before and after one delta, for tests and for readers."""

    delta: str
    before: str
    after: str


@dataclass(frozen=True)
class Refusal:
    """A module on which one delta is refused, with the id of the refusal."""

    delta: str
    before: str
    code: str


def _check_invariant(name: str, target: str, *patterns: str) -> None:
    """Compile its patterns, so that a bad one is an error where it is declared."""
    check_target(f"invariant {name!r}", target)
    for pattern in patterns:
        declared_here(partial(compile_pattern, pattern))

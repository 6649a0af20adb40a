"""What a status is made of: frozen data, with the same names in JSON.

The names are part of the public interface; ``schema`` in the JSON changes when one of them goes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .environment import EntryPoint, Switch, Vllm
from .errors import Failure, did_you_mean
from .feature import LaunchPath
from .origins import Origin


@dataclass(frozen=True)
class Armed:
    """Whether engine cores of this process ask for a decision.

    Attributes:
        armed: Whether they do.
        how: In words: by what, or why not.
        would_arm: Whether importing vLLM in a process of this environment would.
        why: By what, or why not.
        run_engine_core: Whether ours stands in for ``EngineCoreProc.run_engine_core``.
    """

    armed: bool
    how: str
    would_arm: bool
    why: str
    run_engine_core: bool


@dataclass(frozen=True)
class DeltaState:
    """One delta on the vLLM of this process: as it was installed, or as it would be.

    Attributes:
        status: ``applied``, ``absorbed``, ``not-applicable``, ``failed``; ``None`` where there is no vLLM.
        file: Upstream's file that it stands in, with its ``line``.
        declared: The line of the declaration.
        digest: Over the declaration: equal where the same is declared.
        remove_when: What must be true upstream so that it can go.
    """

    name: str
    target: str
    status: str | None
    variant: str | None
    file: str | None
    line: int | None
    declared: str
    digest: str
    remove_when: str


@dataclass(frozen=True)
class TargetState:
    """One upstream function that the feature's deltas speak of.

    Attributes:
        file: Upstream's file, with the ``line`` of the definition.
        digest: Over the definition's syntax tree: equal where the same upstream is installed.
        imported: Whether this process has imported its module.
        now: What stands there in this process.
        around: Who wraps upstream's function, or ours where it is installed, the outermost first.
    """

    name: str
    file: str | None
    line: int | None
    digest: str | None
    imported: bool
    now: Origin | None
    around: tuple[Origin, ...]


@dataclass(frozen=True)
class BindingState:
    """One attribute that was changed here.

    Attributes:
        place: Whose, ``module:Class.name``.
        before: What was there, and who had put it there.
        after: What we put there.
        now: What is there.
        state: ``ours``, ``wrapped`` (ours is reached through ``around``) or ``overwritten``.
        around: Who wraps it now, the outermost first.
    """

    place: str
    before: Origin
    after: Origin
    now: Origin | None
    state: str
    around: tuple[Origin, ...]


@dataclass(frozen=True)
class DecisionState:
    """One decision of this process.

    Attributes:
        engine: Which engine of the process it was for, counted from 0.
        active: Whether the feature runs in it.
        reason: Why, in words.
        failures: What stood against it, where it was asked for and could not be had.
    """

    engine: int
    active: bool
    reason: str
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class RankState:
    """One rank of the data-parallel group, as it called itself when the ranks agreed."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class TakeOverState:
    """What became of one module of another project that a feature stands in for.

    Attributes:
        feature: The feature.
        owner: Whose module it is.
        module: Its name, with the ``file`` that the project brings for it.
        ours: Whether ours stands in; else the project's own text runs.
        why: Why its own text runs; ``None`` where ours stands in.
    """

    feature: str
    owner: str
    module: str
    file: str | None
    ours: bool
    why: str | None


@dataclass(frozen=True)
class Relation:
    """What a feature says of another one, and why."""

    feature: str
    why: str


@dataclass(frozen=True)
class FeatureState:
    """One feature in this process.

    Attributes:
        distribution: Name and version of the distribution that brings it; empty for one of balance_patcher's own.
        declared: The file that declares it.
        digest: Over all of its declarations.
        armed: Whether an engine core of this process would ask for a decision on it.
        decisions: Those that were made here.
        installed: Whether all of it is bound here. Where it stands in for another project's module, its classes
            are bound before any engine asks for it, and are among the ``bindings`` then.
        running: The digest of the texts that are bound; equal on ranks that run the same.
        ranks: The ranks of the data-parallel group that agreed on it with this one; none where they need not.
        active: Whether it runs: decided ON for an engine of this process, bound, and read back as bound.
        why: Why it is active, or why not; one sentence.
        bindings: Every attribute that was changed.
        rebased: Every class that got other bases.
        stale: Names in loaded modules that still mean what was replaced.
        launches: The ways in which vLLM starts engine cores, and what is known of the feature there.
        needs: Features that must run where it runs.
        conflicts: Features that must not.
        after: Features whose edits come before its own.
        remove_when: What must be true upstream so that it can go; all of it.
        failures: What is wrong with it here.
    """

    name: str
    summary: str
    distribution: str
    declared: str
    digest: str
    armed: bool
    decisions: tuple[DecisionState, ...]
    installed: bool
    running: str | None
    ranks: tuple[RankState, ...]
    active: bool
    why: str
    deltas: tuple[DeltaState, ...]
    targets: tuple[TargetState, ...]
    bindings: tuple[BindingState, ...]
    rebased: tuple[str, ...]
    stale: tuple[str, ...]
    launches: tuple[LaunchPath, ...]
    needs: tuple[Relation, ...]
    conflicts: tuple[Relation, ...]
    after: tuple[str, ...]
    remove_when: tuple[str, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Status:
    """Everything that is to be known of balance_patcher in one process."""

    version: str
    python: str
    vllm: Vllm
    switches: tuple[Switch, ...]
    entry_points: tuple[EntryPoint, ...]
    armed: Armed
    takeovers: tuple[TakeOverState, ...]
    features: tuple[FeatureState, ...]
    failures: tuple[Failure, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the attributes by their names, and ``schema``, which changes when one of them does."""
        told = plain(self)
        return {"schema": 1, **told}

    def feature(self, name: str) -> FeatureState:
        """The state of one feature.

        Raises:
            KeyError: If there is none of that name.
        """
        for feature in self.features:
            if feature.name == name:
                return feature
        known = [feature.name for feature in self.features]
        raise KeyError(f"there is no feature {name!r}: {did_you_mean(name, known, f'use one of: {known}')}")


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses by their fields, failures as everywhere."""
    if isinstance(value, Failure):
        return value.as_dict()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)

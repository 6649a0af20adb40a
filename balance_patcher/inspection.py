"""What balance_patcher is doing in this process: declared, armed, decided, active, and why not.

Read back from the live objects, never from what was meant to be there. Nothing is imported for it: of a
vLLM that is not there yet, or half imported, it says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from . import __version__, launch, plugin, ranks
from .bindings import bypassed
from .decision import decisions
from .digests import declaration_digest, tree_digest
from .environment import EntryPoint, Vllm, entry_points, installed_vllm, switches, would_arm
from .errors import Failure, PatchError
from .feature import Feature
from .installation import Installation, bound, features_bound, installed, overwritten, stale
from .origins import Origin, attribute_at, imported, origin_of, wrapped_by
from .plan import Placement, make_plan
from .proof import reached
from .registry import all_broken, all_features
from .source import InstalledSource, Lane
from .states import (
    Armed,
    BindingState,
    DecisionState,
    DeltaState,
    FeatureState,
    RankState,
    Relation,
    Status,
    TakeOverState,
    TargetState,
)
from .takeover import take_overs
from .targets import Target

_T = TypeVar("_T")


def status() -> Status:
    """What is declared, armed, decided and active in this process; changes and imports nothing of vLLM."""
    failures = list(all_broken())
    none: tuple[EntryPoint, ...] = ()
    points = _tried(entry_points, none, failures)
    vllm = _tried(installed_vllm, Vllm(None, None, "vllm" in sys.modules), failures)
    armed = _tried(lambda: _armed(points), Armed(False, "unknown", False, "unknown", False), failures)
    lane = _tried(_lane, None, failures) if vllm.place else None
    unknown: tuple[TakeOverState, ...] = ()
    states = []
    declared = {feature.name: feature for feature in all_features()}
    by_hand = {feature.name: feature for feature in features_bound() if feature.name not in declared}
    for feature in (declared | by_hand).values():
        state = _tried(lambda f=feature: _feature(f, lane, armed), None, failures)  # type: ignore[misc]
        states += [state] if state is not None else []
    return Status(
        version=__version__,
        python=".".join(map(str, sys.version_info[:3])),
        vllm=vllm,
        switches=switches(),
        entry_points=points,
        armed=armed,
        takeovers=_tried(_takeovers, unknown, failures),
        features=tuple(states),
        failures=tuple(failures),
    )


def _tried(part: Callable[[], _T], otherwise: _T, failures: list[Failure]) -> _T:
    """One part of the picture; an odd process must not keep the others from being seen."""
    try:
        return part()
    except PatchError as error:
        failures += error.failures
    except Exception as error:  # noqa: BLE001 - what others did to their modules may do anything
        failures.append(Failure("BP599", f"{type(error).__name__}: {error}", "report this with the traceback"))
    return otherwise


def _lane() -> Lane:
    return Lane("installed", InstalledSource())


def _armed(points: tuple[EntryPoint, ...]) -> Armed:
    would, why = would_arm(points)
    there = imported(plugin.ENGINE.module) is not None
    armed = plugin.armed()
    if armed:
        name = f"{plugin.ENGINE.name}.__init__"
        how = f"{name} calls through us" if there else f"{name} will call through us when it is imported"
    else:
        how = "vLLM's engine core is imported, and nobody armed it" if there else "vLLM's engine core is not imported"
    return Armed(armed, how, would, why, launch.bound())


def _takeovers() -> tuple[TakeOverState, ...]:
    """What became of the modules of other projects that features stand in for, so far."""
    return tuple(
        TakeOverState(
            done.feature, done.stand_in.owner, done.stand_in.module, done.file, done.declined is None, done.declined
        )
        for done in take_overs()
    )


# -- one feature -----------------------------------------------------------------------------


def _feature(feature: Feature, lane: Lane | None, armed: Armed) -> FeatureState:
    failures: list[Failure] = []
    here = bound(feature.name)
    whole = installed(feature.name) is not None
    placements = _placements(feature, here, lane, failures)
    made = tuple(_decisions(feature.name))
    broken_here = [*overwritten(here), *bypassed(here)] if here is not None else []
    failures += broken_here
    active = whole and not broken_here and any(decision.active for decision in made)
    targets = [p.target for p in placements.values() if p.target is not None]
    return FeatureState(
        name=feature.name,
        summary=feature.summary,
        distribution=feature.distribution,
        declared=feature.deltas[0].declared.rpartition(":")[0],
        digest=declaration_digest(feature.deltas),
        armed=armed.armed,
        decisions=made,
        installed=whole,
        running=here.digest if here is not None else None,
        ranks=tuple(
            RankState(rank, said.host, said.pid) for rank, said in sorted(ranks.latest(feature.name).ranks.items())
        ),
        active=active,
        why=_why(here, made, broken_here, armed, whole=whole),
        deltas=tuple(_delta(delta, placements.get(delta.name)) for delta in feature.deltas),
        targets=tuple(_target(name, targets, here) for name in feature.targets),
        bindings=tuple(_bindings(here)) if here is not None else (),
        rebased=tuple(_rebased(here)) if here is not None else (),
        stale=tuple(stale(here)) if here is not None else (),
        launches=feature.launches,
        needs=tuple(Relation(name, why) for name, why in feature.needs.items()),
        conflicts=tuple(Relation(name, why) for name, why in feature.conflicts.items()),
        after=feature.after,
        remove_when=feature.remove_when,
        failures=tuple(failures),
    )


def _placements(
    feature: Feature, here: Installation | None, lane: Lane | None, failures: list[Failure]
) -> dict[str, Placement]:
    """Where its deltas were placed in this process, or would be."""
    names = {delta.name for delta in feature.deltas}
    found = {p.delta.name: p for p in here.built.plan.placements if p.delta.name in names} if here is not None else {}
    if lane is not None and names - set(found):
        try:
            plan = make_plan(lane, feature)
        except PatchError as error:
            failures += error.failures
            return found
        failures += plan.all_failures if here is None else []
        found = {p.delta.name: p for p in plan.placements} | found
    return found


def _decisions(name: str) -> Iterator[DecisionState]:
    # Engine cores and workers decide on other features: each is counted among its own kind.
    found = [decision for made in decisions() for decision in made if decision.feature == name]
    for engine, decision in enumerate(found):
        yield DecisionState(engine, decision.active, decision.reason, decision.failures)


def _why(
    here: Installation | None,
    made: tuple[DecisionState, ...],
    broken_here: list[Failure],
    armed: Armed,
    *,
    whole: bool,
) -> str:
    if broken_here:
        return f"not active: {len(broken_here)} of what was bound is not there any more"
    if made:
        return next((decision.reason for decision in reversed(made) if decision.active), made[-1].reason)
    if whole:
        return "not active: installed by hand, and no engine of this process has asked for it"
    if here is not None:
        return "not active: its classes stand in for a host's, and no engine of this process has asked for it"
    if armed.armed:
        return "not active: armed, and no engine core has been built in this process"
    return f"not active: {armed.how}"


def _delta(delta: Any, placement: Placement | None) -> DeltaState:
    target = placement.target if placement is not None else None
    return DeltaState(
        name=delta.name,
        target=delta.target,
        status=placement.status if placement is not None else None,
        variant=placement.variant.name if placement is not None and placement.variant is not None else None,
        file=target.text.display if target is not None else None,
        line=placement.line if placement is not None else None,
        declared=delta.declared,
        digest=declaration_digest([delta]),
        remove_when=delta.remove_when,
    )


def _target(name: str, targets: list[Target], here: Installation | None) -> TargetState:
    homes = here.built.homes if here is not None else {}
    target = next((target for target in targets if homes.get(target.name, target.name) == name), None)
    there, live = attribute_at(name)
    around: tuple[Origin, ...] | None = ()
    if there:
        ours = here.built.functions.get(name) if here is not None else None
        around = wrapped_by(live, ours) if ours is not None else _around_upstreams(name, live)
    return TargetState(
        name=name,
        file=target.text.display if target is not None else None,
        line=target.node.lineno if target is not None else None,
        digest=tree_digest(target.node) if target is not None else None,
        imported=there,
        now=origin_of(live) if there else None,
        around=around or (),
    )


def _around_upstreams(name: str, live: object) -> tuple[Origin, ...] | None:
    """What stands around the function that the target's own module defines."""
    module = name.partition(":")[0]
    for function, _ in reached(live):
        if function.__globals__.get("__name__") == module and function.__code__.co_name == name.rpartition(".")[2]:
            return wrapped_by(live, function)
    return ()


def _bindings(here: Installation) -> Iterator[BindingState]:
    for binding in here.bindings:
        now = vars(binding.owner).get(binding.name)
        yield _binding(binding.place, binding.before, binding.after, now)
    for base, ours in here.built.classes.items():
        for name, function in here.built.functions.items():
            owner, _, method = name.rpartition(".")
            if owner == base:
                place = f"{ours.__module__}:{ours.__qualname__}.{method}"
                yield _binding(place, here.built.originals[name], function, vars(ours).get(method))


def _binding(place: str, before: object, after: object, now: object) -> BindingState:
    around = wrapped_by(now, after)
    state = "overwritten" if around is None else "wrapped" if around else "ours"
    return BindingState(
        place=place,
        before=origin_of(before),
        after=origin_of(after),
        now=origin_of(now) if now is not None else None,
        state=state,
        around=around or (),
    )


def _rebased(here: Installation) -> Iterator[str]:
    for cls, before, after in here.rebased:
        names = [", ".join(base.__name__ for base in bases) for bases in (before, after)]
        yield f"{cls.__module__}.{cls.__qualname__}: {names[0]} → {names[1]}"

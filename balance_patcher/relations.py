"""What features say of each other: which they need, which they exclude, and in which order they are had."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .errors import Failure, did_you_mean
from .feature import Feature


def excluding(
    wanted: Sequence[Feature], sources: Mapping[str, str], beside: Sequence[tuple[Feature, str]] = ()
) -> dict[str, tuple[Failure, ...]]:
    """For each feature that excludes another one that is asked for too, why; neither can be had (BP709).

    Args:
        wanted: The features that are asked for.
        sources: Who asks for each.
        beside: Others that they meet, each with what is to be said of it: those of the engine's other processes,
            and what runs in this process for other engines. They are not this engine's to refuse.
    """
    found: dict[str, tuple[Failure, ...]] = {}
    for at, one in enumerate(wanted):
        for other in wanted[at + 1 :]:
            why = against(one, other)
            if why:
                who = f"asked for by {sources.get(other.name, 'a caller')}"
                failure = _excluded(one, other, f"are both asked for: {why}", sources, who)
                for name in (one.name, other.name):
                    found[name] = (*found.get(name, ()), failure)
        for other, said in beside:
            why = against(one, other)
            if why:
                both = "are both asked for" if said.startswith("asked for") else "would run side by side"
                found[one.name] = (
                    *found.get(one.name, ()),
                    _excluded(one, other, f"{both}: {why}", sources, said),
                )
    return found


def against(one: Feature, other: Feature) -> str | None:
    """Why two features exclude each other, whichever of them says so; ``None`` where they do not."""
    return one.conflicts.get(other.name) or other.conflicts.get(one.name)


def _excluded(one: Feature, other: Feature, what: str, sources: Mapping[str, str], said: str) -> Failure:
    rows = (
        ("one", f"{one.name!r}, declared {declared(one)}, asked for by {sources.get(one.name, 'a caller')}"),
        ("other", f"{other.name!r}, declared {declared(other)}, {said}"),
    )
    next_step = "switch one of the two off"
    if not said.startswith("asked for"):
        next_step = f"switch {one.name!r} off, or start this engine in a process of its own"
    return Failure("BP709", f"{one.name!r} and {other.name!r} {what}", next_step, rows)


def lacking(
    feature: Feature, there: Collection[str], wanted: Sequence[Feature], off: Mapping[str, str] | None = None
) -> tuple[Failure, ...]:
    """Which features it needs and has not (BP708).

    Args:
        feature: The feature that is to be had.
        there: The names of those that can be had with it.
        wanted: All that are asked for, to tell one that cannot be had from one that nobody asked for.
        off: Of others that are asked for and are off, why, as a clause.
    """
    asked = {other.name: other for other in wanted}
    failures = []
    for name, why in feature.needs.items():
        if name in there:
            continue
        other = asked.get(name)
        if other is not None and feature.name in _needed(other, asked):
            what, next_step = "the two need each other", "make one feature of the two"
        elif off and name in off:
            what, next_step = off[name], f"see what is said of {name!r}, or switch {feature.name!r} off"
        elif other is not None:
            what, next_step = "which is asked for and cannot run", f"see what is said of {name!r}"
        else:
            what, next_step = "which nobody asks for", f"ask for {name!r} too, or switch {feature.name!r} off"
        rows = (("declared", declared(feature)),)
        failures.append(Failure("BP708", f"{feature.name!r} needs {name!r}, {what}: {why}", next_step, rows))
    return tuple(failures)


def unknown(features: Sequence[Feature], known: Collection[str]) -> tuple[Failure, ...]:
    """What features say of others that there are not: a need that nobody can meet, and what looks like a slip.

    Another distribution's feature may be excluded, or come first, without being there.
    """
    failures = []
    for feature in features:
        rows = (("declared", declared(feature)),)
        for name, why in feature.needs.items():
            if name not in known:
                what = f"{feature.name!r} needs {name!r}, which there is not: {why}"
                next_step = did_you_mean(name, known, "install what brings it, or mend `needs`")
                failures.append(Failure("BP708", what, next_step, rows))
        for field, named in (("conflicts", feature.conflicts), ("after", feature.after)):
            for name in named:
                near = did_you_mean(name, known, "")
                if name not in known and near:
                    what = f"`{field}` of {feature.name!r} speaks of {name!r}, which there is not"
                    failures.append(Failure("BP003", what, f"{near}mend the declaration", rows))
    return tuple(failures)


def _needed(feature: Feature, asked: Mapping[str, Feature]) -> set[str]:
    """Everything that a feature needs, directly and through others."""
    found: set[str] = set()
    left = list(feature.needs)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += list(asked[name].needs) if name in asked else []
    return found


def needed_first(features: Sequence[Feature]) -> list[Feature]:
    """The features by name, but each after those that it needs."""
    left = sorted(features, key=lambda feature: feature.name)
    done: list[Feature] = []
    while left:
        waiting = {feature.name for feature in left}
        ready = next((f for f in left if not (f.needs.keys() & waiting - {f.name})), left[0])
        left.remove(ready)
        done.append(ready)
    return done


def groups_in_turn(groups: Sequence[Sequence[Feature]]) -> Iterator[list[Feature]]:
    """Groups of features, each after those that hold what its members need."""
    left = [needed_first(group) for group in groups]
    while left:
        waiting = {id(group): {feature.name for feature in group} for group in left}

        def waits(group: list[Feature], waiting: Mapping[int, set[str]] = waiting) -> bool:
            needs = {name for feature in group for name in feature.needs}
            return any(needs & names for key, names in waiting.items() if key != id(group))

        ready = next((group for group in left if not waits(group)), left[0])
        left.remove(ready)
        yield ready


def compatible(features: Sequence[Feature]) -> Iterator[tuple[Feature, ...]]:
    """The largest sets of features that do not exclude each other: what may run together."""
    names = {feature.name: feature for feature in features}
    apart_from = {name: {other.name for other in features if against(f, other)} for name, f in names.items()}

    def grow(chosen: frozenset[str], open_: frozenset[str], closed: frozenset[str]) -> Iterator[frozenset[str]]:
        if not open_ and not closed:
            yield chosen
        for name in sorted(open_):
            apart = apart_from[name] | {name}
            yield from grow(chosen | {name}, open_ - apart, closed - apart)
            open_, closed = open_ - {name}, closed | {name}

    for found in grow(frozenset(), frozenset(names), frozenset()):
        yield tuple(names[name] for name in sorted(found))


def declared(feature: Feature) -> str:
    """Where it is declared, and by which distribution if that is not ours."""
    return f"{feature.declared}{f' of {feature.distribution}' if feature.distribution else ''}"

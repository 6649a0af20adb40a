"""A change that needs somebody, with a proposal, or with why there is none. What was proposed before is remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .changed import Proposal, Transition
from .decoding import decoded
from .index import digest, maker_digest
from .proposing import Asked, Where, for_a_person, made

if TYPE_CHECKING:
    from .engine import Chosen, Engine


def proposed(engine: Engine, one: Chosen, change: Transition) -> Transition:
    """The change with what could be written instead."""
    delta = next((each for each in one.feature.deltas if each.name == change.delta), None)
    if delta is None or one.file is None:
        return replace(change, why_no_proposal=_why_none(one, change.subject))
    at = {column.ref.name: number for number, column in enumerate(engine.columns)}
    # The last good one and the first bad one; and both ends.
    asked = list(dict.fromkeys((at[change.before], at[change.after], 0, len(engine.columns) - 1)))
    names = [engine.columns[number].ref.name for number in asked]
    reads = [str(sorted(engine.look_of(one.feature.name, number).reads.items(), key=str)) for number in asked]
    key = digest([maker_digest(), one.subject().about, delta.name, change.was_variant or "", *names, *reads])
    found = engine.index.find(f"proposal {key}", lambda _: None)
    if found is None:
        where = [Where(engine.columns[number].ref.name, engine.columns[number].lane) for number in asked]
        folder, command = one.file.parent, _command(engine, one)
        found = made(Asked(one.feature, folder, delta, change.was_variant, where[0], where[1], where[2:], command))
        engine.index.keep(f"proposal {key}", {}, found)
    if isinstance(found, str):
        return replace(change, why_no_proposal=found)
    return replace(change, proposal=decoded(Proposal, found))


def _why_none(one: Chosen, subject: str) -> str:
    """Why nothing is proposed for what is no delta."""
    if one.file is None or all(each.name != subject for each in one.feature.invariants):
        return "it has no anchor that could be another one"
    return for_a_person(one.file.parent, one.feature, subject)


def _command(engine: Engine, one: Chosen) -> Callable[[str], str]:
    """What proves a proposal at a ref, once it is applied."""
    places = {column.ref.name: column.place for column in engine.columns}
    what = f"--deltas {one.file}" if one.loose else f"--feature {one.feature.name}"

    def command(ref: str) -> str:
        return f"python -m balance_patcher verify {what} {getattr(places[ref], 'spec', places[ref].name)}"

    return command

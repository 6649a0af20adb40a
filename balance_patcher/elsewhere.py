"""Whether what a variant goes with stands elsewhere in a lane, as the variant says.

A change of upstream's often has two parts in two functions. An anchor sees one of them; with the other missing it
is no shape that anybody has looked at, and refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .anchors import find_anchor
from .delta import Anchor, Delta, Nowhere, There, Variant
from .errors import Failure
from .pattern import compile_pattern
from .refusals import failed
from .source import Lane
from .targets import Target, absent, find_target, short


def unmet(lane: Lane, variant: Variant) -> list[str]:
    """What a variant says of other functions and is not so, each in a clause; empty where all of it is."""
    return [why for given in variant.given if (why := _why_not(lane, given))]


def _why_not(lane: Lane, given: There | Nowhere) -> str:
    name = given.target.partition(":")[2]
    if isinstance(given, Nowhere):
        return "" if absent(lane, given.target) else f"{name} is there: {_first_line(lane, given.target)}"
    found = find_target(lane, given.target)
    if isinstance(found, Failure):
        return f"{name} is not there"
    matches, misses = find_anchor(found, Anchor(given.pattern))
    if len(matches) == 1:
        return ""
    near = max(misses, key=lambda miss: miss.score, default=None)
    where = found.where(near.node if near else found.node)
    return f"{name} has `{compile_pattern(given.pattern)}` {len(matches)} times, not once: {where}"


def _first_line(lane: Lane, target: str) -> str:
    """Where the last part of a name stands first in its module."""
    text = lane.module(target.partition(":")[0])
    word = re.compile(rf"\b{target.rpartition('.')[2]}\b")
    lines = text.lines if text is not None else []
    at = next((number for number, line in enumerate(lines, 1) if word.search(line)), 1)
    return f"{short(text.display) if text is not None else target}:{at}"


def part_only(delta: Delta, target: Target, found: Sequence[tuple[Variant, int, list[str]]]) -> Failure:
    """Why a delta cannot be placed though anchors were found, by variant: line of the anchor, and what is not so."""
    rows = []
    for variant, line, reasons in found:
        anchor = f"`{variant.anchor.compiled}`" if variant.anchor is not None else "the function itself"
        rows.append(("anchor", f"{variant.name!r}: {anchor}   {short(target.text.display)}:{line}"))
        rows += [("but", reason) for reason in reasons]
    what = f"delta {delta.name!r} cannot be placed; nothing was patched."
    next_step = f"compare with upstream and add a variant to {delta.declared}"
    return failed(delta, target, "BP125", what, rows, found[0][1], next_step)

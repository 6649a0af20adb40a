"""A diff in which each changed line is marked with the feature that changes it, where several share a function.

The marks stand in a column of their own, so such a diff is for reading; that of one feature can be applied.
"""

from __future__ import annotations

import bisect
import difflib
import re
from collections.abc import Sequence

from .build import Compiled
from .delta import AddParameter
from .lines import physical_lines, starts
from .plan import Plan
from .rewrite import Rewrite
from .splice import MARKED, Splice

_CONTEXT = 3
_CHANGED = re.compile(r"(?P<names>\S+(?: \S+)*) {2,}(?P<sign>[+-])")
Marks = dict[int, list[str]]


def shared(plan: Plan, target: str) -> bool:
    """Whether deltas of several features stand on a target."""
    return sum(target in part.targets for part in plan.feature.parts) > 1


def marked_diff(plan: Plan, result: Rewrite) -> str:
    """The diff of a rewritten module against upstream's, each changed line behind the name of its feature."""
    theirs, ours = _marks(plan, result)
    head = (f"--- a/{result.original.path}", f"+++ b/{result.filename}")
    return _diff(head, result.original.lines, physical_lines(result.text), theirs, ours)


def marked_through(plan: Plan, item: Compiled) -> str:
    """The same of a function that calls upstream's; what surrounds the edits belongs to all of them."""
    lines = physical_lines(item.text)
    found = [MARKED.match(line.rstrip("\r\n")) for line in lines]
    names = [_features(plan, mark["delta"]) if mark else [] for mark in found]
    everyone = list(dict.fromkeys(name for each in names for name in each))
    ours = {at: each or everyone for at, each in enumerate(names)}
    return _diff(("--- /dev/null", f"+++ b/{item.filename}"), [], lines, {}, ours)


def sign_of(line: str) -> str:
    """What a line of such a diff says: ``+``, ``-``, or nothing."""
    found = _CHANGED.match(line)
    return found["sign"] if found else ""


def _diff(head: Sequence[str], old: Sequence[str], new: Sequence[str], theirs: Marks, ours: Marks) -> str:
    rows = [("", line) for line in head]
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT):
        first, last = group[0], group[-1]
        rows.append(("", f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@"))
        for tag, begin, end, our_begin, our_end in group:
            if tag == "equal":
                rows += [("", f" {line}") for line in old[begin:end]]
            else:
                rows += [(_told(theirs, at), f"-{old[at]}") for at in range(begin, end)]
                rows += [(_told(ours, at), f"+{new[at]}") for at in range(our_begin, our_end)]
    width = max(len(mark) for mark, _ in rows)
    return "".join(f"{mark:<{width}}  {line}".rstrip() + "\n" for mark, line in rows)


def _told(marks: Marks, at: int) -> str:
    return " ".join(dict.fromkeys(marks.get(at, ())))


def _range(first: int, last: int) -> str:
    """A range of lines as a unified diff writes it."""
    return str(first + 1) if last - first == 1 else f"{first + (last > first)},{last - first}"


def _marks(plan: Plan, result: Rewrite) -> tuple[Marks, Marks]:
    """The features of each line that goes and of each that comes, by its index in upstream's text and in ours."""
    before, after = starts(result.original.lines), starts(physical_lines(result.text))
    theirs: Marks = {}
    ours: Marks = {at: _features(plan, delta) for at, (_, delta) in enumerate(result.line_map) if delta is not None}
    shift = 0
    for splice in result.splices:
        names = _features(plan, splice.delta) if splice.whole else _declaring(plan, splice)
        if splice.end > splice.start or not splice.whole:
            last = max(splice.start, splice.end - 1)
            for at in range(bisect.bisect_right(before, splice.start) - 1, bisect.bisect_right(before, last)):
                theirs.setdefault(at, []).extend(names)
        if not splice.whole:
            ours.setdefault(bisect.bisect_right(after, splice.start + shift) - 1, []).extend(names)
        shift += len(splice.text) - (splice.end - splice.start)
    return theirs, ours


def _features(plan: Plan, delta: str) -> list[str]:
    """The feature that a delta belongs to; of an early return that several share, all of them: ``one+other``."""
    parts = [part.name for part in plan.feature.parts if any(own.name == delta for own in part.deltas)]
    return parts or [delta.rpartition(".")[0]]


def _declaring(plan: Plan, splice: Splice) -> list[str]:
    """The features that add a parameter; the delta's name is that of all who share the early return."""
    parts = []
    for part in plan.feature.parts:
        edits = [edit for delta in part.deltas for variant in delta.variants for edit in variant.edits]
        if any(isinstance(e, AddParameter) and f"{e.name}={e.default}" in splice.text for e in edits):
            parts.append(part.name)
    return parts or _features(plan, splice.delta)

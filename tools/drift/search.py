"""The first commit at which something is not what it was: found by halves, and proven at its parent.

Halving believes that what changed stayed changed. So the commit that is found is looked at with its parents: only if
each of them still has what was there before is it the one, and the report says whether that is so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .changed import FirstBad
from .matrix import Commit

State = TypeVar("State")


@dataclass(frozen=True)
class Line:
    """The commits between two columns, the oldest first; the last one is the later column's, or before it.

    Attributes:
        ref: The later column.
        start: The commit of the earlier column; empty for what is no commit.
        commits: Those behind it that touch what is asked about.
        every: Merged branches are a part of the history: a commit has all of its parents.
    """

    ref: str
    start: str
    commits: tuple[Commit, ...]
    every: bool = False


def first_bad(line: Line, was: State, state: Callable[[str], State | None]) -> FirstBad | None:
    """Where a state ended that was there before; ``None`` where no commit is known to have done it.

    Args:
        line: The commits.
        was: The state at the earlier column.
        state: The state at a commit, by its hash; ``None`` where it cannot be read.
    """
    commits: Sequence[Commit] = line.commits
    if not commits:
        return None
    low, high, tries = 0, len(commits) - 1, 0
    while low < high:
        middle = (low + high) // 2
        tries += 1
        if state(commits[middle].hash) == was:
            low = middle + 1
        else:
            high = middle
    found = commits[high]
    if not found.parents:
        return FirstBad(line.ref, found, "", "", proven=False, tries=tries)
    states = [state(parent) for parent in (found.parents if line.every else found.parents[:1])]
    tries += len(states)
    # What cannot be read may be as it was: then nobody knows whether it is this one.
    good = all(one == was for one in states) and state(found.hash) not in {was, None}
    worst = next((one for one in states if one != was), states[0])
    return FirstBad(line.ref, found, found.parents[0][:10], _said(worst), proven=good, tries=tries)


def _said(state: object) -> str:
    """A state in words."""
    if state is None:
        return "unreadable"
    if isinstance(state, tuple):
        return ", ".join(str(part) for part in state if part)
    return str(state)

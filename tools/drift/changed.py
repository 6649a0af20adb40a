"""What changed between two columns of a report, as data: the lines, the commit, and what could be written instead."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from balance_patcher.errors import Failure

from .kinds import Kind
from .matrix import Commit


@dataclass(frozen=True)
class Snippet:
    """Some lines of upstream's text: never trusted, always to be escaped.

    Attributes:
        file: A path inside the distribution.
        first: The number of the first line.
        lines: Without their ends.
        marked: The numbers of the lines that it is about.
    """

    file: str
    first: int
    lines: tuple[str, ...]
    marked: tuple[int, ...] = ()

    def around(self, count: int) -> Snippet:
        """No more than so many lines before and after the marked ones."""
        if not self.marked:
            return dataclasses.replace(self, lines=self.lines[: 2 * count + 1])
        start = max(self.first, min(self.marked) - count)
        stop = min(self.first + len(self.lines), max(self.marked) + count + 1)
        return dataclasses.replace(self, first=start, lines=self.lines[start - self.first : stop - self.first])


@dataclass(frozen=True)
class Difference:
    """Where upstream's tree first differs from what was there: ``test.ops[0]: == → >=``.

    Attributes:
        path: The field, from the statement down; empty for the node itself.
    """

    path: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"differs at {self.path or 'the node itself'}: {self.wanted} → {self.found}"


@dataclass(frozen=True)
class FirstBad:
    """Where something changed for the first time.

    Attributes:
        ref: The column in which it shows first.
        commit: The commit that did it; ``None`` for a release.
        parent: The commit (or the release) before it.
        parent_status: What was seen there: a status of the delta, or ``unreadable``.
        proven: That the parent itself was looked at, and was as it had been.
        tries: How many commits were looked at to find it.
    """

    ref: str
    commit: Commit | None
    parent: str
    parent_status: str
    proven: bool
    tries: int = 0


@dataclass(frozen=True)
class Proposal:
    """What could be written into ``deltas/`` instead. Nobody applies it but a person.

    Attributes:
        delta: The delta that it is for.
        file: The file that it changes, ``deltas/balance.py``.
        line: Where it changes it.
        pattern: The candidate anchor, for a reader.
        patch: A unified diff that ``git apply`` takes at the root of the checkout.
        holds_on: Refs on which the changed delta was tried, and its feature verifies.
        fails_on: Refs on which it was tried, and does not.
        command: What proves it once it is applied.
        note: What a person has to look at first; empty where there is nothing.
    """

    delta: str
    file: str
    line: int
    pattern: str
    patch: str
    holds_on: tuple[str, ...]
    fails_on: tuple[str, ...]
    command: str
    note: str = ""


@dataclass(frozen=True)
class Transition:
    """What changed for one delta (or for one invariant of a feature) between two neighbouring columns.

    Attributes:
        kind: :attr:`Kind.label`.
        subject: What it is about: a delta's name, an invariant's, a call shape, or an attribute.
        delta: The delta; ``None`` where it is about the feature.
        declared: The line of the declaration, ``deltas/balance.py:41``.
        target: ``module:Qual.name``, if there is one.
        before: The column before.
        after: The column in which it shows.
        was: The status before, with ``was_variant``.
        now: The status since, with ``now_variant``.
        action: Whether somebody has to edit something.
        explanation: One sentence on this very change.
        next: One next step.
        difference: Where the tree differs, if a near miss is there.
        first_bad: Where it came from.
        old: Upstream's lines before.
        new: Upstream's lines since; what came nearest, where the anchor is not found.
        proposal: A candidate, if there is one.
        why_no_proposal: Why there is none, where an edit is needed.
        failure: The refusal that ``verify`` gives, where there is one.
    """

    kind: str
    feature: str
    subject: str
    delta: str | None
    declared: str
    target: str | None
    before: str
    after: str
    was: str
    now: str
    action: bool
    explanation: str
    next: str
    was_variant: str | None = None
    now_variant: str | None = None
    difference: Difference | None = None
    first_bad: FirstBad | None = None
    old: Snippet | None = None
    new: Snippet | None = None
    proposal: Proposal | None = None
    why_no_proposal: str = ""
    failure: Failure | None = None

    @property
    def id(self) -> str:
        return Kind.of(self.kind).id


@dataclass(frozen=True)
class CalleeChange:
    """A function that a target calls, and that is another one since.

    Attributes:
        target: Who calls it.
        callee: ``module:Qual.name``.
        what: ``return``, ``parameters``, ``gone``, ``new``, ``moved``, ``decorators`` or ``body``.
        rank: How likely it matters to a copy of the target; 1 comes first.
        was: The signature or the return shape before, as text.
        now: The same since.
        explanation: One sentence.
        next: One next step.
        calls: Lines of the target, at the later column, that call it.
        before: The column before.
        after: The column in which it shows.
        first_bad: Where it came from.
        old: The head of the callee before.
        new: The same since.
    """

    target: str
    callee: str
    what: str
    rank: int
    was: str
    now: str
    explanation: str
    next: str
    calls: tuple[int, ...]
    before: str
    after: str
    first_bad: FirstBad | None = None
    old: Snippet | None = None
    new: Snippet | None = None

    @property
    def id(self) -> str:
        return Kind.CALLEE_CHANGED.id


@dataclass(frozen=True)
class Absorbed:
    """A delta that upstream has made needless.

    Attributes:
        since: The first column from which on it is absorbed in all.
        deletable: It is absorbed in every column of the report.
        remove_when: What the declaration waits for.
        file: ``deltas/balance.py``.
        lines: The lines to delete, as (first, last) pairs: the declaration, and where it is named.
        patch: The same as a unified diff; empty where it cannot be told.
        commit: The commit that absorbed it.
    """

    feature: str
    delta: str
    since: str
    deletable: bool
    remove_when: str
    file: str
    lines: tuple[tuple[int, int], ...]
    patch: str = ""
    commit: Commit | None = None

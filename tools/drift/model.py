"""A drift report: frozen data, with the same names in JSON, and nothing that looks anything up.

Who writes a report down gets a :class:`Report` and nothing else. The names are part of the public interface; ``schema``
changes when one of them goes. Places in the history are named by :attr:`Ref.name`, which is unique in a report.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from balance_patcher.errors import Failure, Outcome

from .kinds import Kind

SCHEMA = 1

#: Every status that a cell can have, the worst last.
STATUSES = ("applied", "absorbed", "not-applicable", "failed", "unreadable")


@dataclass(frozen=True)
class Commit:
    """One commit of upstream's.

    Attributes:
        hash: All of it.
        date: The author's, as ISO 8601.
        pull: The number of the pull request that its subject ends with, ``(#12345)``; ``None`` where it has none.
    """

    hash: str
    subject: str
    author: str
    date: str
    parents: tuple[str, ...] = ()
    pull: int | None = None

    @property
    def short(self) -> str:
        return self.hash[:10]


@dataclass(frozen=True)
class Ref:
    """One column of the matrix.

    Attributes:
        name: What a person calls it: a tag, a release, or ten digits of a hash.
        kind: ``since``, ``until``, ``tag``, ``commit`` or ``release``.
        judged: Whether the verdict speaks of it. In a history only the last one is; of releases each is.
        commit: ``None`` where there is no git.
        version: vLLM's, where the source says so.
    """

    name: str
    kind: str
    judged: bool
    commit: Commit | None = None
    version: str | None = None


@dataclass(frozen=True)
class DeltaInfo:
    """One declared delta; ``declared`` is ``deltas/balance.py:41``."""

    name: str
    target: str
    declared: str
    why: str
    upstream: str
    remove_when: str


@dataclass(frozen=True)
class FeatureInfo:
    """One row of the matrix, and the rows below it."""

    name: str
    summary: str
    declared: str
    deltas: tuple[DeltaInfo, ...]


@dataclass(frozen=True)
class DeltaCell:
    """One delta at one ref.

    Attributes:
        status: One of :data:`STATUSES`.
        file: Upstream's, as a path inside the distribution, with the ``line`` of the anchor.
        detail: What was bound, or why it failed; a few words.
    """

    delta: str
    status: str
    variant: str | None = None
    file: str | None = None
    line: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Cell:
    """One feature at one ref; what ``verify`` says there is in ``failures``."""

    feature: str
    ref: str
    status: str
    deltas: tuple[DeltaCell, ...] = ()
    failures: tuple[Failure, ...] = ()

    def delta(self, name: str) -> DeltaCell | None:
        return next((cell for cell in self.deltas if cell.delta == name), None)


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
        deletable: It is absorbed in every column of the report, so that it can go now.
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


@dataclass(frozen=True)
class BadCall:
    """A call in somebody's copy that no longer fits what is called.

    Attributes:
        line: Of the copy's file.
        call: The call as it is written.
        callee: ``module:Qual.name``.
        signature: What the callee takes now.
        why: Why it does not fit.
    """

    line: int
    call: str
    callee: str
    signature: str
    why: str


@dataclass(frozen=True)
class CopyCell:
    """A copy beside upstream's function at one ref.

    Attributes:
        status: ``equal``, ``drifted``, ``misfit`` (a call no longer fits), ``gone`` (upstream's function is not
            there) or ``unreadable``.
        added: Lines that only the copy has.
        removed: Lines that only upstream has.
        hunks: In how many places they differ.
        calls: Those that do not fit.
    """

    ref: str
    status: str
    added: int = 0
    removed: int = 0
    hunks: int = 0
    calls: tuple[BadCall, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Copy:
    """Somebody's verbatim copy of one of upstream's functions.

    Attributes:
        file: The file that holds it, with the ``line`` of its definition.
        qualname: What it is called there.
        target: What it is a copy of.
        cells: One for each column.
        base: The column that it is most like.
        diff: Against the last column, as a unified diff; both sides are other people's text.
    """

    file: str
    line: int
    qualname: str
    target: str
    cells: tuple[CopyCell, ...]
    base: str | None = None
    diff: str = ""


@dataclass(frozen=True)
class Counts:
    """How much was looked at.

    Attributes:
        commits: All between the ends.
        relevant: Those that touch a file that a feature reads.
        blobs: Different texts that were read.
        judged: Times that a feature was looked at, equal texts once.
        remembered: Of those, how many the index had.
        seconds: How long it took.
    """

    commits: int = 0
    relevant: int = 0
    blobs: int = 0
    judged: int = 0
    remembered: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The whole of it.

    Attributes:
        mode: ``git`` or ``releases``.
        source: The repository, or the distribution.
        refs: The columns, the oldest first.
        cells: One for each feature and ref.
        failures: What kept the report from being whole; with one of them it is never green.
        notes: What a reader should know of how it was made.
    """

    mode: str
    source: str
    refs: tuple[Ref, ...]
    features: tuple[FeatureInfo, ...]
    cells: tuple[Cell, ...]
    transitions: tuple[Transition, ...] = ()
    callees: tuple[CalleeChange, ...] = ()
    absorbed: tuple[Absorbed, ...] = ()
    copies: tuple[Copy, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Counts = Counts()
    schema: int = SCHEMA

    def ref(self, name: str) -> Ref:
        return next(ref for ref in self.refs if ref.name == name)

    def cell(self, feature: str, ref: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.feature, cell.ref) == (feature, ref)), None)

    def row(self, feature: str) -> tuple[Cell, ...]:
        return tuple(cell for ref in self.refs if (cell := self.cell(feature, ref.name)) is not None)

    def only(self, deltas: Collection[str]) -> Report:
        """The same with some deltas only; what speaks of a whole feature of theirs stays."""
        features = tuple(
            dataclasses.replace(feature, deltas=tuple(delta for delta in feature.deltas if delta.name in deltas))
            for feature in self.features
        )
        targets = {delta.target for feature in features for delta in feature.deltas}
        return dataclasses.replace(
            self,
            features=features,
            transitions=tuple(one for one in self.transitions if one.delta is None or one.delta in deltas),
            callees=tuple(one for one in self.callees if one.target in targets),
            absorbed=tuple(one for one in self.absorbed if one.delta in deltas),
        )

    @property
    def shown(self) -> tuple[Ref, ...]:
        """The columns that say something: the ends, tags and releases, and those in which something changed."""
        told = {change.after for change in self.transitions} | {change.after for change in self.callees}
        last = self.refs[-1:]
        return tuple(ref for ref in self.refs if ref.kind != "commit" or ref.name in told or ref in last)

    @property
    def actions(self) -> tuple[Transition, ...]:
        """What needs an edit and still does at the last ref, the first change first."""
        return tuple(change for change in self.transitions if change.action)

    @property
    def outcome(self) -> Outcome:
        """As ``verify`` counts: broken where a judged column fails; unknown where anything could not be looked at."""
        judged = {ref.name for ref in self.refs if ref.judged}
        found = [failure.outcome for failure in self.failures]
        for cell in self.cells:
            if cell.status == "unreadable":
                found.append(Outcome.UNKNOWN)
            elif cell.status == "failed" and cell.ref in judged:
                found.append(Outcome.BROKEN)
        found += [Outcome.BROKEN] * bool(self.actions)
        if not self.cells and not self.copies:
            found.append(Outcome.UNKNOWN)
        for copy in self.copies:
            found += [_COPIED[cell.status] for cell in copy.cells if cell.ref in judged or cell.status == "unreadable"]
        return Outcome.worst(found)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """One line for each feature, those that need somebody first."""
        return tuple(line for _, line in sorted(self._verdicts(), key=lambda item: item[0]))

    def _verdicts(self) -> Iterator[tuple[int, str]]:
        over = f"{self.refs[0].name}..{self.refs[-1].name}" if self.refs else "nothing"
        for feature in self.features:
            row = self.row(feature.name)
            judged = [cell for cell in row if self.ref(cell.ref).judged]
            bad = [cell for cell in judged if cell.status == "failed"]
            dark = [cell for cell in row if cell.status == "unreadable"]
            actions = [change for change in self.actions if change.feature == feature.name]
            for change in actions:
                yield 0, _action(change)
            if bad and not actions:
                yield 0, f"ACTION: {feature.name} does not apply at {', '.join(cell.ref for cell in bad)}"
            if dark:
                yield 1, f"{feature.name}: could not be looked at in {', '.join(cell.ref for cell in dark)}"
            if not bad and not dark and row:
                fits = sum(cell.status in STATUSES[:3] for cell in row[-1].deltas)
                edits = "no edit needed" if not actions else "see above"
                yield 2, f"{feature.name}: {fits}/{len(row[-1].deltas)} apply on {over}, {edits}"
        for copy in self.copies:
            yield from _copied(copy, [ref.name for ref in self.refs if ref.judged])


#: What a copy at a judged ref means for the exit status.
_COPIED = {
    "equal": Outcome.HOLDS,
    "drifted": Outcome.HOLDS,
    "misfit": Outcome.BROKEN,
    "gone": Outcome.BROKEN,
    "unreadable": Outcome.UNKNOWN,
}


def _copied(copy: Copy, judged: Collection[str]) -> Iterator[tuple[int, str]]:
    """What a copy needs at the last judged ref."""
    cells = [cell for cell in copy.cells if cell.ref in judged]
    if not cells:
        return
    cell = cells[-1]
    place = f"{copy.file}:{copy.line}"
    if cell.status == "misfit":
        count = f"{len(cell.calls)} calls do not fit" if len(cell.calls) > 1 else "1 call does not fit"
        yield 0, f"ACTION: edit {place} ({copy.qualname}: {count} in {cell.ref})"
    elif cell.status == "gone":
        yield 0, f"ACTION: edit {place} ({copy.qualname}: what it copies is not in {cell.ref})"
    elif cell.status == "unreadable":
        yield 1, f"{copy.qualname}: could not be looked at in {cell.ref}"


def _action(change: Transition) -> str:
    where = f"in {change.after}"
    if change.first_bad is not None and change.first_bad.commit is not None:
        commit = change.first_bad.commit
        where = f"in {commit.short}" + (f", vllm#{commit.pull}" if commit.pull is not None else "")
    what = change.subject if change.delta is None else "anchor"
    return f"ACTION: edit {change.declared} ({what} {change.kind} {where})"


# -- JSON ----------------------------------------------------------------------------------------

_T = TypeVar("_T")


def to_json(report: Report) -> str:
    """The report as JSON; :func:`from_json` makes the same report of it."""
    verdict = {"outcome": report.outcome.name.lower(), "verdicts": report.verdicts}
    return json.dumps({**dataclasses.asdict(report), **verdict}, ensure_ascii=False, indent=2)


def from_json(text: str) -> Report:
    """The report that :func:`to_json` wrote.

    Raises:
        ValueError: If it is no such text, or one of another schema.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"this is no drift report of schema {SCHEMA}")
    return decoded(Report, data)


def decoded(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """A frozen dataclass of what ``dataclasses.asdict`` made; what it does not know is left out."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name in data]  # type: ignore[arg-type]
    return kind(**{name: _value(hints[name], data[name]) for name in names})


def _value(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [one for one in get_args(hint) if one is not type(None)]
        return None if value is None else _value(inner[0], value)
    if origin is tuple:
        parts = get_args(hint)
        if parts[-1] is Ellipsis:
            return tuple(_value(parts[0], one) for one in value)
        return tuple(_value(part, one) for part, one in zip(parts, value, strict=True))
    if dataclasses.is_dataclass(hint):
        return decoded(hint, value)  # type: ignore[arg-type]
    return value

"""A drift report: frozen data, with the same names in JSON, and nothing that looks anything up.

Who writes a report down gets a :class:`Report` and nothing else. The names are part of the public interface; ``schema``
changes when one of them goes. Places in the history are named by :attr:`Ref.name`, which is unique in a report.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from balance_patcher.errors import Failure, Outcome

from .changed import Absorbed, CalleeChange, Transition
from .copied import COPIED, Copy, verdicts_of
from .matrix import STATUSES, Cell, FeatureInfo, Ref

SCHEMA = 1


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
        told |= {ref for feature in self.features for ref in _ends_of_the_dark(self.row(feature.name))}
        last = self.refs[-1:]
        return tuple(ref for ref in self.refs if ref.kind != "commit" or ref.name in told or ref in last)

    @property
    def troubles(self) -> tuple[Failure, ...]:
        """What kept it from being whole, and is told nowhere else: why the first column could not be read, as well."""
        rows = (self.row(feature.name)[:1] for feature in self.features)
        dark = [failure for row in rows for cell in row if cell.status == "unreadable" for failure in cell.failures]
        return tuple(dict.fromkeys((*self.failures, *dark)))

    @property
    def empty(self) -> str:
        """Why nothing can have changed; empty where something may have."""
        if self.mode != "git":
            return "one release has nothing to be compared with" if len(self.refs) == 1 else ""
        if not self.counts.commits:
            return "the range is empty: no commit lies between its ends"
        count = counted(self.counts.commits, "commit")
        return "" if self.counts.relevant else f"nothing can have changed: {count}, none of which touches what is read"

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
            found += [COPIED[cell.status] for cell in copy.cells if cell.ref in judged or cell.status == "unreadable"]
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
            for together in _together(actions):
                yield 0, _action(together)
            if bad and not actions:
                yield 0, f"ACTION: {feature.name} does not apply at {', '.join(cell.ref for cell in bad)}"
            if dark:
                yield 1, f"{feature.name}: could not be looked at in {', '.join(cell.ref for cell in dark)}"
            if not bad and not dark and row:
                fits = sum(cell.status in STATUSES[:3] for cell in row[-1].deltas)
                edits = "no edit needed" if not actions else "see above"
                yield 2, f"{feature.name}: {fits}/{len(row[-1].deltas)} apply on {over}, {edits}"
        for copy in self.copies:
            yield from verdicts_of(copy, [ref.name for ref in self.refs if ref.judged])


def _ends_of_the_dark(row: tuple[Cell, ...]) -> Iterator[str]:
    """The columns that could be read again."""
    for before, after in itertools.pairwise(row):
        if before.status == "unreadable" != after.status:
            yield after.ref


def _together(actions: Iterable[Transition]) -> list[list[Transition]]:
    """What one commit broke in one function is one thing to look at, in as many places of a declaration."""
    groups: dict[object, list[Transition]] = {}
    for change in actions:
        commit = change.first_bad.commit if change.first_bad is not None else None
        key = (change.target, commit.hash if commit is not None else change.after)
        groups.setdefault(key if change.delta is not None and change.target else id(change), []).append(change)
    return list(groups.values())


def _action(changes: Sequence[Transition]) -> str:
    first, *more = changes
    where = f"in {first.after}"
    if first.first_bad is not None and first.first_bad.commit is not None:
        commit = first.first_bad.commit
        where = f"in {commit.short}" + (f", vllm#{commit.pull}" if commit.pull is not None else "")
    what = first.subject if first.delta is None else "anchor"
    along = "".join(f", and with it {change.declared} ({change.subject} {change.kind})" for change in more)
    return f"ACTION: edit {first.declared} ({what} {first.kind} {where}){along}"


def counted(count: int, what: str) -> str:
    """``1 commit``, ``2 commits``."""
    return f"{count} {what}{'s' if count != 1 else ''}"

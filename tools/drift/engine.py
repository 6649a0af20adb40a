"""Make the report: look at every column, explain what changed between neighbours, and find the commit that did it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from balance_patcher.errors import Failure
from balance_patcher.feature import Feature

from .absorbing import absorbed
from .callees import Calls
from .changed import Absorbed, FirstBad, Transition
from .columns import Column, GitPlace, Place
from .drifted import callee_changes
from .explain import Side, delta_state, explain, fact_state, of_dark, reasons
from .index import Index
from .looks import CallsLook, Look
from .matrix import Cell, Commit, DeltaInfo, FeatureInfo
from .model import Counts, Report
from .proposed import proposed
from .search import Line, first_bad
from .work import Answer, Done, Job, Subject, do, subject_of_calls, subject_of_feature

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Chosen:
    """A feature with the file that declares it; ``loose`` where the registry does not know it."""

    feature: Feature
    file: Path | None
    loose: bool = False

    def subject(self) -> Subject:
        return subject_of_feature(self.feature, self.file if self.loose else None, self.file)


@dataclass
class Engine:
    """One run.

    Attributes:
        columns: The refs, the oldest first.
        chosen: The features.
        index: What is known.
        place: The place of a commit by its hash, to look between columns; ``None`` where there are no commits.
        between: The commits from one column (left out) to the next one that touch what a look has read.
        before: The columns that a column goes on from, by number: the one before it, and in a history with merged
            branches each that leads to one of its parents.
        every: Whether merged branches are a part of the history.
        processes: How many; 0 for as many as there are cores.
        tell: Told of progress.
    """

    columns: Sequence[Column]
    chosen: Sequence[Chosen]
    index: Index
    place: Callable[[str], Place] | None = None
    between: Callable[[int], tuple[Commit, ...]] = lambda _: ()
    before: Callable[[int], tuple[int, ...]] = lambda at: (at - 1,)
    every: bool = False
    processes: int = 0
    tell: Tell | None = None
    _looks: dict[tuple[str, int], Look] = field(default_factory=dict)
    _calls: dict[tuple[str, int], CallsLook] = field(default_factory=dict)
    _extra: dict[tuple[Subject, str], Answer] = field(default_factory=dict)
    _judged: int = 0

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target for one in self.chosen for target in one.feature.targets))

    def subjects(self) -> list[Subject]:
        return [*(one.subject() for one in self.chosen), *map(subject_of_calls, self.targets)]

    def look(self) -> set[str]:
        """Look at every column that was not looked at; returns every path that was read."""
        jobs: list[Job] = []
        wanted: list[tuple[Subject, int]] = []
        for subject in self.subjects():
            known = self._looks if subject.kind == "feature" else self._calls
            for at, column in enumerate(self.columns):
                if (subject.name, at) not in known:
                    jobs.append((len(wanted), subject, column.place))
                    wanted.append((subject, at))
        # Columns in their order, so that a process parses what neighbours share once.
        jobs.sort(key=lambda job: wanted[job[0]][1])
        self._take(do(jobs, self.index, processes=self.processes, tell=self.tell), wanted)
        answers: list[Answer] = [*self._looks.values(), *self._calls.values()]
        return {path for answer in answers for path in answer.reads}

    def restart(self, columns: Sequence[Column]) -> None:
        """Other columns: more commits turned out to matter. What was seen at the others is in the index."""
        self.columns = columns
        self._looks.clear()
        self._calls.clear()

    def _take(self, done: Done, wanted: Sequence[tuple[Subject, int]]) -> None:
        self._judged += done.judged
        for number, answer in done.answers.items():
            subject, at = wanted[number]
            if isinstance(answer, Look):
                self._looks[subject.name, at] = answer
            else:
                self._calls[subject.name, at] = answer

    # -- what changed ----------------------------------------------------------------------------

    def transitions(self) -> Iterator[Transition]:
        """Every change of every feature, with the commit that made it."""
        for one in self.chosen:
            found = [change for at in range(1, len(self.columns)) for change in self._changes(one, at)]
            for change in _marked(found, self._looks[one.feature.name, len(self.columns) - 1]):
                yield proposed(self, one, change) if change.action else change

    def _changes(self, one: Chosen, at: int) -> Iterator[Transition]:
        name = one.feature.name
        new = self._looks[name, at]
        dark = self._looks.get((name, self.before(at)[0]))
        if new.status == "unreadable" and dark is not None and dark.status == "unreadable":
            yield from self._darker(one, at)
            return
        before = self.last_seen(at, lambda i: self._looks[name, i].status != "unreadable")
        if before is None or _same(self._looks[name, before], new):
            return
        if any(_same(self._looks[name, other], new) for other in self.before(at)[1:]):
            return  # it came with a merged branch, and is told there
        sides = [Side(self.columns[i].ref.name, self._looks[name, i], self.columns[i].lane) for i in (before, at)]
        for change in explain(one.feature, sides[0], sides[1]):
            state = _state_of(change, one.feature)
            yield replace(change, first_bad=self.search(one.subject(), before, at, state) if state else self._here(at))

    def _darker(self, one: Chosen, at: int) -> Iterator[Transition]:
        """Another reason why a column cannot be read that stands behind one that could not be read either."""
        before = self.before(at)[0]
        sides = [
            Side(self.columns[i].ref.name, self._looks[one.feature.name, i], self.columns[i].lane) for i in (before, at)
        ]
        if reasons(sides[0].look) != reasons(sides[1].look):
            found = self._here(at)
            first_bad = replace(found, parent_status="unreadable") if found is not None else None
            yield replace(of_dark(one.feature, sides[0], sides[1]), first_bad=first_bad)

    def last_seen(self, at: int, seen: Callable[[int], bool]) -> int | None:
        """The last column before one that could be read; the one before, if none could."""
        first = self.before(at)[0]
        i = first
        while i >= 0 and not seen(i):
            i = self.before(i)[0] if i else -1
        return i if i >= 0 else (first if first >= 0 else None)

    def _here(self, at: int) -> FirstBad | None:
        ref = self.columns[at].ref
        if ref.commit is None:
            return FirstBad(ref.name, None, self.columns[at - 1].ref.name, "", proven=False)
        parent = ref.commit.parents[0][:10] if ref.commit.parents else ""
        return FirstBad(ref.name, ref.commit, parent, "", proven=False)

    def search(
        self, subject: Subject, before: int, at: int, state: Callable[[Answer], object | None]
    ) -> FirstBad | None:
        """The first commit behind a column at which a state is not what it was there."""
        old, new = self.columns[before].ref, self.columns[at].ref
        was = state(self._answer(subject, before))
        if was is None:
            return self._here(at)
        if self.place is None or new.commit is None:
            neighbours = before == self.before(at)[0]
            return FirstBad(new.name, None, old.name, _word(was), proven=neighbours)
        commits = tuple(dict.fromkeys(commit for i in range(before + 1, at + 1) for commit in self.between(i)))
        if self.every:
            commits = (new.commit,)
        start = old.commit.hash if old.commit else ""
        line = Line(new.name, start, commits or (new.commit,), self.every)
        return first_bad(line, was, lambda commit: state(self.at_commit(subject, commit)))

    def _answer(self, subject: Subject, at: int) -> Answer:
        return self._looks[subject.name, at] if subject.kind == "feature" else self._calls[subject.name, at]

    def at_commit(self, subject: Subject, commit: str) -> Answer:
        """A look at a commit that need not be a column."""
        for at, column in enumerate(self.columns):
            if column.ref.commit is not None and column.ref.commit.hash == commit:
                return self._answer(subject, at)
        if (subject, commit) not in self._extra:
            assert self.place is not None  # noqa: S101 - there are commits
            done = do([(0, subject, self.place(commit))], self.index, processes=1)
            self._judged += done.judged
            self._extra[subject, commit] = done.answers[0]
        return self._extra[subject, commit]

    # -- the whole of it -------------------------------------------------------------------------

    def report(self, mode: str, source: str, started: float, counts: Counts, notes: Sequence[str]) -> Report:
        """The report, once every column has been looked at.

        Args:
            mode: ``git`` or ``releases``.
            source: The repository, or the distribution.
            started: When, on the monotonic clock.
            counts: How many commits there are, and how many of them matter.
            notes: What a reader should know besides.
        """
        callees, transitions = tuple(callee_changes(self)), tuple(self.transitions())
        answers: list[Answer] = [*self._looks.values(), *self._calls.values()]
        blobs = {blob for answer in answers for blob in answer.reads.values() if blob}
        remembered = max(0, len(answers) + len(self._extra) - self._judged)
        report = Report(
            mode=mode,
            source=source,
            refs=tuple(column.ref for column in self.columns),
            features=tuple(info(one.feature) for one in self.chosen),
            cells=tuple(self._cells()),
            transitions=transitions,
            callees=callees,
            absorbed=tuple(self._absorbed(transitions)),
            failures=tuple(self._failures()),
            notes=(*notes, *self._notes()),
        )
        seconds = round(time.monotonic() - started, 3)
        counts = replace(counts, blobs=len(blobs), judged=self._judged, remembered=remembered, seconds=seconds)
        return replace(report, counts=counts)

    def _cells(self) -> Iterator[Cell]:
        for at, column in enumerate(self.columns):
            for one in self.chosen:
                look = self._looks[one.feature.name, at]
                yield Cell(one.feature.name, column.ref.name, look.status, look.deltas, look.failures)

    def _absorbed(self, changes: Sequence[Transition]) -> Iterator[Absorbed]:
        refs = [column.ref for column in self.columns]
        cells = list(self._cells())
        for one in self.chosen:
            row = [cell for cell in cells if cell.feature == one.feature.name]
            yield from absorbed(one.feature, one.file.parent if one.file else None, refs, row, changes)

    def _failures(self) -> Iterator[Failure]:
        """What kept callees from being looked at in a column in which the features themselves could be."""
        for target in self.targets:
            dark = [at for at in range(len(self.columns)) if self._calls[target, at].why]
            readable = [
                at
                for at in dark
                if all(self._looks[one.feature.name, at].status != "unreadable" for one in self.chosen)
            ]
            for at in readable[:1]:
                ref = self.columns[at].ref.name
                what = f"what {target} calls cannot be told in {ref}: {self._calls[target, at].why}"
                yield Failure("BP913", what, "mend what keeps it from being read, and look again")

    def _notes(self) -> Iterator[str]:
        last = len(self.columns) - 1
        for target in self.targets:
            calls = self._calls[target, last].calls
            if calls is not None and calls.unknown:
                shown = ", ".join(calls.unknown[:4]) + (" …" if len(calls.unknown) > 4 else "")  # noqa: PLR2004
                count = f"calls in {target} that were not followed: {len(calls.unknown)}"
                yield f"{count}, because the text does not say what is called: {shown}"

    def look_of(self, feature: str, at: int) -> Look:
        return self._looks[feature, at]

    def calls(self, target: str, at: int) -> Calls | None:
        return self._calls[target, at].calls


def _same(one: Look, other: Look) -> bool:
    """Whether two looks say the same; where lines stand does not count."""
    return one == other or (
        (one.status, one.failures, [(cell.status, cell.variant) for cell in one.deltas], one.facts)
        == (other.status, other.failures, [(cell.status, cell.variant) for cell in other.deltas], other.facts)
    )


def _state_of(change: Transition, feature: Feature) -> Callable[[Answer], object | None] | None:
    """What has to be equal for the change not to be there."""
    delta = next((one for one in feature.deltas if one.name == change.delta), None)
    if delta is not None:
        return lambda look: delta_state(look, delta) if isinstance(look, Look) else None
    if change.kind == "unreadable":
        return lambda look: ("readable" if look.status != "unreadable" else None) if isinstance(look, Look) else None
    if change.was in {"holds", "broken"}:
        return lambda look: fact_state(look, change.subject) if isinstance(look, Look) else None
    return lambda look: (look.status, tuple(f.code for f in look.failures)) if isinstance(look, Look) else None


def _word(state: object) -> str:
    return str(state[0]) if isinstance(state, tuple) and state else str(state)


def _marked(changes: list[Transition], last: Look) -> Iterator[Transition]:
    """The changes, with those marked that need somebody: what they broke is broken in the last column."""
    for at, change in enumerate(changes):
        later = [one for one in changes[at + 1 :] if (one.subject, one.delta) == (change.subject, change.delta)]
        mended = any(one.now not in {"failed", "broken", "unreadable"} for one in later)
        bad = change.now in {"failed", "broken"} and change.was not in {"failed", "broken"}
        if change.delta is None and change.was not in {"holds", "broken"}:
            bad = change.now == "failed" and last.status == "failed" and change.kind != "unreadable"
        yield replace(change, action=bad and not mended)


def info(feature: Feature) -> FeatureInfo:
    """A feature's row."""
    deltas = tuple(
        DeltaInfo(delta.name, delta.target, delta.declared, delta.why, delta.upstream, delta.remove_when)
        for delta in feature.deltas
    )
    return FeatureInfo(feature.name, feature.summary, feature.declared, deltas)


def git_place(repo: Path) -> Callable[[str], GitPlace]:
    """The place of a commit of a repository."""
    return lambda commit: GitPlace(repo, commit, f"git:{repo}@{commit[:10]}")

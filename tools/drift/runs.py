"""The two ways to make a report: along a repository's history, and over released versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .columns import Column
from .engine import Chosen, Engine, Tell, git_place
from .history import Ends, History
from .index import Index
from .matrix import Commit
from .model import Counts, Report
from .releases import DISTRIBUTION, fetch, release_columns, released
from .work import seldom_collected

_ROUNDS = 8  # each brings files that only a commit in between reads


@dataclass(frozen=True)
class Options:
    """What a person may choose.

    Attributes:
        every: Commits of merged branches too, and not only first parents.
        tags: Only the ends and tags are columns; the commits between are searched by halves.
        processes: How many; 0 for as many as there are cores.
    """

    every: bool = False
    tags: bool = False
    processes: int = 0


@dataclass(frozen=True)
class Run:
    """A finished run: the report, and the columns for who wants to look at more of their texts."""

    report: Report
    columns: Sequence[Column]


@seldom_collected()
def run_git(
    repo: Path,
    since: str,
    until: str,
    chosen: Sequence[Chosen],
    index: Index,
    options: Options,
    tell: Tell | None = None,
) -> Run:
    """The report of a history.

    Raises:
        PatchError: BP506, BP507, BP514, BP920, BP921: what keeps the history from being read.
    """
    started = time.monotonic()
    with History(repo, every=options.every) as history:
        ends = history.ends(since, until)
        tags, line = history.tags(), history.line(ends)
        first, last = _ends(history, ends, tags)
        engine = Engine((first, last) if first is not last else (last,), chosen, index, git_place(repo))
        engine.processes, engine.tell = options.processes, tell
        paths, relevant = engine.look(), list[Commit]()
        for _ in range(_ROUNDS):
            relevant = history.touching(ends, sorted(paths))
            columns = _columns(history, ends, [first, last], [] if options.tags else relevant, tags, line)
            engine.restart(columns)
            seen = paths | engine.look()
            if seen == paths:
                break
            paths = seen
        at = {name: number for number, name in enumerate(line)}
        places = [at.get(column.ref.commit.hash, -1) if column.ref.commit else -1 for column in engine.columns]
        engine.between = lambda i: tuple(one for one in relevant if places[i - 1] < at[one.hash] <= places[i])
        engine.every = options.every
        if options.every and not options.tags:
            engine.before = _before(engine.columns, history.parents(ends))
        counts = Counts(commits=len(line), relevant=len(relevant))
        return Run(engine.report("git", str(repo), started, counts, _notes(ends, options)), engine.columns)


def _ends(history: History, ends: Ends, tags: dict[str, str]) -> tuple[Column, Column]:
    named = [(ends.since, ends.since_name, "since"), (ends.until, ends.until_name, "until")]
    first, last = (
        history.column(history.commit(commit), name, kind, tag=tags.get(commit, ""), judged=kind == "until")
        for commit, name, kind in named
    )
    return (last, last) if ends.since == ends.until else (first, last)


def _columns(
    history: History,
    ends: Ends,
    fixed: Sequence[Column],
    relevant: Sequence[Commit],
    tags: dict[str, str],
    line: Sequence[str],
) -> list[Column]:
    """The ends, the place where they parted, every tag between, and the commits that matter; the oldest first."""
    first, last = fixed
    if first is last:
        return [last]
    known = {commit.hash: commit for commit in relevant}
    found = [first]
    if ends.fork is not None:
        commit = history.commit(ends.fork)
        tag = tags.get(ends.fork, "")
        found.append(history.column(commit, tag or commit.short, "commit", tag=tag))
    for name in line:
        if name != ends.until and (name in known or name in tags):
            commit = known.get(name) or history.commit(name)
            tag = tags.get(name, "")
            found.append(history.column(commit, tag or commit.short, "tag" if tag else "commit", tag=tag))
    names = {first.ref.name, last.ref.name}
    return [first, *(column for column in found[1:] if column.ref.name not in names), last]


def _before(columns: Sequence[Column], parents: dict[str, tuple[str, ...]]) -> Callable[[int], tuple[int, ...]]:
    """For each column those that lead to its parents: along first parents, what is no column has the same texts."""
    at = {column.ref.commit.hash: number for number, column in enumerate(columns) if column.ref.commit is not None}

    def leading(commit: str) -> int:
        while commit not in at:
            above = parents.get(commit, ())
            if not above:
                return 0
            commit = above[0]
        return at[commit]

    found: list[tuple[int, ...]] = []
    for number, column in enumerate(columns):
        own = parents.get(column.ref.commit.hash, ()) if column.ref.commit is not None else ()
        found.append(tuple(leading(parent) for parent in own) or (number - 1,))
    return lambda number: found[number]


def _notes(ends: Ends, options: Options) -> list[str]:
    notes = []
    if ends.fork is not None:
        notes.append(
            f"{ends.since_name} is on a branch of its own, which left at {ends.fork[:10]}: "
            "what was put only there shows as a change between these two"
        )
    if options.tags:
        notes.append("only the ends and tags were looked at; what broke and was mended between two of them is not told")
    return notes


@seldom_collected()
def run_releases(text: str, chosen: Sequence[Chosen], index: Index, options: Options, tell: Tell | None = None) -> Run:
    """The report over released versions.

    Raises:
        PatchError: BP501, BP502, BP921, BP922.
    """
    started = time.monotonic()
    columns = release_columns(released(text))
    engine = Engine(columns, chosen, index, processes=options.processes, tell=tell)
    modules = dict.fromkeys(target.partition(":")[0] for target in engine.targets)
    fetch(columns, ["vllm/_version.py", *(f"{module.replace('.', '/')}.py" for module in modules)])
    engine.look()
    return Run(engine.report("releases", DISTRIBUTION, started, Counts(), []), columns)

"""The matrix of a report: its columns, its rows, and what was seen where they meet."""

from __future__ import annotations

from dataclasses import dataclass

from balance_patcher.errors import Failure

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

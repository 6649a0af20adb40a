"""Somebody's copies in a report, each beside every column, and what a copy means for the exit status."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from balance_patcher.errors import Outcome


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


#: What a copy at a judged ref means for the exit status.
COPIED = {
    "equal": Outcome.HOLDS,
    "drifted": Outcome.HOLDS,
    "misfit": Outcome.BROKEN,
    "gone": Outcome.BROKEN,
    "unreadable": Outcome.UNKNOWN,
}


def verdicts_of(copy: Copy, judged: Collection[str]) -> Iterator[tuple[int, str]]:
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

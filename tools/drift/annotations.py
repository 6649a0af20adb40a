"""The report as GitHub workflow commands: each finding on the line that declares the delta it is about.

An error is what somebody has to edit, or what could not be looked at; a warning is what only hurts copies; a notice is
what may go. GitHub shows the first ten of each, so the ones that count come first.
"""

from __future__ import annotations

from collections.abc import Iterator

from balance_patcher.annotating import command
from balance_patcher.errors import CATALOGUE, Outcome

from .changed import Absorbed, CalleeChange, Transition
from .copied import Copy
from .kinds import Kind
from .model import Report

_LOUD = 2  # a changed body is no news: only what a caller can see is


def as_github(report: Report) -> str:
    """One command a line."""
    return "\n".join(_commands(report))


def _commands(report: Report) -> Iterator[str]:
    for change in report.actions:
        yield _change("error", change)
    for failure in report.troubles:
        place = f"{failure.file or ''}:{failure.line or ''}"
        yield command("error", place, f"{failure.code} {failure.title}", str(failure))
    for change in report.transitions:
        if change.kind == Kind.UNREADABLE.label:
            yield _change("error", change)
    for copy in report.copies:
        yield from _copy(copy, report)
    for callee in sorted(report.callees, key=lambda one: one.rank):
        if callee.rank <= _LOUD:
            yield _callee(callee, report)
    yield from map(_absorbed, report.absorbed)
    level = "notice" if report.outcome is Outcome.HOLDS else "error"
    verdict = "\n".join((*report.verdicts, *filter(None, [report.empty]))) or "nothing was looked at"
    yield command(level, "", "drift report", verdict)


def _change(level: str, change: Transition) -> str:
    lines = [f"{change.explanation}."]
    if change.first_bad is not None:
        commit = change.first_bad.commit
        pull = f" (vllm#{commit.pull})" if commit is not None and commit.pull is not None else ""
        lines.append(
            f"first in {commit.short}{pull}, {commit.date[:10]}: {commit.subject}"
            if commit is not None
            else f"first in {change.first_bad.ref}"
        )
    lines.append(f"next: {change.next}")
    if change.proposal is not None:
        lines.append(f"proof: {change.proposal.command}")
    return command(level, change.declared, _title(change.id, change.subject), "\n".join(lines))


def _callee(change: CalleeChange, report: Report) -> str:
    deltas = [delta for feature in report.features for delta in feature.deltas if delta.target == change.target]
    text = f"{change.explanation}: {change.was} → {change.now}, since {change.after}\nnext: {change.next}"
    return command(
        "warning", deltas[0].declared if deltas else "", _title(change.id, change.callee.partition(":")[2]), text
    )


def _absorbed(found: Absorbed) -> str:
    first = found.lines[0][0] if found.lines else 1
    lines = ", ".join(f"{start}-{end}" for start, end in found.lines)
    every = "all refs here have it; " if found.deletable else ""
    when = f"{every}when {found.remove_when}, delete these lines"
    return command(
        "notice", f"{found.file}:{first}", _title(Kind.ABSORBED.id, found.delta),
        f"absorbed since {found.since}\nnext: {when}: {found.file} {lines}",
    )  # fmt: skip


def _copy(copy: Copy, report: Report) -> Iterator[str]:
    judged = {ref.name for ref in report.refs if ref.judged}
    for cell in copy.cells:
        if cell.ref not in judged and cell.status != "unreadable":
            continue
        for call in cell.calls:
            text = f"{call.call}\n{call.why}, at {cell.ref}\nnow: {call.signature or 'not there'}"
            yield command("error", f"{copy.file}:{call.line}", _title(Kind.CALLEE_CHANGED.id, copy.qualname), text)
        if cell.status in {"gone", "unreadable"}:
            kind = Kind.TARGET_GONE if cell.status == "gone" else Kind.UNREADABLE
            yield command(
                "error", f"{copy.file}:{copy.line}", _title(kind.id, copy.qualname), f"{cell.ref}: {cell.why}"
            )


def _title(number: str, subject: str) -> str:
    return f"{number} {CATALOGUE[number][0]} ({subject})"

"""The report for a person at a terminal, as plain text: the verdict first, then what is behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from .changed import Absorbed, CalleeChange, FirstBad, Snippet, Transition
from .copied import Copy
from .kinds import Kind
from .matrix import Commit
from .model import Report, counted

#: A letter for each status, so that a row of the matrix is a word.
LETTERS = {"applied": "+", "absorbed": "=", "not-applicable": ".", "failed": "X", "unreadable": "?"}
_WIDTH = 118
_SUBJECT = 62  # characters of a commit's subject, so that its line is not wrapped
_COLUMNS = 24  # so many columns are named
_BODIES = 8  # so many callees whose body alone changed are named


def as_text(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from report.verdicts
    if report.empty:
        yield report.empty
    yield ""
    yield from _matrix(report)
    for failure in report.troubles:
        yield ""
        yield str(failure)
    for change in report.transitions:
        yield ""
        yield from _transition(change)
    yield from _callees(report.callees)
    for absorbed in report.absorbed:
        yield ""
        yield from _absorbed(absorbed)
    for copy in report.copies:
        yield ""
        yield from _copy(copy)
    yield ""
    for note in report.notes:
        yield from textwrap.wrap(f"note: {note}", _WIDTH, subsequent_indent="      ")
    counts = report.counts
    if report.mode == "git":
        touch = "touches" if counts.relevant == 1 else "touch"
        yield f"{counted(counts.commits, 'commit')}, {counts.relevant} of them {touch} a file that is read"
    looks = f"{counted(counts.judged, 'look')} at {counted(counts.blobs, 'text')}, {counts.remembered} more remembered"
    yield f"{looks}; {counts.seconds:.1f} s"


def _matrix(report: Report) -> Iterator[str]:
    """A letter for each feature and column; columns in which nothing changed are left out."""
    shown = report.shown
    width = max((len(delta.name) + 2 for feature in report.features for delta in feature.deltas), default=8)
    yield "  ".join(f"{letter} {status}" for status, letter in LETTERS.items())
    named = shown if len(shown) <= _COLUMNS else (*shown[: _COLUMNS - 1], shown[-1])
    for number, ref in enumerate(named):
        commit = f"  {_cut(ref.commit.subject)}" if ref.commit is not None else ""
        yield f"{' ' * width} {'|' * number}{ref.name}{commit}"
    for feature in report.features:
        cells = [report.cell(feature.name, ref.name) for ref in named]
        yield f"{feature.name:<{width}} " + "".join(LETTERS[cell.status] if cell else " " for cell in cells)
        for delta in feature.deltas:
            inner = [cell.delta(delta.name) if cell else None for cell in cells]
            yield f"  {delta.name:<{width - 2}} " + "".join(LETTERS[one.status] if one else " " for one in inner)
    if len(named) < len(shown):
        yield f"{len(shown) - len(named)} columns more are left out here; --format json has all of them"


def _transition(change: Transition) -> Iterator[str]:
    mark = "ACTION  " if change.action else ""
    yield f"{mark}{change.id} {change.kind}: {change.subject}  ({change.feature}, {change.before} -> {change.after})"
    yield from _row("what", change.explanation)
    yield from _row("status", f"{_status(change.was, change.was_variant)} -> {_status(change.now, change.now_variant)}")
    if change.difference is not None:
        yield from _row("tree", str(change.difference))
    yield from _first_bad(change.first_bad)
    if change.target:
        yield from _row("target", change.target)
    yield from _row("declared", change.declared)
    yield from _side("before", change.old)
    yield from _side("since", change.new)
    if change.proposal is not None:
        proposal = change.proposal
        yield from _row("proposal", f"{proposal.pattern}   (holds on {', '.join(proposal.holds_on)})")
        yield from textwrap.indent(proposal.patch.rstrip("\n"), "    ").split("\n")
        if proposal.note:
            yield from _row("look at", proposal.note)
        yield from _row("prove", proposal.command)
    elif change.action and change.why_no_proposal:
        yield from _row("proposal", f"none: {change.why_no_proposal}")
    yield from _row("next", change.next)


def _status(status: str, variant: str | None) -> str:
    return f"{status} by {variant!r}" if variant else status


def _first_bad(found: FirstBad | None) -> Iterator[str]:
    if found is None:
        return
    if found.commit is not None:
        yield from _row("commit", _commit(found.commit))
        yield from _row("", f"{found.commit.author}, {found.commit.date}")
    if found.parent:
        proof = f"{found.parent} before it was looked at and has: {found.parent_status}"
        doubt = f"not proven: {found.parent} before it has: {found.parent_status or 'not looked at'}"
        yield from _row("parent", proof if found.proven else doubt)


def _commit(commit: Commit) -> str:
    return f"{commit.hash}  {_cut(commit.subject)}"


def _cut(subject: str) -> str:
    """A subject is as long as its author likes; a line is not."""
    return subject if len(subject) <= _SUBJECT else f"{subject[: _SUBJECT - 1]}…"


def _side(label: str, shown: Snippet | None) -> Iterator[str]:
    if shown is None:
        return
    near = shown.around(3)
    yield f"  {label:<9} {near.file}"
    for number, line in enumerate(near.lines, near.first):
        yield f"  {'>' if number in near.marked else ' '} {number:>6}  {line}".rstrip()


def _row(label: str, text: str) -> Iterator[str]:
    lines = textwrap.wrap(text, _WIDTH - 12, break_long_words=False, break_on_hyphens=False) or [""]
    yield f"  {label:<9} {lines[0]}".rstrip()
    for line in lines[1:]:
        yield f"  {'':<9} {line}"


def _callees(found: tuple[CalleeChange, ...]) -> Iterator[str]:
    """What changed for callers first; where only what it does changed, a line for each."""
    if not found:
        return
    yield ""
    yield f"{Kind.CALLEE_CHANGED.id} {Kind.CALLEE_CHANGED.label}: what matters most to a copy comes first"
    for change in found:
        if change.what != "body":
            where = f"[{change.after}] " if change.after else ""
            yield from _row(change.what, f"{where}{change.explanation}, called in {change.target.partition(':')[2]}")
            if change.first_bad is not None and change.first_bad.commit is not None:
                yield from _row("", f"{change.first_bad.commit.short} {_cut(change.first_bad.commit.subject)}")
    bodies = [change for change in found if change.what == "body"]
    for change in bodies[:_BODIES]:
        yield from _row("body", f"[{change.after}] {change.callee}")
    if len(bodies) > _BODIES:
        yield from _row("", f"and {len(bodies) - _BODIES} more whose body alone changed")


def _absorbed(item: Absorbed) -> Iterator[str]:
    yield f"{Kind.ABSORBED.id} {Kind.ABSORBED.label}: {item.delta}, since {item.since}"
    lines = ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in item.lines)
    # A report of one release says nothing of the older ones that are supported.
    when = f"{'all refs here have it; ' if item.deletable else ''}when this is true: {item.remove_when}"
    yield from _row("delete", f"{item.file}, lines {lines}: {when}")


def _copy(copy: Copy) -> Iterator[str]:
    yield f"copy {copy.file}:{copy.line} {copy.qualname} of {copy.target}"
    for cell in copy.cells:
        drift = f"+{cell.added} -{cell.removed} in {cell.hunks} hunks" if cell.hunks else ""
        yield from _row(cell.ref[:9], f"{cell.status} {drift} {cell.why}".strip())
        for call in cell.calls:
            yield from _row("", f"line {call.line}: {call.call}: {call.why}")

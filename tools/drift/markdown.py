"""The report for a pull request that moves to another vLLM: the verdict first, and never more than sixty lines.

Nobody reads a long comment of a machine. So what is there is cut to what fits: first the lines around a change, then
the patches of all but the first break, then everything but a line each. What was left out is said. All that is
upstream's stands in code spans and code blocks, where nothing of it is markup or a mention.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from .changed import Absorbed, CalleeChange, FirstBad, Proposal, Transition
from .copied import Copy
from .matrix import Commit
from .model import Report

LIMIT = 60
_REPOSITORY = "https://github.com/vllm-project/vllm"


@dataclass(frozen=True)
class _Detail:
    """How much is said.

    Attributes:
        around: Lines of upstream's before and after what changed; ``None`` for none at all.
        patches: Of so many breaks the proposal is shown.
        items: So many entries of each list.
    """

    around: int | None
    patches: int
    items: int


_ALL = 1_000_000
_DETAILS = (
    _Detail(6, _ALL, 12), _Detail(6, _ALL, 6), _Detail(3, _ALL, 6), _Detail(1, _ALL, 6), _Detail(1, 1, 6),
    _Detail(1, 1, 3), _Detail(None, 1, 3), _Detail(None, 0, 3), _Detail(None, 0, 1),
)  # fmt: skip


def as_markdown(report: Report) -> str:
    """At most sixty lines, as much in them as fits."""
    lines: list[str] = []
    for detail in _DETAILS:
        lines = list(_lines(report, detail))
        if len(lines) <= LIMIT:
            break
    if len(lines) > LIMIT:
        left = len(lines) - LIMIT + 2
        lines = [*lines[: LIMIT - 2], "", f"{left} lines more: `--format html` and `--format text` have them all."]
    return "\n".join(lines)


def _lines(report: Report, detail: _Detail) -> Iterator[str]:
    yield from (_text(line) for line in report.verdicts)
    if report.empty:
        yield f"{_sentence(report.empty)}"
    for failure in report.troubles:
        yield f"Could not check: {_text(failure.headline)}"
    if not report.verdicts and not report.troubles:
        yield "Could not check: nothing was looked at."
    for at, change in enumerate(report.actions):
        yield from _break(change, detail, with_patch=at < detail.patches)
    yield from _list("Callees changed", _callees(report.callees), detail.items)
    yield from _list("Absorbed by upstream", map(_absorbed, report.absorbed), detail.items)
    judged = [ref.name for ref in report.refs if ref.judged]
    copies = chain.from_iterable(_copy(copy, judged) for copy in report.copies)
    yield from _list("Copies", copies, detail.items)


def _list(title: str, lines: Iterator[str], most: int) -> Iterator[str]:
    found = list(lines)
    if not found:
        return
    yield from ("", f"**{title}**")
    yield from (f"- {line}" for line in found[:most])
    if len(found) > most:
        yield f"- and {len(found) - most} more"


# -- one break -------------------------------------------------------------------------------


def _break(change: Transition, detail: _Detail, *, with_patch: bool) -> Iterator[str]:
    yield from ("", f"**{_code(change.subject)}** {change.kind} ({change.id}), {_text(change.declared)}")
    if change.first_bad is not None:
        yield _first_bad(change.first_bad)
    yield f"{_sentence(change.explanation)} Next: {_text(change.next)}."
    if detail.around is not None:
        yield from _difference(change, detail.around)
    if change.proposal is not None and with_patch:
        yield from _proposal(change.proposal)
    elif change.proposal is not None:
        yield f"A proposal for {change.proposal.file} is in the full report."
    elif change.why_no_proposal:
        yield f"No proposal: {_text(change.why_no_proposal)}."


def _first_bad(found: FirstBad) -> str:
    if found.commit is None:
        said = f"First in {_code(found.ref)}"
    else:
        said = f"First in {_commit(found.commit)}: {_code(found.commit.subject)}"
        said += f" by {_code(found.commit.author)}, {found.commit.date[:10]}"
    proof = f"its parent {_code(found.parent[:10])} was looked at: {found.parent_status}"
    return f"{said}; {proof if found.proven else f'what was before it ({_code(found.parent[:10])}) is not proven'}."


def _commit(commit: Commit) -> str:
    link = f"[{commit.short}]({_REPOSITORY}/commit/{commit.hash})"
    return f"{link} ({_pull(commit.pull)})" if commit.pull is not None else link


def _pull(number: int) -> str:
    return f"[vllm#{number}]({_REPOSITORY}/pull/{number})"


def _difference(change: Transition, around: int) -> Iterator[str]:
    """Upstream's lines before and since, as one diff; what was found only once is shown as it is."""
    old, new = (side.around(around) if side is not None else None for side in (change.old, change.new))
    if old is None and new is None:
        return
    before, since = list(old.lines if old else ()), list(new.lines if new else ())
    lines = [*difflib.ndiff(before, since)] if before and since else [f"  {line}" for line in before or since]
    shown = [f"{line[0]}{line[2:]}".rstrip() for line in lines if not line.startswith("?")]
    place = next(f"{side.file}:{side.first}" for side in (new, old) if side is not None)
    yield from _block("diff", [f"@@ {place}, {change.before} → {change.after} @@", *shown])


def _proposal(proposal: Proposal) -> Iterator[str]:
    holds = ", ".join(map(_code, proposal.holds_on)) or "no ref"
    fails = f", fails on {', '.join(map(_code, proposal.fails_on))}" if proposal.fails_on else ""
    note = f" {_sentence(proposal.note)}" if proposal.note else ""
    yield f"Proposed for {proposal.file}, to be read before it is applied: verifies on {holds}{fails}.{note}"
    yield from _block("diff", proposal.patch.splitlines())
    yield f"Proof: {_code(proposal.command)}"


# -- the lists -------------------------------------------------------------------------------


def _callees(callees: Sequence[CalleeChange]) -> Iterator[str]:
    """Those that a caller can tell, what matters most first; the others are counted."""
    told = [change for change in callees if change.what not in {"body", "new"}]
    yield from map(_callee, sorted(told, key=lambda change: change.rank))
    if len(told) < len(callees):
        yield f"{len(callees) - len(told)} that are called as they were, and do something else"


def _callee(change: CalleeChange) -> str:
    found = change.first_bad.commit if change.first_bad is not None else None
    where = f"in {_commit(found)}" if found is not None else f"in {_code(change.after)}"
    calls = f"; called at {_places(change.calls)}" if change.calls else ""
    name = change.callee.partition(":")[2]
    said = change.explanation.removeprefix(name).strip()
    return f"{_code(name)} {_text(said)}, {where}{calls}"


def _places(lines: Sequence[int]) -> str:
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"


def _absorbed(found: Absorbed) -> str:
    lines = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found.lines)
    place = f"{found.file}:{lines}" if lines else found.file
    where = f" in {_commit(found.commit)}" if found.commit is not None else f" since {_code(found.since)}"
    if found.deletable:
        name = _code(found.delta)
        when = f"when {_text(found.remove_when)}"
        return f"delete these lines, {when}: {place} ({name}, absorbed{where} and in all refs here)"
    return f"{_code(found.delta)}, absorbed{where}: delete {place} when {_text(found.remove_when)}"


def _copy(copy: Copy, judged: Sequence[str]) -> Iterator[str]:
    cells = [cell for cell in copy.cells if cell.ref in judged]
    if not cells:
        return
    cell = cells[-1]
    place = f"{_code(copy.qualname)}, {_text(copy.file)}:{copy.line}"
    if cell.status in {"gone", "unreadable"}:
        yield f"{place}: {cell.status} at {_code(cell.ref)}: {_code(cell.why)}"
        return
    nearest = f"; nearest is {_code(copy.base)}" if copy.base not in {None, cell.ref} else ""
    lines = f"+{cell.added} −{cell.removed} lines in {cell.hunks} places from {_code(cell.ref)}{nearest}"  # noqa: RUF001
    said = "as upstream's" if cell.status == "equal" else lines
    calls = {0: "every call fits", 1: "1 call no longer fits"}.get(
        len(cell.calls), f"{len(cell.calls)} calls no longer fit"
    )
    yield f"{place}: {said}; {calls}"
    yield from (f"line {call.line}: {_code(_short(call.call))}: {_text(call.why)}" for call in cell.calls)


# -- text that is not ours -------------------------------------------------------------------


def _short(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width]}…"


def _code(text: str | None) -> str:
    """A code span: nothing in it is markup, a mention or the number of somebody else's issue."""
    text = " ".join((text or "").split()) or " "
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _block(language: str, lines: Sequence[str]) -> Iterator[str]:
    longest = max((len(run) for line in lines for run in re.findall(r"`{3,}", line)), default=2)
    fence = "`" * (longest + 1)
    yield f"{fence}{language}"
    yield from (re.sub(r"[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", "?", line) for line in lines)
    yield fence


def _text(text: str) -> str:
    """Prose of ours, in which names of upstream's may stand: what it has in backticks stays a code span."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if at % 2 else _escaped(part) for at, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = re.sub(r"[\\<>*~|`]|(?<!\w)_|_(?!\w)|\[(?=[^\]]*\]\()", r"\\\g<0>", text)
    # A backslash does not keep GitHub from telling people and issues: a space of no width does.
    return re.sub(r"(?<!\w)([@#])(?=\w)", r"\1&#8203;", text)


def _sentence(text: str) -> str:
    text = _text(text)
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"

"""The report as one HTML page that needs nothing else: no network, no library, and without scripts it is whole too.

The matrix is a picture: a row for each feature and delta, a column for each place in the history, a band as long as a
status lasts. Colour says the status, and shape says it again. A cell is a link to its explanation, which the style
sheet shows when it is the target of the address: so a cell can be sent to somebody, and the browser's own keys work.

Everything that upstream wrote is escaped by the template engine. The page forbids itself, by its own policy, to load
anything or to run any script but the one that stands in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from balance_patcher.errors import CATALOGUE, Failure, Outcome
from balance_patcher.extras import require

from .changed import CalleeChange, Transition
from .copied import CopyCell
from .kinds import Kind
from .matrix import Cell, DeltaCell, Ref
from .model import Report, counted
from .sides import Pair, beside, of_patch

_FILES = Path(__file__).parent / "web"

#: What a status is called in the legend, the best first; each has a shape of its name in the template.
STATUSES = {
    "applied": "every edit has its place",
    "absorbed": "upstream has it now",
    "not-applicable": "upstream has nothing to patch",
    "failed": "cannot be placed",
    "unreadable": "could not be looked at",
}
_COPIES = {
    "equal": "as upstream's",
    "drifted": "differs, and every call fits",
    "misfit": "a call does not fit",
    "gone": "upstream's function is not there",
    "unreadable": "could not be looked at",
}


@dataclass
class View:
    """One cell of the picture.

    Attributes:
        id: Of its explanation.
        ref: Its column.
        status: Which colour and shape it has.
        words: What it says to somebody who does not see it.
        begins: It is another status than the cell before it; ``ends`` the same for the one after.
        changes: What changed here for the first time.
        cell: Of a feature's row.
        delta: Of a delta's row.
        copy: Of a copy's row, with its ``height``, a share of the highest drift.
    """

    id: str
    ref: Ref
    status: str
    words: str
    begins: bool = True
    ends: bool = True
    changes: tuple[Transition, ...] = ()
    cell: Cell | None = None
    delta: DeltaCell | None = None
    copy: CopyCell | None = None
    height: int = 0

    @property
    def action(self) -> bool:
        return any(change.action for change in self.changes)


@dataclass
class Row:
    """One row of the picture.

    Attributes:
        kind: ``feature``, ``delta`` or ``copy``.
        parent: The feature of a delta.
        info: What is declared, or the copy.
        quiet: Nothing changed in it, and nothing is wrong.
    """

    kind: str
    title: str
    parent: str
    info: Any
    views: list[View] = field(default_factory=list)

    @property
    def quiet(self) -> bool:
        return not any(view.changes or view.status in {"failed", "unreadable"} for view in self.views)


def as_html(report: Report) -> str:
    """The whole page."""
    jinja2 = require("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FILES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    script, style = ((_FILES / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    markup = jinja2.utils.markupsafe.Markup

    def prose(text: str) -> Any:
        """Words in which names stand in backticks: those are code, and all is escaped."""
        parts = re.split(r"`([^`]*)`", text)
        pieces = [markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts)]
        return markup("").join(pieces)

    environment.filters["prose"] = prose
    ids = _Ids()
    rows = list(_rows(report, ids))
    text: str = environment.get_template("page.html").render(
        report=report, rows=rows, copies=list(_copy_rows(report, ids)), columns=report.shown,
        script=markup(script), style=markup(style),
        digests=[_digest(script), _digest(style)], statuses=STATUSES, copied=_COPIES,
        mood=_mood(report), title=_title(report), callees=sorted(report.callees, key=lambda one: one.rank),
        timeline=list(_timeline(report, rows)), beside=beside, of_patch=of_patch, kind_says=_kind_says,
        callee_pairs=_callee_pairs, told=_told, short=_short, verdicts=report.verdicts, commit_url=_commit_url,
        pull_url=_pull_url, loud=_loud, quiet=_quiet, name_of=_name_of, said_of=_said_of, counted=counted,
    )  # fmt: skip
    return text


# -- the rows --------------------------------------------------------------------------------


class _Ids:
    """Ids for explanations: readable, safe in an address, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def new(self, *words: str) -> str:
        plain = "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-") or "x" for word in words)
        found, count = plain, 1
        while found in self._taken:
            count += 1
            found = f"{plain}~{count}"
        self._taken.add(found)
        return found


def _rows(report: Report, ids: _Ids) -> Iterator[Row]:
    for feature in report.features:
        own = [change for change in report.transitions if change.feature == feature.name]
        row = Row("feature", feature.name, "", feature)
        for ref in report.shown:
            cell = report.cell(feature.name, ref.name)
            changes = tuple(change for change in own if change.after == ref.name)
            status = cell.status if cell is not None else "unreadable"
            words = _words(feature.name, ref.name, status, changes)
            row.views.append(View(ids.new(feature.name, ref.name), ref, status, words, changes=changes, cell=cell))
        yield _joined(row)
        for delta in feature.deltas:
            inner = Row("delta", delta.name, feature.name, delta)
            for ref in report.shown:
                cell = report.cell(feature.name, ref.name)
                found = cell.delta(delta.name) if cell is not None else None
                changes = tuple(change for change in own if change.after == ref.name and change.delta == delta.name)
                status = found.status if found is not None else "unreadable"
                words = _words(delta.name, ref.name, status, changes)
                inner.views.append(
                    View(ids.new(delta.name, ref.name), ref, status, words, changes=changes, cell=cell, delta=found)
                )
            yield _joined(inner)


def _copy_rows(report: Report, ids: _Ids) -> Iterator[Row]:
    sizes = [cell.added + cell.removed for copy in report.copies for cell in copy.cells]
    highest = max(sizes, default=0) or 1
    for copy in report.copies:
        row = Row("copy", copy.qualname, "", copy)
        for ref in report.shown:
            cell = next((cell for cell in copy.cells if cell.ref == ref.name), None)
            status = cell.status if cell is not None else "unreadable"
            lines = cell.added + cell.removed if cell is not None else 0
            words = f"{copy.qualname} at {ref.name}: {_COPIES[status]}, {lines} lines differ"
            row.views.append(
                View(ids.new("copy", copy.qualname, ref.name), ref, status, words, copy=cell,
                     height=round(100 * lines / highest))
            )  # fmt: skip
        yield _joined(row)


def _joined(row: Row) -> Row:
    """The row with bands: a status goes on until it changes, or until something changed under it."""
    for before, after in zip(row.views, row.views[1:], strict=False):
        same = before.status == after.status and not after.changes
        before.ends = after.begins = not same
    return row


def _words(name: str, ref: str, status: str, changes: Sequence[Transition]) -> str:
    kinds = list(dict.fromkeys(change.kind for change in changes))
    said = f"{name} at {ref}: {status}"
    if kinds:
        said += f"; changed here: {', '.join(kinds)}"
    return f"{said}; an edit is needed" if any(change.action for change in changes) else said


def _timeline(
    report: Report, rows: Sequence[Row]
) -> Iterator[tuple[Ref, list[tuple[Transition, str]], list[CalleeChange]]]:
    """The columns in which something changed, the newest first, each change with the id of its explanation."""
    places = {(row.title, view.ref.name): view.id for row in rows for view in row.views}
    for ref in reversed(report.shown):
        changes = [
            (change, places[change.delta or change.feature, ref.name])
            for change in report.transitions
            if change.after == ref.name and (change.delta or change.feature, ref.name) in places
        ]
        changes.sort(key=lambda item: not item[0].action)
        callees = sorted((one for one in report.callees if one.after == ref.name), key=lambda one: one.rank)
        if changes or callees:
            yield ref, changes, callees


# -- words -----------------------------------------------------------------------------------


def _mood(report: Report) -> str:
    if report.outcome is Outcome.HOLDS:
        return "good"
    return "dark" if report.outcome is Outcome.UNKNOWN else "bad"


def _title(report: Report) -> str:
    return f"{report.refs[0].name} → {report.refs[-1].name}" if report.refs else "nothing"


def _kind_says(label: str) -> tuple[str, str]:
    kind = Kind.of(label)
    return kind.id, CATALOGUE[kind.id][0]


def _told(failures: Iterable[Failure]) -> str:
    return "\n\n".join(str(failure) for failure in failures)


def _loud(callees: Iterable[CalleeChange]) -> list[CalleeChange]:
    """Those that a caller can tell."""
    return [one for one in callees if one.what not in {"body", "new"}]


def _quiet(callees: Iterable[CalleeChange]) -> list[CalleeChange]:
    return [one for one in callees if one.what in {"body", "new"}]


def _name_of(change: CalleeChange) -> str:
    return change.callee.partition(":")[2]


def _said_of(change: CalleeChange) -> str:
    """The explanation, without the name that stands before it."""
    return change.explanation.removeprefix(_name_of(change)).strip()


def _callee_pairs(change: CalleeChange) -> tuple[Pair, ...]:
    return beside(change.old, change.new)


def _short(file: str) -> str:
    """What tells one file from another: the release that it is of, or its last two parts."""
    form, _, rest = file.partition(":")
    return rest.partition(":")[0] if form == "pypi" else "/".join(file.replace("\\", "/").split("/")[-2:])


def _commit_url(number: str) -> str:
    return f"https://github.com/vllm-project/vllm/commit/{number}"


def _pull_url(number: int) -> str:
    return f"https://github.com/vllm-project/vllm/pull/{number}"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

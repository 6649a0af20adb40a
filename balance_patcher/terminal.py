"""What a person reads in a terminal: the report, and the texts that ``show`` shows.

Lines are as long as they are; only on a terminal are they broken, between words.
"""

from __future__ import annotations

import difflib
import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from .adding import added_file, adds
from .build import compile_plan
from .delta import APART
from .errors import Failure, Outcome
from .feature import Feature
from .marked import marked_diff, marked_through, shared, sign_of
from .plan import Plan, make_plan
from .report import FeatureReport, LaneReport, Report, footer, place
from .rewrite import Rewrite
from .source import Lane
from .targets import Target

COLOURS = {
    "applied": "green", "absorbed": "cyan", "not-applicable": "cyan", "failed": "red", "unknown": "yellow",
    "holds": "green", "broken": "red", "ok": "green", "usage": "red", "proven": "green", "different": "red",
}  # fmt: skip
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")
_LABEL = re.compile(r" *\S+(?: \S+)? {2,}")
_COMMAND = re.compile(r"( *next +| {4,})(git|pip) ")


def as_text(report: Report) -> str:
    console = Console(record=True, file=io.StringIO())
    print_report(report, console)
    return console.export_text()


def print_report(report: Report, console: Console) -> None:
    width = console.width if console.is_terminal else None
    lines: list[Text] = []
    for lane in report.lanes:
        lines += [*_lane(lane, width), Text()]
    for lane in report.lanes:
        for failure in lane.all_failures:
            lines += [*_failure(lane, failure, width), Text()]
    style = "bold green" if report.outcome is Outcome.HOLDS else "bold red"
    lines += [Text(line, style) for line in folded(report.verdict, width, 0)]
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)


def _lane(lane: LaneReport, width: int | None) -> Iterator[Text]:
    version = f"vLLM {lane.vllm_version}" if lane.vllm_version else ""
    source = lane.source if lane.source != lane.name else ""
    heading = "  ".join(filter(None, (lane.name, version, source)))
    if not lane.features:
        yield Text.assemble((heading, "bold"), "  ", _painted(lane.status))
    else:
        yield Text(heading, "bold")
    for feature in lane.features:
        yield from _table(feature, width)
        yield from _seen(feature, width)
        for at, line in enumerate(folded(f"  {feature.name}: {feature.status}, {', '.join(footer(feature))}", width)):
            colour = COLOURS.get(feature.status, "yellow")
            yield Text(line, f"bold {colour}" if not at else colour)
    if lane.pin:
        told = f"  pin {lane.pin.wanted}: {lane.pin.status}, {lane.pin.detail}"
        colour = COLOURS.get(lane.pin.status, "yellow")
        yield from (Text(line, colour) for line in folded(_COMMIT.sub(r"\1", told), width))


def _table(feature: FeatureReport, width: int | None) -> Iterator[Text]:
    """A row a delta; under it, indented, what it bound, and its variant if the row is too narrow for that."""
    rows = [("delta", "status", "variant", "where", "matches")]
    rows += [(d.name, d.status, d.variant or "", place(d), str(d.matches)) for d in feature.deltas]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = [0, 1, 2, 3, 4]
    narrow = width is not None and sum(widths) + 2 * len(shown) > width
    if narrow:
        shown.remove(2)
    for row, delta in zip(rows, [None, *feature.deltas], strict=True):
        if not feature.deltas:
            return
        line = Text("  ")
        for at in shown:
            colour = "dim" if delta is None else COLOURS.get(row[1], "yellow") if at == 1 else ""
            line.append(row[at].ljust(widths[at] + 2), colour)
        yield line
        if delta is not None:
            below = [delta.variant] if narrow and delta.variant else []
            # The whole of a failure follows below the tables.
            below.append(delta.detail.partition(": ")[0] if delta.status == "failed" else delta.detail)
            yield from (Text(more, "dim") for more in folded("      " + "; ".join(filter(None, below)), width, 6))


def _seen(feature: FeatureReport, width: int | None) -> Iterator[Text]:
    """A line for each thing that was seen in a running engine core."""
    for line in feature.invariants if feature.live else ():
        told = f"  {line.status:<8}{line.name}: {line.detail}"
        for at, part in enumerate(folded(told, width, 10)):
            text = Text(part)
            if not at:
                text.stylize(COLOURS.get(line.status, "yellow"), 2, 10)
            yield text


def _failure(lane: LaneReport, failure: Failure, width: int | None) -> Iterator[Text]:
    for line in f"{lane.name}: {failure}".split("\n"):
        if _COMMAND.match(line):  # to be copied as it is
            yield Text(line)
        else:
            label = _LABEL.match(line) if line.startswith(" ") else None
            yield from map(Text, folded(line, width, label.end() if label else 4))


def folded(line: str, width: int | None, indent: int = 4) -> list[str]:
    if not line.strip():
        return []
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, max(width, indent + 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False,
        expand_tabs=False, replace_whitespace=False,
    )  # fmt: skip


def _painted(status: str) -> tuple[str, str]:
    return status, COLOURS.get(status, "yellow")


# -- show ------------------------------------------------------------------------------------


def show_features(lane: Lane, features: Sequence[Feature], only: str | None, console: Console, mode: str) -> None:
    """Print the text that would run, a diff or the line map.

    Args:
        lane: The vLLM to look at.
        features: Whose targets are shown.
        only: The one target to show.
        console: Where to.
        mode: ``text``, ``diff`` or ``map``.

    Raises:
        PatchError: If a feature cannot be placed on the lane.
    """
    parts = []
    for feature in features:
        plan = make_plan(lane, feature)
        own = list(_parts(plan, only, mode))
        if not own:
            _nothing_to_show(plan, only, console)
        parts += own
    for at, (name, text, first) in enumerate(parts):
        if at and mode != "diff":
            console.print()
        if (len(parts) > 1 and mode == "text") or mode == "map":
            console.print(f"# {name}", highlight=False, markup=False, soft_wrap=True)
        if mode == "map":
            console.print(text.rstrip(), highlight=False, markup=False, soft_wrap=True)
        else:
            _code(console, text, "python" if mode == "text" else "diff", first)


def _nothing_to_show(plan: Plan, only: str | None, console: Console) -> None:
    """Why nothing is put in: for each delta what was recognised instead, and where."""
    lines = [f"# {only or plan.feature.name}: nothing is put in on {plan.lane.name}, because"]
    for placement in plan.placements:
        if only in (None, placement.delta.target):
            variant = placement.variant
            why = placement.why if variant is None else variant.note or variant.name
            where = placement.target.where(placement.target.node) if placement.target is not None else ""
            where = f"{where.rpartition(':')[0]}:{placement.line}" if where and placement.line else where
            lines.append(f"#   {placement.delta.name} is {placement.status}: {why}{f'   ({where})' if where else ''}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _parts(plan: Plan, only: str | None, mode: str) -> Iterator[tuple[str, str, int]]:
    """Target, text and number of its first line; 0 for a diff that is marked."""
    rewrites, compiled = compile_plan(plan)
    edited = {name for name, steps in plan.steps.items() if not all(isinstance(s.edit, APART) for s in steps)}
    for result in rewrites.values():
        for name, target in result.targets.items():
            if name in edited and only in (None, name):
                marked = mode == "diff" and shared(plan, name)
                text = marked_diff(plan, result) if marked else _spliced(result, target, plan.target(name), mode)
                yield name, text, 0 if marked else target.node.lineno
                if mode == "diff":
                    break  # it is the whole module's
    for item in compiled:
        if item.through and only in (None, item.target):
            marked = mode == "diff" and shared(plan, item.target)
            text = (
                marked_through(plan, item)
                if marked
                else _whole(item.text, item.filename, mode, "a function of its own")
            )
            yield item.target, text, 0 if marked else 1
    for addition in adds(plan) if only is None else ():
        yield addition.owner, _whole(addition.text + "\n", added_file(addition), mode, "added"), 1


def _spliced(result: Rewrite, target: Target, before: Target, mode: str) -> str:
    new, first, last = target.text.lines, target.node.lineno, target.node.end_lineno or 0
    if mode == "diff":
        lines = difflib.unified_diff(before.text.lines, new, f"a/{before.text.path}", f"b/{result.filename}", n=3)
        return "".join(line.rstrip("\r\n") + "\n" for line in lines)
    if mode == "map":
        return f"ours       upstream ({before.text.display})\n" + _line_map(result.line_map, first, last)
    return "".join(new[first - 1 : last])


def _whole(text: str, filename: str, mode: str, what: str) -> str:
    """A text of ours that stands under a name of its own."""
    if mode == "map":
        return f"{what}; no line map\n"
    if mode == "text":
        return text
    return "".join(difflib.unified_diff([], text.splitlines(keepends=True), "/dev/null", f"b/{filename}", n=3))


def _line_map(origins: Sequence[tuple[int | None, str | None]], first: int, last: int) -> str:
    """Runs of upstream's lines as ranges; each line that a delta put in, with its name."""

    def run(at: int) -> tuple[int | str, int]:
        line, delta = origins[at - 1]
        return (delta or "", at) if line is None else (at - line, 0)

    rows = []
    for _, group in groupby(range(first, last + 1), run):
        ours = list(group)
        line, delta = origins[ours[0] - 1]
        theirs = f"+ {delta}" if line is None else _range(line, line + len(ours) - 1)
        rows.append(f"{_range(ours[0], ours[-1]):<10} {theirs}\n")
    return "".join(rows)


def _range(first: int, last: int) -> str:
    return f"{first}–{last}" if last > first else str(first)  # noqa: RUF001 - as ranges are written


def _code(console: Console, text: str, language: str, first: int = 1) -> None:
    if console.is_terminal and not first:
        for line in text.splitlines():
            console.print(Text(line, {"+": "green", "-": "red"}.get(sign_of(line), "")), soft_wrap=True)
    elif console.is_terminal:
        console.print(
            Syntax(text, language, line_numbers=language == "python", start_line=first, background_color="default")
        )
    else:
        console.file.write(text)

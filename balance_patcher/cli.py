"""The command line: ``verify`` and ``show``.

Exit status: 0 all hold, 1 something cannot be placed or an invariant is broken, 2 wrong usage,
3 could not check, and anything that nobody foresaw.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.syntax import Syntax

from .build import compile_plan
from .check import check_lane, fetch
from .errors import Failure, Outcome, PatchError, refuse
from .feature import Feature
from .lanes import declared_lanes
from .pins import missing_lane, pin_failure, prove_pin, read_pins
from .plan import make_plan
from .registry import features, find_feature
from .render import prefer_astor
from .report import RENDERINGS, LaneReport, Report
from .source import FORMS, Lane, LaneSpec, Source, open_source
from .terminal import WIDE, as_text, print_report

app = typer.Typer(
    name="balance_patcher", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Patch vLLM at run time from declared deltas, and prove beforehand that they can be placed.",
)  # fmt: skip


class Format(str, Enum):
    """How a report is written."""

    text = "text"
    json = "json"
    github = "github"
    markdown = "markdown"
    junit = "junit"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; what nobody foresaw exits 3."""
    try:
        # astor 0.8 uses what Python 3.12 deprecates and 3.14 lacks; without it the standard library renders
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            prefer_astor()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # an arrow must not turn a finding into an error
        app(args=list(arguments) if arguments is not None else None, prog_name="balance_patcher")
    except PatchError as error:
        _complain(error)
        sys.exit(int(error.outcome))
    except SystemExit as stop:
        # typer ends an interrupted run with 130, and a closed pipe with 1, which would read as a finding
        sys.exit(int(Outcome.UNKNOWN) if _interrupted(stop) else stop.code)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(int(Outcome.UNKNOWN))
    except Exception as error:  # noqa: BLE001 - an uncaught error must not look like a finding
        traceback.print_exc()
        _complain(_unexpected(error))
        sys.exit(int(Outcome.UNKNOWN))
    sys.exit(0)


def _interrupted(stop: SystemExit) -> bool:
    cause: BaseException | None = stop
    while cause is not None and not isinstance(cause, (KeyboardInterrupt, EOFError, BrokenPipeError)):
        cause = cause.__context__
    return cause is not None


def _complain(error: PatchError) -> None:
    sys.stderr.write(f"{error}\n")


def _unexpected(error: Exception) -> PatchError:
    return refuse(
        "BP599",
        f"{type(error).__name__}: {error}",
        next="report this with the traceback; nothing was checked or patched",
    )


@app.callback()
def _app() -> None:
    """The commands below."""


@app.command()
def verify(
    lanes: Annotated[
        list[str] | None, typer.Argument(metavar="[LANE]…", help=f"SOURCE or NAME=SOURCE. A source is {FORMS}.")
    ] = None,
    pins: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with vllm-ascend's two pin files; every lane must be the pinned one."),
    ] = None,
    expect: Annotated[str | None, typer.Option(metavar="REF", help="The one lane must be this tag or commit.")] = None,
    feature: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only these features.")] = None,
    format: Annotated[Format, typer.Option(help="How standard output is written.")] = Format.text,  # noqa: A002
    report: Annotated[
        list[str] | None, typer.Option(metavar="FORMAT:FILE", help="Write the report to a file as well.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="An absorbed delta is a failure too.")] = False,  # noqa: FBT002
) -> None:
    """Prove on each lane that every delta can be placed and that what comes of it compiles."""
    extra = [_report_file(text) for text in report or []]
    chosen = [find_feature(name) for name in dict.fromkeys(feature)] if feature else list(features())
    specs = [LaneSpec.parse(text) for text in lanes] if lanes else declared_lanes(Path.cwd())
    _unique(specs)
    wanted = read_pins(pins) if pins else {}
    if expect is not None:
        if pins or len(specs) != 1:
            raise refuse("BP004", "--expect speaks of one lane, and not together with --pins", next="name one lane")
        wanted = {specs[0].name: expect}
    result = Report(_check_all(specs, chosen, wanted, strict=strict))
    result.lanes += [_no_lane(name, ref) for name, ref in wanted.items() if name not in {spec.name for spec in specs}]
    if format is Format.text:
        print_report(result, Console(width=None if sys.stdout.isatty() else WIDE))
    else:
        typer.echo(RENDERINGS[format.value](result))
    outcomes = [result.outcome]
    for kind, file in extra:
        try:
            _write(file, as_text(result) if kind is Format.text else RENDERINGS[kind.value](result))
        except PatchError as error:
            _complain(error)
            outcomes.append(error.outcome)
    raise typer.Exit(int(Outcome.worst(outcomes)))


def _report_file(text: str) -> tuple[Format, Path]:
    kind, _, file = text.partition(":")
    if kind not in Format.__members__ or not file:
        raise refuse(
            "BP004", f"`--report {text}` is not FORMAT:FILE", next=f"use one of {', '.join(Format.__members__)}"
        )
    return Format(kind), Path(file)


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise refuse(
            "BP514", f"the report cannot be written to {file}: {error.strerror}", next="check the path"
        ) from error


def _unique(specs: Sequence[LaneSpec]) -> None:
    names = [spec.name for spec in specs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise refuse("BP004", f"two lanes are called {double!r}", next="give each a name of its own: NAME=SOURCE")


def _no_lane(name: str, wanted: str) -> LaneReport:
    lane = LaneReport(name, "")
    lane.failures.append(missing_lane(name, wanted))
    return lane


def _check_all(
    specs: Sequence[LaneSpec], chosen: list[Feature], wanted: dict[str, str], *, strict: bool
) -> list[LaneReport]:
    """Read all lanes side by side, then look at one after the other.

    Reading waits for the network; parsing does not, and in threads CPython 3.11 fails at it with a
    ``SystemError`` about the depth of its recursion.
    """
    with ThreadPoolExecutor(max_workers=min(8, max(1, len(specs)))) as pool:
        fetched = list(pool.map(lambda spec: _guarded(spec, lambda: fetch(spec, chosen)), specs))

    def one(spec: LaneSpec, source: Source) -> LaneReport:
        found, lane = check_lane(spec, chosen, strict=strict, source=source)
        if lane is not None and spec.name in wanted:
            found.pin = prove_pin(lane, wanted[spec.name])
            failure = pin_failure(lane, found.pin)
            found.failures += [failure] if failure else []
        return found

    reports = []
    for spec, item in zip(specs, fetched, strict=True):
        reports.append(item if isinstance(item, LaneReport) else _guarded(spec, partial(one, spec, item)))
    return reports


_T = TypeVar("_T")


def _guarded(spec: LaneSpec, work: Callable[[], _T]) -> _T | LaneReport:
    """What the work returns; or a report of why it failed, so that one lane's surprise does not hide the others."""
    try:
        return work()
    except PatchError as error:
        return LaneReport(spec.name, spec.spec, failures=list(error.failures))
    except Exception as error:  # noqa: BLE001 - see above
        trace = traceback.format_exc(limit=-3).strip()
        surprise = Failure(
            "BP599", f"{type(error).__name__}: {error}", "report this with the traceback", (("trace", trace),)
        )
        return LaneReport(spec.name, spec.spec, failures=[surprise])


# -- show ------------------------------------------------------------------------------------


@app.command()
def show(
    what: Annotated[
        str, typer.Argument(metavar="FEATURE|TARGET", help="A feature's name, or a target as module:Qual.name.")
    ],
    lane: Annotated[str | None, typer.Option(metavar="LANE", help="A source, or the name of a declared lane.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="A unified diff against upstream.")] = False,  # noqa: FBT002
    map: Annotated[bool, typer.Option("--map", help="The line map: ours, upstream's, delta.")] = False,  # noqa: A002, FBT002
) -> None:
    """Show the text that would run."""
    if diff and map:
        raise refuse("BP004", "--diff and --map exclude each other", next="ask for one of them")
    chosen = _features_of(what)
    spec = _one_lane(lane)
    opened = Lane(spec.name, open_source(spec.spec))
    console = Console(width=None if sys.stdout.isatty() else 10_000, soft_wrap=True)
    for feature in chosen:
        _show(opened, feature, what if ":" in what else None, console, "diff" if diff else "map" if map else "text")


def _features_of(what: str) -> list[Feature]:
    if ":" not in what:
        return [find_feature(what)]
    chosen = [feature for feature in features() if what in feature.targets]
    if not chosen:
        known = ", ".join(sorted({target for feature in features() for target in feature.targets}))
        raise refuse("BP003", f"no feature edits {what!r}", next=f"use a feature's name or one of: {known}")
    return chosen


def _one_lane(text: str | None) -> LaneSpec:
    if text is not None and ":" in text:
        return LaneSpec.parse(text)
    declared = declared_lanes(Path.cwd())
    if text is None:
        return declared[0]
    by_name = {spec.name: spec for spec in declared}
    return by_name.get(text) or LaneSpec.parse(text)


def _show(lane: Lane, feature: Feature, only: str | None, console: Console, mode: str) -> None:
    plan = make_plan(lane, feature)
    rewrites, compiled = compile_plan(plan)
    for result in rewrites.values():
        for name, target in result.targets.items():
            if only not in (None, name):
                continue
            before = plan.target(name)
            new, old = target.text.lines, before.text.lines
            if mode == "diff":
                display = before.text.path
                lines = difflib.unified_diff(old, new, f"a/{display}", f"b/{result.filename}", n=3)
                _code(console, "".join(_ended(line) for line in lines), "diff")
            elif mode == "map":
                _map(console, result.line_map, target.node.lineno, target.node.end_lineno or 0, before.text.display)
            else:
                _code(
                    console, "".join(new[target.node.lineno - 1 : target.node.end_lineno]), "python", target.node.lineno
                )
    for item in compiled:
        if item.through and only in (None, item.target) and mode != "map":
            if mode == "diff":
                lines = difflib.unified_diff(
                    [], item.text.splitlines(keepends=True), "/dev/null", f"b/{item.filename}", n=3
                )
                _code(console, "".join(lines), "diff")
            else:
                _code(console, item.text, "python", 1)


def _ended(line: str) -> str:
    return line.rstrip("\r\n") + "\n"


def _map(
    console: Console, origins: Sequence[tuple[int | None, str | None]], first: int, last: int, display: str
) -> None:
    console.print(f"ours    upstream ({display})", highlight=False, markup=False)
    for at in range(first, last + 1):
        line, delta = origins[at - 1]
        console.print(f"{at:<7} {line if line is not None else f'+ {delta}'}", highlight=False, markup=False)


def _code(console: Console, text: str, language: str, first: int = 1) -> None:
    if console.is_terminal:
        console.print(
            Syntax(text, language, line_numbers=language == "python", start_line=first, background_color="default")
        )
    else:
        console.file.write(text)

"""The command line: ``verify``, ``show``, ``describe``, ``new-delta``, ``status`` and ``demo``.

Exit status: 0 all hold, 1 something cannot be placed or an invariant is broken, 2 wrong usage,
3 could not check, and anything that nobody foresaw.
"""

from __future__ import annotations

import contextlib
import io
import json
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

from . import __version__
from .build import no_collection
from .check import check_lane, fetch
from .compose import at_work, compose
from .demo.session import run_demo
from .describe import as_ascend_patch_doc
from .describe import as_text as describe_text
from .errors import Failure, Outcome, PatchError, did_you_mean, refuse
from .examples import check_examples
from .feature import Feature
from .hosts import as_json, as_lines, check_hosts, worst
from .inquiry import inquire
from .inspection import status as inspect_status
from .lanes import declared_lanes, lane_named
from .live import check_live
from .loading import chosen_features
from .newdelta import new_delta as propose_delta
from .npu.session import detected, run_check
from .outputs import write
from .pins import missing_lane, pin_failure, prove_pin, read_pins
from .registry import all_broken as broken
from .registry import all_features as features
from .registry import features as own_features
from .registry import find_feature, known_names
from .relations import unknown
from .render import prefer_astor
from .renderings import RENDERINGS
from .report import LaneReport, Report
from .source import FORMS, Lane, LaneSpec, Source, open_source
from .terminal import as_text, print_report, show_features
from .terminal_inquiry import print_inquiry
from .terminal_served import tell_server
from .terminal_status import print_status

_STATUS = """Exit status: 0 all hold; 1 something cannot be placed or an invariant is broken; 2 wrong usage; \
3 could not check. Of several lanes, 2 goes before 1 before 3 before 0."""
_PROGRAM = "python -m balance_patcher"

app = typer.Typer(
    name="balance_patcher", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Patch vLLM at run time from declared deltas, and prove beforehand that they can be placed.",
)  # fmt: skip


class StartMethod(str, Enum):
    """How an engine core is started."""

    spawn = "spawn"
    fork = "fork"


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
        app(args=list(arguments) if arguments is not None else None, prog_name=_PROGRAM)
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


def _say_version(asked: bool) -> None:  # noqa: FBT001 - as typer calls it
    if asked:
        typer.echo(f"balance_patcher {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[  # noqa: FBT002
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """Patch vLLM at run time from declared deltas, and prove beforehand that they can be placed."""


@app.command(epilog=_STATUS)
def verify(
    lanes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LANE]…",
            help=f"SOURCE, NAME=SOURCE, or the name of a lane in pyproject.toml. A source is {FORMS}. "
            "Without any: the lanes of the nearest pyproject.toml, else installed.",
        ),
    ] = None,
    pins: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with vllm-ascend's two pin files; every lane must be the pinned one."),
    ] = None,
    expect: Annotated[str | None, typer.Option(metavar="REF", help="The one lane must be this tag or commit.")] = None,
    feature: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this feature; may be given several times.")
    ] = None,
    deltas: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A delta file anywhere: only it, and what --feature names beside it."),
    ] = None,
    format: Annotated[Format, typer.Option(help="How standard output is written.")] = Format.text,  # noqa: A002
    report: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT:FILE", help="Write the report to a file as well; may be given several times."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="An absorbed delta is a failure too.")] = False,  # noqa: FBT002
    live: Annotated[  # noqa: FBT002
        bool, typer.Option("--live", help="Start real engine cores of the installed vLLM too, up to the model.")
    ] = False,
    start_method: Annotated[
        StartMethod | None, typer.Option(help="How --live starts them; without it spawn, as vLLM's servers do.")
    ] = None,
    vllm_ascend: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|REF",
            help="Say instead what a release of vllm-ascend holds in the module that a feature stands in for: a "
            "checkout, a wheel, pypi:vllm-ascend==VERSION or git:REPO@REF. With --format text or json.",
        ),
    ] = None,
) -> None:
    """Prove on each lane that every delta can be placed and that what comes of it compiles."""
    extra = [_report_file(text) for text in report or []]
    chosen = _chosen(deltas, feature)
    lanes = ["installed"] if live and not lanes else lanes
    specs = [lane_named(text, Path.cwd()) for text in lanes] if lanes else declared_lanes(Path.cwd())
    _unique(specs)
    if vllm_ascend is not None:
        raise typer.Exit(_say_hosts(vllm_ascend, specs, chosen, format, alone=not (pins or expect or extra or live)))
    if start_method is not None and not live:
        raise refuse("BP007", "--start-method speaks of --live", next="give --live too, or leave --start-method out")
    if live and [spec.spec for spec in specs] != ["installed"]:
        raise refuse("BP007", "--live speaks of the installed vLLM", next="name no other lane with it")
    wanted = read_pins(pins) if pins else {}
    if expect is not None:
        if pins or len(specs) != 1:
            what = (
                "--expect and --pins exclude each other" if pins else f"--expect speaks of one lane, not {len(specs)}"
            )
            raise refuse("BP007", what, next="name one lane with --expect, or give --pins alone")
        wanted = {specs[0].name: expect}
    result = Report(_check_all(specs, chosen, wanted, strict=strict))
    result.lanes += [_no_lane(name, ref) for name, ref in wanted.items() if name not in {spec.name for spec in specs}]
    result.lanes += _guarded_live(chosen, (start_method or StartMethod.spawn).value) if live else []
    wrong = [*([] if feature or deltas else broken()), *unknown(chosen, [*known_names(), *(f.name for f in chosen)])]
    ours = {id(own.deltas) for own in own_features()}  # theirs are tests
    wrong += [failure for one in chosen if id(one.deltas) not in ours for failure in check_examples(one)]
    result.lanes += [LaneReport("deltas", "", failures=wrong, vllm=False)] if wrong else []
    if format is Format.text:
        print_report(result, Console())
    else:
        typer.echo(RENDERINGS[format.value](result))
    outcomes = [result.outcome]
    for kind, file in extra:
        try:
            text = as_text(result) if kind is Format.text else RENDERINGS[kind.value](result)
            write(file, text if text.endswith("\n") else text + "\n")
        except PatchError as error:
            _complain(error)
            outcomes.append(error.outcome)
    raise typer.Exit(int(Outcome.worst(outcomes)))


def _say_hosts(host: str, specs: Sequence[LaneSpec], chosen: list[Feature], kind: Format, *, alone: bool) -> int:
    if not alone or kind not in {Format.text, Format.json}:
        what = "--vllm-ascend goes with lanes, --feature, and --format text or json, and with nothing else"
        raise refuse("BP007", what, next="ask for the other report in a run of its own")
    reports = check_hosts(host, specs, chosen)
    typer.echo(as_json(reports) if kind is Format.json else as_lines(reports))
    return int(worst(reports))


def _chosen(deltas: Sequence[Path] | None, names: Sequence[str] | None) -> list[Feature]:
    """What a command looks at: the delta files and what is named beside them; else what is named, or everything."""
    if deltas:
        return chosen_features(deltas, names or ())
    return [find_feature(name) for name in dict.fromkeys(names)] if names else list(features())


def _report_file(text: str) -> tuple[Format, Path]:
    kind, _, file = text.partition(":")
    if kind not in Format.__members__ or not file:
        raise refuse(
            "BP007", f"`--report {text}` is not FORMAT:FILE", next=f"FORMAT is one of {', '.join(Format.__members__)}"
        )
    return Format(kind), Path(file)


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
    """Look at one lane after the other, while those behind it are being read side by side.

    Reading waits for the network; parsing does not, and in threads CPython 3.11 fails at it with a
    ``SystemError`` about the depth of its recursion. A lane's trees are gone when it is done, because nothing in
    them points up; so the collector finds nothing, and looking for it costs a third of the time.
    """

    def one(spec: LaneSpec, source: Source) -> LaneReport:
        found, lane = check_lane(spec, chosen, strict=strict, source=source)
        if lane is not None and spec.name in wanted:
            found.pin = prove_pin(lane, wanted[spec.name])
            failure = pin_failure(lane, found.pin)
            found.failures += [failure] if failure else []
        return found

    reports = []
    with ThreadPoolExecutor(max_workers=min(8, max(1, len(specs)))) as pool, no_collection():
        reading = pool.map(lambda spec: _guarded(spec, lambda: fetch(spec, chosen)), specs)
        for spec, item in zip(specs, reading, strict=True):
            reports.append(item if isinstance(item, LaneReport) else _guarded(spec, partial(one, spec, item)))
    return reports


def _guarded_live(chosen: list[Feature], start_method: str) -> list[LaneReport]:
    """What was seen in running engine cores, or one lane that says why nothing was."""
    found = _guarded(LaneSpec("live", "installed"), lambda: check_live(chosen, start_method))
    return [found] if isinstance(found, LaneReport) else found


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
    deltas: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A delta file anywhere: only it, and what --feature names beside it."),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of a target, the edits of this feature only; may be given several times."),
    ] = None,
) -> None:
    """Show the text that would run."""
    if diff and map:
        raise refuse("BP007", "--diff and --map exclude each other", next="ask for one of them")
    chosen = _features_of(what, _chosen(deltas, feature))
    spec = _one_lane(lane)
    opened = Lane(spec.name, open_source(spec.spec))
    only = what if ":" in what else None
    if only:  # what runs is one text, whoever edits it
        chosen = [compose(at_work(chosen, opened) or chosen)]
    show_features(opened, chosen, only, Console(soft_wrap=True), "diff" if diff else "map" if map else "text")


def _features_of(what: str, known: Sequence[Feature]) -> list[Feature]:
    """The feature of a name, or all that edit a target; of those that the command looks at, and of no others."""
    chosen = [feature for feature in known if what == feature.name or what in feature.targets]
    if chosen:
        return chosen
    names = [feature.name for feature in known]
    targets = sorted({target for feature in known for target in feature.targets})
    if ":" in what:
        said, otherwise = f"no feature edits {what!r}", f"use a feature's name or one of: {', '.join(targets)}"
    else:
        said, otherwise = f"there is no feature {what!r}", f"use one of: {', '.join(names)}"
    lost = [failure for failure in broken() if ":" not in what]
    raise PatchError(Failure("BP003", said, did_you_mean(what, [*names, *targets], otherwise)), *lost)


def _one_lane(text: str | None) -> LaneSpec:
    if text is not None:
        return lane_named(text, Path.cwd())
    spec, *others = declared_lanes(Path.cwd())
    named = spec.name if spec.name == spec.spec else f"{spec.name} ({spec.spec})"
    more = f"; --lane takes {', '.join(other.name for other in others)} too" if others else ""
    sys.stderr.write(f"lane {named}{more}\n")
    return spec


# -- new-delta -------------------------------------------------------------------------------


@app.command("new-delta")
def new_delta(
    target: Annotated[str, typer.Argument(help="The upstream function, as module:Qual.name.")],
    at: Annotated[
        str,
        typer.Option(
            metavar="FILE:LINE",
            help="The statement to edit at. The line is counted in FILE if that is a file of a "
            "vLLM tree on disk, else in the first lane's file of that name.",
        ),
    ],
    lane: Annotated[
        list[str] | None,
        typer.Option(metavar="LANE", help="Where it has to hold; may be given several times. Without any: as verify."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="FEATURE[.WHAT]", help="Without it: as the file, else my_feature.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="A new file; without it, standard output.")
    ] = None,
) -> None:
    """Write the skeleton of a delta file, with the smallest anchor that is found exactly once on every lane."""
    if output is not None and output.exists():
        raise refuse("BP806", f"{output} is there already", next="choose another name, or remove it first")
    specs = [lane_named(text, Path.cwd()) for text in lane] if lane else declared_lanes(Path.cwd())
    _unique(specs)
    file = output or Path("my_feature.py")
    made = propose_delta(target, at, specs, name or file.stem, file)
    for line in made.said:
        sys.stderr.write(f"{line}\n")
    if output is None:
        typer.echo(made.text, nl=False)
        return
    write(output, made.text)
    sys.stderr.write(f"{output} is written; next: {_PROGRAM} verify --deltas {output}\n")


# -- describe --------------------------------------------------------------------------------


class DescribeFormat(str, Enum):
    """How a description is written."""

    text = "text"
    ascend_patch_doc = "ascend-patch-doc"


@app.command()
def describe(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[FEATURE]…", help="Features by name; without any, all.")
    ] = None,
    format: Annotated[  # noqa: A002
        DescribeFormat, typer.Option(help="For a person, or the block for vllm-ascend's patch ledger.")
    ] = DescribeFormat.text,
    first: Annotated[int, typer.Option(metavar="N", min=1, help="The number of the first block in the ledger.")] = 1,
    deltas: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A delta file anywhere: only it, and what is named.")
    ] = None,
) -> None:
    """Say what is declared: why, how, which upstream change it relates to, and when it can go."""
    if deltas:
        chosen = chosen_features(deltas, names or ())
    else:
        chosen = [find_feature(name) for name in dict.fromkeys(names)] if names else list(features())
    text = as_ascend_patch_doc(chosen, first) if format is DescribeFormat.ascend_patch_doc else describe_text(chosen)
    typer.echo(text)


# -- status ----------------------------------------------------------------------------------


class StatusFormat(str, Enum):
    """How a status is written."""

    text = "text"
    json = "json"


@app.command()
def status(
    format: Annotated[StatusFormat, typer.Option(help="How standard output is written.")] = StatusFormat.text,  # noqa: A002
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Of a running server instead, by its Prometheus metrics.")
    ] = None,
    interval: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="With --url: read twice, for rates in between.")
    ] = None,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="With --url: read again and again, until Ctrl-C.")
    ] = None,
    pid: Annotated[
        int | None,
        typer.Option(
            metavar="PID", min=1, help="Of an engine's process instead, or of all below this one: they answer."
        ),
    ] = None,
) -> None:
    """Say what is declared, and what would be armed in a process of this Python; imports no vLLM.

    Or what the gate of a running server does (--url), or how engines stand that no server answers for (--pid).
    """
    if (url is not None and pid is not None) or (interval is not None and watch is not None):
        one, other = ("--url", "--pid") if url is not None and pid is not None else ("--interval", "--watch")
        raise refuse("BP007", f"{one} and {other} exclude each other", next="give one of them")
    if url is None and (interval is not None or watch is not None):
        raise refuse("BP007", "--interval and --watch speak of --url", next="give --url too")
    text = format is StatusFormat.text
    if url is not None:
        tell_server(url, Console() if text else None, interval=interval, watch=watch)
        return
    if pid is not None:
        asked = inquire(pid)
        if text:
            print_inquiry(asked, Console())
        else:
            typer.echo(json.dumps(asked.as_dict(), indent=2, ensure_ascii=False))
        raise typer.Exit(int(asked.outcome))
    found = inspect_status()
    if format is StatusFormat.text:
        print_status(found, Console())
    else:
        typer.echo(json.dumps(found.as_dict(), indent=2, ensure_ascii=False))


# -- demo ------------------------------------------------------------------------------------


class DemoFormat(str, Enum):
    """How the demo is shown while it runs."""

    auto = "auto"
    live = "live"
    plain = "plain"


@app.command()
def demo(
    requests: Annotated[int, typer.Option(min=8, max=1000, help="How many requests are sent in each replay.")] = 48,
    seed: Annotated[int, typer.Option(help="Of the load; the same seed is the same load.")] = 0,
    format: Annotated[  # noqa: A002
        DemoFormat, typer.Option(help="Tables that change in place, or lines; auto: tables on a terminal.")
    ] = DemoFormat.auto,
) -> None:
    """Show balance off beside on, in real engine cores on the CPU; needs vLLM's CPU build in this Python."""
    console = Console()
    run_demo(
        requests, seed, console, live=console.is_terminal if format is DemoFormat.auto else format is DemoFormat.live
    )


# -- npu-check -------------------------------------------------------------------------------


class Device(str, Enum):
    """Whose memory counts as the device's."""

    auto = "auto"
    npu = "npu"
    cuda = "cuda"
    cpu = "cpu"


@app.command()
def npu_check(
    model: Annotated[str, typer.Option(help="Loaded with dummy weights; without it, a tiny mixture of experts.")] = "",
    device: Annotated[Device, typer.Option(help="The device; auto: NPU, else CUDA, else the CPU.")] = Device.auto,
) -> None:
    """Count device synchronisations per step, balance off and on; prints Markdown for a pull request."""
    chosen = detected() if device is Device.auto else device.value
    text, ends = run_check(model, chosen, lambda what: typer.echo(what, err=True))
    typer.echo(text)
    raise typer.Exit(ends)

"""The command line of the drift report."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand

from balance_patcher.errors import Outcome, PatchError, refuse
from balance_patcher.render import prefer_astor

from .choice import choose, pinned
from .copies import copies_in, held, with_copies
from .engine import Tell
from .formats import FORMATS
from .index import FOLDER, Index
from .releases import range_of
from .runs import Options, run_git, run_releases

_EPILOG = """Exit status: 0 nothing needs an edit; 1 something does; 2 wrong usage; 3 could not check. \
What broke and was mended before the last ref is told, and does not count."""
_ROOT = Path(__file__).resolve().parents[2]
_INTERRUPTED = 130  # typer's
_KEPT = "interrupted; what was looked at is kept, and the next run goes on from there\n"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Format = Enum("Format", {name: name for name in FORMATS}, type=str)  # type: ignore[misc]


class Columns(str, Enum):
    """Which commits are columns of the matrix."""

    relevant = "relevant"
    tags = "tags"


class _Command(TyperCommand):
    """A command whose ``--help`` takes no value, and does not say that it does."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


@app.command(epilog=_EPILOG, cls=_Command)
def report(
    repo: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A git checkout, worktree or mirror of vLLM; with --since.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="REF",
            help="The first ref; pin:release or pin:main with --vllm-ascend. Without --repo a release.",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="REF", help="The last ref, which is judged; HEAD, or the newest release.")
    ] = None,
    releases: Annotated[
        str | None, typer.Option(metavar="FIRST..LAST", help="Released versions instead, or a list: 0.31.0,0.32.0.")
    ] = None,
    features: Annotated[
        list[str] | None, typer.Option("--features", metavar="NAME[,NAME]", help="Only these features.")
    ] = None,
    delta: Annotated[
        list[str] | None, typer.Option(metavar="FEATURE.WHAT", help="Only these deltas; may be given several times.")
    ] = None,
    deltas: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A delta file anywhere, as verify takes it.")
    ] = None,
    vllm_ascend: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A checkout of vllm-ascend, or its unpacked wheel: its own copies are held beside each ref, and the "
            "pins of a checkout can be named.",
        ),
    ] = None,
    copy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE:Class.method[=TARGET]",
            help="Somebody's verbatim copy, to be held beside each ref; FILE may be a member of a source, as in "
            "pypi:vllm-ascend==0.25.1rc1:vllm_ascend/x.py. With --vllm-ascend, its own copies.",
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="How it is written.")] = Format.text,  # type: ignore[attr-defined]  # noqa: A002
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Not to standard output.")
    ] = None,
    columns: Annotated[
        Columns, typer.Option(help="Every commit that matters, or only tags; the first bad commit is found either way.")
    ] = Columns.relevant,
    all_commits: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--all-commits", metavar="", help="Commits of merged branches too, and not only first parents."),
    ] = False,
    processes: Annotated[int, typer.Option(min=0, max=64, help="How many look at once; 0: one for each core.")] = 0,
    kept: Annotated[
        Path, typer.Option("--index", metavar="DIR", help="Where is kept what was seen, for the next run.")
    ] = FOLDER,
    no_index: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-index", metavar="", help="Look at everything anew, and remember nothing.")
    ] = False,
) -> None:
    """Tell, commit by commit, which deltas still apply, what broke them, and what to do."""
    if repo is None and releases is None and since is not None:
        releases = range_of(since, until)
    if (repo is None) == (releases is None):
        raise refuse("BP007", "give either --repo with --since, or --releases, or --since alone", next="see --help")
    if repo is not None and since is None:
        raise refuse("BP007", "--repo needs --since", next="name the first ref: --since v0.32.0")
    if ".." in (since or ""):  # in no ref
        first, last = (part.strip(".") for part in (since or "").split("..", 1))
        raise refuse("BP007", "--since is one ref", next=f"write --since {first or 'HEAD'} --until {last or 'HEAD'}")
    names = [name.strip() for text in features or () for name in text.split(",") if name.strip()]
    chosen = choose(names, deltas or (), delta or ())
    declared = [one.feature for one in chosen]
    copies = [held(text) for text in copy or ()]
    copies += copies_in(vllm_ascend, declared) if vllm_ascend is not None and not copies else []
    index = Index(None if no_index else kept)
    options = Options(all_commits, columns is Columns.tags, processes)
    with _progress() as tell:
        try:
            if repo is not None:
                ends = [pinned(ref, vllm_ascend) for ref in (since or "", until or "HEAD")]
                run = run_git(repo, ends[0], ends[1], chosen, index, options, tell)
            else:
                run = run_releases(releases or "", chosen, index, options, tell)
        finally:
            index.close()
    if index.trouble:
        sys.stderr.write(
            f"warning: nothing is kept for the next run, because that cannot be written: {index.trouble}\n"
        )
    found = with_copies(run.report, copies, run.columns, declared)
    if vllm_ascend is not None and not copies:
        found = replace(found, notes=(*found.notes, f"{vllm_ascend} holds none of the copies that are declared"))
    found = found if not delta else found.only(delta)
    _write(FORMATS[format.value](found), output)
    raise typer.Exit(int(found.outcome))


def _write(text: str, output: Path | None) -> None:
    if output is None:
        try:
            typer.echo(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise refuse("BP515", f"standard output: {error.strerror}", next="write it elsewhere: -o FILE") from error
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise refuse("BP515", f"{output}: {error.strerror}", next="check the path and its rights") from error


@contextlib.contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on standard error, if somebody watches."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("looking", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield tell


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; what nobody foresaw exits 3."""
    os.environ.setdefault("BALANCE_PATCHER_CACHE", str(_ROOT / ".cache" / "wheels"))
    try:
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            prefer_astor()
        app(args=list(arguments) if arguments is not None else None, prog_name="python -m tools.drift_report")
    except PatchError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.outcome))
    except SystemExit as stop:
        # typer ends an interrupted run with 130, and a closed pipe with 1, which would read as a finding
        broken = isinstance(stop.__context__, (KeyboardInterrupt, BrokenPipeError)) or stop.code not in {
            0,
            1,
            2,
            3,
            None,
        }
        if stop.code == _INTERRUPTED:
            sys.stderr.write(_KEPT)
        sys.exit(int(Outcome.UNKNOWN) if broken else stop.code)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stderr.write(_KEPT)
        sys.exit(int(Outcome.UNKNOWN))
    except Exception as error:  # noqa: BLE001 - an uncaught error must not look like a finding
        if os.environ.get("BALANCE_PATCHER_DEBUG"):
            traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        surprise = refuse(
            "BP599", f"{type(error).__name__}: {error}", ("where", f"{frame.filename}:{frame.lineno}"),
            next="report this; BALANCE_PATCHER_DEBUG=1 shows the traceback",
        )  # fmt: skip
        sys.stderr.write(f"{surprise}\n")
        sys.exit(int(Outcome.UNKNOWN))
    sys.exit(0)

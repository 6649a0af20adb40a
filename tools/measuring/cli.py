"""The command line of the bench."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from balance_patcher.errors import Outcome, PatchError, refuse

from . import commands, machine, table
from .lanes import Lane, declared, run_in
from .results import Results
from .worker import MODULES

PARTS = ("install", "schedule", "gather", "verify", "drift", "engine")
INTERRUPTED = 130

#: Columns of a table that goes to a file.
WIDTH = 150

#: Seconds after which a part is taken for hung, on a quiet machine and with all its rounds.
LIMIT = 900.0

Part = Enum("Part", {name: name for name in PARTS}, type=str)  # type: ignore[misc]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=(
    "Measure what the patch costs against upstream's own work, on real vLLM; a table here, JSON in a file."
))  # fmt: skip


@app.command()
def bench(
    part: Annotated[list[Part] | None, typer.Option(help="What to measure; without any, all.")] = None,
    lane: Annotated[
        list[str] | None, typer.Option(metavar="NAME|NAME=PYTHON", help="Lanes; without any, the declared ones.")
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.01, max=10, help="Of the number of rounds; below 1 also of what is measured.")
    ] = 1.0,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the JSON and the logs go.")] = machine.ROOT
    / ".bench",
    check: Annotated[bool, typer.Option("--check", help="Exit 1, unless every target is met for sure.")] = False,  # noqa: FBT002
) -> None:
    """Measure, print, and write down."""
    parts = list(dict.fromkeys(one.value for one in part)) if part else list(PARTS)
    lanes = [Lane.of(text) for text in lane] if lane else declared()
    results = Results(machine.facts())
    file = output / f"{'bench' if len(parts) == len(PARTS) else '-'.join(parts)}.json"
    try:
        output.mkdir(parents=True, exist_ok=True)
        file.write_text(results.text(), encoding="utf-8")  # a place that cannot be written to is found now
    except OSError as error:
        raise refuse("BP515", f"{file}: {error.strerror}", next="give another --output") from error
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with _progress() as tell:
        for name in parts:
            _measure(name, lanes, scale, output, results, tell)
            results.machine["load after"] = machine.load()
            file.write_text(results.text(), encoding="utf-8")
    table.show(results, console)
    console.print(f"written: {file}", highlight=False, soft_wrap=True)
    if not results.rows:
        raise typer.Exit(Outcome.UNKNOWN)
    if check and results.failed():
        raise typer.Exit(Outcome.BROKEN)


def _measure(
    part: str, lanes: Sequence[Lane], scale: float, folder: Path, results: Results, tell: Callable[[str], None]
) -> None:
    if part in MODULES:
        for lane in lanes:
            run_in(lane, part, scale, folder, results, tell, LIMIT)
        return
    try:
        measured = {"verify": commands.verify, "drift": commands.drift}[part]
        results.rows += measured([lane.name for lane in lanes], scale, tell)
    except PatchError as error:
        results.lost[part] = str(error)


@contextlib.contextmanager
def _progress() -> Any:
    """One line that changes in place on a terminal; elsewhere one line for each step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False, markup=False)
        return
    with console.status("") as status:
        yield status.update


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. See :mod:`tools.bench` for the exit status."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except PatchError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.outcome)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what was measured so far is in the file\n")
        sys.exit(INTERRUPTED)
    except Exception:  # noqa: BLE001 - exit 1 means a missed target, so nothing unforeseen may end with it
        traceback.print_exc()
        sys.exit(Outcome.UNKNOWN)
    sys.exit(0)

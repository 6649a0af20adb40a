"""The command line of the simulator."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from balance_patcher.errors import Outcome, PatchError, refuse

from . import steptime
from .dispatch import NAMES
from .files import read_parts, write_summary
from .job import Job, part_name
from .plots import plot
from .plugging import plug_in
from .running import job_in, prepare, python_of, run
from .tables import tables
from .traces import Load

GATES = ("off", "on", "catch-up")
ASSUMED = ", ".join(f"{name}={value:g}" for name, value in asdict(steptime.StepTime()).items())
INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, help=(
    "Drive a lane's real schedulers through a trace, with the balance gate off and on, and with a counter-example: "
    "lagging ranks catch up."
))  # fmt: skip

Dispatch = Enum("Dispatch", {name: name for name in NAMES}, type=str)  # type: ignore[misc]


@app.command("run")
def run_command(
    ranks: Annotated[str, typer.Option(metavar="N[,N]", help="Numbers of ranks, 2 to 512.")] = "16",
    gates: Annotated[str, typer.Option(metavar="GATE[,GATE]", help="off, on, catch-up.")] = ",".join(GATES),
    requests: Annotated[int, typer.Option(min=1, help="Requests for the most ranks; fewer get their share.")] = 2000,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second for each rank.")] = 5.0,
    burst: Annotated[int, typer.Option(min=1, help="Requests that arrive at one moment; 1: Poisson.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Mean tokens of a prompt.")] = 512,
    output: Annotated[int, typer.Option(min=1, help="Mean tokens of an answer.")] = 128,
    spread: Annotated[float, typer.Option(min=0, help="Deviation of the logarithm of lengths; 0: all alike.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of times and lengths.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="A recorded trace: arrival, prompt, output; rank, for --dispatcher recorded."),
    ] = None,
    dispatcher: Annotated[Dispatch, typer.Option(help="Who gets a request.")] = Dispatch.vllm,  # type: ignore[attr-defined]
    step: Annotated[
        str,
        typer.Option(
            metavar="base=S,prefill=S,decode=S",
            help=f"Seconds of a step, a prompt token, a decoding request. What is left out is {ASSUMED}.",
        ),
    ] = "",
    fitted: Annotated[
        Path | None, typer.Option("--fit", metavar="CSV", help="Fit them to measured steps instead: see `fit`.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=4096, help="Requests that a rank runs at a time.")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    max_model_len: Annotated[int, typer.Option(min=2, help="Tokens that the model takes.")] = 8192,
    block: Annotated[int, typer.Option(min=1, help="Tokens of a KV cache block.")] = 64,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a rank's KV cache; 0: so many that none is preempted.")
    ] = 0,
    closed: Annotated[
        int, typer.Option(min=0, help="A closed loop: so many requests a rank are unanswered at a time; 0: open.")
    ] = 0,
    asynchronous: Annotated[  # noqa: FBT002
        bool, typer.Option("--async-scheduling", help="Decide on a step before the tokens of the one before are there.")
    ] = False,
    processes: Annotated[
        int, typer.Option("--processes", "-j", min=0, help="Parts that are simulated at a time; 0: one a core.")
    ] = 0,
    lane: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The lane whose scheduler is driven, or a Python that has vLLM.",
            show_default="this Python if it has vLLM, else main",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--output-dir", "-o", metavar="DIR", help="Where it is left.")] = Path(
        "simulated"
    ),
    resume: Annotated[  # noqa: FBT002
        bool, typer.Option("--resume", help="Simulate only what an interrupted run has left out.")
    ] = False,
    plots: Annotated[bool, typer.Option(help="Draw the ranks over time (needs matplotlib).")] = True,  # noqa: FBT002
) -> None:
    """Simulate, and leave tables, CSV and plots."""
    chosen = _ranks(ranks)
    if step and fitted is not None:
        raise refuse("BP007", "give either --step or --fit", next="see --help")
    model = steptime.fit(fitted).model if fitted is not None else steptime.given(step)
    job = Job(
        ranks=chosen, gates=_gates(gates), dispatcher=dispatcher.value, seqs=max_num_seqs,
        tokens=max(max_num_batched_tokens, max_num_seqs), longest=max_model_len, block=block, cache=kv_tokens,
        step=model, load=Load(requests, rate * max(chosen), prompt, output, spread, burst, max_model_len, seed),
        file=str(trace.resolve()) if trace is not None else "", closed=closed, asynchronous=asynchronous,
        processes=processes or os.cpu_count() or 1,
    )  # fmt: skip
    longest = max(one.prompt + one.output for one in job.trace(max(chosen)))
    if kv_tokens and kv_tokens < longest + 2 * block:
        what = f"--kv-tokens {kv_tokens} does not hold the longest request, {longest} tokens and a block to spare"
        raise refuse("BP007", what, next=f"give at least {longest + 2 * block}, or 0")
    python = python_of(lane)
    prepare(job, folder, resume=resume)
    console, interrupted = Console(), False
    try:
        with _Watching() as watching:
            run(folder, python, watching)
    except KeyboardInterrupt:
        interrupted = True
    finally:  # what is finished is shown, whatever ended the rest
        _show(console, job, folder, plots=plots)
    if interrupted:
        missing = [name for name in job.names() if not (folder / name).exists()]
        console.print(
            f"interrupted. Not simulated: {', '.join(missing) or 'nothing'}. "
            "The same command with --resume goes on.", markup=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(INTERRUPTED)


@app.command("fit")
def fit_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="CSV...", help="prefill_tokens,decode_batch,seconds: a line a step; a file a rank."),
    ],
) -> None:
    """Fit the step-time model to measured steps: see `recorder`."""
    found = steptime.fit(*files)
    model = found.model
    typer.echo(f"--step base={model.base:.6g},prefill={model.prefill:.6g},decode={model.decode:.6g}")
    typer.echo(
        f"{found.steps} steps; the model explains {100 * found.explained:.1f} % of the variance, "
        f"and lies {1000 * found.error:.3g} ms from a step on average"
    )


@app.command("recorder")
def recorder_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the plugin's metadata is written.")],
) -> None:
    """Make a folder that lets vLLM's engine cores write down their steps, for `fit`."""
    for line in plug_in(folder):
        typer.echo(line)


@app.command("plot")
def plot_command(folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `run` left.")]) -> None:
    """Draw again what was simulated."""
    for file in plot(folder, _parts(folder), job_in(folder).described()):
        typer.echo(str(file))


def _parts(folder: Path) -> list[Any]:
    parts = read_parts(folder)
    if not parts:
        raise refuse("BP514", f"{folder} holds no finished part", next="name the folder that `run` was given")
    return list(parts)


def _ranks(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 2 <= int(word) <= 512 for word in words):  # noqa: PLR2004 - as the help says
        raise refuse("BP007", f"--ranks {text!r}: each number is from 2 to 512", next="write it as in --ranks 2,16,64")
    return tuple(dict.fromkeys(int(word) for word in words))


def _gates(text: str) -> tuple[str, ...]:
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if word not in GATES]:
        raise refuse("BP007", f"--gates: there is no {', '.join(wrong)}", next=f"name some of {', '.join(GATES)}")
    return tuple(gate for gate in GATES if gate in words)


def _show(console: Console, job: Job, folder: Path, *, plots: bool) -> None:
    """The parts of this job that are there: as tables, as a summary, as plots."""
    parts = [part for part in read_parts(folder) if part_name(part.ranks, part.gate) in job.names()]
    if not parts:
        return
    write_summary(folder, parts)
    for table in tables(parts, job.described()):
        console.print(table)
    console.print(f"{folder / 'summary.csv'}, and a folder for each part", soft_wrap=True, highlight=False)
    if plots:
        try:
            for file in plot(folder, parts, job.described()):
                console.print(str(file), soft_wrap=True, highlight=False)
        except PatchError as error:
            console.print(f"no plots: {error.failures[0].what} {error.failures[0].next}", markup=False, soft_wrap=True)


class _Watching(contextlib.AbstractContextManager[Any]):
    """A bar for each part on standard error, if somebody watches; a line at its end, if nobody does."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(), console=Console(stderr=True), disable=not self._live,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Any:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        name = event.get("name", "")
        if event["event"] == "part":
            self._tasks[name] = self._bar.add_task(name, total=event["requests"])
        elif event["event"] == "progress":
            self._bar.update(self._tasks[name], completed=event["done"])
        elif event["event"] == "done" and not self._live:
            sys.stderr.write(f"{name}: done\n")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; what nobody foresaw exits 3."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="python -m tools.simulate")
    except PatchError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.outcome))
    except Exception as error:  # noqa: BLE001 - an uncaught error must not look like a result
        if os.environ.get("BALANCE_PATCHER_DEBUG"):
            traceback.print_exc()
        surprise = refuse("BP599", f"{type(error).__name__}: {error}", next="BALANCE_PATCHER_DEBUG=1 tells where")
        sys.stderr.write(f"{surprise}\n")
        sys.exit(int(Outcome.UNKNOWN))
    sys.exit(0)

"""Traces: when each request arrives, how long its prompt is, and how many tokens it is answered with.

A trace is made from a seed, or read from a CSV. What is read is judged line by line, before anything starts: a
simulation of an hour should not end at a negative length.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from balance_patcher.errors import Failure, PatchError, refuse

COLUMNS = ("arrival", "prompt", "output")
RANK = "rank"

#: After so many bad lines no more are looked for.
SHOWN = 5

CODE = "BP950"


class Arrival(NamedTuple):
    """One request.

    Attributes:
        at: Seconds from the start of the trace.
        prompt: Tokens of its prompt.
        output: Tokens of its answer.
        rank: Who had it, as the recorded dispatcher gives it out again; below 0: nobody knows.
    """

    at: float
    prompt: int
    output: int
    rank: int = -1


@dataclass(frozen=True)
class Load:
    """How a trace is made.

    Attributes:
        requests: How many.
        rate: Requests a second, over all ranks.
        prompt: Mean tokens of a prompt.
        output: Mean tokens of an answer.
        spread: How far lengths lie apart: the deviation of their logarithm; 0 makes all alike.
        burst: Requests that arrive at one moment; 1 is a Poisson process.
        longest: Tokens that the model takes, prompt and answer together.
        seed: Of times and lengths.
    """

    requests: int
    rate: float
    prompt: int = 512
    output: int = 128
    spread: float = 0.6
    burst: int = 1
    longest: int = 8192
    seed: int = 1


def made(load: Load) -> list[Arrival]:
    """The trace of a load: bursts at random moments, alike in rate however large a burst is."""
    pick = random.Random(load.seed)  # noqa: S311 - a load, no secret
    now, trace = 0.0, list[Arrival]()
    while len(trace) < load.requests:
        now += pick.expovariate(load.rate / load.burst)
        for _ in range(min(load.burst, load.requests - len(trace))):
            prompt = _length(pick, load.prompt, load.spread, load.longest - 1)
            output = _length(pick, load.output, load.spread, load.longest - prompt)
            trace.append(Arrival(now, prompt, output))
    return trace


def _length(pick: random.Random, mean: int, spread: float, longest: int) -> int:
    """A length from a log-normal distribution of that mean, cut to what fits."""
    drawn = mean * math.exp(pick.gauss(0, spread) - spread**2 / 2)
    return max(1, min(longest, round(drawn)))


def read(file: Path, longest: int, ranks: int = 0) -> list[Arrival]:
    """The trace that a CSV holds, with the columns ``arrival``, ``prompt`` and ``output``, and maybe ``rank``.

    Other columns are passed over.

    Args:
        file: The CSV.
        longest: Tokens that the model takes, prompt and answer together.
        ranks: How many there are; 0: any rank will do.

    Raises:
        PatchError: BP514, if it cannot be read; BP950 for each bad line, with its number.
    """
    trace, bad = list[Arrival](), list[Failure]()
    for line, row in rows(file, COLUMNS, CODE):
        found = _arrival(row, trace[-1].at if trace else 0.0, longest, ranks)
        if isinstance(found, Arrival):
            trace.append(found)
            continue
        bad.append(_bad(file, line, found))
        if len(bad) == SHOWN:
            break
    if bad:
        raise PatchError(*bad)
    if not trace:
        raise PatchError(_bad(file, 1, "no request follows the header"))
    return trace


def _arrival(row: dict[str, str], last: float, longest: int, ranks: int) -> Arrival | str:
    """The request of one row, or what is wrong with it."""
    try:
        at = float(row["arrival"])
        prompt, output = int(row["prompt"]), int(row["output"])
        rank = int(row.get(RANK) or -1)
    except ValueError as error:
        return f"not a number ({error})"
    wrong = ""
    if not math.isfinite(at) or at < 0:
        wrong = f"arrival {row['arrival']} is no time from the start of the trace"
    elif at < last:
        wrong = f"arrival {at:g} comes before the line above it, {last:g}: not sorted"
    elif prompt < 1 or output < 1:
        wrong = f"prompt {prompt}, output {output}: a length is below 1"
    elif prompt + output > longest:
        wrong = f"prompt {prompt} and output {output} are {prompt + output} tokens, the model takes {longest}"
    elif (RANK in row and row[RANK] and rank < 0) or rank >= ranks > 0:
        wrong = f"rank {rank}, of {ranks} ranks" if rank >= 0 else f"rank {rank} is below 0"
    return wrong or Arrival(at, prompt, output, rank)


def rows(file: Path, columns: Sequence[str], code: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV with a header, each with the number of its line.

    Raises:
        PatchError: BP514, if the file cannot be read; ``code``, if columns are missing, or a row has too few fields.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            if missing := [name for name in columns if name not in names]:
                raise PatchError(_bad(file, 1, f"no column {', '.join(missing)}", code, columns))
            reader.fieldnames = names
            for row in reader:
                short = [name for name in columns if not (row[name] or "").strip()]
                if short:
                    raise PatchError(_bad(file, reader.line_num, f"nothing under {', '.join(short)}", code, columns))
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise refuse("BP514", f"{file}: {error}", next="give a CSV in UTF-8 that can be read") from error


def _bad(file: Path, line: int, what: str, code: str = CODE, columns: Sequence[str] = COLUMNS) -> Failure:
    follow = f"mend the line; a CSV has the header {','.join(columns)}"
    return Failure(code, f"{file}:{line}: {what}", follow, file=str(file), line=line)


def write(file: Path, trace: Sequence[Arrival]) -> None:
    """Keep a trace as a CSV that :func:`read` takes."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        known = any(one.rank >= 0 for one in trace)
        writer.writerow((*COLUMNS, RANK) if known else COLUMNS)
        # Of one that nobody knows nothing is written: a number below 0 would be refused.
        writer.writerows((*one[:3], *([one.rank if one.rank >= 0 else ""] * known)) for one in trace)

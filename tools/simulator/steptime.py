"""How long a step takes on one rank: a fixed part, a part for each prompt token, a part for each request that decodes.

In a data-parallel wave all ranks wait for the slowest, so the step of the group takes the longest of these. The three
figures can be fitted to measured steps; where several ranks were measured, to the rank of each step that had most to
do, as all took as long as that one. None of them may come out negative: a model in which more work takes less
time would be exploited by no scheduler, and believed by some reader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from balance_patcher.errors import Failure, PatchError, refuse

from .traces import rows

COLUMNS = ("prefill_tokens", "decode_batch", "seconds")
STEP = "step"
CODE = "BP951"


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        base: With nothing to do.
        prefill: For each prompt token more.
        decode: For each request more that gets a token.
    """

    base: float = 0.020
    prefill: float = 0.000080
    decode: float = 0.000200

    def of(self, prefill: int, decode: int) -> float:
        """Seconds of one rank's step."""
        return self.base + self.prefill * prefill + self.decode * decode

    def described(self) -> str:
        """In words."""
        each = f"{1e6 * self.prefill:g} µs a prompt token, {1e6 * self.decode:g} µs a decoding request"
        return f"a step takes {1000 * self.base:g} ms, {each}"


@dataclass(frozen=True)
class Measured:
    """One step that was measured on one rank."""

    prefill: int
    decode: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted model.

    Attributes:
        steps: How many were measured.
        explained: The share of the variance that the model explains.
        error: Mean distance of the model from what was measured, in seconds.
    """

    model: StepTime
    steps: int
    explained: float
    error: float


def given(text: str) -> StepTime:
    """The model that a person wrote, as ``base=0.02,prefill=8e-5,decode=2e-4``; what is left out stays as it is.

    Raises:
        PatchError: BP007, if it is not that.
    """
    names = ("base", "prefill", "decode")
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            values[part] = math.nan
    wrong = [name for name, value in values.items() if name not in names or not 0 <= value < math.inf]
    if wrong or values.get("base") == 0:
        what = f"--step {text!r}: {', '.join(wrong) or 'base=0'} is no part of a step's time"
        raise refuse("BP007", what, next="write seconds, as in --step base=0.02,prefill=8e-5,decode=2e-4")
    return StepTime(**values)


def read(file: Path) -> dict[int, Measured]:
    """Measured steps, one a line, by the number that the file gives them under ``step``, or else by their place.

    A step in which nothing was computed is left out: what it took is a wait for somebody else.

    Raises:
        PatchError: BP514, if the file cannot be read; BP951 for a bad line, with its number.
    """
    steps: dict[int, Measured] = {}
    for line, row in rows(file, COLUMNS, CODE):
        try:
            step = Measured(int(row["prefill_tokens"]), int(row["decode_batch"]), float(row["seconds"]))
            number = int(row.get(STEP) or line)
        except ValueError as error:
            raise PatchError(_bad(file, line, f"not a number ({error})")) from None
        if step.prefill < 0 or step.decode < 0 or not 0 < step.seconds < math.inf:
            raise PatchError(_bad(file, line, "a count is negative, or a time is not above 0"))
        if step.prefill or step.decode:
            steps[number] = step
    return steps


def fit(*files: Path) -> Fit:
    """The model that lies nearest to measured steps, by least squares.

    Args:
        files: The steps of one rank each.

    Raises:
        PatchError: As :func:`read`; BP951, if the steps do not tell the three parts from each other.
    """
    slowest: dict[int, Measured] = {}
    for file in files:
        for number, step in read(file).items():
            slowest[number] = max(step, slowest.get(number, step), key=lambda one: (one.prefill, one.decode))
    steps = list(slowest.values())
    table = [(1.0, float(step.prefill), float(step.decode)) for step in steps]
    seconds = [step.seconds for step in steps]
    if _solve(table, seconds, (0, 1, 2)) is None:
        what = "the steps do not tell base, prefill and decode from each other"
        raise PatchError(_bad(files[0], 1, f"{what}: {len(steps)} lines, which differ in too little"))
    best = min((_solution(table, seconds, chosen) for chosen in _choices()), key=lambda found: found[0])
    model = StepTime(*best[1])
    average = sum(seconds) / len(seconds)
    around = sum((value - average) ** 2 for value in seconds)
    error = sum(abs(model.of(step.prefill, step.decode) - step.seconds) for step in steps) / len(steps)
    return Fit(model, len(steps), 1 - best[0] / around if around else 1.0, error)


def _choices() -> list[tuple[int, ...]]:
    """Which of the three parts may differ from 0: with three, every choice can be tried."""
    return [chosen for count in (3, 2, 1) for chosen in itertools.combinations(range(3), count)]


def _solution(
    table: Sequence[tuple[float, ...]], seconds: Sequence[float], chosen: Sequence[int]
) -> tuple[float, tuple[float, float, float]]:
    """The squared error and the parts, if only the chosen parts differ from 0; an endless error if one is negative."""
    solved = _solve(table, seconds, chosen)
    if solved is None or min(solved) < 0:
        return math.inf, (0.0, 0.0, 0.0)
    parts = [0.0, 0.0, 0.0]
    for place, value in zip(chosen, solved, strict=True):
        parts[place] = value
    error = sum(
        (sum(part * x for part, x in zip(parts, row, strict=True)) - y) ** 2
        for row, y in zip(table, seconds, strict=True)
    )
    return error, (parts[0], parts[1], parts[2])


def _solve(table: Sequence[tuple[float, ...]], seconds: Sequence[float], chosen: Sequence[int]) -> list[float] | None:
    """Least squares over the chosen columns by their normal equations, each column scaled to 1."""
    scale = [max((abs(row[c]) for row in table), default=0.0) or 1.0 for c in chosen]
    columns = [[row[c] / s for row in table] for c, s in zip(chosen, scale, strict=True)]
    system = [
        [*(sum(x * z for x, z in zip(a, b, strict=True)) for b in columns),
         sum(x * y for x, y in zip(a, seconds, strict=True))]
        for a in columns
    ]  # fmt: skip
    size = len(chosen)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(system[row][at]))
        system[at], system[pivot] = system[pivot], system[at]
        if abs(system[at][at]) <= 1e-9 * len(table):
            return None
        for row in range(size):
            if row != at:
                factor = system[row][at] / system[at][at]
                system[row] = [x - factor * y for x, y in zip(system[row], system[at], strict=True)]
    return [system[at][size] / system[at][at] / scale[at] for at in range(size)]


def _bad(file: Path, line: int, what: str) -> Failure:
    follow = f"mend the line; a CSV of measured steps has the header {','.join(COLUMNS)}"
    return Failure(CODE, f"{file}:{line}: {what}", follow, file=str(file), line=line)

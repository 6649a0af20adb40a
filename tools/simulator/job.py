"""What is to be simulated, as it is handed to the lane's Python."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import traces
from .steptime import StepTime
from .traces import Arrival, Load


def part_name(ranks: int, gate: str) -> str:
    """What a part is called: so many ranks, with one way to admit."""
    return f"{ranks}-ranks-{gate}"


@dataclass(frozen=True)
class Job:
    """The parts of one simulation: every number of ranks with every gate.

    Attributes:
        ranks: Numbers of ranks.
        gates: How ranks admit: ``off``, ``on``, ``catch-up``.
        dispatcher: Who gets a request.
        seqs: Requests that a rank runs at a time.
        tokens: Tokens of a step.
        longest: Tokens that the model takes.
        block: Tokens of a KV cache block.
        cache: Tokens of a rank's KV cache; 0: as many as the longest requests need.
        step: How long a step takes.
        load: How a trace is made, for the largest number of ranks; a smaller one gets its share. With ``file``, unused.
        file: A recorded trace, the same for all numbers of ranks; empty, if it is made.
        closed: Requests of each rank that are unanswered at a time, in a closed loop; 0: they come when the trace says.
        asynchronous: Whether a step is decided on before the one before it has its tokens.
        processes: Parts that are simulated at a time.
    """

    ranks: tuple[int, ...]
    gates: tuple[str, ...]
    dispatcher: str
    seqs: int
    tokens: int
    longest: int
    block: int
    cache: int
    step: StepTime
    load: Load
    file: str = ""
    closed: int = 0
    asynchronous: bool = False
    processes: int = 1

    def trace(self, ranks: int) -> list[Arrival]:
        """What arrives at so many ranks.

        Raises:
            PatchError: What :func:`traces.read` raises.
        """
        if self.file:
            return traces.read(Path(self.file), self.longest, ranks if self.dispatcher == "recorded" else 0)
        share = ranks / max(self.ranks)
        values = asdict(self.load)
        requests, rate = max(1, round(self.load.requests * share)), self.load.rate * share
        return traces.made(Load(**values | {"requests": requests, "rate": rate}))

    def names(self) -> list[str]:
        """The names of its parts, in their order."""
        return [part_name(ranks, gate) for ranks in self.ranks for gate in self.gates]

    def like(self, other: Job) -> bool:
        """Whether both say the same of what is simulated; how many parts at a time means nothing to that."""
        return replace(self, processes=1) == replace(other, processes=1)

    def described(self) -> str:
        """What was assumed, on one line."""
        arrive = "Poisson" if self.load.burst == 1 else f"bursts of {self.load.burst}"
        came = f"{self.load.rate / max(self.ranks):g} requests/s a rank ({arrive})"
        came = f"closed loop, {self.closed} requests a rank" if self.closed else came
        lengths = f"{self.load.prompt:,} + {self.load.output:,} tokens on average"
        load = f"trace {Path(self.file).name}" if self.file else f"{came}, {lengths}"
        load += f", closed loop, {self.closed} requests a rank" if self.file and self.closed else ""
        rank = f"cap {self.seqs}, {self.tokens:,} tokens a step"
        rank += ", asynchronous scheduling" if self.asynchronous else ""
        rank += f", KV cache of {self.cache:,} tokens" if self.cache else ""
        return f"{rank}; {load}; dispatcher {self.dispatcher}; {self.step.described()}"

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def of(text: str) -> Job:
        """The job of such a text."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("ranks", "gates")}
        return Job(**values | lists | {"step": StepTime(**values["step"]), "load": Load(**values["load"])})

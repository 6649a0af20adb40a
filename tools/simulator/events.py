"""The events: requests arrive, all ranks step together, the slowest sets the pace, and the counts are exchanged.

Time passes only here. A request that arrives during a step is seen by its rank before the next, as an engine core
reads its queue between steps. Where no rank has anything to do, the clock goes on to the next arrival. In a closed
loop a request is sent when another is answered, at that very moment, and the times of the trace mean nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .dispatch import Dispatcher
from .steptime import StepTime
from .traces import Arrival

#: Steps in a row in which nothing was computed although requests wait: then nothing ever will be.
STALL = 1000

#: Requests after which progress is told.
TOLD = 100


class Work(NamedTuple):
    """What one rank does in a step.

    Attributes:
        prefill: Prompt tokens that are computed.
        decode: Requests that get a token.
        admitted: Requests admitted.
        preempted: Requests preempted.
        awaited: Whether it waits for the tokens at all: asynchronous scheduling starts with a step ahead.
    """

    prefill: int
    decode: int
    admitted: int
    preempted: int
    awaited: bool = True


class Answered(NamedTuple):
    """Requests that got their first token, and those that ended, each with its tokens."""

    first: Sequence[int]
    finished: Sequence[tuple[int, int]]


class Rank(Protocol):
    """One scheduler with its model."""

    @property
    def count(self) -> int:
        """What its own admission stop compares with the cap."""

    @property
    def waiting(self) -> int:
        """Requests that it has and does not run."""

    def add(self, number: int, arrival: Arrival) -> None:
        """Give it a request."""

    def step(self) -> Work:
        """Decide on a step."""

    def answer(self) -> Answered:
        """Give the step its tokens."""


class Gate(Protocol):
    """How what one rank counts gets to the others.

    Attributes:
        freezes: Whether a count at the cap stops admission on all ranks.
    """

    freezes: bool

    def gathered(self, counts: Sequence[int]) -> None:
        """A step has ended with these counts."""


class StalledError(Exception):
    """Requests wait, and no rank computes anything any more."""


@dataclass
class Run:
    """What happened, by request and by step.

    Attributes:
        ranks: How many.
        cap: Requests at which a rank stops admitting.
        rank: The rank of each request.
        sent: When it was sent.
        first: When it got its first token.
        finish: When it got its last.
        tokens: How many it got.
        end: When each step ended.
        seconds: How long it took.
        prefill: Prompt tokens in it, over all ranks.
        decode: Requests that decoded in it, over all ranks.
        admitted: Requests admitted in it.
        preempted: Requests preempted in it.
        leader: The largest count before it: what the gate of this step saw.
        frozen: Ranks that had room and requests waiting, and were stopped by the gate.
        waiting: Requests that waited at its end.
        running: The count of each rank at its end, step after step.
        calls: Calls of ``schedule``.
        cpu: Seconds of this process.
    """

    ranks: int
    cap: int
    rank: array[int] = field(default_factory=lambda: array("l"))
    sent: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    finish: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("l"))
    end: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    prefill: array[int] = field(default_factory=lambda: array("l"))
    decode: array[int] = field(default_factory=lambda: array("l"))
    admitted: array[int] = field(default_factory=lambda: array("l"))
    preempted: array[int] = field(default_factory=lambda: array("l"))
    leader: array[int] = field(default_factory=lambda: array("l"))
    frozen: array[int] = field(default_factory=lambda: array("l"))
    waiting: array[int] = field(default_factory=lambda: array("l"))
    running: array[int] = field(default_factory=lambda: array("H"))
    calls: int = 0
    cpu: float = 0.0

    def counts(self, step: int) -> array[int]:
        """The counts of all ranks at the end of a step."""
        return self.running[step * self.ranks : (step + 1) * self.ranks]


def simulate(
    ranks: Sequence[Rank],
    trace: Sequence[Arrival],
    dispatcher: Dispatcher,
    model: StepTime,
    gate: Gate,
    cap: int,
    tell: Callable[[int], None] = lambda _: None,
    closed: int = 0,
) -> Run:
    """Let the ranks answer a trace.

    Args:
        ranks: One scheduler each.
        trace: Sorted by time.
        dispatcher: Who gets a request.
        model: How long a step takes.
        gate: Gets the counts of each step.
        cap: Requests at which a rank stops admitting.
        tell: Told now and then how many requests are answered.
        closed: Requests that are unanswered at a time, in a closed loop; 0: they come when the trace says.

    Raises:
        StalledError: If requests wait, and nothing is computed any more.
    """
    run = Run(len(ranks), cap)
    requests = len(trace)
    for column, start in ((run.rank, -1), (run.tokens, 0)):
        column.extend([start] * requests)
    for times in (run.sent, run.first, run.finish):
        times.extend([0.0] * requests)
    has = [0] * len(ranks)  # unfinished requests of each rank
    counts = [0] * len(ranks)
    now, sent, done, still, told = 0.0, 0, 0, 0, 0
    started = time.process_time()
    while done < requests:
        if done == sent:  # all ranks rest until the next request comes
            now = now if closed else max(now, trace[sent].at)
            counts = [0] * len(ranks)
            gate.gathered(counts)
        while sent < requests and (sent - done < closed if closed else trace[sent].at <= now):
            chosen = dispatcher.choose(sent, trace[sent])
            ranks[chosen].add(sent, trace[sent])
            run.rank[sent], run.sent[sent] = chosen, now if closed else trace[sent].at
            has[chosen] += 1
            sent += 1
        leader = max(counts)
        frozen = 0
        if gate.freezes and leader >= cap:
            frozen = sum(1 for rank, count in zip(ranks, counts, strict=True) if count < cap and rank.waiting)
        active = [number for number, unfinished in enumerate(has) if unfinished]
        prefill = decode = admitted = preempted = 0
        ahead, longest = 0, 0.0
        for number in active:
            work = ranks[number].step()
            prefill += work.prefill
            decode += work.decode
            admitted += work.admitted
            preempted += work.preempted
            ahead += not work.awaited
            longest = max(longest, model.of(work.prefill, work.decode))
        if ahead == len(active):  # nobody has anything to wait for: the first step of a wave is only handed on
            longest = 0.0
        still = 0 if prefill or decode else still + 1
        if still == STALL:
            raise StalledError(f"{sent - done} requests wait, and {STALL} steps computed nothing")
        now += longest
        run.calls += len(active)
        for number in active:
            rank = ranks[number]
            answered = rank.answer()
            for request in answered.first:
                run.first[request] = now
            for request, tokens in answered.finished:
                run.finish[request], run.tokens[request] = now, tokens
                dispatcher.finished(request)
                has[number] -= 1
                done += 1
            counts[number] = rank.count
        gate.gathered(counts)
        dispatcher.passes(now)
        run.end.append(now)
        run.seconds.append(longest)
        run.prefill.append(prefill)
        run.decode.append(decode)
        run.admitted.append(admitted)
        run.preempted.append(preempted)
        run.leader.append(leader)
        run.frozen.append(frozen)
        run.waiting.append(sent - done - sum(counts))
        run.running.extend(counts)
        if done - told >= TOLD or done == requests:
            told = done
            tell(done)
    run.cpu = time.process_time() - started
    return run

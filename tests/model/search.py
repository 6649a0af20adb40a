"""Every state that can be reached, and from each of them: can it still come to rest?

What comes from outside may come at any time, and need not come at all. So each state must be able to come to
rest by itself, and one that cannot is *doomed*: whatever the ranks do from there, some request is never
answered or some rank never leaves a collective, until something comes from outside. A doomed state from
which nothing at all can move is *stuck*. That is a deadlock; a doomed state that leads to no stuck one would
be a livelock.
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass

from tests.model.cluster import Cluster
from tests.model.setup import Setup


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        states: How many states there are.
        rests: How many of them are at rest.
        errors: What went wrong in a move, such as collectives that do not match.
        miscounts: Ranks that made a step with no gather in the hook, or more than one.
        uneven: In how many states at rest the ranks have not gathered equally often.
        stale: In how many the gate is closed though no rank is at its cap.
        doomed: How many states cannot come to rest by themselves.
        stuck: The states, frozen, in which nothing can move.
        livelocks: How many doomed states lead to no stuck one.
        trace: The states of a shortest way to an error, else to a stuck state, else to a doomed one.
    """

    setup: Setup
    states: int
    rests: int
    errors: tuple[str, ...]
    miscounts: tuple[str, ...]
    uneven: int
    stale: int
    doomed: int
    stuck: tuple[tuple, ...]
    livelocks: int
    trace: tuple[tuple, ...]

    @property
    def sound(self) -> bool:
        return self.rests > 0 and not (self.errors or self.miscounts or self.uneven or self.stale or self.doomed)


def after(setup, state):
    """Each move from a state, with each way to go on in it: whether it comes from outside, and the cluster then."""
    for outside, move, number in Cluster(setup, state).moves():
        scripts = [()]
        while scripts:
            cluster = Cluster(setup, state, scripts.pop())
            cluster.make(move, number)
            scripts += cluster.forks
            yield outside, cluster


@functools.cache
def explore(setup: Setup) -> Result:
    """Breadth first, so that the first way to a state is a shortest one."""
    order = [Cluster.start(setup)]
    known, parents = {order[0]: 0}, array("l", [-1])
    tails, heads = array("l"), array("l")  # the moves that do not come from outside
    rests, stuck, wrong, uneven, stale = [], [], [], 0, 0
    errors, miscounts = {}, {}  # sets that keep their order
    for at, state in enumerate(order):  # It grows meanwhile.
        still = True
        for outside, cluster in after(setup, state):
            still = still and outside
            if cluster.miscount:
                miscounts[cluster.miscount] = None
            if cluster.error:
                errors[cluster.error] = None
                wrong.append(at)
                continue
            new = cluster.freeze()
            number = known.setdefault(new, len(order))
            if number == len(order):
                order.append(new)
                parents.append(at)
            if not outside:
                tails.append(at)
                heads.append(number)
        here = Cluster(setup, state)
        if here.at_rest():
            rests.append(at)
            uneven += here.uneven()
            stale += here.stale()
        elif still:
            stuck.append(at)
    doomed = _complement(_leading_to(rests, tails, heads, len(order)))
    to_stuck = _leading_to([*stuck, *wrong], tails, heads, len(order))
    target = next(iter([*wrong, *stuck, *doomed]), -1)
    trace = []
    while target >= 0:
        trace.append(order[target])
        target = parents[target]
    return Result(
        setup,
        states=len(order),
        rests=len(rests),
        errors=tuple(errors),
        miscounts=tuple(miscounts),
        uneven=uneven,
        stale=stale,
        doomed=len(doomed),
        stuck=tuple(order[at] for at in stuck),
        livelocks=sum(not to_stuck[at] for at in doomed),
        trace=tuple(reversed(trace)),
    )


def _leading_to(goals, tails, heads, size):
    """One byte a state: whether moves lead from it to one of the goals."""
    before = [[] for _ in range(size)]
    for tail, head in zip(tails, heads, strict=True):
        before[head].append(tail)
    marked, todo = bytearray(size), list(goals)
    for goal in goals:
        marked[goal] = 1
    while todo:
        for tail in before[todo.pop()]:
            if not marked[tail]:
                marked[tail] = 1
                todo.append(tail)
    return marked


def _complement(marked):
    return [at for at, mark in enumerate(marked) if not mark]

"""Ranks that must run the same thing tell each other what they run, before weights load; who differs is named.

Each rank that has a feature on writes a statement into the store of its data-parallel group and reads those
of the others. A rank that runs something else, that cannot run it, or that says nothing at all is named on
every rank that asked, instead of a collective in which they would wait for each other. A rank that is off
does nothing.

What each rank makes of it is written down too, and read by all. There is one verdict for all of them: whoever
knows it first puts it into the store, and everybody obeys what stands there. So none goes on while another has
refused, also where one is late by just the time that the others wait.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .board import Board
from .errors import Failure

SCHEMA = 1
#: Seconds until a rank that says nothing is named.
PATIENCE = 60.0
#: Seconds that a rank which is about to stop leaves those that spoke to tell why: it may hold the store.
LINGER = 10.0
#: Seconds that the store has for an answer; the process that holds it may stand still.
ANSWER = 10.0
_GO = "go"


@dataclass(frozen=True)
class Statement:
    """What one rank says of itself.

    Attributes:
        rank: Its number in the data-parallel group.
        facts: What has to be equal on all ranks, by the name that a refusal gives it.
        failure: Why it cannot run the feature; empty if it can.
        host: Where it runs.
        pid: Its process.
        schema: The version of this format; another one is a difference too.
    """

    rank: int
    facts: Mapping[str, object] = field(default_factory=dict)
    failure: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    schema: int = SCHEMA

    def __str__(self) -> str:
        return f"rank {self.rank} (host={self.host} pid={self.pid})"


@dataclass(frozen=True)
class Agreed:
    """What came of it on this rank.

    Attributes:
        failures: BP704 for what is not the same everywhere, BP705 for a rank that is silent, BP706 for one that
            cannot run it or has refused; empty if all ranks run the same.
        ranks: What each rank said, by its number; without those that said nothing.
        mine: What this rank said.
    """

    failures: tuple[Failure, ...] = ()
    ranks: Mapping[int, Statement] = field(default_factory=dict)
    mine: Statement | None = None


def agree(
    store: Any, mine: Statement, size: int, feature: str, *, occasion: str = "start", patience: float | None = None
) -> Agreed:
    """Say what this rank runs, hear what the others run, and say what does not fit.

    Args:
        store: The store of the data-parallel group, a ``torch.distributed.Store``.
        mine: What this rank says; with a failure it hears nobody.
        size: How many ranks there are.
        feature: What it is about.
        occasion: What it is said for; ranks that meet again on the same store say it anew.
        patience: Seconds to wait for those that say nothing, once for what they say and once for what they make
            of it; :data:`PATIENCE` if not given.
    """
    patience = PATIENCE if patience is None else patience
    board = Board(store, feature, occasion, answer=ANSWER)
    if mine.failure:
        say(board, mine)
        return Agreed((), {}, mine)
    said, gone = hear(board, size, patience, first=mine)
    said |= {mine.rank: mine}
    there = {rank: statement for rank, statement in said.items() if statement is not None}
    failures = tuple(_judge(said, feature, patience, gone))
    # The first line is enough for who has not seen it himself; the rest stands in the log of that rank.
    finds = f"finds/{mine.rank}", failures[0].headline if failures else ""
    others = [statement for statement in there.values() if statement is not mine and not failures]
    found, gone = board.read([f"finds/{statement.rank}" for statement in others], patience, first=finds)
    failures = failures or tuple(_refused(found, others, feature, patience, gone))
    stands, gone = board.settle("verdict", f"{mine} has refused: {failures[0].headline}" if failures else _GO)
    if stands == _GO:
        failures = ()  # one that this rank gave up on has answered after all, and the others have gone on
    elif not failures:
        why = stands if stands is not None else f"whether all go on is not known: {_lost(gone)}"
        failures = (Failure("BP706", f"{feature}: {why}", next=_MEND),)
    return Agreed(failures, there, mine)


def part(
    store: Any, agreed: Agreed, size: int, feature: str, *, occasion: str = "start", patience: float | None = None
) -> None:
    """Say that this rank has told why it will stop, and wait until the others have told it too.

    Whoever stops may hold the store, and where one engine core has ended, vLLM's front end ends the others. Those
    that spoke are done in a moment; one that failed before it heard anybody waits for all.

    Args:
        store: The store in which they met.
        agreed: What came of that on this rank.
        size: How many ranks there are.
        feature: What it is about.
        occasion: What they met for.
        patience: Seconds to wait for those that say nothing; 0 where this rank goes on without the feature.
    """
    if agreed.mine is None:
        return
    patience = PATIENCE if patience is None else patience
    board = Board(store, feature, occasion, answer=ANSWER)
    board.write(f"told/{agreed.mine.rank}", "yes")
    if patience:
        waits = (range(size), patience) if agreed.mine.failure else (agreed.ranks, min(LINGER, patience))
        board.read([f"told/{rank}" for rank in waits[0]], waits[1])


def _judge(said: Mapping[int, Statement | None], feature: str, patience: float, gone: str) -> Iterator[Failure]:
    for rank, statement in said.items():
        if statement is None and gone:
            yield Failure("BP705", f"rank {rank} of {len(said)}: {_lost(gone)}", next=_MEND)
        elif statement is None:
            yield Failure(
                "BP705",
                f"rank {rank} of {len(said)}: it said nothing for {patience:g} s; {feature} is off there, or "
                "balance_patcher is not installed",
                next=f"start every rank with {feature} on and the same balance_patcher, or every one with it off",
            )  # fmt: skip
        elif statement.failure:
            yield _cannot(statement, feature, statement.failure)
    present = [statement for statement in said.values() if statement is not None and not statement.failure]
    yield from differences(present, feature)


def _refused(
    found: Mapping[str, str], others: Sequence[Statement], feature: str, patience: float, gone: str
) -> Iterator[Failure]:
    """What another rank has found, where this one has found nothing itself: it was late, or the other was."""
    for statement in others:
        finding = found.get(f"finds/{statement.rank}")
        if finding is None:
            finding = _lost(gone) if gone else f"it did not answer for {patience:g} s"
        if finding:
            yield _cannot(statement, feature, finding)


_MEND = "see the logs of the other ranks, first that of rank 0, whose process holds the store"


def _lost(gone: str) -> str:
    return f"the store of the group is lost ({gone})"


def _cannot(statement: Statement, feature: str, why: str) -> Failure:
    return Failure(
        "BP706", f"{statement} does not run {feature}: {why}",
        next="mend that rank, or switch the feature off on all; see that rank's log",
    )  # fmt: skip


def differences(present: Sequence[Statement], feature: str) -> Iterator[Failure]:
    """One BP704 for each fact that is not the same everywhere, with every rank's value."""
    schemas = {statement.schema for statement in present}
    names = list(dict.fromkeys(name for statement in present for name in statement.facts))
    facts = {name: [statement.facts.get(name) for statement in present] for name in names}
    if len(schemas) > 1:
        facts = {"balance_patcher's format": [statement.schema for statement in present]}
    for name, values in facts.items():
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1:
            rows = tuple(
                (f"rank {s.rank}", f"{v}   host={s.host} pid={s.pid}") for s, v in zip(present, values, strict=True)
            )
            yield Failure(
                "BP704", f"{name} is not the same on all ranks of {feature}",
                next="start every rank with the same configuration, vLLM and balance_patcher", fields=rows,
            )  # fmt: skip


def say(board: Board, mine: Statement) -> None:
    """Write down what this rank says."""
    board.write(*_says(mine))


def hear(
    board: Board, size: int, patience: float = 0.0, *, first: Statement | None = None
) -> tuple[dict[int, Statement | None], str]:
    """What each rank has said, ``None`` where it has not; and why no more could be heard. One may be said before."""
    keys = [f"says/{rank}" for rank in range(size)]
    heard, gone = board.read(keys, patience, first=None if first is None else _says(first))
    return {rank: _statement(rank, heard.get(f"says/{rank}")) for rank in range(size)}, gone


def _says(mine: Statement) -> tuple[str, str]:
    return f"says/{mine.rank}", json.dumps(asdict(mine))


def _statement(rank: int, text: str | None) -> Statement | None:
    """What a rank has written; ``None`` if it has not, and a failure if it cannot be read."""
    if text is None:
        return None
    try:
        statement = Statement(**json.loads(text))
        return statement if statement.rank == rank and isinstance(statement.facts, dict) else _unread(rank, text)
    except (ValueError, TypeError):
        return _unread(rank, text)


def _unread(rank: int, text: str) -> Statement:
    return Statement(rank, failure=f"what it says cannot be read: {text[:80]}", host="?", pid=0, schema=0)

"""Ranks that must run the same thing tell each other what they run, before weights load; who differs is named.

Each rank that has a feature on writes a statement into the store of its data-parallel group and reads those
of the others. A rank that runs something else, that cannot run it, or that says nothing at all is named on
every rank that asked, instead of a collective in which they would wait for each other. A rank that is off
does nothing.

What each rank makes of it is written down too, and read by all: none goes on while another has refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import Failure

SCHEMA = 1
#: Seconds until a rank that says nothing is named.
PATIENCE = 60.0
#: Seconds that a rank which is about to stop leaves the others to read what it said: it may hold the store.
LINGER = 10.0
_PAUSE = 0.02


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
        mine: What this rank says.
        size: How many ranks there are.
        feature: What it is about.
        occasion: What it is said for; ranks that meet again on the same store say it anew.
        patience: Seconds to wait for those that say nothing, once for what they say and once for what they make
            of it; :data:`PATIENCE` if not given.
    """
    patience = PATIENCE if patience is None else patience
    board = Board(store, f"balance_patcher/{feature}/{occasion}")
    board.write(f"says/{mine.rank}", json.dumps(asdict(mine)))
    heard, gone = board.read([f"says/{rank}" for rank in range(size)], patience)
    said = {rank: read_statement(rank, heard.get(f"says/{rank}")) for rank in range(size)}
    failures = tuple(_judge(mine, said, feature, patience, gone))
    # The first line is enough for who has not seen it himself; the rest stands in the log of that rank.
    board.write(f"finds/{mine.rank}", failures[0].headline if failures else mine.failure)
    there = [rank for rank, statement in said.items() if statement is not None]
    # Whoever stops now may hold the store: those that wrote must have read first.
    found, gone = board.read([f"finds/{rank}" for rank in there], LINGER if failures or mine.failure else patience)
    if not failures and not mine.failure:
        failures = tuple(_refused(found, said, feature, patience, gone))
    return Agreed(failures, {rank: statement for rank, statement in said.items() if statement is not None}, mine)


def _judge(
    mine: Statement, said: Mapping[int, Statement | None], feature: str, patience: float, gone: str
) -> Iterator[Failure]:
    for rank, statement in said.items():
        if statement is None:
            why = f"the store went away ({gone})" if gone else f"it said nothing for {patience:g} s"
            yield Failure(
                "BP705",
                f"rank {rank} of {len(said)}: {why}; {feature} is off there, or balance_patcher is not installed",
                next=f"start every rank with {feature} on and the same balance_patcher, or every one with it off",
            )  # fmt: skip
        elif statement.failure and statement.rank != mine.rank:
            yield _cannot(statement, feature, statement.failure)
    present = [statement for statement in said.values() if statement is not None and not statement.failure]
    yield from differences(present, feature)


def _refused(
    found: Mapping[str, str], said: Mapping[int, Statement | None], feature: str, patience: float, gone: str
) -> Iterator[Failure]:
    """What another rank has found, where this one has found nothing itself: it was late, or the other was."""
    for rank, statement in said.items():
        finding = found.get(f"finds/{rank}")
        if finding:
            yield _cannot(statement or Statement(rank), feature, finding)
        elif finding is None:
            why = f"the store went away ({gone})" if gone else f"it did not answer for {patience:g} s"
            yield _cannot(statement or Statement(rank), feature, why)


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


def read_statement(rank: int, text: str | None) -> Statement | None:
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


class Board:
    """Keys of one occasion in a store that may go away while it is read."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def write(self, key: str, text: str) -> None:
        """Put a text there; if the store is gone, so is who would read it, and :meth:`read` says so."""
        with contextlib.suppress(Exception):
            self._store.set(f"{self._prefix}/{key}", text)

    def read(self, keys: Sequence[str], patience: float) -> tuple[dict[str, str], str]:
        """What stands under the keys, as far as it came in time; and why no more could be read."""
        found: dict[str, str] = {}
        deadline = time.monotonic() + patience
        try:
            while missing := [key for key in keys if key not in found]:
                for key in missing:
                    if self._store.check([f"{self._prefix}/{key}"]):
                        found[key] = self._store.get(f"{self._prefix}/{key}").decode()
                if len(found) == len(keys) or time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE)
        except Exception as error:  # noqa: BLE001 - whatever a store raises whose process has ended
            return found, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return found, ""

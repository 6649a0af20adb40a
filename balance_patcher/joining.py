"""Ranks that join a running group: what they run is known before the others gather with them.

Elastic scaling makes a new group beside the old one, and gives old and new ranks a store of its own to prepare
it. The old ranks write there what they run as soon as they are asked to scale up; a new one reads it before its
weights load, and writes down what it runs. Before the old ranks switch, they read that: a new rank that runs
something else, or has said nothing, makes the scaling fail, and the old group goes on.

A new rank that differs does not stop by itself when the old ones have spoken: they refuse it, and one that died
halfway would leave them in upstream's collectives. Where they have said nothing, it stops.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from . import agreement
from .agreement import Agreed, Board, Statement, differences, read_statement
from .errors import Failure, PatchError, refuse

#: vLLM sets it for an engine core that joins a group that runs.
LAUNCHED = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
#: Seconds to reach the store of a scaling.
REACH = 30.0
_SIZE = "data_parallel_size"


def joins() -> bool:
    """Whether the engine core of this process joins a group that runs."""
    return os.environ.get(LAUNCHED, "0").strip() not in ("", "0")


class Peers:
    """The ranks of one engine's group, as they agreed, and those that join it.

    Args:
        feature: What they agreed on.
        agreed: What they said.

    Attributes:
        names: What each rank is called, by its number.
    """

    def __init__(self, feature: str, agreed: Agreed) -> None:
        self._feature, self._mine = feature, agreed.mine
        self.names = {rank: str(said) for rank, said in agreed.ranks.items()}
        self._scaling: tuple[Any, int, int] | None = None

    def scales(self, host: str, port: int, old: int, new: int) -> None:
        """This rank is asked to go from one size to another: the new ranks are told what runs here.

        Args:
            host: Where the store of the scaling is.
            port: Its port; 0 where this vLLM has none.
            old: Ranks of the running group.
            new: Ranks of the next one.

        Raises:
            PatchError: BP707, if there is no way to hear the new ranks; nothing is scaled then.
        """
        self._scaling = None
        if new <= old or self._mine is None:
            return
        store = connect(host, port)
        facts = {**self._mine.facts, _SIZE: new}
        _board(store, self._feature).write(
            f"says/{self._mine.rank}", json.dumps(asdict(replace(self._mine, facts=facts)))
        )
        self._scaling = store, old, new

    def admit(self) -> None:
        """Refuse new ranks that do not fit, before the old ones switch to the group with them.

        Raises:
            PatchError: BP704 to BP706, with every rank that does not fit; the old group goes on.
        """
        if self._scaling is None or self._mine is None:
            return
        store, old, new = self._scaling
        said, gone = _read(store, self._feature, range(new), 0.0)
        joiners = [rank for rank in range(old, new) if rank not in said]
        failures = _silent(joiners, new, self._feature, gone or "it has said nothing")
        failures += _judge(said, self._feature)
        if failures:
            raise PatchError(*failures)
        self.names |= {rank: str(statement) for rank, statement in said.items()}


def join(store: Any, mine: Statement, size: int, feature: str) -> Agreed:
    """Say what this rank runs to a group that it joins, and hear what runs there.

    Args:
        store: The store of the scaling.
        mine: What this rank says.
        size: How many ranks the next group has.
        feature: What it is about.

    Returns:
        BP705 for old ranks that said nothing. What differs is not among the failures: the old ranks refuse it.
    """
    board = _board(store, feature)
    board.write(f"says/{mine.rank}", json.dumps(asdict(mine)))
    if mine.failure:
        return Agreed((), {}, mine)
    said, gone = _read(store, feature, range(size), agreement.PATIENCE)
    missing = [rank for rank in range(size) if rank not in said]
    why = gone or f"it said nothing for {agreement.PATIENCE:g} s"
    return Agreed(tuple(_silent(missing, size, feature, why)), said, mine)


def unfit(agreed: Agreed, feature: str) -> tuple[Failure, ...]:
    """What the ranks that this one joins will refuse."""
    return tuple(_judge(agreed.ranks, feature))


def connect(host: str, port: int) -> Any:
    """A connection of our own to the store of a scaling: one that vLLM shares may be waiting in another thread.

    Raises:
        PatchError: BP707, if it cannot be reached.
    """
    if not port:
        raise refuse("BP707", "this vLLM's scaling has no store", next="start all ranks anew, with their new number")
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=REACH))
    except Exception as error:
        raise refuse(
            "BP707", f"the store of the scaling at {host}:{port} cannot be reached: {error}",
            next="see whether the front end that scales is still there, and scale again",
        ) from error  # fmt: skip


def _board(store: Any, feature: str) -> Board:
    return Board(store, f"balance_patcher/{feature}/scaling")


def _read(store: Any, feature: str, ranks: Sequence[int], patience: float) -> tuple[dict[int, Statement], str]:
    found, gone = _board(store, feature).read([f"says/{rank}" for rank in ranks], patience)
    said = {rank: read_statement(rank, found.get(f"says/{rank}")) for rank in ranks}
    return {rank: statement for rank, statement in said.items() if statement is not None}, gone


def _silent(ranks: Sequence[int], size: int, feature: str, why: str) -> list[Failure]:
    return [
        Failure(
            "BP705",
            f"rank {rank} of {size}, of a scaling: {why}; {feature} is off there, or balance_patcher is not installed",
            next=f"scale up with ranks that have {feature} on and the same balance_patcher",
        )
        for rank in ranks
    ]


def _judge(said: Mapping[int, Statement], feature: str) -> list[Failure]:
    failures = [
        Failure("BP706", f"{statement} does not run {feature}: {statement.failure}", "see that rank's log")
        for statement in said.values()
        if statement.failure
    ]
    return failures + list(differences([statement for statement in said.values() if not statement.failure], feature))

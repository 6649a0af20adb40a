"""Ranks that join a running group: what they run is known before the others work with them.

Elastic scaling makes a new group beside the old one, and gives old and new ranks a store of its own to prepare
it. Old ranks write there what they run as soon as they are asked to scale up, new ones before their weights load.
There is one verdict for all of them: whoever knows it first puts it into the store, and everybody obeys what
stands there. If a new rank runs something else, or says nothing, it does not start, and the old ranks give the
scaling up before anything of their group has been touched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from . import agreement
from .agreement import Agreed, Statement, differences, hear, say
from .board import Board
from .errors import Failure, refuse

#: vLLM sets it for an engine core that joins a group that runs.
LAUNCHED = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
#: Seconds to reach the store of a scaling.
REACH = 30.0
#: Seconds from one look into it to the next, while ranks go on working.
LOOK = 0.1
_SIZE, _VERDICT, _FITS = "data_parallel_size", "verdict", "fits"
_logger = logging.getLogger("vllm.balance_patcher")


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
        refused: Whether the scaling that was asked for last is to be given up.
    """

    def __init__(self, feature: str, agreed: Agreed) -> None:
        self._feature, self._mine = feature, agreed.mine
        self.names = {rank: str(said) for rank, said in agreed.ranks.items()}
        self.refused = False
        self._scaling: Scaling | None = None

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
        self._scaling, self.refused = None, False
        if new > old and self._mine is not None:
            mine = replace(self._mine, facts={**self._mine.facts, _SIZE: new})
            self._scaling = Scaling(connect(host, port), mine, new, self._feature)
            self._scaling.say()

    def fits(self, *, wait: bool = False) -> bool:
        """Whether the next group may be worked with; no scaling up always may.

        Args:
            wait: For the verdict; without it, ``False`` while there is none. The time that new ranks have to
                speak starts with the first call, when the group with them exists.
        """
        if self._scaling is None:
            return True
        verdict = self._scaling.verdict(wait=wait)
        if verdict is None:
            return False
        if verdict.failures:
            self._scaling, self.refused = None, True
            for failure in verdict.failures:
                _logger.error("%s: the scaling is given up, and the ranks go on as before: %s", self._feature, failure)
            return False
        self._scaling = None
        self.names |= {rank: str(statement) for rank, statement in verdict.ranks.items()}
        return True


class Scaling:
    """One scaling, as one of its ranks sees it.

    Args:
        store: The store of the scaling, a ``torch.distributed.Store``; vLLM makes one for each.
        mine: What this rank says.
        size: How many ranks the next group has.
        feature: What it is about.
    """

    def __init__(self, store: Any, mine: Statement, size: int, feature: str) -> None:
        self._mine, self._size, self._feature = mine, size, feature
        self._board = Board(store, feature, "scaling", answer=agreement.ANSWER)
        self._since = self._looked = 0.0

    def say(self) -> None:
        """Write down what this rank runs."""
        say(self._board, self._mine)

    def verdict(self, *, wait: bool) -> Agreed | None:
        """What all ranks of the scaling go by; ``None`` while it is open and is not waited for."""
        self._since = self._since or time.monotonic()
        while True:
            found = self._look() if time.monotonic() - self._looked >= LOOK else None
            if found is not None or not wait:
                return found
            time.sleep(LOOK)

    def _look(self) -> Agreed | None:
        """Read what was said, propose a verdict if that is enough for one, and take the one that stands."""
        self._looked = time.monotonic()
        said, gone = hear(self._board, self._size)
        there = {rank: statement for rank, statement in said.items() if statement is not None}
        missing = [rank for rank, statement in said.items() if statement is None]
        failures = tuple(_judge(there, self._feature))
        late = self._looked - self._since > agreement.PATIENCE
        if missing and (late or gone) and not failures:
            why = f"the store went away ({gone})" if gone else f"it said nothing for {agreement.PATIENCE:g} s"
            failures = tuple(_silent(missing, self._size, self._feature, why))
        if gone:
            return Agreed(failures, there, self._mine)
        stands, gone = self._stands("" if missing and not failures else failures[0].headline if failures else _FITS)
        if gone:
            stands = f"the store went away ({gone})"
        if stands == _FITS:
            return Agreed((), there, self._mine)
        if stands is None:
            return None
        # Somebody else's; what this rank has found itself says more.
        other = Failure(
            "BP706", f"the scaling to {self._size} ranks is given up: {stands}", "see the logs of the other ranks"
        )
        return Agreed(failures or (other,), there, self._mine)

    def _stands(self, proposed: str) -> tuple[str | None, str]:
        """The verdict in the store, after this rank's proposal if it has one; and why nothing is known of it."""
        if proposed:
            return self._board.settle(_VERDICT, proposed)
        found, gone = self._board.read([_VERDICT])
        return found.get(_VERDICT), gone


def join(store: Any, mine: Statement, size: int, feature: str) -> Agreed:
    """Say what this rank runs to a group that it joins, and wait for the verdict.

    Args:
        store: The store of the scaling.
        mine: What this rank says; with a failure it does not wait.
        size: How many ranks the next group has.
        feature: What it is about.

    Returns:
        BP704 to BP706 where it must not start.
    """
    scaling = Scaling(store, mine, size, feature)
    scaling.say()
    if mine.failure:
        return Agreed((), {}, mine)
    return scaling.verdict(wait=True) or Agreed()


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

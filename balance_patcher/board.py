"""Texts under keys in a store that ranks share: one that may go away while it is read, or not answer any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_PAUSE = 0.02


class Board:
    """The keys of one occasion.

    The store is asked in a thread: a call of it may wait without an end, and what a signal raises in this one
    is not the store's. Once it is lost, it is not asked again.

    Args:
        store: A ``torch.distributed.Store``.
        feature: What it is about.
        occasion: What is written for; ranks that meet again on the same store write it anew.
        answer: Seconds that the store has for an answer; the process that holds it may stand still.
        again: It is asked again after it was lost, but only one thing at a time: while it has not answered, that is
            no answer either.
    """

    def __init__(self, store: Any, feature: str, occasion: str, *, answer: float, again: bool = False) -> None:
        self._store, self._prefix = store, f"balance_patcher/{feature}/{occasion}"
        self._answer, self._again = answer, again
        self._asked: threading.Thread | None = None
        self._gone = ""

    def write(self, key: str, text: str) -> str:
        """Put a text there; why it is not, or nothing. If the store is gone, so is who would read it."""
        return self._ask(lambda: self._store.set(f"{self._prefix}/{key}", text), self._answer)

    def settle(self, key: str, text: str) -> tuple[str | None, str]:
        """What stands under a key that is written once: this text if there was none. And why nothing is known."""
        stands: list[str] = []
        gone = self._ask(
            lambda: stands.append(_text(self._store.compare_set(f"{self._prefix}/{key}", "", text))), self._answer
        )
        return (None, gone) if gone else (stands[0], "")

    def read(
        self, keys: Sequence[str], patience: float = 0.0, *, first: tuple[str, str] | None = None
    ) -> tuple[dict[str, str], str]:
        """What stands under the keys, as far as it came in time; and why no more could be read.

        Args:
            keys: What is waited for.
            patience: Seconds to wait for it.
            first: A key and a text that is put there before; that has the same time.
        """
        found: dict[str, str] = {}
        deadline = time.monotonic() + patience

        def look() -> None:
            if first is not None:
                self._store.set(f"{self._prefix}/{first[0]}", first[1])
            while missing := [key for key in keys if key not in found]:
                for key in missing:
                    if self._store.check([f"{self._prefix}/{key}"]):
                        found[key] = _text(self._store.get(f"{self._prefix}/{key}"))
                if len(found) == len(keys) or time.monotonic() >= deadline:
                    break
                time.sleep(_PAUSE)

        gone = self._ask(look, max(self._answer, patience + 1) if patience else self._answer)
        return dict(found), gone

    def _ask(self, work: Callable[[], object], seconds: float) -> str:
        """Do a piece of work that may never end; why it was not done, or nothing."""
        raised: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - whatever a store raises whose process has ended
                raised.append(error)

        if self._gone and not self._again:
            return self._gone
        if self._asked is not None and self._asked.is_alive():
            return "no answer yet"
        self._asked = asked = threading.Thread(target=run, name="balance_patcher board", daemon=True)
        asked.start()
        asked.join(seconds)
        if asked.is_alive():
            self._gone = f"no answer for {seconds:g} s"
        else:
            self._gone = "".join(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}" for error in raised)
        return self._gone


def _text(value: bytes) -> str:
    return value.decode(errors="replace")

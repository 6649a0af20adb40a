"""Say a thing again and again while an engine lives: one that serves without what was asked of it must not go quiet.

A daemon thread that sleeps: it keeps no process alive, and it holds the engine by a weak reference only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

#: Seconds from one line to the next.
INTERVAL = 600.0


def remind(engine: object, tell: Callable[[], None], interval: float | None = None) -> threading.Event:
    """Call ``tell`` every ``interval`` seconds from now on, until the engine is gone or the event is set.

    Args:
        engine: The engine that it is about; it is not kept alive.
        tell: Says it; what it raises ends the reminding and nothing else.
        interval: In seconds; :data:`INTERVAL` if not given.

    Returns:
        The event that ends it.
    """
    over = threading.Event()
    weakref.finalize(engine, over.set)
    every = INTERVAL if interval is None else interval

    def run() -> None:
        while not over.wait(every):
            tell()

    threading.Thread(target=run, name="balance_patcher reminder", daemon=True).start()
    return over
